"""Calls that a host prepares, keeps under keys of its making, and repeats without a look-up in core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.dense.backends import use_device
from attnplug.dense.calls import prepare_packed, prepare_padded
from attnplug.dense.params import NO_TENSORS, CallParams

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.dense.calls import PreparedAttention


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
        return prepare_padded(query, key, value, params, NO_TENSORS)


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
        return prepare_packed(query, key, value, (query_start_loc, key_start_loc), (None, None), params, NO_TENSORS)
