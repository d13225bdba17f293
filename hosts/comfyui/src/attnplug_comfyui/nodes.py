"""The nodes: one gives a model the attention of attnplug, the other says where its calls went."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import attnplug
from attnplug.errors import AttnplugError, SettingsError
from attnplug_comfyui.patching import override_of, patch

_logger: Final = logging.getLogger("attnplug.comfyui")
AUTO: Final = "auto"

_TYPICAL: Final = tuple(
    attnplug.Requirements(
        head_size=size,
        num_q_heads=8,
        num_kv_heads=8,
        dtype=dtype,
        attn_type="encoder_only",
        paged=False,
        phases=("prefill",),
    )
    for size in (64, 128)
    for dtype in ("bfloat16", "float16", "float32")
)
"""Calls of diffusion models: a backend that serves one of them is a choice."""


def backend_choices() -> list[str]:
    """Return ``"auto"``, and the backends and variants that serve typical calls on this machine."""
    try:
        ids = list(
            dict.fromkeys(
                verdict.id for layer in _TYPICAL for verdict in attnplug.explain(layer).verdicts if verdict.agreement
            )
        )
    except AttnplugError as error:  # raised here, it would hide the node from ComfyUI; the first call raises it, too
        _logger.error("attnplug: %s", error)  # noqa: TRY400 - the error says all, and ComfyUI prints it to users
        return [AUTO]
    return [AUTO, *dict.fromkeys(name for one in ids for name in (one.partition("/")[0], one))]


def options_from(text: str) -> dict[str, dict[str, Any]] | None:
    """
    Return options by backend, from JSON.

    Raises:
        SettingsError: It is no object of objects.
    """
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        found = str(error)
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise SettingsError(
            f"the options {text!r} were given",
            "options are a JSON object with an object for each backend",
            'write them as {"BACKEND": {"OPTION": VALUE}}, or leave the field empty',
        )
    return found


class AttnplugAttention:
    """The node that gives a model the attention of attnplug."""

    DESCRIPTION = (
        "Runs the attention of this model on the backend that attnplug selects, or on the one named. Other models stay "
        "as they are. The log says once for each kind of call which backend runs it."
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model/patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802 - ComfyUI's name
        """Return the inputs, as ComfyUI wants them."""
        return {
            "required": {
                "model": ("MODEL",),
                "backend": (
                    backend_choices(),
                    {"default": AUTO, "tooltip": "auto: the best of those that serve a call. Or the one that has to."},
                ),
                "fallback": (
                    "BOOLEAN",
                    {
                        "default": False,
                        "tooltip": "Whether ComfyUI's own attention runs what no backend serves, with a warning. "
                        "Otherwise that is an error with all reasons.",
                    },
                ),
            },
            "optional": {
                "options": (
                    "STRING",
                    {"default": "", "multiline": True, "tooltip": 'JSON, such as {"BACKEND": {"OPTION": VALUE}}.'},
                ),
                "replace": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Whether the attention that another node has set is replaced."},
                ),
            },
        }

    def patch(
        self,
        model: Any,
        backend: str = AUTO,
        fallback: bool = False,  # noqa: FBT001, FBT002 - ComfyUI passes inputs by name
        options: str = "",
        replace: bool = False,  # noqa: FBT001, FBT002 - likewise
    ) -> tuple[Any]:
        """
        Return a clone of the model with the attention of attnplug.

        Raises:
            RequestError: As for `attnplug_comfyui.patch`.
            SettingsError: The options are no JSON object of objects.
        """
        named = None if backend == AUTO else backend
        return (patch(model, named, options=options_from(options), fallback=fallback, replace=replace),)


class AttnplugAttentionReport:
    """The node that says where the attention calls of a model went."""

    DESCRIPTION = "Says which backends of attnplug ran the attention of a model, how often, and why others did not."
    RETURN_TYPES = ("STRING",)
    FUNCTION = "report"
    CATEGORY = "model/patch"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Any]]:  # noqa: N802 - ComfyUI's name
        """Return the inputs, as ComfyUI wants them."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model that the sampler has."}),
                "after": ("LATENT", {"tooltip": "The sampler's output: the report waits for it."}),
            },
            "optional": {"reset": ("BOOLEAN", {"default": True, "tooltip": "Whether the next run counts from zero."})},
        }

    @classmethod
    def IS_CHANGED(cls, **_: object) -> float:  # noqa: N802 - ComfyUI's name
        """Return what equals nothing: the counts of a run are new, and ComfyUI keeps no former output."""
        return float("nan")

    def report(self, model: Any, after: object, reset: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002 - as above
        """
        Return a line for each route.

        Raises:
            RequestError: The model has no override of attnplug.
        """
        del after
        override = override_of(model)
        text = "\n".join(map(str, override.report())) or "no attention call was made"
        if reset:
            override.reset()
        return {"ui": {"text": (text,)}, "result": (text,)}


NODE_CLASS_MAPPINGS: Final = {
    "AttnplugAttention": AttnplugAttention,
    "AttnplugAttentionReport": AttnplugAttentionReport,
}
"""ComfyUI's table of the nodes of a folder, by the name that workflows keep."""

NODE_DISPLAY_NAME_MAPPINGS: Final = {
    "AttnplugAttention": "Attention by attnplug",
    "AttnplugAttentionReport": "Attention report of attnplug",
}
"""How the nodes are called in menus."""
