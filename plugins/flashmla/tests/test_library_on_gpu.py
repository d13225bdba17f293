"""What the kit does not request of the library: other head counts, prefills in several calls, long replays."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug_flashmla.builder import MOST_ROWS, PIECE, spans_of
from attnplug_kit.oracle import Case, check, check_replays, materialize, padded_for
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
