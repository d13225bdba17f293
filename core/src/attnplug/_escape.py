"""
Text from elsewhere, made safe to print: names, summaries, paths and values that others write may hold characters that
move a terminal's cursor, change its colors, or reverse or hide what is beside them.

What is escaped is what `repr` escapes: control characters, format characters (bidirectional marks and zero-width
ones among them), line and paragraph separators, blanks other than a space, lone surrogates, unassigned characters.
"""

from __future__ import annotations


def escaped(text: str) -> str:
    r"""Return one line of text, with each character that is not printable as its escape, such as ``\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escaped_lines(text: str) -> str:
    """Return a text of several lines, each as `escaped` returns it."""
    return text if text.isprintable() else "\n".join(map(escaped, text.split("\n")))
