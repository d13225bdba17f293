"""Models of real architectures with random weights, in the shapes that GPU kernels support, or small ones."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

VOCABULARY: Final = 512
NAMES: Final = ("llama", "gpt_oss", "gemma2")

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
# Every token uses all experts: with fewer, the rounding of the router would change the choice.
_EXPERTS: Final = {"num_local_experts": 2, "num_experts_per_tok": 2}
_LARGE: Final[dict[str, dict[str, Any]]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131072,  # the length that its rotary embedding is scaled to
        **_EXPERTS,
    },
    "gemma2": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "query_pre_attn_scalar": 128,
        "sliding_window": 128,
        "attn_logit_softcapping": 2.0,  # low enough to change these scores
    },
}
_SMALL: Final = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_CONFIGURATIONS: Final[dict[str, Any]] = {
    "llama": transformers.LlamaConfig,
    "gpt_oss": transformers.GptOssConfig,
    "gemma2": transformers.Gemma2Config,
}


def build(name: str, *, device: str, small: bool = False, seed: int = 0) -> Any:
    """Return a model in bfloat16 whose tokens depend on every position that they attend to."""
    sizes = _LARGE[name] | (_SMALL | ({"query_pre_attn_scalar": 64} if name == "gemma2" else {}) if small else {})
    if small and "sliding_window" in sizes:
        sizes = sizes | {"sliding_window": 12}
    configuration = _CONFIGURATIONS[name](**_COMMON | sizes)
    with torch.device(device), torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation="eager")
    return _drawn(model.to(device), seed).to(torch.bfloat16).eval()


def _drawn(model: Any, seed: int) -> Any:
    """
    Draw weights so that tokens depend on attention.

    Attention is neither an average over all keys, which would hide a missing key, nor so sharp that the rounding of a
    score decides. Sinks take about half of the weight.
    """
    source = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source, device=weight.device)
            if "sinks" in label:
                weight.copy_(noise + 4)
            elif weight.ndim > 1:
                weight.copy_(noise * _gain(model, label) * weight.shape[-1 if weight.ndim == 2 else -2] ** -0.5)
            elif weight.ndim == 1 and "bias" in label:
                weight.zero_()
    return model


def _gain(model: Any, label: str) -> float:
    """Return the gain of a matrix: attention and MLP contribute equally."""
    if "q_proj" in label or "k_proj" in label:
        return 0.8 if model.config.model_type == "gpt_oss" else 1.2  # its rotary embedding makes both larger by a third
    return 0.5 if "mlp" in label else 1.0


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Return random prompts of these lengths."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=source).tolist() for length in lengths]
