"""The lines of keys: found as a plain search over all keys finds them, in steps that grow with the text only."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnplug.errors import ManifestError
from attnplug.manifest import line_numbers
from attnplug.manifest.line_numbers import locate
from attnplug.manifest.reader import parse_manifest
from attnplug.request.settings import parse_toml

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from attnplug.manifest.line_numbers import Place

# What a header is, as a regular expression says it. It takes cubic time for blanks.
HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]#\s][^\[\]#]*?)\s*\]\]?\s*(?:#.*)?$")
NAMES = st.sampled_from(["a", "b", "long-name", '"q.r"', "c_1"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
LINES = st.one_of(
    PATHS.map("[{}]".format),
    PATHS.map("[[ {} ]] # [a comment]".format),
    PATHS.map("  {} = 1".format),
    PATHS.map("{} = {{ a = 1, b = 2 }}".format),
    st.just("x = ["),
    st.just('  "a", {{ b = 1 }},'),
    st.just("]"),
    st.just(""),
)
WANTED = st.lists(st.one_of(st.sampled_from(["a", "b", "long-name", "q.r", "c_1"]), st.integers(0, 2)), max_size=4)


def plain(text: str, path: Place) -> tuple[int, int] | None:
    """Return (depth, line): the key itself, else a key inside it, else the longest key that it is inside of."""
    keys = list(line_numbers._keys(text))
    itself = [line for line, key in keys if key == path]
    inside = [line for line, key in keys if key[: len(path)] == path]
    around = [(-len(key), line) for line, key in keys if path[: len(key)] == key and key != path]
    if path and (itself or inside):
        return len(path), (itself or inside)[0]
    return (-min(around)[0], min(around)[1]) if around else None


@given(st.lists(LINES, max_size=12).map("\n".join), WANTED.map(tuple))
def test_a_key_is_found_where_a_plain_search_finds_it(text: str, path: Place) -> None:
    found, expected = locate(text, path), plain(text, path)

    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        depth, line = expected
        rest_has_names = any(isinstance(part, str) for part in path[depth:])  # these may be further down
        assert found == line or (rest_has_names and found > line)


@given(st.text(alphabet="[]# ab\t\"'.=", max_size=12))
@example("[ ]")
@example("[[\t]]")
def test_a_header_is_what_the_expression_says(line: str) -> None:
    expected = HEADER.match(line)
    found = line_numbers._header(line)

    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found[0], found[1].strip()) == (expected[1], expected[2].strip())


def steps(call: Callable[[], object]) -> int:
    """Return how many lines of Python the search and the reader take, whatever they are called with."""
    count = 0
    files = {line_numbers.__file__, sys.modules[parse_manifest.__module__].__file__}

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "an example" }
supports = { device_type = "cpu", dtype = "float32", head_size = { min = 1 } }
"""
NEWLINE = "\n"
WHY = 'when = { head_size = 64 }, because = "why"'
# Texts of about `count` parts: each once refused a plugin after steps that grew with the square or the cube of them.
GROWING: dict[str, Callable[[int], str]] = {
    "blanks after a bracket": lambda count: f"{MANIFEST}odd = [\n[{' ' * count}\n]]",
    "brackets and blanks": lambda count: f"{MANIFEST}odd = '''\n{'[ ' * count}\n'''",
    "inline rules": lambda count: f"{MANIFEST}rules = [{', '.join([f'{{ {WHY} }}'] * count)}]\n",
    "rules over lines": lambda count: (
        f"{MANIFEST}rules = [\n{''.join(f'{{ {WHY} }},{chr(10)}' for _ in range(count))}]\n"
    ),
    "rules and keys": lambda count: (
        f"{MANIFEST}rules = [{', '.join([f'{{ {WHY} }}'] * count)}]\n[options]\n"
        + "".join(f'o{i} = {{ type = "bool", default = true, help = "x" }}\n' for i in range(count))
    ),
    "tables of rules": lambda count: (
        MANIFEST + "".join(f"[[rules]]\n{WHY.replace(', b', chr(10) + 'b')}\n" for _ in range(count))
    ),
    "unknown keys": lambda count: MANIFEST + "".join(f"k{i} = 1\n" for i in range(count)),
}


@pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)
def test_the_steps_grow_with_the_text_only(make: Callable[[int], str]) -> None:
    def read(count: int) -> Callable[[], object]:
        def call() -> object:
            try:
                return parse_manifest(make(count))
            except ManifestError as error:
                return error

        return call

    few, many = steps(read(50)), steps(read(400))

    assert many <= 8 * few + 200


@pytest.mark.parametrize(
    "line",
    ["[" + " " * 50_000, "[[" + " " * 50_000 + "x", "[ " * 25_000, "[a]" + " " * 50_000 + "x", "a" + " " * 50_000],
)
def test_a_long_line_is_passed_over(line: str) -> None:
    assert locate(f"{line}\nkey = 1\n", ("key",)) == 2


def test_a_rule_of_an_inline_array_is_where_the_array_begins() -> None:
    text = f"{MANIFEST}rules = [\n  {{ {WHY} }},\n  {{ {WHY} }},\n]\n"

    assert parse_toml(text)["rules"]
    assert [rule.line for rule in parse_manifest(text).variants[0].rules] == [4, 4]
