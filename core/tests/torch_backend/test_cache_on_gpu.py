"""FP8 KV caches, shared prefixes and gathered blocks on an NVIDIA GPU, by both variants."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, check, limits_of, materialize, random_case
from tests.backends.harness import no_synchronization

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.contract import Backend

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("variant", ["sdpa", "flex"])]

FEATURES = ("sinks", "kv_sharing", "decode_query_len")
NARROW = ["fp8_e4m3", "fp8_e5m2"]


def load(variant: str, case: Case, layout: str = "NHD", **engine: object) -> Backend:
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, **engine)
    return attnplug.load(requested, Device.current(), backend=f"torch/{variant}")


@pytest.fixture(autouse=True)
def _compiler_may_warn() -> Iterator[None]:
    """Warnings of torch's compiler do not fail these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def some_cases(seed: int, count: int, **fixed: object) -> Iterator[Case]:
    """Cases of one head size, dtype and number of KV heads: each further one compiles again."""
    generator = random.Random(seed)
    for _ in range(count):
        case = random_case(generator, features=FEATURES, head_size=64, num_kv_heads=2, dtype="bfloat16", **fixed)
        yield evolve(case, num_q_heads=generator.choice([2, 8]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("scales", [(1.0, 1.0, False), (0.004, 0.3, False), (0.3, 0.004, True)], ids=str)
def test_8_bit_caches(variant: str, layout: str, dtype: str, scales: tuple[float, float, bool]) -> None:
    k_scale, v_scale, per_head = scales
    quantized = {"kv_cache_dtype": dtype, "k_scale": k_scale, "v_scale": v_scale, "per_head_scales": per_head}
    for case in some_cases(1, 15, **quantized):
        check(load(variant, case, layout, return_lse=True), materialize(case))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_shared_prefixes(variant: str, layout: str, dtype: str) -> None:
    generator = random.Random(2)
    for case in some_cases(3, 20, kv_cache_dtype=dtype):
        shared = case.with_shared_prefix(generator.randint(1, 20))
        check(load(variant, shared, layout, return_lse=generator.random() < 0.5), materialize(shared))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("contexts", [(199,) * 9, (3, 40, 77, 200, 201), (15, 31, 47)], ids=str)
def test_decodes_in_whole_blocks(variant: str, layout: str, contexts: tuple[int, ...]) -> None:
    case = Case(query_lens=(1,) * len(contexts), context_lens=contexts, head_size=64, dtype="bfloat16")

    check(load(variant, case, layout), materialize(case))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("requested", [{"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.3, "v_scale": 0.3}, {}], ids=str)
@pytest.mark.parametrize("shares", [0, 3])
def test_build_and_forward_do_not_wait_for_the_device(variant: str, shares: int, requested: dict[str, object]) -> None:
    lengths = {"query_lens": (1, 1, 9, 40), "context_lens": (30, 3, 40, 0)}
    case = Case(**lengths, head_size=64, dtype="bfloat16", num_padding_tokens=2, **requested)
    case = case.with_shared_prefix(shares) if shares else case
    backend, scene = load(variant, case), materialize(case)
    impl = backend.make_impl(scene.layer(device="cuda"))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, "cuda")
    arguments = (call.query, call.key, call.value, call.cache)
    impl.forward(*arguments, builder.build(call.batch), call.output)
    torch.cuda.synchronize()

    with no_synchronization():
        impl.forward(*arguments, builder.build(call.batch), call.output)


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_writes_saturate_and_keep_nan(variant: str, dtype: str, largest: float) -> None:
    case = Case(query_lens=(3,), context_lens=(0,), dtype="bfloat16", kv_cache_dtype=dtype, k_scale=0.5)
    backend, scene = load(variant, case), materialize(case)
    impl = backend.make_impl(scene.layer(device="cuda", cache_write="host"))
    call = scene.paged(backend, "cuda")
    call.key[0], call.key[1] = 1e6, torch.nan  # type: ignore[index]

    impl.write_kv(call.key, call.value, call.cache, call.batch.slot_mapping)  # type: ignore[arg-type]

    keys = call.cache.k.cpu().float().flatten(0, 1)
    assert keys[scene.slot_mapping[0]].eq(largest).all()
    assert keys[scene.slot_mapping[1]].isnan().all()
    assert keys[: case.block_size].isnan().all(), "the null block keeps its poison"


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("head_size_v", [None, 32])
def test_8_bit_blocks_travel_between_host_and_device(variant: str, dtype: str, head_size_v: int | None) -> None:
    case = Case(query_lens=(5,), context_lens=(3,), head_size=64, head_size_v=head_size_v, dtype="bfloat16")
    backend = load(variant, evolve(case, kv_cache_dtype=dtype))
    there, here = backend.make_cache(6), backend.make_cache(6, device="cpu")
    for pages in (there.k, there.v):
        pages.view(torch.uint8).random_(0, 120)

    backend.swap_blocks(there, here, [(2, 4), (5, 1)])
    backend.copy_blocks([here], {4: [2, 3]})
    backend.swap_blocks(here, there, [(3, 1)])

    for sent, returned in zip((there.k, there.v), (here.k, here.v), strict=True):
        assert torch.equal(returned[2].view(torch.uint8), sent[2].cpu().view(torch.uint8))
        assert torch.equal(sent[1].view(torch.uint8), sent[2].view(torch.uint8))
