"""Small models of real architectures with random weights, run through attnplug and through transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import transformers
from attrs import frozen
from torch import Tensor

from attnplug.hosts.transformers.decisions import selections
from attnplug.hosts.transformers.registration import register
from attnplug.selection.selection import Selection

_VOCABULARY: Final = 257
_PADDING: Final = 256
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
    "pad_token_id": _PADDING,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@frozen
class Example:
    """
    One architecture.

    Attributes:
        name: Its name.
        about: What is special about its attention.
        config: Makes its configuration.
    """

    name: str
    about: str
    config: Callable[[], transformers.PreTrainedConfig]


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
)
"""The architectures that are shown."""


@frozen(eq=False)
class Outcome:
    """
    One architecture, run both ways.

    Attributes:
        example: The architecture.
        decisions: The decision for each attention module.
        expected: ``(prompts, tokens)`` that transformers' eager attention generates.
        tokens: ``(prompts, tokens)`` through attnplug.
        margin: Least distance between the best and the second logit, over all tokens of the reference.
    """

    example: Example
    decisions: Mapping[str, Selection]
    expected: Tensor
    tokens: Tensor
    margin: float

    @property
    def num_equal(self) -> int:
        """Tokens that are the same."""
        return int((self.expected == self.tokens).sum())

    @property
    def agrees(self) -> bool:
        """Whether all are."""
        return self.num_equal == self.expected.numel()


def cut_prompts(text: bytes, lengths: Sequence[int] = (41, 67, 96)) -> list[bytes]:
    """Return a piece of the text for each length, spread over it."""
    step = len(text) // len(lengths)
    return [text[index * step : index * step + length] for index, length in enumerate(lengths)]


def demonstrate(example: Example, prompts: Sequence[bytes], new_tokens: int, *, least_margin: float = 1e-3) -> Outcome:
    """
    Generate from the prompts greedily, in one batch padded on the left, with a token per byte.

    Weights are drawn again until every choice of the reference is clear by `least_margin`: where two tokens tie,
    rounding decides, and nothing is learned from who wins.

    Args:
        example: The architecture.
        prompts: The prompts.
        new_tokens: Tokens that each is continued by.
        least_margin: Least distance between the best and the second logit.
    """
    key = register()
    model, expected, margin = _reference(example, prompts, new_tokens, least_margin)
    model.set_attn_implementation(key)
    tokens, _ = _generate(model, prompts, new_tokens)
    return Outcome(example, selections(model), expected, tokens, margin)


def _reference(
    example: Example, prompts: Sequence[bytes], new_tokens: int, least_margin: float
) -> tuple[transformers.PreTrainedModel, Tensor, float]:
    best: tuple[transformers.PreTrainedModel, Tensor, float] | None = None
    for seed in range(16):
        model = _draw(example, seed)
        tokens, margin = _generate(model, prompts, new_tokens)
        if best is None or margin > best[2]:
            best = model, tokens, margin
        if margin >= least_margin:
            break
    assert best is not None  # noqa: S101 - the range is not empty
    return best


def _draw(example: Example, seed: int) -> transformers.PreTrainedModel:
    """Make a model whose tokens depend on all of their context: every weight of unit gain, queries and keys sharper."""
    maker: Any = transformers.AutoModelForCausalLM
    model = maker.from_config(example.config(), attn_implementation="eager", dtype=torch.float32).eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if name.endswith("sinks"):
                weight.copy_(noise + 2)
            elif weight.ndim > 1:
                gain = 3.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
                weight.copy_(noise * gain * weight.shape[-1] ** -0.5)
    drawn: transformers.PreTrainedModel = model
    return drawn


def _generate(model: Any, prompts: Sequence[bytes], new_tokens: int) -> tuple[Tensor, float]:
    """Return ``(prompts, new tokens)``, and the least margin by which a token was chosen."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[_PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    found = model.generate(
        input_ids=ids,
        attention_mask=(ids != _PADDING).long(),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(found.logits, 1).topk(2).values
    return found.sequences[:, longest:], float((best[..., 0] - best[..., 1]).min())
