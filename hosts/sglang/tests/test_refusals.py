"""What is not served is refused by name, and the fix says what to do."""

from __future__ import annotations

from types import SimpleNamespace as Names
from typing import Any

import pytest
import torch

from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_sglang import options
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


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("DSATokenToKVPool", "sparse latent attention"),
        ("MLATokenToKVPoolFP4", ""),
        ("UnifiedMHATokenToKVPool", "translated at each step"),
        ("HybridLinearKVPool", ""),
    ],
)
def test_pools(name: str, named: str) -> None:
    world = World(1)
    world.runner.token_to_kv_pool = type(name, (), {})()
    with pytest.raises(NotNegotiatedError, match=f"SGLang's pool is {name}.*{named}"):
        world.backend()


def test_options_of_sglang() -> None:
    with pytest.raises(NotNegotiatedError, match="unified memory pool"):
        World(1, server={"enable_unified_memory": True}).backend()


@pytest.mark.parametrize(
    ("option", "named", "fix"),
    [
        ({"dcp_size": 2}, "decode context parallelism", "leave --dcp-size out"),
        ({"enable_prefill_cp": True}, "prefill context parallelism", "leave --enable-prefill-cp"),
        ({"attn_cp_size": 2}, "prefill context parallelism", "--attn-cp-size out"),
    ],
)
def test_context_parallelism(option: dict[str, Any], named: str, fix: str) -> None:
    with pytest.raises(NotNegotiatedError, match=named) as caught:
        World(1, server=option).backend()
    assert fix in caught.value.fix


def test_images_whose_tokens_attend_to_each_other() -> None:
    world = World(1)
    world.model.prepare_attn_masks = lambda *_: None  # as SGLang's Gemma 3 and Gemma 4 have it
    world.runner.model_config = Names(is_multimodal=False)
    assert world.backend()  # text alone
    world.runner.model_config = Names(is_multimodal=True)
    with pytest.raises(NotNegotiatedError, match="later tokens of the same image") as caught:
        world.backend()
    assert "--attention-backend triton" in caught.value.fix


@pytest.mark.parametrize("settled", [False, True])
def test_a_deterministic_engine_requests_batch_invariance(settled: bool) -> None:
    """SGLang settles it for some other options: the field of its arguments then stays as it was passed."""
    option = {"enable_deterministic_inference": True}
    server = {"enable_deterministic_inference": False, "_resolved_overrides": [("_", option)]} if settled else option
    with pytest.raises(NoBackendError, match="batch_invariant"):
        World(1, server=server).backend()


def test_limits_have_the_drafts_that_sglang_settled() -> None:
    world = World(1, server={"speculative_num_draft_tokens": None})
    plain = options.limits_of(world.runner, 2)
    world.runner.server_args._resolved_overrides = [("_", {"speculative_num_draft_tokens": 5})]
    drafted = options.limits_of(world.runner, 2)
    assert drafted.max_seq_len == plain.max_seq_len + 4
    assert drafted.max_num_tokens == plain.max_num_tokens + 4 * plain.max_num_reqs


@pytest.mark.parametrize("chunk", [None, -1])
def test_limits_without_chunks_have_a_prompt_of_full_length(chunk: int | None) -> None:
    found = options.limits_of(World(1, server={"chunked_prefill_size": chunk, "max_prefill_tokens": 7}).runner, 2)
    assert found.max_num_tokens >= found.max_seq_len


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
    world = World(1)
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [5], ForwardMode.EXTEND)
    spec = Names(custom_mask=torch.ones(3, dtype=torch.bool), draft_token_num=2)
    with pytest.raises(NotNegotiatedError, match="a mask of 3 elements"):
        backend.init_forward_metadata(world.batch([a], [2], ForwardMode.TARGET_VERIFY, spec=spec))


def test_decodes_of_a_draft_tree() -> None:
    world = World(1)
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [5], ForwardMode.EXTEND)
    step = world.batch([a], [1], ForwardMode.DECODE)
    step.spec_info = Names(kv_indptr=torch.tensor([0, 6]), kv_indices=torch.arange(6))
    with pytest.raises(NotNegotiatedError, match="each branch of its tree") as caught:
        backend.init_forward_metadata(step)
    assert "--speculative-draft-attention-backend triton" in caught.value.fix


def test_drafts_of_other_numbers_for_each_request() -> None:
    world = World(1)
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [5], ForwardMode.EXTEND)
    spec = Names(custom_mask=None, draft_token_num=2, ragged_verify_layout=object())
    with pytest.raises(NotNegotiatedError, match="another number of drafts"):
        backend.init_forward_metadata(world.batch([a], [2], ForwardMode.TARGET_VERIFY, spec=spec))


def test_drafts_that_are_prepared_ahead() -> None:
    with pytest.raises(NotNegotiatedError, match="on a stream beside") as caught:
        World(1).backend().update_verify_buffers_to_fill_after_draft(None, None)
    assert "SGLANG_ENABLE_OVERLAP_PLAN_STREAM" in caught.value.fix
