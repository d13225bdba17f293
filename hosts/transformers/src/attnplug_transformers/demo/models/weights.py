"""Random weights with which tokens depend on what is attended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_transformers.demo.models.example import Example

_MAKERS: Final[dict[str, Any]] = {
    "decoder": transformers.AutoModelForCausalLM,
    "encoder": transformers.AutoModelForMaskedLM,
    "encoder_decoder": transformers.AutoModelForSpeechSeq2Seq,
}
_SHARP: Final = ("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")


def draw(example: Example, seed: int) -> Any:
    """Return a model on eager attention: every weight of unit gain, those of queries and keys sharper."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _MAKERS[example.kind].from_config(example.config(), attn_implementation="eager", dtype=torch.float32)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if name.endswith("sinks"):
                weight.copy_(noise + 2)
            elif weight.ndim > 1:
                weight.copy_(noise * (3.0 if name.endswith(_SHARP) else 1.0) * _inputs(name, weight) ** -0.5)
    return model.eval()


def _inputs(name: str, weight: Tensor) -> int:
    """Return how many numbers are summed into one: a convolution sums over its width too."""
    return weight[0].numel() if "conv" in name else weight.shape[-1]
