"""The word lint finds every phrase of the glossary's first table, in prose and in names, and passes right uses."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import words

if TYPE_CHECKING:
    from pathlib import Path

WORDS = words.Words.read()

# The first column of the glossary's first table; for each row, texts with the phrase of the list that finds them.
GLOSSARY: dict[str, tuple[tuple[str, str], ...]] = {
    "way out; remedy": (
        ("the way out", "way out"),
        ("no ways out are left", "way out"),
        ("the way out is known", "way out"),
        ("one remedy", "remedy"),
        ("smaller remedies", "remedy"),
        ("a Remedy is proposed", "remedy"),
        ("it was remedied", "remedy"),
    ),
    "X asked, supported: only none": (
        ("alibi=linear asked, supported: only none", "asked, supported: only none"),
        ("sinks=True asked, supported: only False", "asked, supported: only none"),
        ("cudagraph=always asked, supported: only never", "asked, supported: only none"),
    ),
    "compute_capability=8.0 asked, supported: 9.0": (
        ("compute_capability=8.0 asked, supported: 9.0", "asked, supported"),
        ("{self.asked} asked, supported: {self.supported}", "asked, supported"),
        ("causal=False asked, supported: only the mask", "asked, supported"),
    ),
    "standing(s); lacks dependency, lacks_dependency": (
        ("a candidate's standing", "standing"),
        ("all standings of the list", "standing"),
        ("lacks dependency", "lacks dependency"),
        ("they lack dependency", "lacks dependency"),
    ),
    "not installed, so not asked": (("not installed, so not asked", "so not asked"),),
    "embedded backend": (
        ("the embedded backend", "embedded backend"),
        ("embedded backends", "embedded backend"),
        ("the embedded torch backend", "embedded backend"),
    ),
    "prompts (for the phase), prompts by the kernels for Hopper": (
        ("prompts by the kernels for Hopper", "prompts by the kernels for"),
        ("runs prompts and decodes", "prompts and decodes"),
        ("a decode or prompt", "prompts and decodes"),
    ),
    "in pieces; equal beginnings computed once": (
        ("prompts in pieces", "in pieces"),
        ("a chunk computed in pieces", "in pieces"),
        ("equal beginnings computed once", "equal beginnings"),
    ),
    "caches of 8-bit floats": (
        ("caches of 8-bit floats", "caches of 8-bit floats"),
        ("a cache of 8-bit floats", "caches of 8-bit floats"),
    ),
    "keys in one piece; keys come whole with each call": (
        ("keys in one piece", "keys in one piece"),
        ("keys come whole with each call", "come whole"),
        ("K/V that comes whole", "come whole"),
    ),
    "warps with roles, by roles": (
        ("warps with roles", "warps with roles"),
        ("warps without roles", "warps with roles"),
        ("computed by roles", "by roles"),
    ),
    "by pointers; by descriptors": (("pages by pointers", "by pointers"), ("loaded by descriptors", "by descriptors")),
    "which tiles was measured, not reasoned": (
        ("which tiles was measured, not reasoned", "measured, not reasoned"),
        ("measured, and not reasoned", "measured, not reasoned"),
    ),
    "bound of splits, `keeps_max_num_splits`": (
        ("a bound of splits", "bound of splits"),
        ("bounds of the splits", "bound of splits"),
        ("`keeps_max_num_splits`", "keeps_max_num_splits"),
    ),
    "kernels with sinks cap no scores": (("kernels with sinks cap no scores", "cap no scores"),),
    "at no distance": (("tokens at no distance", "at no distance"),),
    "values are weighed": (
        ("while values are weighed", "values are weighed"),
        ("values are still weighed", "values are weighed"),
        ("used before they are weighed", "values are weighed"),
    ),
    "largest values are noted; takes notes": (
        ("largest values are noted", "largest values are noted"),
        ("largest values per channel are noted", "largest values are noted"),
        ("the largest value of each channel is noted", "largest values are noted"),
        ("what an observer has noted", "largest values are noted"),
        ("this one takes notes", "takes notes"),
        ("while taking notes", "takes notes"),
    ),
    "outlying channels": (("two outlying channels", "outlying channels"), ("an outlying channel", "outlying channels")),
    "sequences over several GPUs": (
        ("sequences over several GPUs", "sequences over several GPUs"),
        ("sequences that are spread over two GPUs", "sequences over several GPUs"),
    ),
    "brings the parts together by their LSEs": (
        ("brings the parts together by their LSEs", "brings the parts together by their LSEs"),
        ("bringing parts together by LSE", "brings the parts together by their LSEs"),
    ),
    "as fast as its bytes come": (("as fast as its bytes come", "as fast as its bytes come"),),
    "puts in line; who comes first is served first": (
        ("puts in line", "puts in line"),
        ("Put a request in line", "puts in line"),
        ("the first in line is older", "puts in line"),
        ("requests that were in line", "puts in line"),
        ("who comes first is served first", "who comes first is served first"),
    ),
    "logits choose no token; logits are no numbers": (
        ("logits choose no token", "logits choose no token"),
        ("its logits were no numbers", "logits are no numbers"),
    ),
    "closest choice": (("the closest choice", "closest choice"),),
    "sounds, an encoder of sound": (
        ("random sounds", "sounds"),
        ("an encoder of sound", "an encoder of sound"),
        ("an encoder-decoder on sound", "an encoder of sound"),
        ("frames of a sound", "an encoder of sound"),
    ),
    "truth values": (("truth values", "truth values"), ("a truth value for a field", "truth values")),
    "held against": (
        ("held against the budget", "held against"),
        ("it holds a backend against its library", "held against"),
        ("hold every layer's terms against them", "held against"),
    ),
    "walked on paper": (
        ("the contract, walked on paper", "walked on paper"),
        ("we walk it on paper", "walked on paper"),
    ),
}
EXAMPLES = [example for examples in GLOSSARY.values() for example in examples]

# What may be between two words of a sentence, in prose, comments, strings and quotations.
GAPS = (
    *(" ", "  ", "\n", "\n    ", "\r\n", "\n# ", "\n    # ", "\n#: ", "\n// ", "\n> "),
    *(' "\n    "', " '\n f'", ' "\n    rf"', " \\\n    ", "\\n", "\\n  ", "_", "-"),
)


def _found(text: str, path: str = "docs/page.md") -> list[tuple[str, int | None]]:
    return [(hit.phrase.phrase, hit.line) for hit in WORDS.check(path, text)]


def test_the_list_has_every_row_of_the_glossary() -> None:
    assert list(dict.fromkeys(phrase.row for phrase in WORDS.phrases)) == list(GLOSSARY)


def test_each_phrase_of_the_list_is_found_by_an_example() -> None:
    assert {phrase.phrase for phrase in WORDS.phrases} == {phrase for _, phrase in EXAMPLES}


def test_each_phrase_has_one_entry_and_another_word_for_it() -> None:
    assert len({phrase.phrase for phrase in WORDS.phrases}) == len(WORDS.phrases)
    for phrase in WORDS.phrases:
        assert not _found(phrase.write), phrase.write


@pytest.mark.parametrize(("row", "text", "phrase"), [(row, *each) for row, some in GLOSSARY.items() for each in some])
def test_a_phrase_is_found(row: str, text: str, phrase: str) -> None:
    hits = list(WORDS.check("docs/page.md", f"Text.\n\nIt is {text}, it is.\n"))

    assert [(hit.phrase.phrase, hit.phrase.row, hit.line) for hit in hits] == [(phrase, row, 3)]


@given(st.sampled_from(EXAMPLES), st.data(), st.integers(0, 5))
def test_a_phrase_is_found_over_any_break(example: tuple[str, str], data: st.DataObject, lines: int) -> None:
    text, phrase = example
    first, *rest = data.draw(st.sampled_from((text, text.upper(), text.lower(), text.title()))).split(" ")
    written = first + "".join(f"{data.draw(st.sampled_from(GAPS))}{word}" for word in rest)

    hits = _found("x\n" * lines + f"    # {written}\n")

    # The phrase may begin with a later word of the example, and that on a later line.
    assert [found for found, _ in hits] == [phrase]
    assert lines < (hits[0][1] or 0) <= lines + 1 + written.count("\n")


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("def find_remedy(verdict):", "remedy"),
        ("class NoRemedyError(Exception):", "remedy"),
        ("_REMEDY = 1", "remedy"),
        ("WAY_OUT = 1", "way out"),
        ("class WayOut:", "way out"),
        ("def test_a_prompt_in_pieces_through_a_cache():", "in pieces"),
        ("#: The prompts\n#: in pieces", "in pieces"),
        ('calls.count("_prompt_by_roles")', "by roles"),
        ("prompts.by_descriptors", "by descriptors"),
        ('standing="lacks_dependency"', "lacks dependency"),
        ("self.keepsMaxNumSplits", "keeps_max_num_splits"),
        ('"trouble\\nremedy: none"', "remedy"),
    ],
)
def test_a_phrase_is_found_in_names(text: str, phrase: str) -> None:
    assert phrase in [found for found, _ in _found(text, "core/src/module.py")]


@pytest.mark.parametrize(
    "text",
    [
        # Other words, and the same words in other sentences.
        "an understanding of outstanding requests, notwithstanding",
        "a long-standing bug; a long standing bug; one standing in for another; STANDING_IN_FOR",
        "in every way outer dimensions; in a subway out; the way\n\nout; it goes this way. Out it comes",
        "| by | roles |",
        "- by\n- roles",
        'f("by", "roles")',
        "pass by pointer; by the pointers; tensor descriptors",
        # Right uses of their words.
        "a file is read in pieces; a large mask is looked at in pieces",
        "a prompt\n\na file is read in pieces\n\na prompt; | a prompt | read in pieces | a prompt |",
        "a path stays in one piece; a prompt in one piece",
        "users send prompts; a prompt of 512 tokens; prompts are tokenized and decoded",
        "it sounds plausible; that sounds like a plan; a sound argument; the sound of it",
        "is accepted and noted; as noted above; it was noted",
        "The truth value of an array with more than one element is ambiguous",
        "the error is in line 8; it is first in line 3; in line with PEP 8; split a line in lines",
        "a number; there is no number NaN; logits are numbers",
        "on paper; a paper; papers about it",
        "the closest allowed value; a close choice",
        "hold on; it holds. Against this; guards against NaN; it holds, against all odds",
        "weighed against each other; the options are weighed; weights",
        "first come, first served (FCFS)",
        "an embedded document; embeddings and a backend",
        "dependency; it lacks an index",
        "the bound of a range; split-KV; num_splits; supports_max_num_splits",
        "supported: bfloat16, float16; the device is cpu, supported: cuda",
        # What the glossary exempts from its second table.
        "vLLM's CUSTOM slot; @attrs.define(slots=True); double-buffered; steps that overlap in flight",
        "reorder_batch_to_split_decodes_and_prefills; split_decodes_and_prefills; decodes and prefills",
    ],
)
def test_right_uses_pass(text: str) -> None:
    assert _found(text) == []


def test_a_hit_says_file_line_phrase_and_replacement() -> None:
    hits = WORDS.check("docs/page.md", "One.\n\nIt is computed by\n    roles, and the way out is none.\n")

    assert list(map(str, hits)) == [
        'docs/page.md:3: "by roles": write "warp-specialized"',
        'docs/page.md:4: "way out": write "fix"',
    ]


def test_the_name_of_a_file_counts() -> None:
    hits = list(WORDS.check("core/src/attnplug/negotiation/remedy.py", ""))

    assert list(map(str, hits)) == [
        'core/src/attnplug/negotiation/remedy.py:1: the file\'s name: "remedy": write "fix"'
    ]


def test_a_changelog_keeps_the_words_of_its_releases() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n- A remedy.\n\n## [0.1.0] - 2030-01-01\n\n- Another remedy.\n"

    assert _found(text, "CHANGELOG.md") == [("remedy", 5)]
    assert _found(text, "plugins/acme/CHANGELOG.md") == [("remedy", 5)]
    assert _found(text, "docs/page.md") == [("remedy", 5), ("remedy", 9)]


def test_the_list_and_its_tests_may_name_the_phrases() -> None:
    for path in (words.LIST, words.ROOT / "tests" / "test_words.py"):
        name, text = path.relative_to(words.ROOT).as_posix(), path.read_text("utf-8")
        assert _found(text, name) == []
        assert _found(text, "another.toml")


def test_a_phrase_may_be_exempt_somewhere(tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text(
        'exempt = ["old/*"]\n[[phrases]]\nphrase = "big word"\nwrite = "small"\nrow = "big word"\nexempt = ["*.in"]\n'
    )
    listed = words.Words.read(path)

    assert [hit.line for hit in listed.check("a.md", "a big\nword")] == [1]
    assert not list(listed.check("new/template.in", "a big word"))
    assert not list(listed.check("old/a.md", "a big word"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two phrases in two files, one of them not added yet, and files that are not read."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "docs" / "how-to").mkdir(parents=True)
    (tmp_path / "docs" / "how-to" / "a.md").write_text("One.\nThe closest\nchoice.\n", encoding="utf-8")
    (tmp_path / "b.toml").write_bytes(b"# \xff is not UTF-8\nbecause = 'a remedy'\n")
    (tmp_path / "binary").write_bytes(b"\0 remedy")
    (tmp_path / "ignored.txt").write_text("remedy", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("ignored.txt\n", encoding="utf-8")
    (tmp_path / "link").symlink_to("b.toml")
    subprocess.run(["git", "-C", str(tmp_path), "add", "docs", "binary", "link"], check=True)
    return tmp_path


def test_the_command_prints_what_it_finds(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main([], repository) == 1
    assert capsys.readouterr().out.splitlines() == [
        'b.toml:2: "remedy": write "fix"',
        'docs/how-to/a.md:2: "closest choice": write "smallest logit margin"',
    ]


def test_the_command_takes_paths(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main([str(repository / "docs")], repository) == 1
    assert capsys.readouterr().out.splitlines() == [
        'docs/how-to/a.md:2: "closest choice": write "smallest logit margin"'
    ]
    assert words.main([str(repository / ".gitignore")], repository) == 0
    assert "no phrase" in capsys.readouterr().out


def test_the_command_counts(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "c.md").write_text("remedies and a remedy", encoding="utf-8")

    assert words.main(["--count"], repository) == 1
    assert capsys.readouterr().out.splitlines() == [
        *("     3 remedy", "     1 closest choice", ""),
        *("     3 .", "     1 docs/how-to", "", "     4 in all"),
    ]


@pytest.mark.parametrize(("path", "said"), [("docs/missing.md", "No such file"), ("..", "outside repository")])
def test_a_path_that_cannot_be_checked_is_an_error(
    path: str, said: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        words.main([str(repository / path)], repository)
    assert said in capsys.readouterr().err
