"""
What versions of ComfyUI publish for attention: facts of `comfy/ldm/modules/attention.py` and `comfy/model_patcher.py`.

Read from the sources at the commits named; `test_real_comfyui.py` compares them with a checkout.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_PARAMETERS: Final = (
    *(("q", ...), ("k", ...), ("v", ...), ("heads", ...)),
    *(("mask", None), ("attn_precision", None), ("skip_reshape", False), ("skip_output_reshape", False)),
)
"""Name and default of each parameter, in order; further ones are in `**kwargs`."""

_SUB_QUAD: Final = (("query", ...), ("key", ...), ("value", ...), *_PARAMETERS[3:])

_FUNCTIONS: Final = {
    **dict.fromkeys(
        ("basic", "split", "xformers", "pytorch", "sage", "flash"),
        _PARAMETERS,
    ),
    "sub_quad": _SUB_QUAD,
}


class Version(NamedTuple):
    """
    What a version has.

    Attributes:
        commit: Of the repository Comfy-Org/ComfyUI, or of the fork that is named.
        functions: The parameters of each function ``attention_NAME``.
        keywords: Keywords that functions read from ``**kwargs``, beside those of the wrapper.
        has_containers: Whether models pass queries, keys and values in containers that are emptied once.
        has_preference: Whether layers pass `preferred_attention`, which comes after an override.
        has_setter: Whether `ModelPatcher` has `set_model_optimized_attention`.
    """

    commit: str
    functions: dict[str, tuple[tuple[str, object], ...]]
    keywords: frozenset[str] = frozenset()
    has_containers: bool = False
    has_preference: bool = False
    has_setter: bool = False


_LOW: Final = frozenset({"low_precision_attention"})

VERSIONS: Final = {
    "0.3.59": Version("d7f40442f91a02946cab7445c6204bf154b1e86f", _FUNCTIONS),
    "0.3.64": Version("a125cd84b054a57729b5eecab930ca9408719832", _FUNCTIONS),
    "0.3.75": Version("9d8a817985bb069685e440b38762f95dc834d242", _FUNCTIONS),
    "0.19.3": Version(
        "34d7a5da7330fd069d939f3519fb6b2d3910789e (alexisrolland/ComfyUI)",
        {**_FUNCTIONS, "3_sage": _PARAMETERS},
        _LOW,
    ),
    "0.33.0": Version(
        "783545f689a0af730065994b46b382ae24844c99",
        {**_FUNCTIONS, "3_sage": _PARAMETERS, "comfy_kitchen_int8": _PARAMETERS},
        _LOW | {"scale", "enable_gqa"},
        has_containers=True,
        has_setter=True,
    ),
    "0.38.1": Version(
        "05080f6022b2572df36a0aa6bcba413209c3d265",
        {**_FUNCTIONS, "3_sage": _PARAMETERS, "comfy_kitchen_int8": _PARAMETERS},
        _LOW | {"scale", "enable_gqa"},
        has_containers=True,
        has_preference=True,
        has_setter=True,
    ),
}
"""0.3.59 is the first with `optimized_attention_override`, 0.38.1 the newest that was read: of it, its file alone."""

CALLS: Final = (
    (3, ("heads",)),
    (3, ("heads", "skip_reshape")),
    (3, ("heads", "mask", "skip_reshape")),
    (3, ("heads", "skip_output_reshape", "skip_reshape")),
    (4, ()),
    (4, ("attn_precision",)),
    (4, ("skip_reshape",)),
    (4, ("mask", "skip_reshape")),
    (4, ("mask", "skip_output_reshape", "skip_reshape")),
    (5, ()),
    (5, ("attn_precision",)),
    (5, ("skip_reshape",)),
)
"""How models of 0.3.64 and 0.19.3 call: how many arguments by position, and which by name beside the options."""
