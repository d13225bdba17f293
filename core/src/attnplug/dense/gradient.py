"""
The gradients of dense calls, in torch operations, from the forward's output and log-sum-exp.

As in FlashAttention 2 (Dao, 2023, algorithm 2): with scores S, P = exp(S - lse) and D = rowsum(dO * O) - dlse,
dV = P^T dO, dS = P * (dO V^T - D), dQ = dS K and dK = dS^T Q, times the scale; a sink s gets -sum(exp(s - lse) * D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from attnplug.contract.inputs.kv_cache import outside_autocast

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.dense.params import CallParams, CallTensors

_SCORES_AT_ONCE: Final = 1 << 24
"""Scores that are held at once, in several copies of 64 MiB."""


def attention_gradients(
    grads: tuple[Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    params: CallParams,
    tensors: CallTensors,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """
    Return the gradients of query, key, value and sinks.

    Args:
        grads: Of the output, ``(batch, queries, num_q_heads, head_size_v)``, and of the LSE or None.
        inputs: ``(batch, tokens, heads, size)`` query, key and value.
        results: The output, and the LSE ``(batch, queries, num_q_heads)``, sinks included.
        params: The call's numbers.
        tensors: Its other tensors; masks are ``(batch, heads, queries, keys)``, or of shapes that expand to it.
    """
    mask, bias, sinks, alibi_slopes = tensors
    query, key, value = inputs
    batch, rows, heads, size = query.shape
    keys, kv_heads = key.shape[1:3]
    scale = size**-0.5 if params.scale is None else params.scale
    groups = (kv_heads, heads // kv_heads)
    k, v = key.float(), value.float()
    grad_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    grad_key, grad_value = torch.zeros_like(k), torch.zeros_like(v)
    grad_sinks = None if sinks is None else torch.zeros(heads, dtype=torch.float32, device=query.device)
    weight = (grads[0].float() * results[0].float()).sum(-1)  # D
    weight = weight if grads[1] is None else weight - grads[1]
    step = max(1, _SCORES_AT_ONCE // max(1, batch * heads * keys))
    with outside_autocast(query.device):  # as the forward
        for first in range(0, rows, step):
            part = slice(first, min(rows, first + step))
            q = query[:, part].float().reshape(batch, part.stop - first, *groups, size)
            grad = grads[0][:, part].float().reshape(batch, part.stop - first, *groups, value.shape[-1])
            lse = _by_group(results[1][:, part], groups)
            scores, slope = _scores(q, k, scale, params.logits_soft_cap)
            visible, distance = _visibility(params, range(first, part.stop), rows, keys, mask, query.device)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes.float().view(1, *groups, 1, 1) * distance
            if bias is not None:
                scores = scores + _bias(bias, part, groups)
            # Rows that attend to nothing have an LSE of -inf.
            shown = visible if visible is None else visible.unsqueeze(2)
            weights = (scores - lse.masked_fill(lse == -torch.inf, torch.inf)).exp()
            weights = weights if shown is None else weights.masked_fill(~shown, 0)
            grad_value += torch.einsum("bgrqk,bqgrd->bkgd", weights, grad)
            inner = torch.einsum("bqgrd,bkgd->bgrqk", grad, v) - _by_group(weight[:, part], groups)
            grad_scores = weights * inner
            grad_scores = grad_scores if slope is None else grad_scores * slope
            grad_query[:, part] = torch.einsum("bgrqk,bkgd->bqgrd", grad_scores, k).flatten(2, 3) * scale
            grad_key += torch.einsum("bgrqk,bqgrd->bkgd", grad_scores, q) * scale
    if grad_sinks is not None and sinks is not None:
        share = (sinks.float() - results[1]).exp().nan_to_num(posinf=0.0)
        grad_sinks = -(share * weight).sum((0, 1)).to(sinks.dtype)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks


def _by_group(rows: Tensor, groups: tuple[int, int]) -> Tensor:
    """Return ``(batch, kv_heads, ratio, rows, 1)`` of ``(batch, rows, heads)``."""
    batch, count, _ = rows.shape
    return rows.transpose(1, 2).reshape(batch, *groups, count, 1)


def _scores(q: Tensor, k: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return scores ``(batch, kv_heads, ratio, rows, keys)``, and their derivative by the uncapped ones."""
    scores = torch.einsum("bqgrd,bkgd->bgrqk", q, k) * scale
    if cap is None:
        return scores, None
    bent = (scores / cap).tanh()
    return bent * cap, 1 - bent * bent


def _bias(bias: Tensor, rows: slice, groups: tuple[int, int]) -> Tensor:
    """Return the additive mask of some rows, ``(batch or 1, kv_heads or 1, ratio or 1, rows or 1, keys or 1)``."""
    bias = bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
    bias = bias[:, :, rows] if bias.shape[2] > 1 else bias
    batch, heads, *last = bias.shape
    # As in `Batch.attn_bias`: -inf is the lowest number.
    bias = bias.clamp(min=torch.finfo(bias.dtype).min).float()
    return bias.reshape(batch, *(groups if heads > 1 else (1, 1)), *last)


def _visibility(
    params: CallParams, rows: range, queries: int, keys: int, mask: Tensor | None, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Return the visible keys, ``(batch or 1, 1, rows, keys)`` or None for all, and distances, ``(rows, keys)``."""
    position = torch.arange(rows.start, rows.stop, device=device) + (keys - queries)
    relative = torch.arange(keys, device=device) - position.unsqueeze(1)
    visible = None if mask is None else mask[..., rows.start : rows.stop, :] if mask.shape[-2] > 1 else mask
    ahead = 0 if params.causal else None if params.sliding_window is None else params.sliding_window - 1
    if params.sliding_window is not None:
        inside = relative > -params.sliding_window
        visible = inside if visible is None else visible & inside
    if ahead is not None:
        inside = relative <= ahead
        visible = inside if visible is None else visible & inside
    if visible is not None:
        visible = visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape))
    return visible, relative.abs().float()
