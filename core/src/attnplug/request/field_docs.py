"""The fields of a request in words, for the docstring of `Requirements`: `help` and the errors have one source."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.request.fields import Field

DEFAULTS: Final = {
    "head_size_v": "head_size",
    "causal": "true for decoders, false otherwise",
    "paged": "true, but false for encoders and with attn_bias",
    "kv_cache_dtype": "the dtype",
}
"""The defaults that follow from other fields, in words."""

_WIDTH: Final = 100


def document(text: str, fields: Iterable[Field]) -> str:
    """
    Return a class's docstring with its fields: what each requests with its unit, the permitted values, the default.

    Args:
        text: The docstring as written, which ends before the fields.
        fields: The fields, in the order in which `help` lists them.
    """
    lines = (line for item in fields for line in _lines(item))
    return "\n".join([text.rstrip(), "", "    Attributes:", *lines, "    "])


def _lines(item: Field) -> Iterator[str]:
    parts = (item.help, item.domain.text, _default(item))
    text = f"{item.name}: {' '.join(f'{part[0].upper()}{part[1:]}.' for part in parts)}"
    yield from wrap(
        text,
        _WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _default(item: Field) -> str:
    if item.name in DEFAULTS:
        return f"default: {DEFAULTS[item.name]}"
    if item.required:
        return "required"
    if item.neutral is None:
        return f"default: None, which {'leaves it to the negotiation' if item.free else 'requests nothing'}"
    return f"default: {item.neutral!r}"
