"""Where a call of `scaled_dot_product_attention` would go, and why, without making it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn.attention import SDPBackend

from attnplug_torch.choice import why_not_flash
from attnplug_torch.decisions import RefusedError
from attnplug_torch.dense import backend_of
from attnplug_torch.routes import SDPA, Route

if TYPE_CHECKING:
    from torch import Tensor

_NAMES: Final = {
    SDPBackend.MATH: "math",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - likewise
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 - likewise
) -> Route:
    """
    Return where torch's `scaled_dot_product_attention` would send this call while attnplug is active.

    Nothing is computed. The chosen backend is loaded. `attnplug.explain` says why it is that one.

    Args:
        query: As for torch's function, and so are the others.
        key: Likewise.
        value: Likewise.
        attn_mask: Likewise.
        dropout_p: Likewise.
        is_causal: Likewise.
        scale: Likewise.
        enable_gqa: Likewise.

    Raises:
        NoBackendError: A setting or a scope names the backend, and it does not serve this.
        RuntimeError: torch refuses the tensors.
    """
    if torch.__version__ >= "2.14":  # it adds a missing batch axis before it chooses
        query, key, value = (each.unsqueeze(0) if each.ndim == 3 else each for each in (query, key, value))
    options = {"scale": scale, "enable_gqa": enable_gqa}
    chosen = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[arg-type] # noqa: SLF001 - torch has no public name for its choice
    device = query.device.type
    if chosen != SDPBackend.FLASH_ATTENTION.value:
        name = next((name for backend, name in _NAMES.items() if backend.value == chosen), f"{chosen}th")
        why = why_not_flash(query, key, value, attn_mask, dropout_p)
        return Route(SDPA, device, None, f"torch takes its {name} operator: {why}")
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # torch makes an additive one of it
        attn_mask = attn_mask.to(query.dtype)
    try:
        backend = backend_of(query, key, value, is_causal=is_causal, attn_mask=attn_mask, dropout_p=dropout_p)
    except RefusedError as refusal:
        return Route(SDPA, device, None, refusal.reason)
    return Route(SDPA, device, backend.id)
