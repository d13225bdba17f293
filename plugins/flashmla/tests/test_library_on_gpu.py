"""What the kit does not request of the library: other head counts, prefills in several calls, long replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from attnplug_flashmla.builder import MOST_ROWS, PIECE, spans_of
from attnplug_flashmla.kernels import Kernels
from attnplug_kit.oracle import Case, SceneRunner, check, check_replays, materialize, padded_for
from plugins.flashmla.tests.real import FLASHMLA

pytestmark = pytest.mark.gpu

load_real = FLASHMLA.load_fixture()


def case_of(heads: int, query_lens: tuple[int, ...], context_lens: tuple[int, ...], **more: Any) -> Case:
    sizes = {"latent": True, "head_size": 576, "head_size_v": 512, "num_q_heads": heads, "num_kv_heads": 1}
    lens = {"query_lens": query_lens, "context_lens": context_lens}
    return Case(**{**sizes, **lens, "dtype": "bfloat16", "block_size": 64, **more})


@pytest.mark.parametrize("heads", [1, 5, 16, 20, 64, 128])
@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_decodes_of_any_number_of_heads(load_real, heads: int, query_len: int) -> None:
    """Tiles have 64 rows, of several tokens where there are fewer heads."""
    case = case_of(heads, (query_len,) * 4, (4095, 16, 62, 999), decode_query_len=query_len)

    check(load_real(case.requirements(return_lse=True), "sgl"), materialize(case))


FP8 = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.25}


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_an_fp8_cache(load_real, heads: int) -> None:
    """Decodes, and pieces of a prefill: a causal mask over two pages, and as many tiles as are tested of a request."""
    case = case_of(heads, (1, 100, 33), (2000, 70, 31), **FP8)

    check(load_real(case.requirements(return_lse=True), "sgl"), materialize(case))


@pytest.mark.parametrize("heads", [16, 128])
def test_prefills_of_several_calls(load_real, heads: int) -> None:
    """The rows of pieces in the block table are one row of memory, which the kernels read by a stride of 0."""
    query_lens = (1, 600, 77, 3)
    assert heads < 128 or len([*spans_of(query_lens, heads, PIECE)]) > len([*spans_of(query_lens, 1, PIECE)])
    assert MOST_ROWS < 600 * 128
    case = case_of(heads, query_lens, (70, 130, 0, 5))

    check(load_real(case.requirements(return_lse=True), "sgl"), materialize(case))


@pytest.mark.parametrize("cache", [{}, FP8], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_replays_with_other_lengths(load_real, query_len: int, cache: dict[str, Any]) -> None:
    """Few keys, then as many as are split over the GPU, then few again: each replay has its own schedule."""
    cases = [
        case_of(16, (query_len,) * 2, lens, decode_query_len=query_len, seed=seed, **cache)
        for seed, lens in enumerate([(3, 60), (3000, 2000), (64, 1)])
    ]
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), "sgl")

    scenes = [materialize(padded_for(case, spare=2)) for case in cases]
    check_replays(backend, scenes, num_reqs=4, max_seq_len=4096)


RECORDS = {"kv_cache_dtype": "fp8_ds_mla"}


@pytest.mark.parametrize("has_lens", [False, True])
@pytest.mark.parametrize("topk", [64, 200, 2048])
@pytest.mark.parametrize("heads", [16, 64, 100, 128])
@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_selected_tokens(load_real, cache: dict[str, Any], heads: int, topk: int, has_lens: bool) -> None:
    """Few tokens whose entries are split over the GPU, and rows without a token."""
    case = case_of(heads, (1, 1, 40), (2999, 100, 70), topk=topk, index_lens=has_lens, **cache)

    check(load_real(case.requirements(return_lse=True), "sgl"), materialize(case))


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_selected_tokens_of_several_calls(load_real, cache: dict[str, Any]) -> None:
    """More tokens than one call over records has."""
    assert MOST_ROWS < 700 * 128
    case = case_of(128, (700, 1), (0, 900), topk=128, **cache)

    check(load_real(case.requirements(return_lse=True), "sgl"), materialize(case))


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_wild_slots_are_not_read(load_real, cache: dict[str, Any]) -> None:
    """The decode kernel would load from their addresses; slots on a device are not checked by the contract."""
    case = case_of(16, (1, 5), (100, 0), topk=64, **cache)
    scene = materialize(case)
    backend = load_real(case.requirements(return_lse=True), "sgl")
    runner = SceneRunner(backend, scene)
    call = runner.call(scene)
    assert call.indices is not None
    unused = call.indices < 0
    wild = torch.tensor([2**31 - 1, -(2**31), -2, call.cache.num_blocks * 64], dtype=torch.int32, device="cuda")
    places = torch.arange(call.indices.numel(), device="cuda").view(call.indices.shape) % 4
    call.indices.copy_(torch.where(unused, wild[places], call.indices))

    runner.forward(call, runner.builder.build(call.batch))
    runner.compare(call, scene, "wild slots")


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_replays_with_other_selections(load_real, cache: dict[str, Any]) -> None:
    cases = [
        case_of(16, (1, 1), lens, topk=256, seed=seed, **cache) for seed, lens in enumerate([(3, 60), (3000, 2000)])
    ]
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), "sgl")

    scenes = [materialize(padded_for(case, spare=2)) for case in cases]
    check_replays(backend, scenes, num_reqs=4, max_seq_len=4096)


@pytest.mark.parametrize("cache", [{}, RECORDS], ids=["bfloat16", "records"])
def test_heads_of_no_query_may_hold_anything(load_real, cache: dict[str, Any], monkeypatch) -> None:
    """The plugin leaves them as they are in memory: NaN there changes no bit of another head."""
    case = case_of(16, (1, 5), (900, 70), topk=256, **cache)
    backend = load_real(case.requirements(return_lse=True), "sgl")

    def results(number: float) -> tuple[torch.Tensor, torch.Tensor]:
        def with_all_heads(kernels: Kernels, query: torch.Tensor) -> torch.Tensor:
            whole = query.new_full((query.shape[0], kernels.sparse_heads, 576), number)
            whole[:, :16] = query
            return whole

        monkeypatch.setattr(Kernels, "_with_all_heads", with_all_heads)
        scene = materialize(case)
        runner = SceneRunner(backend, scene)
        call = runner.call(scene)
        runner.forward(call, runner.builder.build(call.batch))
        return call.output, call.lse

    for found, expected in zip(results(torch.nan), results(0.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("gap", [64, 8])
def test_latents_of_blocks_that_are_apart(load_real, gap: int) -> None:
    """The prefill kernel reads rows of one stride, which overlap here."""
    case = case_of(16, (1, 30), (200, 0), topk=128)
    scene = materialize(case)
    backend = load_real(case.requirements(return_lse=True), "sgl")
    runner = SceneRunner(backend, scene)
    call = runner.call(scene)
    blocks = call.cache.num_blocks
    pool = torch.zeros(blocks, 64 * 576 + gap, dtype=torch.bfloat16, device="cuda")
    pages = pool[:, : 64 * 576].view(blocks, 64, 1, 576)
    pages.copy_(call.cache.k)
    apart = evolve(call, cache=backend.bind_cache({"k": pages, "v": pages[..., :512]}))

    runner.forward(apart, runner.builder.build(apart.batch))
    runner.compare(apart, scene, f"blocks {gap} elements apart")
