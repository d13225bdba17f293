from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import attnplug
from attnplug.torch_backend import sdpa

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    sdpa.fused_cpu_op.cache_clear()
    yield
    sdpa.fused_cpu_op.cache_clear()


def requested(**more: object) -> attnplug.Requirements:
    return attnplug.Requirements(head_size=16, num_q_heads=4, num_kv_heads=2, dtype="float32", **more)


@pytest.mark.parametrize("more", [{}, {"sinks": True}, {"return_lse": True}, {"sliding_window": 3}], ids=str)
def test_the_cpu_kernel_supports_lse_and_sinks(more: dict[str, object]) -> None:
    assert sdpa.choose_kernel(requested(**more), "cpu").fused


@pytest.mark.parametrize("more", [{"sinks": True}, {"return_lse": True}], ids=str)
def test_on_cuda_lse_and_sinks_are_unfused(more: dict[str, object]) -> None:
    assert sdpa.choose_kernel(requested(**more), "cuda") is sdpa.UNFUSED
    assert sdpa.choose_kernel(requested(), "cuda") is sdpa.FUSED


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("more", [{"logits_soft_cap": 5.0}, {"head_size_v": 8}], ids=str)
def test_what_no_fused_kernel_supports_is_unfused(more: dict[str, object], device: str) -> None:
    assert sdpa.choose_kernel(requested(**more), device) is sdpa.UNFUSED


def other_schema(*names: str, results: int) -> SimpleNamespace:
    arguments = [SimpleNamespace(name=name) for name in names]
    schema = SimpleNamespace(arguments=arguments, returns=[None] * results)
    return SimpleNamespace(default=SimpleNamespace(_schema=schema))


@pytest.mark.parametrize(
    "op",
    [
        None,
        other_schema("query", "key", "value", results=2),
        other_schema("query", "key", "value", "is_causal", "attn_mask", "scale", results=3),
    ],
    ids=["absent", "other arguments", "other results"],
)
def test_a_torch_without_the_private_kernel_uses_public_ones(op: object, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_flash_attention_for_cpu=op))
    monkeypatch.setattr(torch, "ops", ops)

    assert sdpa.fused_cpu_op() is None
    assert sdpa.choose_kernel(requested(), "cpu") is sdpa.FUSED
    assert sdpa.choose_kernel(requested(sinks=True), "cpu") is sdpa.UNFUSED
