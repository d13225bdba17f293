"""The built-in backend serves vLLM on a GPU for which no kernel library is installed: torch is all that it needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch

import attnplug
from attnplug_vllm import facts
from attnplug_vllm.backend import backend_class
from hosts.vllm.tests.cuda_platform import use_cuda

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)]
LAYERS = {
    "plain": {},
    "window": {"sliding_window": 4096},
    "sinks beside a window": {"sinks": True, "sliding_window": 128},
    "soft cap": {"logits_soft_cap": 50.0},
    "alibi": {"alibi": "linear"},
    "encoder": {"attn_type": "encoder_only"},
}


@pytest.fixture(params=CAPABILITIES, ids=lambda each: f"{each[0]}.{each[1]}")
def platform(request, monkeypatch):
    """A CUDA device, and no plugin beside attnplug itself."""
    monkeypatch.setenv("ATTNPLUG_ALLOW", "torch")
    attnplug.refresh()
    yield use_cuda(monkeypatch, request.param)
    attnplug.refresh()


@pytest.mark.feature("no kernel library", kind="selection")
def test_vllms_selector_gets_the_built_in_backend(platform):
    from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: PLC0415 - of the installed version

    found = backend_class(())
    member = SimpleNamespace(get_class=lambda: found, name=found.get_name())
    asked = AttentionSelectorConfig(head_size=128, dtype=torch.float16, kv_cache_dtype="auto", block_size=None)

    path = platform.get_attn_backend_cls(member, asked)

    assert path == f"{found.__module__}.{found.__qualname__}"
    candidates = {one.id for one in facts.candidates(())}
    assert candidates
    assert {one.partition("/")[0] for one in candidates} == {"torch"}


@pytest.mark.feature("no kernel library", kind="selection")
@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_it_is_selected_for_the_layers_of_models(platform, fields):
    requirements = facts.layer_requirements(
        head_size=128, dtype=torch.float16, num_q_heads=32, num_kv_heads=8, **fields
    )
    selection = facts.select(requirements, ())
    assert selection.agreement.backend == "torch"
    if fields.get("attn_type") != "encoder_only":
        assert selection.bind(block_size=16).agreement.block_size == 16
