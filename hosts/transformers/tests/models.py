"""Tiny models of real architectures, with weights that make every token depend on all of its context."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
import transformers

PAD = 256
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
ENCODER_SIZES: dict[str, Any] = {
    name: SIZES[name]
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""What models call their KV cache: another name since transformers 5.24."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}


def config(name, **changes):
    """Return the configuration of a tiny model."""
    return _CONFIGS[name](changes)


_CONFIGS = {
    "llama": lambda more: transformers.LlamaConfig(**(SIZES | more)),
    "qwen3": lambda more: transformers.Qwen3Config(**(SIZES | more)),
    "mistral": lambda more: transformers.MistralConfig(**(SIZES | {"sliding_window": WINDOW} | more)),
    "gemma2": lambda more: transformers.Gemma2Config(
        **(SIZES | {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 5} | more)
    ),
    "gpt_oss": lambda more: transformers.GptOssConfig(**(SIZES | EXPERTS | {"sliding_window": WINDOW} | more)),
    "llama4": lambda more: transformers.Llama4TextConfig(
        **(SIZES | EXPERTS | {"num_experts_per_tok": 1, "attention_chunk_size": 8, "intermediate_size_mlp": 48} | more)
    ),
    "deepseek_v3": lambda more: transformers.DeepseekV3Config(**(SIZES | LATENT | more)),
    "gpt2": lambda more: transformers.GPT2Config(
        **({"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128} | more)
    ),
    "bert": lambda more: transformers.BertConfig(**(ENCODER_SIZES | {"pad_token_id": PAD} | more)),
    "modernbert": lambda more: transformers.ModernBertConfig(
        **(ENCODER_SIZES | {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": PAD} | more)
    ),
    "bart": lambda more: transformers.BartConfig(
        **(
            {"vocab_size": 257, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32}
            | {"decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": PAD}
            | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
            | more
        )
    ),
    "whisper": lambda more: transformers.WhisperConfig(
        **(
            {"vocab_size": 257, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32}
            | {"decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": PAD}
            | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
            | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            | more
        )
    ),
}

_HEADS = {"bert": "AutoModel", "modernbert": "AutoModel", "bart": "AutoModelForSeq2SeqLM", "whisper": "AutoModel"}


PARTS = {
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextModel"),
    "ernie4_5_vl_moe_text": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel"),
    "emu3_text_model": ("emu3", "Emu3TextModel"),
    "step3p5": ("step3p7", "Step3p7TextModel"),
    "mllama_text_model": ("mllama", "MllamaTextModel"),
    "qwen2_5_omni_text": ("qwen2_5_omni", "Qwen2_5OmniThinkerTextModel"),
}
"""Parts of composite models, which the library's automatic classes do not build."""


def made_from(config, auto=transformers.AutoModel):
    """Return a model of any configuration on eager attention: by its automatic class, or the class of a part."""
    if config.model_type not in PARTS:
        return auto.from_config(config, attn_implementation="eager")
    module, name = PARTS[config.model_type]
    cls = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    return cls._from_config(config, attn_implementation="eager")


def model(name, seed=0, dtype=torch.float32, **changes):
    """Return a tiny model on eager attention."""
    auto = getattr(transformers, _HEADS.get(name, "AutoModelForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what `sharpen` leaves unchanged, such as a router's bias
        made = auto.from_config(config(name, **changes), attn_implementation="eager", dtype=torch.float32)
    return sharpen(made, seed).to(dtype)


def sharpen(made, seed=0):
    """Draw weights of unit gain, and sharp queries and keys, so that tokens depend on their context."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, weight in made.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if "sinks" in label:
                weight.copy_(noise + 2)
            elif weight.ndim > 1:
                sharp = 3.0 if any(part in label for part in ("q_proj", "k_proj", "query", "key")) else 1.0
                weight.copy_(noise * sharp * weight.shape[-1] ** -0.5)
    return made.eval()


def prompts(*lengths, right=False, seed=1):
    """Return ids and attention mask of random prompts, padded on the left (or on the right)."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        columns = slice(0, length) if right else slice(max(lengths) - length, None)
        ids[row, columns] = torch.randint(0, 256, (length,), generator=source)
    return ids, (ids != PAD).long()


def generate(made, ids, mask, new_tokens=16, **how):
    """Return the tokens that follow the prompts, and the smallest logit margin."""
    found = made.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )
    best = torch.stack(found.logits, 1).topk(2).values
    return found.sequences[:, ids.shape[1] :], float((best[..., 0] - best[..., 1]).min())
