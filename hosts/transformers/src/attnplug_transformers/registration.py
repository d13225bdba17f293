"""Making the name ``"attnplug"`` known to transformers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attnplug import AttnplugError, select
from attnplug_transformers.binding import bound, device_of, layer_of_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnplug import Selection
    from attnplug.models import ModelLayer


KEY: Final = "attnplug"
"""The attention implementation's name; with "flash" or "sdpa" in it the library would take it for one of its own."""


def register() -> str:
    """
    Register the attention function and its mask function with transformers. Doing it again changes nothing.

    Then ``from_pretrained(..., attn_implementation="attnplug")`` works, and so does
    ``model.set_attn_implementation("attnplug")``.

    Returns:
        The name.

    Raises:
        AttnplugError: transformers or torch is not installed.
    """
    try:
        from transformers import AttentionInterface  # noqa: PLC0415 - only this function needs the library
        from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415
    except ImportError as error:
        raise AttnplugError(
            "the host 'transformers' was asked for",
            f"it needs transformers 5.17 or newer, and torch: {error}",
            "pip install 'attnplug[transformers]'",
        ) from error
    from attnplug_transformers.attention import attend  # noqa: PLC0415 - imports torch and transformers
    from attnplug_transformers.mask import make_mask  # noqa: PLC0415

    AttentionMaskInterface.register(KEY, make_mask)
    AttentionInterface.register(KEY, attend)
    return KEY


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
        layer = layer_of_module(module)
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
