"""The architectures of the demonstration: configurations of a few layers, and models with random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import transformers
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

Kind = Literal["decoder", "encoder", "encoder_decoder"]

PADDING: Final = 256
"""The padding token."""

SPECIAL: Final = 257
"""The mask token of the encoder, and the start token of a transcription."""

MEL_BINS: Final = 16
"""Mel bins of the audio."""

FRAMES: Final = 96
"""Frames of the audio; the encoder has half as many tokens."""

_VOCABULARY: Final = 258
_WINDOW: Final = 16

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PADDING,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_ENCODER: Final[Mapping[str, Any]] = {
    name: value for name, value in _SIZES.items() if name not in ("num_key_value_heads", "head_dim")
}
_SPEECH: Final[Mapping[str, Any]] = {
    "vocab_size": _VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": MEL_BINS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "pad_token_id": PADDING,
    "bos_token_id": PADDING,
    "eos_token_id": PADDING,
    "decoder_start_token_id": SPECIAL,
    "tie_word_embeddings": False,
}


@frozen
class Example:
    """
    One architecture.

    Attributes:
        name: Its name.
        about: What distinguishes its attention.
        config: Returns its configuration.
        kind: A decoder runs in the paged engine, the others through dense calls.
    """

    name: str
    about: str
    config: Callable[[], transformers.PreTrainedConfig]
    kind: Kind = "decoder"


EXAMPLES: Final = (
    Example("Llama", "grouped-query attention", lambda: transformers.LlamaConfig(**_SIZES)),
    Example(
        "Mistral",
        f"a sliding window of {_WINDOW} tokens",
        lambda: transformers.MistralConfig(**_SIZES, sliding_window=_WINDOW),
    ),
    Example(
        "Gemma 2",
        f"soft-capped scores, a sliding window of {_WINDOW} tokens in every other layer",
        lambda: transformers.Gemma2Config(
            **_SIZES, sliding_window=_WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=24
        ),
    ),
    Example(
        "gpt-oss",
        f"attention sinks, a sliding window of {_WINDOW} tokens in every other layer",
        lambda: transformers.GptOssConfig(**_SIZES, sliding_window=_WINDOW, num_local_experts=4, num_experts_per_tok=2),
    ),
    Example("Qwen3", "normalized queries and keys", lambda: transformers.Qwen3Config(**_SIZES)),
    Example(
        "BERT",
        "an encoder, whose tokens attend to their whole sentence",
        lambda: transformers.BertConfig(**_ENCODER),
        "encoder",
    ),
    Example(
        "Whisper",
        "an audio encoder, and a decoder with cross attention to it",
        lambda: transformers.WhisperConfig(**_SPEECH),
        "encoder_decoder",
    ),
)
"""The architectures, in the order of the output."""

_AUTO_CLASSES: Final[dict[str, Any]] = {
    "decoder": transformers.AutoModelForCausalLM,
    "encoder": transformers.AutoModelForMaskedLM,
    "encoder_decoder": transformers.AutoModelForSpeechSeq2Seq,
}
_QUERIES_AND_KEYS: Final = ("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")


def make_model(example: Example, seed: int) -> Any:
    """Return a model on eager attention. Queries and keys have a gain of 3, so that tokens depend on their context."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _AUTO_CLASSES[example.kind].from_config(
            example.config(), attn_implementation="eager", dtype=torch.float32
        )
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if name.endswith("sinks"):
                weight.copy_(noise + 2)
            elif weight.ndim > 1:
                weight.copy_(noise * (3.0 if name.endswith(_QUERIES_AND_KEYS) else 1.0) * _fan_in(name, weight) ** -0.5)
    return model.eval()


def _fan_in(name: str, weight: Tensor) -> int:
    """Return the numbers that are summed into one output: a convolution sums over its width too."""
    return weight[0].numel() if "conv" in name else weight.shape[-1]
