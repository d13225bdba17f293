"""Which backend each attention layer of a model runs on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attnplug import select
from attnplug_transformers.binding import bound, device_of
from attnplug_transformers.described import described
from attnplug_transformers.registration import KEY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnplug import Selection
    from attnplug.models import ModelLayer


def selections(model: PreTrainedModel) -> dict[str, Selection]:
    """
    Return the decision for every attention module that runs through attnplug.

    Those are the modules whose configuration has the attention implementation ``"attnplug"``. An empty mapping means
    that the model was never switched to it, or has been switched back, or that its classes do not let their attention
    be replaced, in which case transformers leaves the setting as it was. A module that has not run yet is decided on as
    its configuration describes it, in the model's dtype and on its device. A layer of which the configuration says
    nothing is absent until it has run.

    Args:
        model: A model of transformers.

    Returns:
        The decisions by module name, as `model.named_modules()` has it.

    Raises:
        NoBackendError: Nothing can serve a layer.
    """
    found: dict[str, Selection] = {}
    for name, module in model.named_modules():
        if not _is_switched(getattr(module, "config", model.config)):
            continue
        binding = bound(module)
        if binding is not None:
            found[name] = binding.selection
            continue
        layer = described(module)
        if layer is not None and _is_attention(name, layer):
            asked = layer.requirements.evolve(dtype=str(model.dtype).removeprefix("torch."), kv_cache_dtype="auto")
            found[name] = select(asked, device_of(model.device))
    return found


def _is_switched(config: object) -> bool:
    return getattr(config, "_attn_implementation", None) == KEY


def _is_attention(name: str, layer: ModelLayer) -> bool:
    """Whether this is an attention module itself, rather than a module around it or inside it."""
    pattern = re.sub(r"\\\.\d+\\\.", lambda _: r"\.\d+\.", re.escape(layer.name))
    return re.fullmatch(rf"(.*\.)?{pattern}", name) is not None
