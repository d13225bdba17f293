"""The built-in backend on an NVIDIA GPU: the cases of the CPU tests, and device synchronization."""

from __future__ import annotations

import random
import time
from statistics import median

import pytest
import torch

import attnplug
from attnplug.contract import Batch
from attnplug.errors import CacheError
from attnplug.request.device import Device
from attnplug_kit.oracle import FEATURES, Case, check, limits_of, materialize, random_case, run
from tests.backends.harness import no_synchronization

pytestmark = pytest.mark.gpu

VARIANTS = ["torch/sdpa"]
SELF = tuple(name for name in FEATURES if name not in ("attn_type", "kv_cache_dtype", "cascade"))
DENSE = tuple(name for name in FEATURES if name not in ("latent", "kv_sharing", "kv_cache_dtype", "cascade"))
LONG = {
    "plain": {},
    "window": {"sliding_window": 100},
    "soft cap": {"logits_soft_cap": 5.0},
    "sinks and window": {"sinks": True, "sliding_window": 7},
    "bidirectional": {"causal": False},
    "chunks": {"attention_chunk": 200},
    "linear ALiBi": {"alibi": "linear"},
    "square-root ALiBi and window": {"alibi": "sqrt", "sliding_window": 90},
    "mask": {"custom_mask": True},
    "spans and window": {"mm_prefix": True, "sliding_window": 90},
    "shared cache": {"kv_sharing": True},
    "cross attention": {"attn_type": "encoder_decoder", "causal": False, "encoder_lens": (500, 20, 333, 1, 0)},
}


@pytest.fixture(scope="module")
def device():
    return Device.current()


@pytest.fixture(params=VARIANTS)
def load(request, device):
    """Load a variant for a case, on this GPU."""

    def make(case, layout="NHD", **engine):
        paged = {} if engine.get("paged") is False else {"block_size": case.block_size, "kv_layout": layout}
        return attnplug.load(case.requirements(**paged, **engine), device, backend=request.param)

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_random_batches_match_the_oracle(load, dtype, layout, record_property):
    generator = random.Random(7)
    paged = [random_case(generator, features=SELF, dtype=dtype) for _ in range(60)]
    paged += [random_case(generator, features=SELF, attn_type="encoder_decoder", dtype=dtype) for _ in range(20)]
    dense = [random_case(generator, features=DENSE, dtype=dtype) for _ in range(60)]
    for case in paged:
        check(load(case, layout, return_lse=True), materialize(case))
    for case in dense:
        check(load(case, paged=False, return_lse=True), materialize(case))
    record_property("batches", len(paged) + len(dense))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("requested", LONG)
def test_prompts_longer_than_a_tile(load, requested, dtype):
    lengths = {"query_lens": (1, 1, 300, 300, 520), "context_lens": (700, 30, 150, 150, 0)}
    case = Case(**lengths, dtype=dtype, num_padding_tokens=3, **LONG[requested])

    check(load(case, return_lse=True), materialize(case))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "requested",
    [
        {"sinks": True},
        {"alibi": "sqrt", "attention_chunk": 32},
        {"custom_mask": True, "kv_sharing": True},
        {"attn_type": "encoder_decoder", "causal": False, "encoder_lens": (50, 20, 33, 7)},
    ],
    ids=str,
)
def test_build_and_forward_do_not_wait_for_the_device(load, requested):
    lengths = {"query_lens": (1, 1, 40, 70), "context_lens": (100, 33, 20, 0)}
    case = Case(**lengths, dtype="bfloat16", num_padding_tokens=2, **requested)
    backend, scene = load(case), materialize(case)
    run(backend, scene)  # the first call may set kernels up
    impl = backend.make_impl(scene.layer(device=backend.device))
    call = scene.paged(backend, backend.device)
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))

    with no_synchronization():
        metadata = builder.build(call.batch)
        impl.forward(call.query, call.key, call.value, call.cache, metadata, call.output)


def test_a_refused_batch_leaves_the_cache_alone(load):
    case = Case(query_lens=(5,), context_lens=(3,), dtype="bfloat16", block_size=4)  # two blocks, where one is allowed
    backend, scene = load(case), materialize(case)
    impl = backend.make_impl(scene.layer(device=backend.device))
    call = scene.paged(backend, backend.device)
    small = backend.make_state(attnplug.Limits(max_num_reqs=1, max_num_tokens=8, max_seq_len=8, num_blocks=2))
    before = [memory.clone() for memory in call.cache.storages]

    with pytest.raises(CacheError):
        backend.make_builder([impl], small).build(call.batch)

    assert all(torch.equal(memory, was) for memory, was in zip(call.cache.storages, before, strict=True))


def test_blocks_travel_between_host_and_device(load):
    case = Case(query_lens=(5,), context_lens=(3,), dtype="bfloat16")
    backend = load(case)
    there, here = backend.make_cache(6), backend.make_cache(6, device="cpu")
    for pages in (there.k, there.v):
        pages.normal_()

    backend.swap_blocks(there, here, [(2, 4), (5, 1)])
    back = backend.make_cache(6)
    backend.swap_blocks(here, back, [(4, 3)])

    for role in ("k", "v"):
        assert torch.equal(here[role][4], there[role][2].cpu())
        assert torch.equal(here[role][1], there[role][5].cpu())
        assert torch.equal(back[role][3], there[role][2])


@pytest.mark.parametrize("work", ["decode 64 x 4096", "prefill 4 x 4096"])
def test_time_of_a_forward(load, work, record_property):
    """Not asserted, recorded in the report: bfloat16, 32 query heads, 8 KV heads of 128, blocks of 16."""
    requests, queries = (64, 1) if work.startswith("decode") else (4, 4096)
    requested = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16", block_size=16)
    backend = attnplug.load(requested, Device.current(), backend="torch")
    blocks, tokens = requests * 256 + 1, requests * queries
    table = torch.arange(1, blocks, dtype=torch.int32).view(requests, 256)
    slots = (table.long() * 16).repeat_interleave(16, 1) + torch.arange(16).repeat(256)
    slots = slots[:, 4096 - queries :].flatten()
    lengths = ([queries] * requests, [4096] * requests)
    batch = Batch.from_lengths(*lengths, block_table=table, slot_mapping=slots, device="cuda")
    limits = attnplug.Limits(max_num_reqs=requests, max_num_tokens=tokens, max_seq_len=4096, num_blocks=blocks)
    impl, cache = backend.make_impl(attnplug.Layer(name="layer", scale=128**-0.5)), backend.make_cache(blocks)
    builder = backend.make_builder([impl], backend.make_state(limits))
    on_gpu = {"device": "cuda", "dtype": torch.bfloat16}
    key, query = torch.randn(tokens, 8, 128, **on_gpu), torch.randn(tokens, 32, 128, **on_gpu)
    output = torch.empty(tokens, 4096, **on_gpu)

    metadata = builder.build(batch)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        impl.forward(query, key, key, cache, metadata, output)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))

    record_property(f"{work}, median of 20", f"{median(times[3:]):.0f} us")
    assert bool(output.isfinite().all())
