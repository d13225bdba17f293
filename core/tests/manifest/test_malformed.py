"""Whatever is in it, a manifest is read or refused with a ManifestError: anything else would end discovery."""

from __future__ import annotations

import copy
import datetime as dt
from contextlib import suppress

import pytest

from attnplug.errors import ManifestError
from attnplug.manifest.reader import Reader, parse_manifest
from attnplug.request.settings import parse_toml

TEXT = """\
api = "1.0"
backend = { name = "acme", aliases = ["ACME"], summary = "an example" }
[supports]
device_type = ["cpu", "cuda"]
dtype = ["bf16", "float16"]
head_size = { multiple_of = 8, max = 256 }
features = ["paged", "sliding_window", "acme.fused"]
block_size = { multiple_of = 16 }
[[rules]]
when = { sliding_window = true, installed = "acme-kernels <2" }
need = { head_size = { max = 128 }, logits_soft_cap = false }
because = "wrong values before version 2"
[variants.fast]
summary = "the fast one"
requires = ["acme-kernels >=1.5"]
jit = "triton"
supports = { compute_capability = ["9.0a", { min = "10.0", max = "11.0" }], block_sparse = { stride = 8 } }
emulates = { paged = "gathers" }
[[prefer]]
order = ["fast"]
when = { compute_capability = "9.0" }
because = "faster"
[options.ratio]
type = "int"
min = 1
max = 9
choices = [3, 4]
default = 4
help = "a ratio"
[variants.fast.install]
acme-kernels = "from its vendor"
"""
ODD = (
    True,
    0,
    -1,
    10**30,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "9.0",
    dt.date(2026, 1, 1),
    [],
    [[]],
    [1],
    ["x"],
    [{}],
    {},
    {"x": 1},
    {"min": "x"},
    {"max": {}},
    {"multiple_of": "3"},
)


def _paths(value, path=()):
    """Yield the path of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


GOOD = parse_toml(TEXT)


def test_the_text_is_a_manifest() -> None:
    assert parse_manifest(TEXT).name == "acme"


@pytest.mark.parametrize("path", list(_paths(GOOD)), ids=lambda path: ".".join(map(str, path)))
def test_nothing_but_a_manifest_error_comes_out(path) -> None:
    read = 0
    for odd in ODD:
        data = copy.deepcopy(GOOD)
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = odd
        with suppress(ManifestError):
            Reader(TEXT, "acme.toml").manifest(data)
            read += 1
    assert read < len(ODD)  # no place takes every value


@pytest.mark.parametrize("alias", ["FL\u0410SH", "FLASH\u200b", "FLASH ATTN", "", "-x", "\u0663"])
def test_an_alias_that_looks_like_another_is_refused(alias) -> None:
    with pytest.raises(ManifestError, match=r"the alias '|a list of texts") as caught:
        parse_manifest(TEXT.replace('["ACME"]', f'["{alias}"]'))
    assert caught.value.line == 17 - 15
    assert str(caught.value).isascii()


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "{ b = " * 100_000, "\0", "= 1", "a" * 100_000])
def test_what_is_no_toml_is_refused(text) -> None:
    with pytest.raises(ManifestError, match="it is not TOML"):
        parse_manifest(text)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("min = 1\n", 'min = "one"\n', 25, "'min' is a number"),
        ("max = 9\n", "max = true\n", 26, "'max' is a number"),
        ('type = "int"', "type = []", 24, "a type is one of"),
        ("choices = [3, 4]", "choices = 4", 27, "a list of values"),
        ("choices = [3, 4]", 'choices = ["3", 4]', 27, "each choice is int from 1 up to 9"),
        ("choices = [3, 4]", "choices = [4, 10]", 27, "each choice is int from 1 up to 9"),
    ],
)
def test_an_option_with_odd_bounds_is_refused(old, new, line, message) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        parse_manifest(TEXT.replace(old, new))

    assert caught.value.line == line
