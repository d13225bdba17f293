"""Tiny models with random weights, written to a folder, and what transformers generates with them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hosts.sglang.tests import stand_ins

stand_ins.install()

import transformers  # noqa: E402 - it imports torchvision where that is installed

if TYPE_CHECKING:
    from pathlib import Path

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_YARN = {  # on a CPU SGLang has no rotation of latents without it
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "window": (  # Mistral has a window as well, which SGLang leaves out
        "Gemma2Config",
        {
            "sliding_window": 12,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": None,  # on the CPU, SGLang has no kernel for it
            "query_pre_attn_scalar": 16,
            "hidden_act": "gelu_pytorch_tanh",  # SGLang reads this name, transformers `hidden_activation`
        },
    ),
    "granite_swa": (  # windows, sinks, and a pool for the layers with a window
        "GraniteSWAConfig",
        {
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_multiplier": 0.25,
        },
    ),
    "minicpm3": (  # latents, absorbed in every step
        "MiniCPM3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "scale_emb": 1.0,
            "scale_depth": 1.4,
            "dim_model_base": 64,
        },
    ),
    "deepseek": (  # latents; prefills with keys and values per head
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,  # no layer has experts
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_layer_freq": 1,  # SGLang reads it, as published configurations have it
            "rope_parameters": _YARN,
        },
    ),
}
LATENT = "deepseek"
NAMES = tuple(name for name in _CONFIGS if name != LATENT)
# The sizes of DeepSeek-V3's latents and heads, which libraries have kernels for.
WIDE = "deepseek_wide"
_CONFIGS[WIDE] = (
    "DeepseekV3Config",
    _CONFIGS[LATENT][1]
    | {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 2048,
        "rope_parameters": _YARN | {"original_max_position_embeddings": 512},
        "initializer_range": 0.08,
    },
)


def make(name: str, folder: Path) -> Any:
    """Write a model, and return it."""
    config, own = _CONFIGS[name]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**{**_COMMON, **own}), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for path, parameter in made.named_parameters():
            if path.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter).add(1).bfloat16())  # SGLang keeps them so
            elif name == WIDE:
                parameter.copy_(parameter.bfloat16())  # engines have it in this dtype
    made.eval().save_pretrained(folder)
    return made


def errors(model: Any, prompt: list[int], answer: dict[str, Any]) -> torch.Tensor:
    """Return the differences of the logprobs of an engine's tokens from those of transformers."""
    tokens = torch.tensor(answer["tokens"], device=model.device)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer["tokens"]], device=model.device)).logits[0, len(prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0].cpu()
    return (expected - torch.tensor(answer["logprobs"])).abs()


def with_projections_apart(model: Any) -> Any:
    """Return a copy as an engine has it that takes all keys of `kv_b_proj` first, and not those of each head."""
    made = copy.deepcopy(model)
    for layer in made.model.layers:
        attn = layer.self_attn
        weight = attn.kv_b_proj.weight.data
        parts = weight.split((attn.num_heads * attn.qk_nope_head_dim, attn.num_heads * attn.v_head_dim))
        per_head = [part.view(attn.num_heads, -1, weight.shape[1]) for part in parts]
        attn.kv_b_proj.weight.data = torch.cat(per_head, 1).flatten(0, 1)
    return made


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers chooses after a prompt."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return found[0, len(prompt) :].tolist()
