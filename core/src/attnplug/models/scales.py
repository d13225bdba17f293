"""
The factor of the scores, as each architecture computes it. A model that scales its queries beforehand has it too.

Sources: the attention modules of transformers, with which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attnplug.errors import RequirementsError

if TYPE_CHECKING:
    from attnplug.models.fields import Fields

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
