"""
The factor of the scores, as each architecture computes it. A model that scales its queries beforehand has it too.

Sources: the attention modules of transformers, with which the tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import evolve

from attnplug.errors import RequirementsError

if TYPE_CHECKING:
    from attnplug.models.fields import Fields

_OF_MISTRAL_4: Final = {"rope_type": "yarn", "factor": 128.0, "mscale_all_dim": 1.0}
"""Of the default that Mistral-4's configuration class derives, what the scale follows from."""

Scale: TypeAlias = Callable[["Fields", int, int], float]
"""Fields, size of one head and number of the layer -> the factor."""


def inverse_root(_: Fields, head_size: int, __: int) -> float:
    """The inverse root of the size of a head."""
    return float(head_size**-0.5)


def unit(_: Fields, __: int, ___: int) -> float:
    """The scores are not scaled."""
    return 1.0


def pre_attn_scalar(fields: Fields, head_size: int, _: int) -> float:
    """The inverse root of `query_pre_attn_scalar`."""
    return float(_number(fields, "query_pre_attn_scalar", head_size) ** -0.5)


def granite(fields: Fields, head_size: int, _: int) -> float:
    """`attention_multiplier` itself."""
    return _number(fields, "attention_multiplier", head_size**-0.5)


def weights_switch(fields: Fields, head_size: int, index: int) -> float:
    """GPT-2: each of two switches changes the scale."""
    scale = 1.0 if fields.is_off("scale_attn_weights") else head_size**-0.5
    return scale / (index + 1) if fields.get("scale_attn_by_inverse_layer_idx") else scale


def mpt_scale(fields: Fields, head_size: int, _: int) -> float:
    """`attn_config.softmax_scale`, where it is set."""
    return float((fields.get("attn_config") or {}).get("softmax_scale") or head_size**-0.5)


def mup(fields: Fields, head_size: int, _: int) -> float:
    """Phi-3-small: `mup_attn_multiplier` over the size of a head, unless `mup_use_scaling` is false."""
    if fields.is_off("mup_use_scaling"):
        return float(head_size**-0.5)
    return _number(fields, "mup_attn_multiplier", 1.0) / head_size


def zamba(_: Fields, head_size: int, __: int) -> float:
    """Heads are made of twice the hidden size, and scaled as if they were not."""
    return float((head_size / 2) ** -0.5)


def yarn(fields: Fields, head_size: int, _: int) -> float:
    """The inverse root of the size of a head, times the square of YaRN's factor where `mscale_all_dim` is set."""
    return _yarn(fields, head_size, {})


def mistral4(fields: Fields, head_size: int, _: int) -> float:
    """As `yarn`; without parameters of its rotary positions the model has YaRN."""
    return _yarn(fields, head_size, _OF_MISTRAL_4)


def _yarn(fields: Fields, head_size: int, default: Mapping[str, Any]) -> float:
    # The older name wins in transformers too, where both are written.
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(name) or default
    if not isinstance(rope, Mapping):
        raise RequirementsError(
            f"{fields.origin} has {name}={rope!r}",
            f"{name!r} is an object of the parameters of rotary positions",
            f"correct {name!r} in the configuration",
        )
    part = evolve(fields, data=rope, origin=f"{fields.origin}.{name}")
    is_scaled = (part.get("rope_type", "type") or "default") != "default" and part.get("mscale_all_dim")
    if not is_scaled:
        return float(head_size**-0.5)
    factor, weight = _number(part, "factor", part.need("factor")), _number(part, "mscale_all_dim", 1.0)
    mscale = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(head_size**-0.5 * mscale * mscale)


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise RequirementsError(
            f"{fields.origin} has {name}={value!r}",
            f"{name!r} is a positive number",
            f"correct {name!r} in the configuration",
        )
    return float(value)
