"""The variant flex on an NVIDIA GPU: right, compiled once, and without device synchronization."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.contract import Batch, Limits
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, check, limits_of, materialize, random_case
from tests.backends.harness import no_synchronization

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.contract import Backend

pytestmark = pytest.mark.gpu

FEATURES = ("sliding_window", "attention_chunk", "sinks", "causal", "kv_sharing", "decode_query_len")


def load(case: Case, **engine: object) -> Backend:
    return attnplug.load(case.requirements(**engine), Device.current(), backend="torch/flex")


@pytest.fixture(autouse=True)
def _compiler_may_warn() -> Iterator[None]:
    """Warnings of torch's compiler do not fail these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("alibi", [None, "linear", "sqrt"])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "dense"])
def test_random_batches(paged: bool, alibi: str | None) -> None:
    generator = random.Random(0)
    # One head size, one dtype, one number of KV heads, capped or not: each further one compiles again.
    fixed = {"dtype": "bfloat16" if paged else "float32", "head_size": 64, "num_kv_heads": 2, "alibi": alibi}
    fixed["logits_soft_cap"] = 5.0 if paged else None
    for _ in range(60):
        case = random_case(generator, features=FEATURES if paged else set(FEATURES) - {"kv_sharing"}, **fixed)
        case = evolve(case, num_q_heads=generator.choice([2, 4, 14]))
        pages = {"block_size": case.block_size} if paged else {}
        check(load(case, paged=paged, return_lse=generator.random() < 0.5, **pages), materialize(case))


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only", "encoder_decoder"])
def test_encoders_and_cross_attention(attn_type: str) -> None:
    generator = random.Random(1)
    fixed = {"dtype": "bfloat16", "head_size": 64, "num_kv_heads": 2, "attn_type": attn_type}
    for _ in range(20):
        case = random_case(generator, features=("sinks",) if attn_type == "encoder_decoder" else FEATURES[:3], **fixed)
        case = evolve(case, num_q_heads=4)
        check(load(case, paged=False, return_lse=True), materialize(case))
        if case.may_be_paged:
            check(load(case, block_size=case.block_size), materialize(case))


@pytest.mark.parametrize("sizes", [(16, None), (48, None), (80, 96), (64, 256), (128, 256), (256, None)], ids=str)
def test_other_head_sizes(sizes: tuple[int, int | None]) -> None:
    case = Case(
        query_lens=(1, 30, 200),
        context_lens=(50, 20, 40),
        head_size=sizes[0],
        head_size_v=sizes[1],
        dtype="float16",
        num_q_heads=7,
        num_kv_heads=1,
    )

    check(load(case, return_lse=True), materialize(case))


@pytest.mark.parametrize(
    "requested",
    [
        {},
        {"sliding_window": 100},
        {"logits_soft_cap": 5.0},
        {"sinks": True, "sliding_window": 7},
        {"causal": False},
        {"attention_chunk": 200},
        {"alibi": "linear", "logits_soft_cap": 5.0},
        {"alibi": "sqrt", "sliding_window": 90},
    ],
    ids=str,
)
def test_prompts_longer_than_a_block(requested: dict[str, object]) -> None:
    case = Case(
        query_lens=(1, 1, 300, 300, 520),
        context_lens=(700, 30, 150, 150, 0),
        head_size=64,
        dtype="bfloat16",
        num_padding_tokens=3,
        **requested,
    )

    check(load(case, return_lse=True), materialize(case))


@pytest.mark.parametrize("requested", [{}, {"alibi": "linear", "attention_chunk": 16}], ids=str)
def test_build_and_forward_do_not_wait_for_the_device(requested: dict[str, object]) -> None:
    lengths = {"query_lens": (1, 1, 9, 40), "context_lens": (30, 3, 40, 0)}
    case = Case(**lengths, head_size=64, dtype="bfloat16", num_padding_tokens=2, **requested)
    scene, backend = materialize(case), load(case)
    impl = backend.make_impl(scene.layer(device="cuda"))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, "cuda")
    arguments = (call.query, call.key, call.value, call.cache)
    impl.forward(*arguments, builder.build(call.batch), call.output)
    torch.cuda.synchronize()

    with no_synchronization():
        impl.forward(*arguments, builder.build(call.batch), call.output)


def test_one_compilation_serves_later_batches() -> None:
    case = Case(query_lens=(1,), context_lens=(0,), head_size=64, dtype="bfloat16", sliding_window=64)
    backend = load(case, paged=False)
    limits = Limits(max_num_reqs=8, max_num_tokens=4096, max_seq_len=4096)
    impl = backend.make_impl(materialize(case).layer(device="cuda"))
    builder = backend.make_builder([impl], backend.make_state(limits))

    def run(*lens: int) -> None:
        batch = Batch.from_lengths(lens, device="cuda")
        query, key = (torch.randn(sum(lens), heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        impl.forward(query, key, key, None, builder.build(batch), torch.empty_like(query).view(sum(lens), -1))

    for lens in ((700,), (300, 200), (20,), (20, 10)):
        run(*lens)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for lens in ((811,), (300, 250, 200), (13,), (30, 20, 10), (640,), (333, 222)):
        run(*lens)

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
