"""Why torch gives a call of `scaled_dot_product_attention` to another operator than flash attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def why_not_flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: object, **kwargs: object
) -> str:
    """
    Return the reason, as far as the arguments of torch's other operators say it.

    Args:
        query: ``(..., heads, tokens, size)``.
        key: Likewise.
        value: Likewise.
        attn_mask: The mask, or None.
        args: The operator's further arguments, among them `dropout_p`.
        kwargs: Likewise.
    """
    dropout = kwargs.get("dropout_p", next((one for one in args if type(one) is float), 0.0))
    return next(_reasons(query, key, value, attn_mask, dropout))


def _reasons(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout: object) -> Iterator[str]:
    """Yield what keeps a call from flash attention; torch has more conditions on CUDA than on the CPU."""
    cuda = query.is_cuda
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call] # of torch
        yield "flash attention is switched off (torch.nn.attention.sdpa_kernel)"
    if query.ndim != 4:
        yield f"a query of {query.ndim} axes, where flash attention takes (batch, heads, tokens, size)"
    if dropout and not cuda:
        yield f"dropout_p={dropout}"
    if attn_mask is not None and attn_mask.requires_grad:
        yield "an attn_mask that requires a gradient"
    if attn_mask is not None and cuda:
        yield "an attn_mask"
    if query.shape[-1] != value.shape[-1]:
        yield "values of another head size"
    if not query.numel() or not key.numel():
        yield "a tensor without elements"
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        yield "a last axis that is not contiguous"
    yield "see torch.backends.cuda.can_use_flash_attention" if cuda else "its tensors do not suit flash attention"
