"""Layer names in few words: nothing is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.commands import abbreviated


def _expanded(text: str) -> list[int]:
    """Expand the braces as a shell does."""
    numbers: list[int] = []
    for part in re.sub(r"^layers\.\{?|\}? \(.*$", "", text).split(","):
        first, last, step, *_ = [*map(int, part.split("..")), None, None]
        numbers += range(first, (first if last is None else last) + 1, step or 1)
    return numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([5], "layers.5.attn (1 layer)"),
        ([0, 1], "layers.{0,1}.attn (2 layers)"),
        (range(26), "layers.{0..25}.attn (26 layers)"),
        (range(0, 26, 2), "layers.{0..24..2}.attn (13 layers)"),
        ([i for i in range(12) if i % 6 != 5], "layers.{0..4,6..10}.attn (10 layers)"),
        ([7, 3, 5], "layers.{3..7..2}.attn (3 layers)"),
        ([0, 1, 5, 6], "layers.{0,1,5,6}.attn (4 layers)"),
    ],
)
def test_layers_that_differ_in_a_number_are_written_once(numbers, text: str) -> None:
    assert abbreviated([f"layers.{number}.attn" for number in numbers]) == text


def test_other_names_stay_whole() -> None:
    names = ["encoder.0.attn", "encoder.1.attn", "pooler2", "decoder.0.attn"]

    assert abbreviated(names) == "encoder.{0,1}.attn, pooler2, decoder.0.attn (4 layers)"


@given(st.sets(st.integers(0, 40), min_size=1))
def test_no_layer_is_lost_and_none_is_made_up(numbers: set[int]) -> None:
    text = abbreviated([f"layers.{number}" for number in numbers])

    assert text.endswith(f"({len(numbers)} layer{'s' * (len(numbers) > 1)})")
    assert _expanded(text) == sorted(numbers)
