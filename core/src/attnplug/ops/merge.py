"""Merges partial outputs over two disjoint sets of keys by LSE."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug.ops.triton import triton_function


def merge_attention_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    sink_in_a: bool = False,
    sink_in_b: bool = False,
) -> tuple[Tensor, Tensor]:
    """
    Merge two partial outputs exactly: each is weighted by its share of the softmax denominator.

    A side without keys (LSE -inf) contributes nothing, whatever its output holds; where both have none, the result is 0
    with LSE -inf. Weights are computed in float32, or in float64 if an LSE is.

    Args:
        out_a: ``(tokens, heads, head_size_v)``.
        lse_a: ``(tokens, heads)`` natural log-sum-exp.
        out_b: As `out_a`.
        lse_b: As `lse_a`.
        sink_in_a: Whether `lse_a` includes the sink.
        sink_in_b: Whether `lse_b` includes the sink.

    Returns:
        The output in the dtype of `out_a`, and its LSE, which includes the sink if a side did.

    Raises:
        NotNegotiatedError: Both sides include the sink, which would enter the denominator twice.
        TensorError: The shapes do not fit together.
    """
    if sink_in_a and sink_in_b:
        raise NotNegotiatedError(
            "both sides of a merge include the sink in their LSE",
            "the sink enters the softmax denominator once",
            "pass the sinks to one of the two attention calls only",
        )
    _check_shapes(out_a, lse_a, out_b, lse_b)
    exact = torch.promote_types(torch.promote_types(lse_a.dtype, lse_b.dtype), torch.float32)
    lse_a, lse_b = lse_a.to(exact), lse_b.to(exact)
    highest = torch.maximum(lse_a, lse_b)
    # Two sides without keys would give -inf - -inf. Any finite shift is right there, since both weights are 0.
    shift = highest.masked_fill(highest == -torch.inf, 0.0)
    weight_a, weight_b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = weight_a + weight_b
    merged = _share(out_a, weight_a, total) + _share(out_b, weight_b, total)
    return merged.to(out_a.dtype), shift + total.log()


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """
    Merge a partial output into another in place, as `merge_attention_states` does. One launch where Triton works.

    Args:
        out: ``(tokens, heads, head_size_v)``; written.
        lse: ``(tokens, heads)`` float32, natural log-sum-exp; written.
        other: As `out`, contiguous.
        other_lse: As `lse`, contiguous. At most one of the two includes the sink.

    Raises:
        TensorError: The shapes do not fit together.
    """
    _check_shapes(out, lse, other, other_lse)
    merge = triton_function("attnplug.ops.triton_merge", "merge") if out.is_cuda else None
    if merge is not None and merge(out, lse, other, other_lse):
        return
    merged, total = merge_attention_states(out, lse, other, other_lse)
    out.copy_(merged)
    lse.copy_(total)


def _share(out: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """Return a side's weighted output. Without keys it may hold NaN, and 0 * NaN is NaN: it is replaced, not scaled."""
    share = (weight / total).unsqueeze(-1)
    return torch.where((weight > 0).unsqueeze(-1), out.to(weight.dtype) * share, 0.0)


def _check_shapes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise TensorError(
            f"outputs of shapes {tuple(out_a.shape)} and {tuple(out_b.shape)}, LSEs of shapes {tuple(lse_a.shape)} and "
            f"{tuple(lse_b.shape)} were given",
            "both outputs are (tokens, heads, head_size_v) and both LSEs (tokens, heads)",
            "reshape them, heads last in the LSE",
        )
