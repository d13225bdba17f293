"""Every public name has an example: `tests/test_docs.py` runs the pages, this finds a name that none uses."""

from __future__ import annotations

import pytest

from tests.test_import_law import PUBLIC
from tools import examples


def test_every_public_name_has_an_example_that_runs() -> None:
    assert examples.unused(examples.programs()) == []


def test_the_modules_are_the_public_ones_of_core() -> None:
    assert set(examples.MODULES) == {name for name in PUBLIC if name.split(".")[0] == "attnplug"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import attnplug\nattnplug.select(1)", {("attnplug", "select")}),
        ("from attnplug.contract import Batch as B\nB()", {("attnplug.contract", "Batch")}),
        ("from attnplug.contract import Batch", set()),  # imported, and used nowhere
        ("from attnplug import ops\nops.quantize", {("attnplug.ops", "quantize")}),
        ("import attnplug.ops as o\no.quantize", {("attnplug.ops", "quantize")}),
        ("import attnplug\nattnplug.request.FIELDS", {("attnplug.request", "FIELDS")}),
        ("select(1)\nother.select", set()),
        ("'attnplug.select'  # attnplug.select", set()),
    ],
)
def test_a_name_counts_where_code_reads_it(source: str, found: set[tuple[str, str]]) -> None:
    names = {(module, name) for module, name in examples.used_names(source) if name not in {"request", "ops"}}

    assert names == found


def test_a_name_without_an_example_is_found() -> None:
    everything = [program for program in examples.programs() if "scope_key" not in program]

    assert ("attnplug", "scope_key") in examples.unused(everything)
    assert examples.unused([])[0] == ("attnplug", "Agreement")


def test_the_same_object_under_another_name_counts() -> None:
    missing = examples.unused(["import attnplug\nattnplug.Batch"])

    assert ("attnplug.contract", "Batch") not in missing
    assert ("attnplug.contract", "Layer") in missing
