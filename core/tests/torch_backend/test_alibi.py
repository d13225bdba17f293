from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.torch_backend.masks import Distances, lower, ragged_distances

forms = st.sampled_from(["linear", "sqrt"])


def far(form: str, distance: int) -> float:
    return math.sqrt(abs(distance)) if form == "sqrt" else float(abs(distance))


@given(forms, st.integers(1, 5), st.integers(-6, 0), st.integers(1, 6), st.data())
def test_a_tile_holds_its_distances(form: str, rows: int, low: int, high: int, data: st.DataObject) -> None:
    picture = Distances(form, rows, (low, high), device=torch.device("cpu"))
    count = data.draw(st.integers(1, rows))
    start = data.draw(st.integers(low, high - 1))
    end = data.draw(st.integers(start + 1, high))

    tile = picture.tile(count, start, end)

    expected = [[far(form, key - row) for key in range(start, end)] for row in range(count)]
    torch.testing.assert_close(tile[0], torch.tensor(expected))


@given(forms, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4))
def test_rows_of_a_ragged_group_stand_at_the_end_of_their_keys(form: str, lens: list[tuple[int, int]]) -> None:
    rows, keys = max(n for n, _ in lens), max(m for _, m in lens)
    num_rows, num_keys = (torch.tensor(column) for column in zip(*lens, strict=True))

    distances = ragged_distances(num_rows, num_keys, rows, keys, form)

    for member, (own_rows, own_keys) in enumerate(lens):
        for row in range(rows):
            position = own_keys - own_rows + min(row, own_rows - 1)
            expected = torch.tensor([far(form, key - position) for key in range(keys)])
            torch.testing.assert_close(distances[member, row], expected)


@pytest.mark.parametrize("members", [1, 3])
def test_each_query_head_has_its_slope(members: int) -> None:
    slopes = torch.tensor([[0.5, 2.0, 0.0], [1.0, -1.0, 3.0]])
    distances = torch.rand(members, 4, 5)
    scores = torch.rand(3, 2, 4 * 3, 5)
    before = scores.clone()

    lower(scores, slopes.flatten(), distances)

    for head, ratio, row in ((0, 0, 0), (0, 1, 3), (1, 2, 2), (1, 1, 0)):
        expected = before[:, head, row * 3 + ratio] - slopes[head, ratio] * distances[:, row]
        torch.testing.assert_close(scores[:, head, row * 3 + ratio], expected)
