"""Tiny models that vLLM and transformers both load, with weights that make every token depend on its whole context."""

from __future__ import annotations

from typing import Any

import tokenizers
import torch
import transformers

VOCABULARY = 512
WINDOW = 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# vLLM reads each of them; the defaults are for another length.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
_BLOOM = ("vocab_size", "hidden_size", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
_ENCODER = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "initializer_range", "pad_token_id")


def _deepseek(longest, **sizes):
    """
    Return a configuration with multi-head latent attention, all layers dense, with YaRN's scale.

    vLLM 0.32 rotates wrongly without YaRN on a CPU, and its own CPU backend has these sizes of latents alone.
    """
    given = {name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")}
    rope = {"truncate": True, "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": longest // 4}
    # Those of queries, keys and values per head are what vLLM's prefill backends have.
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128} | sizes
    return transformers.DeepseekV3Config(
        **given | {"max_position_embeddings": longest} | heads,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        first_k_dense_replace=SIZES["num_hidden_layers"],
        n_routed_experts=8,
        rope_parameters=YARN | rope,
    )


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    # Layers with a window beside layers without one, in one KV-cache group.
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=16,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=YARN,
    ),
    # With ALiBi, and no other positions.
    "bloom": lambda: transformers.BloomConfig(
        **{name: SIZES[name] for name in _BLOOM}, n_layer=SIZES["num_hidden_layers"], n_head=4
    ),
    "deepseek": lambda: _deepseek(512),
    "deepseek_long": lambda: _deepseek(4096),
    # Heads that no prefill backend of vLLM has.
    "latent_96": lambda: _deepseek(4096, qk_nope_head_dim=32, v_head_dim=96),
    "bert": lambda: transformers.BertConfig(
        **{name: SIZES[name] for name in _ENCODER}, num_attention_heads=2, max_position_embeddings=512
    ),
}


def save(name, folder):
    """Write a tiny model in float32 to a folder, with a tokenizer where vLLM does not go without one."""
    torch.manual_seed(0)
    model = _auto(name).from_config(CONFIGS[name]()).float()
    _strengthen(model)
    model.save_pretrained(folder)
    if name == "bert":
        save_tokenizer(folder)


def _strengthen(model):
    """Let attention decide: fresh sinks take next to nothing, and a fresh Gemma 2 repeats the token before."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 2.0, 0.5)
        elif "gemma2" in model.config.model_type and "layernorm" in name and ".post_" in name:
            torch.nn.init.constant_(parameter, 4.0)


def _auto(name):
    return transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM


def save_tokenizer(folder):
    """Write a tokenizer with a word for each number to a folder."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))  # noqa: S106 - no password
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w0", unk_token="w3")  # noqa: S106 - likewise
    tokenizer.save_pretrained(folder)


def load(folder, **changes):
    """Load one for the reference: eager attention in float32, with changes of its configuration."""
    config = transformers.AutoConfig.from_pretrained(folder, **changes)
    auto = _auto(config.model_type)
    return auto.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
