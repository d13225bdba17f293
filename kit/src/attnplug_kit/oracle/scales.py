"""The scales of a layer with a cache of 8-bit floats, and queries as a host gives them that quantizes them itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from attnplug.contract import Backend
    from attnplug_kit.oracle.rounding import Rounding

_QUERY_SCALE: Final = 0.5
"""Of queries that are quantized: they are numbers of the cache's dtype already, and this loses no bit of one."""


def scales_of(
    rounding: Rounding | None, names: Collection[str], device: torch.device | str, *, per_head: bool
) -> dict[str, Any]:
    """
    Return the scales, as the fields of a layer. Keys get theirs as a tensor, the others as a number where one is
    enough: a host may give either.

    Args:
        rounding: What the cache makes of keys and values; None has no scales.
        names: The scales that a quantized cache has, as `AttentionImpl.static_scales` says.
        device: Where tensors go.
        per_head: Whether each KV head has its own.
    """
    if rounding is None:
        return {}
    found: dict[str, Any] = {"k_scale_tensor": rounding.key_scale.to(device)}
    if per_head:
        found["v_scale_tensor"] = rounding.value_scale.to(device)
    else:
        found["v_scale"] = float(rounding.value_scale)
    if "q" in names:
        found |= {"q_scale_tensor": _by_head(rounding).to(device)} if per_head else {"q_scale": _QUERY_SCALE}
    return found


def as_host_gives(query: Tensor, backend: Backend, rounding: Rounding | None) -> Tensor:
    """
    Return queries as a host gives them: in the dtype of a cache of 8-bit floats, where a backend leaves that to it.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, in the layer's dtype.
        backend: The backend.
        rounding: What its cache makes of keys and values.
    """
    impl = backend.impl_class
    if rounding is None or impl.query_quantization != "host":
        return query
    scale = torch.tensor([_QUERY_SCALE if "q" in impl.static_scales else 1.0])
    if "q" in impl.static_scales and backend.agreement.requirements.per_head_scales:
        scale = _by_head(rounding)
    by_head = scale.repeat_interleave(query.shape[1] // len(scale)).unsqueeze(1)
    return (query.float() / by_head.to(query.device)).to(rounding.dtype)


def _by_head(rounding: Rounding) -> Tensor:
    heads = torch.arange(len(rounding.key_scale), dtype=torch.float32)
    return torch.pow(_QUERY_SCALE, 1 + heads % 3)
