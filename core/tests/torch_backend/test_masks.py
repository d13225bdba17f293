from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnplug.torch_backend import sdpa
from attnplug.torch_backend.builder import PlanParams
from attnplug.torch_backend.masks import (
    AlibiMask,
    RequestCells,
    Tiler,
    Visibility,
    additive_mask,
    alibi_distance,
    apply_alibi,
    relative_positions,
)
from attnplug.torch_backend.plan import Budget, Rectangle, Segment, segments_of

windows = st.tuples(st.sampled_from([-1, 0, 2, 9]), st.sampled_from([-1, 0, 3]))
visibilities = windows.map(lambda window: Visibility(*window))
forms = st.sampled_from(["linear", "sqrt"])
lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4)
CPU = torch.device("cpu")


def is_visible(visibility: Visibility, relative: int) -> bool:
    return not (0 <= visibility.left < -relative) and not (0 <= visibility.right < relative)


def distance_of(form: str, relative: int) -> float:
    return math.sqrt(abs(relative)) if form == "sqrt" else float(abs(relative))


def params_of(window: tuple[int, int], ratio: int, alibi: str | None, tile_rows: int, *, fused: bool) -> PlanParams:
    return PlanParams(
        window=window,
        causal=False,
        ratio=ratio,
        num_kv_heads=1,
        chunk=None,
        alibi=alibi,
        reads_call=True,
        block_size=None,
        row_strides=None,
        kernel=sdpa.FUSED if fused else sdpa.UNFUSED,
        mask_dtype=torch.float32,
        tile_rows=tile_rows,
        tile_scores=None if fused else 40,
        budget=Budget(keys=100, scores=100, slack=0, ragged_rows=tile_rows),
    )


def rectangle_of(lens: list[tuple[int, int]]) -> Rectangle:
    return Rectangle.of([Segment(request, rows, keys, 0, 0, False) for request, (rows, keys) in enumerate(lens)])


@given(
    windows,
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.none() | forms,
    st.integers(1, 4),
    st.booleans(),
)
def test_tiles_of_uniform_groups_show_what_is_visible(
    window: tuple[int, int],
    sizes: list[tuple[int, int, int]],
    ratio: int,
    alibi: str | None,
    tile_rows: int,
    fused: bool,
) -> None:
    params = params_of(window, ratio, alibi, tile_rows, fused=fused and alibi is None)
    groups = [rectangle_of([(rows, rows + context)] * members) for members, rows, context in sizes]
    tiler = Tiler(params, groups, None, None, CPU)

    for group in groups:
        tiles = tiler.tiles(group)
        assert [row for tile in tiles for row in range(*tile.rows)] == list(range(group.rows))
        for tile in tiles:
            assert not tile.causal or (window[1] == 0 and group.rows == group.keys)
            mask = tile.mask.mask if isinstance(tile.mask, AlibiMask) else tile.mask
            for row in range(*tile.rows):
                relative = [key - (group.keys - group.rows + row) for key in range(group.keys)]
                visible = [is_visible(params.visibility, one) for one in relative]
                shown = [tile.keys[0] <= key < tile.keys[1] for key in range(group.keys)]
                if tile.causal:
                    shown = [key <= row for key in range(group.keys)]
                elif mask is not None:
                    part = mask[0, 0, (row - tile.rows[0]) * ratio : (row - tile.rows[0] + 1) * ratio]
                    assert bool((part == part[0]).all())
                    shown[slice(*tile.keys)] = (part[0] == 0).tolist()
                assert shown == visible
                if alibi:
                    expected = torch.tensor([distance_of(alibi, one) for one in relative[slice(*tile.keys)]])
                    torch.testing.assert_close(tile.mask.distance[0, row - tile.rows[0]], expected)


@given(visibilities, forms, lengths)
def test_padding_of_ragged_groups_is_hidden(visibility: Visibility, form: str, lens: list[tuple[int, int]]) -> None:
    rows, keys = max(n for n, _ in lens), max(m for _, m in lens)
    num_rows, num_keys = (torch.tensor(column) for column in zip(*lens, strict=True))

    relative = relative_positions(num_rows, num_keys, rows, keys)
    visible, distances = visibility.in_group(relative, num_keys), alibi_distance(relative, form)

    for member, (own_rows, own_keys) in enumerate(lens):
        for row in range(rows):
            position = own_keys - own_rows + min(row, own_rows - 1)
            seen = [key < own_keys and is_visible(visibility, key - position) for key in range(keys)]
            assert visible[member, row].tolist() == seen
            expected = torch.tensor([distance_of(form, key - position) for key in range(keys)])
            torch.testing.assert_close(distances[member, row], expected)


@given(visibilities, st.integers(1, 6), st.integers(0, 6))
def test_a_mask_is_needed_where_a_key_is_hidden(visibility: Visibility, rows: int, context: int) -> None:
    keys = rows + context
    hidden = [not is_visible(visibility, key - (keys - rows + row)) for row in range(rows) for key in range(keys)]

    assert visibility.hides_keys(rows, keys) == any(hidden)


def test_an_additive_mask_is_0_or_minus_infinity() -> None:
    mask = additive_mask(torch.tensor([True, False]), torch.bfloat16)

    assert mask.dtype == torch.bfloat16
    assert mask.tolist() == [0.0, -torch.inf]


@pytest.mark.parametrize("members", [1, 3])
def test_each_query_head_has_its_slope(members: int) -> None:
    slopes = torch.tensor([[0.5, 2.0, 0.0], [1.0, -1.0, 3.0]])
    distances = torch.rand(members, 4, 5)
    scores = torch.rand(3, 2, 4 * 3, 5)
    before = scores.clone()

    apply_alibi(scores, slopes.flatten(), distances)

    for head, ratio, row in ((0, 0, 0), (0, 1, 3), (1, 2, 2), (1, 1, 0)):
        expected = before[:, head, row * 3 + ratio] - slopes[head, ratio] * distances[:, row]
        torch.testing.assert_close(scores[:, head, row * 3 + ratio], expected)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), min_size=1, max_size=4),
    st.sampled_from([-1, 0, 3]),
    st.sampled_from([None, 4]),
    st.integers(0, 2**16),
)
def test_each_segment_gets_its_part_of_the_batch_mask(
    lens: list[tuple[int, int]], left: int, chunk: int | None, seed: int
) -> None:
    query_lens, seq_lens = [n for n, _ in lens], [n + m for n, m in lens]
    generator = torch.Generator().manual_seed(seed)
    shapes = list(zip(query_lens, seq_lens, strict=True))
    masks: list[Tensor] = [torch.rand(shape, generator=generator) < 0.5 for shape in shapes]
    segments, _ = segments_of(query_lens, seq_lens, (left, 0), causal=True, chunk=chunk)
    if not segments:
        return
    group = Rectangle.of(segments)
    custom = RequestCells(torch.cat([mask.flatten() for mask in masks]), query_lens, seq_lens)

    lens = torch.tensor([[one.rows for one in segments], [one.keys for one in segments]])
    part = custom.of(group, lambda _: lens)

    for member, segment in enumerate(segments):
        first_row = segment.first_row - sum(query_lens[: segment.request])
        row = first_row + torch.arange(group.rows).clamp(max=segment.rows - 1)
        key = segment.first_key + torch.arange(group.keys).clamp(max=segment.keys - 1)
        assert torch.equal(part[member], masks[segment.request][row][:, key])
