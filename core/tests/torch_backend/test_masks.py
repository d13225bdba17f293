from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.torch_backend.masks import MaskTemplate, Visibility, ragged_mask

visibilities = st.builds(Visibility, left=st.sampled_from([-1, 0, 2, 9]), right=st.sampled_from([-1, 0, 3]))
INF = float("inf")


def brute(visibility: Visibility, position: int, key: int) -> float:
    distance = key - position
    hidden = (0 <= visibility.left < -distance) or (0 <= visibility.right < distance)
    return -INF if hidden else 0.0


@given(visibilities, st.integers(1, 5), st.integers(-6, 0), st.integers(1, 6), st.integers(1, 3), st.data())
def test_a_tile_shows_what_distances_allow(
    visibility: Visibility, rows: int, low: int, high: int, repeat: int, data: st.DataObject
) -> None:
    template = MaskTemplate(
        visibility, rows, (low, high), repeat=repeat, dtype=torch.float32, device=torch.device("cpu")
    )
    count = data.draw(st.integers(1, rows))
    start = data.draw(st.integers(low, high - 1))
    end = data.draw(st.integers(start + 1, high))

    tile = template.tile(count, start, end)

    expected = [
        [brute(visibility, row, key) for key in range(start, end)] for row in range(count) for _ in range(repeat)
    ]
    assert tile[0, 0].tolist() == expected


@given(
    visibilities, st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4), st.integers(1, 3)
)
def test_a_ragged_mask_hides_padding(visibility: Visibility, lens: list[tuple[int, int]], repeat: int) -> None:
    rows, keys = max(n for n, _ in lens), max(m for _, m in lens)
    num_rows, num_keys = (torch.tensor(column) for column in zip(*lens, strict=True))

    mask = ragged_mask(visibility, num_rows, num_keys, rows, keys, repeat=repeat, dtype=torch.float32)

    for member, (own_rows, own_keys) in enumerate(lens):
        for row in range(rows * repeat):
            position = own_keys - own_rows + min(row // repeat, own_rows - 1)
            expected = [brute(visibility, position, key) if key < own_keys else -INF for key in range(keys)]
            assert mask[member, 0, row].tolist() == expected


@given(visibilities, st.integers(1, 6), st.integers(0, 6))
def test_a_sight_binds_where_a_mask_would_hide_something(visibility: Visibility, rows: int, context: int) -> None:
    keys = rows + context
    hidden = [brute(visibility, keys - rows + row, key) for row in range(rows) for key in range(keys)]

    assert visibility.binds(rows, keys) == (-INF in hidden)
