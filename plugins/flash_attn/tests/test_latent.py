"""Latent attention on FlashAttention 3 of vLLM's wheel: numbers, and views of the engine's tensors in each call."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import Layer
from attnplug_kit.oracle import Case, check, materialize
from plugins.flash_attn.tests.varlen_requests import module_of
from tests.backends.harness import Harness

pytestmark = pytest.mark.usefixtures("fakes")

SIZES = ((576, 512), (320, 256))
MIXED = Case(
    query_lens=(1, 1, 5, 70), context_lens=(20, 7, 5, 0), num_q_heads=16, num_kv_heads=1, head_size=576,
    head_size_v=512, latent=True, dtype="bfloat16",
)  # fmt: skip
UNCOMPRESSED = evolve(MIXED, num_q_heads=4, num_kv_heads=4, head_size=192, head_size_v=128, latent=False)


@pytest.mark.parametrize(("head_size", "head_size_v"), SIZES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 64},
        {"block_size": 96},
        {"dtype": "float16"},
        {"causal": False},
        {"sliding_window": 9},
        {"logits_soft_cap": 2.0},
        {"kv_sharing": True},
        {"num_q_heads": 128, "query_lens": (1, 3), "context_lens": (40, 0)},
        {"shared_blocks": 1, "context_lens": (20, 17, 18, 30)},
    ],
    ids=str,
)
def test_outputs_and_lse(load_fake, head_size, head_size_v, changes) -> None:
    """Slots that were never written hold NaN, and pages of 64 and 96 are full tiles."""
    case = evolve(MIXED, head_size=head_size, head_size_v=head_size_v, **changes)

    check(load_fake(case.requirements(return_lse=True), "fa3_vllm"), materialize(case))


@pytest.mark.parametrize(("sizes", "block_size"), [((576, 512), 64), ((320, 256), 96)], ids=str)
def test_without_the_padding_the_rest_of_a_page_is_read(load_fake, monkeypatch, sizes, block_size) -> None:
    monkeypatch.setattr(module_of("fa3_vllm"), "may_load_whole_tiles", lambda _: False)
    case = evolve(MIXED, head_size=sizes[0], head_size_v=sizes[1], block_size=block_size)

    with pytest.raises(AssertionError, match="nan, exact"):
        check(load_fake(case.requirements(), "fa3_vllm"), materialize(case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
def test_uncompressed_keys(load_fake, paged, causal) -> None:
    case = evolve(UNCOMPRESSED, causal=causal)

    check(load_fake(case.requirements(paged=paged, return_lse=True), "fa3_vllm"), materialize(case))


def test_calls_have_views_of_the_tensors(load_fake, monkeypatch) -> None:
    """Neither queries nor keys nor pages are copied: the kernels read them through their strides."""
    harness = Harness(
        load_fake, [Layer(name="layers.0", scale=192**-0.5)], "fa3_vllm", head_size=576, head_size_v=512,
        num_q_heads=16, num_kv_heads=1, latent=True,
    )  # fmt: skip
    impl, calls, kernels = harness.impls[0], [], harness.backend.wrapped.kernels
    fwd = kernels._fwd
    monkeypatch.setattr(kernels, "_fwd", lambda *given: calls.append(given) or fwd(*given))
    batch, cache = harness.batch([1, 6], [9, 6]), harness.backend.make_cache(8)
    query, key = torch.randn(7, 16, 576).bfloat16(), torch.randn(7, 1, 576).bfloat16()

    impl.forward(query, key, None, cache, harness.builder.build(batch), torch.empty(7, 16 * 512).bfloat16())

    def parts(tensor, last):
        rows = tensor[last:]
        return [(each.data_ptr(), each.shape, each.stride()) for each in (rows[..., 512:], rows[..., :512])]

    decode, prefill = ([(t.data_ptr(), t.shape, t.stride()) for t in (*call[:3], call[5])] for call in calls)
    assert decode[1:3] == parts(cache.k, 0)
    assert prefill[1:3] == parts(key, 1)
    assert [prefill[0], prefill[3]] == parts(query, 1)
    assert decode[0][0] == query[..., 512:].data_ptr()


def test_schedules_are_made_for_the_rotary_size(load_fake, journal) -> None:
    check(load_fake(MIXED.requirements(), "fa3_vllm"), materialize(MIXED))

    (scheduled, *_) = journal.of("get_scheduler_metadata")
    sizes = [scheduled.arguments[name] for name in ("num_heads", "num_heads_k", "headdim", "headdim_v")]
    assert sizes == [16, 1, 64, 512]
