"""The calls of a step: which rows and keys each has, and its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import GraphShape, Layer, Limits, capture
from attnplug_flashmla.builder import MOST_ROWS, PIECE, spans_of
from attnplug_kit.oracle import Case, check, materialize
from tests.backends.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable

LATENT = {"latent": True, "head_size": 576, "head_size_v": 512, "num_q_heads": 4, "num_kv_heads": 1, "block_size": 64}
LAYERS = [Layer(name=f"layers.{index}", scale=0.1) for index in range(2)]


class Steps(Harness):
    """Two layers of latents that share a builder."""

    limits = Limits(max_num_reqs=8, max_num_tokens=512, max_seq_len=512)

    def __init__(self, load: Callable[..., Any], **requirements: Any) -> None:
        super().__init__(load, LAYERS, **LATENT, **requirements)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.sampled_from([1, 16, 128]), st.integers(1, 200))
def test_each_row_is_in_one_call_with_its_keys(query_lens: list[int], heads: int, longest: int) -> None:
    found = []
    for span in spans_of(query_lens, heads, longest):
        assert span.count == 1 or span.count * span.query_len * heads <= MOST_ROWS
        for index in range(span.count):
            request = span.first_req + (index if span.behind is None else 0)
            behind = 0 if span.behind is None else span.behind - index * span.query_len
            row = span.first_row + index * span.query_len
            found += [(row + place, request, behind + span.query_len - place) for place in range(span.query_len)]
    rows = [(request, length - place) for request, length in enumerate(query_lens) for place in range(length)]
    assert found == [(row, *each) for row, each in enumerate(rows)]


def test_uniform_decodes_are_one_call() -> None:
    (span,) = spans_of([4] * 64, 128, PIECE)

    assert (span.count, span.query_len) == (64, 4)


def test_layers_share_the_schedules_of_a_step(load_fake: Callable[..., Any], journal: Any) -> None:
    steps = Steps(load_fake)

    metadata = steps.builder.build(steps.batch([1, 1, 0, 3], [70, 2, 0, 9]))

    assert journal.schedules == 2
    assert [(call.first, call.last, call.lens.tolist()) for call in metadata.calls] == [(0, 2, [70, 2]), (2, 5, [9])]


@pytest.mark.parametrize(("causal", "lens"), [(True, [108, 140]), (False, [150, 150])])
def test_pieces_of_a_prefill_have_their_keys(load_fake: Callable[..., Any], causal: bool, lens: list[int]) -> None:
    steps = Steps(load_fake, causal=causal)

    metadata = steps.builder.build(steps.batch([2 * PIECE + 10], [150], causal=causal))

    assert [(call.query_len, call.lens.tolist()) for call in metadata.calls] == [(PIECE, lens), (10, [150])]
    assert metadata.calls[0].table.stride() == (0, 1)  # no copy of the table for each piece


@pytest.mark.parametrize("causal", [True, False])
def test_cut_prefills_agree_with_the_oracle(load_fake: Callable[..., Any], journal: Any, causal: bool) -> None:
    sizes = {"latent": True, "head_size": 576, "head_size_v": 512, "num_q_heads": 2, "num_kv_heads": 1}
    lens = {"query_lens": (1, 150, 65), "context_lens": (3, 70, 0)}
    case = Case(causal=causal, dtype="bfloat16", block_size=64, **lens, **sizes)

    check(load_fake(case.requirements(return_lse=True)), materialize(case))

    assert [(call.requests, call.query_len) for call in journal.calls] == [(1, 1), (4, 32), (1, 22), (2, 32), (1, 1)]


def test_replays_without_a_build_have_their_schedules(load_fake: Callable[..., Any]) -> None:
    steps = Steps(load_fake, cudagraph="uniform_batch", decode_query_len=2)
    assert steps.builder.replays_without_build
    with steps.state.graph_capture(2):
        graph = steps.state.graph(GraphShape(2, 4, 2))
        captured = steps.builder.build(graph.dummy_batch(steps.builder), graph=graph)
        _, replay = capture(lambda: steps.builder.prepare(captured), torch.device("cpu"))
    (call,) = captured.calls

    for lens in ([61, 2], [62, 3]):
        captured.batch.seq_lens.copy_(torch.tensor(lens))
        replay()

        assert call.splits.diff().tolist() == lens  # the fake's schedules are made of the lengths


def test_padding_over_an_fp8_cache_has_a_key_of_the_null_block(load_fake: Callable[..., Any]) -> None:
    """These kernels read out of bounds for a request without a key."""
    steps = Steps(load_fake, cudagraph="uniform_batch", kv_cache_dtype="fp8_e4m3")
    with steps.state.graph_capture(2):
        graph = steps.state.graph(GraphShape(2, 2, 1))
        (call,) = steps.builder.build(graph.dummy_batch(steps.builder), graph=graph).calls

    for lens in ([61, 2], [62]):
        steps.builder.build(steps.batch([1] * len(lens), lens), graph=graph)

        is_full = len(lens) == 2
        assert call.lens.tolist() == [lens[0], 2 if is_full else 1]
        assert call.table[:, 0].tolist() == [1, 2 if is_full else 0]
        assert call.padding.flatten().tolist() == [False, not is_full]
