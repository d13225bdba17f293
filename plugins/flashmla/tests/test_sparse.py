"""Selected tokens: which kernel computes them, in how many calls, and what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import attnplug_flashmla.builder as builder_module
import attnplug_flashmla.impl  # noqa: F401 - it copies a constant of the builder, which a test replaces
from attnplug.contract import GraphShape, Layer, Limits, capture
from attnplug.ops import quantize_latents
from attnplug_kit.oracle import Case, check, materialize
from tests.backends.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable

LATENT = {"latent": True, "head_size": 576, "head_size_v": 512, "num_kv_heads": 1, "block_size": 64, "topk": 70}
RECORDS = {"kv_cache_dtype": "fp8_ds_mla"}
LAYERS = [Layer(name=f"layers.{index}", scale=0.1) for index in range(2)]


class Steps(Harness):
    """Two layers of latents that share a builder."""

    limits = Limits(max_num_reqs=8, max_num_tokens=512, max_seq_len=512)

    def __init__(self, load: Callable[..., Any], **requirements: Any) -> None:
        super().__init__(load, LAYERS, **{"num_q_heads": 4, "dtype": "bfloat16", **LATENT, **requirements})


def case_of(heads: int, **more: Any) -> Case:
    lens = {"query_lens": (1, 9, 3), "context_lens": (100, 0, 60)}
    return Case(num_q_heads=heads, dtype="bfloat16", **LATENT, **lens, **more)


@pytest.mark.parametrize("has_lens", [False, True])
@pytest.mark.parametrize(("heads", "padded"), [(3, 64), (64, 64), (65, 128), (128, 128)])
@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_heads_and_entries_are_padded(
    load_fake: Callable[..., Any],
    journal: Any,
    heads: int,
    padded: int,
    cache: dict[str, Any],
    has_lens: bool,
) -> None:
    """70 entries are two tiles of 64 for either kernel."""
    case = case_of(heads, index_lens=has_lens, **cache)

    check(load_fake(case.requirements(return_lse=True)), materialize(case))

    assert journal.sparse == [(13, padded, 128)]


@pytest.mark.parametrize("has_lens", [False, True])
def test_a_call_over_records_has_a_bounded_memory(
    load_fake: Callable[..., Any], journal: Any, monkeypatch: pytest.MonkeyPatch, has_lens: bool
) -> None:
    monkeypatch.setattr(builder_module, "MOST_ROWS", 5 * 64)
    for cache, counts in ((RECORDS, [5, 5, 3]), ({}, [13])):
        journal.clear()
        case = case_of(16, index_lens=has_lens, **cache)
        check(load_fake(case.requirements(return_lse=True)), materialize(case))
        assert [tokens for tokens, _, _ in journal.sparse] == counts


def selected(
    impl: Any, steps: Any, metadata: Any, cache: Any, indices: torch.Tensor, index_lens: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a layer past the checks of the contract, as on a device, whose slots are not checked."""
    tokens = len(indices)
    query = torch.ones(tokens, 4, 576).bfloat16()
    output, lse = torch.full((tokens, 2048), torch.nan).bfloat16(), torch.full((tokens, 4), torch.nan)
    impl.wrapped.run_sparse(query, None, cache, metadata, indices, index_lens, output, lse)
    return torch.cat([output.float(), lse], 1)


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_slots_beyond_the_pages_are_no_token(load_fake: Callable[..., Any], cache: dict[str, Any]) -> None:
    """The fake refuses to load from the addresses of others, where the library does not."""
    steps = Steps(load_fake, kv_in_cache=True, **cache)
    pages, metadata = steps.backend.make_cache(3), steps.builder.build(steps.batch([1, 1, 1], [70, 2, 5]))
    rows = torch.randn(3 * 64, 1, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages.k.copy_((quantize_latents(rows) if cache else rows).view(pages.k.shape))
    wild = torch.tensor([[3 * 64, 70, -2] + [2**31 - 1] * 67, [-1] * 70, [-(2**31)] * 70], dtype=torch.int32)
    right = torch.tensor([[70] + [-1] * 69, [-1] * 70, [-1] * 70], dtype=torch.int32)

    found = selected(steps.impls[0], steps, metadata, pages, wild)

    assert torch.equal(found, selected(steps.impls[1], steps, metadata, pages, right))
    assert not found[1:, :2048].any()
    assert bool((found[1:, 2048:] == -torch.inf).all())


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_lengths_beyond_a_row_are_those_of_the_row(load_fake: Callable[..., Any], cache: dict[str, Any]) -> None:
    """The prefill kernel would read as many entries as they say."""
    steps = Steps(load_fake, kv_in_cache=True, **cache)
    pages, metadata = steps.backend.make_cache(3), steps.builder.build(steps.batch([1, 1, 1], [70, 2, 5]))
    indices = torch.full((3, 70), 70, dtype=torch.int32)

    found, right = (
        selected(steps.impls[0], steps, metadata, pages, indices, torch.tensor(lens, dtype=torch.int32))
        for lens in ([999, -3, 1], [70, 0, 1])
    )

    assert torch.equal(found, right)


@pytest.mark.parametrize("gap", [64, 8])
@pytest.mark.parametrize("topk", [64, 128])
def test_latents_of_blocks_that_are_apart(load_fake: Callable[..., Any], gap: int, topk: int) -> None:
    """The prefill kernel reads rows of one stride, 128 at a time: slots are its rows where blocks are not apart."""
    steps = Steps(load_fake, kv_in_cache=True, topk=topk)
    metadata = steps.builder.build(steps.batch([1, 1], [70, 2]))
    pool = torch.randn(3, 64 * 576 + gap, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = pool[:, : 64 * 576].view(3, 64, 1, 576)
    apart, dense = (steps.backend.bind_cache({"k": one, "v": one[..., :512]}) for one in (pages, pages.contiguous()))
    indices = torch.arange(2 * topk, dtype=torch.int32).view(2, topk) % 192

    found, right = (selected(steps.impls[0], steps, metadata, cache, indices) for cache in (apart, dense))

    assert torch.equal(found, right)


def test_layers_share_a_schedule(load_fake: Callable[..., Any], journal: Any) -> None:
    steps = Steps(load_fake, kv_in_cache=True, **RECORDS)
    pages, indices = steps.backend.make_cache(3), torch.full((2, 70), 70, dtype=torch.int32)
    for count in (1, 2):
        metadata = steps.builder.build(steps.batch([1, 1], [70, 2]))
        for impl in steps.impls:
            selected(impl, steps, metadata, pages, indices)
        assert journal.schedules == count


@pytest.mark.parametrize("prepares", [False, True])
def test_a_graph_keeps_the_schedule_that_it_reads(
    load_fake: Callable[..., Any], journal: Any, *, prepares: bool
) -> None:
    """It knows the address alone: neither a capture, which fills in nothing, nor a later step may replace it."""
    steps = Steps(load_fake, kv_in_cache=True, cudagraph="uniform_batch", **RECORDS)
    pages, indices = steps.backend.make_cache(3), torch.full((2, 70), 70, dtype=torch.int32)
    with steps.state.graph_capture(2):
        graph = steps.state.graph(GraphShape(2, 2, 1))
        captured = steps.builder.build(graph.dummy_batch(steps.builder), graph=graph)
    (call,) = captured.sparse
    kept = call.schedule.tile_scheduler_metadata, call.schedule.num_splits
    assert None not in kept

    def step() -> None:
        if prepares:
            steps.builder.prepare(captured)
        for impl in steps.impls:
            selected(impl, steps, captured, pages, indices)

    for _ in range(2):
        _, replay = capture(step, torch.device("cpu"))
        metadata = steps.builder.build(steps.batch([1, 1], [70, 2]), graph=graph)
        assert metadata.sparse == (call,)
        replay()
        assert call.schedule.tile_scheduler_metadata is kept[0]
        assert call.schedule.num_splits is kept[1]
    assert journal.schedules == 1


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_a_warm_up_runs_both_forms_of_a_selection(
    load_fake: Callable[..., Any], journal: Any, cache: dict[str, Any]
) -> None:
    Steps(load_fake, **cache).backend.warmup([GraphShape(2, 2, 1)])

    assert journal.sparse == [(1, 64, 128)] * 2


@pytest.mark.parametrize(("cache", "tokens"), [({}, 2000), (RECORDS, 1024)], ids=["bfloat16", "records"])
def test_a_profiling_run_takes_the_memory_of_the_largest_call(
    load_fake: Callable[..., Any], cache: dict[str, Any], tokens: int
) -> None:
    """Queries and outputs of 64 heads; over records also partial outputs, of a call of at most 1,024 tokens."""
    steps = Steps(load_fake, kv_in_cache=True, **cache)
    query, output = torch.empty(2000, 4, 576).bfloat16(), torch.empty(2000, 2048).bfloat16()
    with torch.profiler.profile(profile_memory=True) as profile:
        steps.impls[0].wrapped.run_profile(query, None, None, output, None)

    rows, bytes_of_lse = 64 * tokens, 4
    expected = rows * (576 * 2 + 512 * 2 + bytes_of_lse)
    if cache:
        expected += (rows + 64 * 132) * (512 * 4 + bytes_of_lse)  # a request and a multiprocessor may have one more
    assert max(event.cpu_memory_usage for event in profile.events()) == expected  # one allocation
