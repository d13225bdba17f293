"""What is not served is refused by name, and the fix says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug.errors import NoBackendError, NotNegotiatedError
from hosts.sglang.tests.rig import AttentionType, ForwardMode, World


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_irope": True}, "irope"),
        ({"xai_temperature_len": 64}, "temperature"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "rotary embedding inside of attention"),
        ({"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, "soft cap by 'sigmoid'"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "bidirectional inside of images"),
        ({"attn_type": AttentionType.ENCODER_ONLY, "sliding_window_size": 6}, "a window in an encoder"),
    ],
)
def test_layers(changes: dict[str, Any], named: str) -> None:
    world = World(1)
    for name, value in changes.items():
        setattr(world.layers[1].attn, name, value)
    with pytest.raises(NotNegotiatedError, match=named) as caught:
        world.backend()
    assert "layers.1.attn" in str(caught.value)
    assert "--attention-backend triton" in str(caught.value)


def test_a_model_without_attention() -> None:
    world = World(1)
    world.runner.model = torch.nn.Linear(2, 2)
    with pytest.raises(NotNegotiatedError, match="Linear has no RadixAttention"):
        world.backend()


@pytest.mark.parametrize("name", ["MLATokenToKVPool", "UnifiedMHATokenToKVPool", "HybridLinearKVPool"])
def test_pools(name: str) -> None:
    world = World(1)
    world.runner.token_to_kv_pool = type(name, (), {})()
    with pytest.raises(NotNegotiatedError, match=f"SGLang's pool is {name}"):
        world.backend()


def test_options_of_sglang() -> None:
    with pytest.raises(NotNegotiatedError, match="unified memory pool"):
        World(1, server={"enable_unified_memory": True}).backend()
    world = World(1)
    world.runner.use_mla_backend = True
    with pytest.raises(NotNegotiatedError, match="multi-head latent attention"):
        world.backend()
    world = World(1)
    world.runner.dcp_size = 2
    with pytest.raises(NotNegotiatedError, match="decode context parallelism"):
        world.backend()


def test_a_deterministic_engine_requests_batch_invariance() -> None:
    world = World(1, server={"enable_deterministic_inference": True})
    with pytest.raises(NoBackendError, match="batch_invariant"):
        world.backend()


def test_a_candidate_that_does_not_serve_is_refused_with_its_reasons() -> None:
    with pytest.raises(NoBackendError, match="flash_attn/fa3"):
        World(16, backend="flash_attn/fa3").backend()


def test_calls() -> None:
    world = World(1, sinks=True)
    backend = world.backend()
    step, data = world.batch([world.new()], [3], ForwardMode.EXTEND), world.qkv(3)
    backend.init_forward_metadata(step)
    layer, (q, k, v) = world.layers[0], data[0]
    with pytest.raises(NotNegotiatedError, match="called without sinks"):
        backend.forward(q.flatten(1), k, v, layer.attn, step)
    with pytest.raises(NotNegotiatedError, match="called with k_rope, topk_indices"):
        backend.forward(q.flatten(1), k, v, layer.attn, step, sinks=layer.sinks, k_rope=k, topk_indices=k)
    stranger = World(1).layers[0].attn
    with pytest.raises(NotNegotiatedError, match="which the model did not have"):
        backend.forward(q.flatten(1), k, v, stranger, step)
    plain = World(1)
    without = plain.backend()
    step = plain.batch([plain.new()], [3], ForwardMode.EXTEND)
    without.init_forward_metadata(step)
    with pytest.raises(NotNegotiatedError, match="called with sinks"):
        without.forward(q.flatten(1), k, v, plain.layers[0].attn, step, sinks=layer.sinks)


def test_steps_of_diffusion_models() -> None:
    world = World(1)
    backend = world.backend()
    step = world.batch([world.new()], [3], ForwardMode.EXTEND)
    step.forward_mode = ForwardMode.DLLM_EXTEND
    with pytest.raises(NotNegotiatedError, match="DLLM_EXTEND"):
        backend.init_forward_metadata(step)


def test_a_scale_for_each_head() -> None:
    world = World(1, kv_dtype=torch.float8_e4m3fn)
    world.layers[0].attn.k_scale = torch.ones(2)
    with pytest.raises(NotNegotiatedError, match="2 values of k_scale"):
        world.backend()


def test_a_mask_that_is_too_small() -> None:
    from types import SimpleNamespace as Names  # noqa: PLC0415

    world = World(1)
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [5], ForwardMode.EXTEND)
    spec = Names(custom_mask=torch.ones(3, dtype=torch.bool), draft_token_num=2)
    with pytest.raises(NotNegotiatedError, match="a mask of 3 elements"):
        backend.init_forward_metadata(world.batch([a], [2], ForwardMode.TARGET_VERIFY, spec=spec))
