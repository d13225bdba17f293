"""Calls that a host prepares, keeps under keys of its making, and repeats without a look-up in core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from attnplug.dense.backends import use_device
from attnplug.dense.calls import prepare_packed, prepare_padded
from attnplug.dense.params import NO_TENSORS, CallParams

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.dense.calls import PreparedCall


@frozen(eq=False)
class PreparedAttention:
    """
    What calls of `attention` or `attention_varlen` run on that have no mask, no sinks and no slopes.

    It serves calls whose tensors have the shapes, the dtypes, the device and the lengths that it was prepared for, in
    the thread and the CUDA stream that prepared it, as long as `scope_key` stays equal: the key under which a host
    keeps it has all of these. It holds no tensor of a caller.

    Attributes:
        id: The candidate that runs, ``backend/variant``.
    """

    id: str
    _call: PreparedCall = field(repr=False)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """
        Attend.

        Args:
            query: ``(query tokens, num_q_heads, head_size)``, those of a batch one after another; the last axis is
                contiguous, as of the others.
            key: ``(key tokens, num_kv_heads, head_size)``.
            value: ``(key tokens, num_kv_heads, head_size_v)``.

        Returns:
            ``(query tokens, num_q_heads * head_size_v)``, contiguous; and the log-sum-exp
            ``(query tokens, num_q_heads)`` float32, or None.

        Raises:
            TensorError: A tensor is another one than it was prepared for.
        """
        return self._call.run_rows(query, key, value, None)


def prepare_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> PreparedAttention:
    """
    Decide a call of `attention`, load its backend and build its metadata, without making it.

    Args:
        query: ``(batch, queries, num_q_heads, head_size)``.
        key: ``(batch, keys, num_kv_heads, head_size)``.
        value: ``(batch, keys, num_kv_heads, head_size_v)``.
        causal: As for `attention`.
        scale: Likewise.
        return_lse: Likewise.

    Raises:
        TensorError: As for `attention`.
        RequirementsError: Likewise.
        NoBackendError: Likewise.
        NotNegotiatedError: A CUDA graph is captured.
    """
    params = CallParams(causal=causal, scale=scale, return_lse=return_lse)
    with use_device(query.device):
        call = prepare_padded(query, key, value, params, NO_TENSORS)
    return PreparedAttention(call.impl.backend.id, call)


def prepare_attention_varlen(  # noqa: PLR0913 - the arguments of `attention_varlen`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    return_lse: bool = False,
) -> PreparedAttention:
    """
    Do for `attention_varlen` what `prepare_attention` does for `attention`.

    Args:
        query: ``(query tokens, num_q_heads, head_size)``.
        key: ``(key tokens, num_kv_heads, head_size)``.
        value: ``(key tokens, num_kv_heads, head_size_v)``.
        query_start_loc: As for `attention_varlen`: it is read.
        key_start_loc: Likewise.
        causal: As for `attention`.
        scale: Likewise.
        sliding_window: Likewise.
        return_lse: Likewise.

    Raises:
        TensorError: As for `attention_varlen`.
        RequirementsError: Likewise.
        NoBackendError: Likewise.
        NotNegotiatedError: A CUDA graph is captured.
    """
    params = CallParams(causal=causal, scale=scale, sliding_window=sliding_window, return_lse=return_lse)
    with use_device(query.device):
        call = prepare_packed(query, key, value, (query_start_loc, key_start_loc), (None, None), params, NO_TENSORS)
    return PreparedAttention(call.impl.backend.id, call)
