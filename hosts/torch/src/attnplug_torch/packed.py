"""
`varlen_attn` on a backend: the operators of sequences that are packed one after another, and of a paged KV cache.

Tensors are ``(tokens, heads, size)``, pools ``(blocks, block_size, heads, size)``, the log-sum-exp ``(heads, tokens)``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

import attnplug
from attnplug.errors import LimitsError, TensorError
from attnplug_torch.decisions import REFUSALS, RefusedError, common_reasons, refused, unknown_arguments
from attnplug_torch.dense import random_state
from attnplug_torch.layers import PackedCall, attend_packed, attend_pages, attend_split, backend_of
from attnplug_torch.nesting import records_gradients
from attnplug_torch.visibility import visibility_of

if TYPE_CHECKING:
    from torch import Tensor


def forward(*args: Any, **kwargs: Any) -> tuple[str, tuple[Tensor, ...]]:
    """
    ``aten::_flash_attention_forward``, with its arguments.

    Returns:
        The candidate that ran; and what the operator returns: the output, the LSE ``(heads, tokens)`` float32, the
        state of a random generator that nothing has used, and an empty mask.

    Raises:
        RefusedError: Torch's own operator has to serve.
    """
    call = call_of(*args, **kwargs)
    ran, output, lse = attend(call)
    return ran, (output, lse, *random_state(call.query))


def forward_into(out: Tensor, *args: Any, **kwargs: Any) -> tuple[str, Tensor]:
    """
    ``aten::_flash_attention_forward_no_dropout_inplace``: as `forward`, and the output is written to `out`.

    Returns:
        The candidate that ran, and the LSE.

    Raises:
        RefusedError: Torch's own operator has to serve.
    """
    ran, output, lse = attend(call_of(*args, **kwargs))
    out.copy_(output)
    return ran, lse


def backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001 - likewise
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unknown: object,
) -> tuple[str, tuple[Tensor, Tensor, Tensor]]:
    """
    ``aten::_flash_attention_backward``, for devices where torch has none: from the output and the LSE, by core.

    Returns:
        ``"attnplug.dense"``; and the gradients of query, key and value.

    Raises:
        RefusedError: As for `forward`.
    """
    del max_q, max_k, rng_state, unused
    unknown_arguments(unknown)
    for reason in common_reasons(query, dropout_p):
        raise RefusedError(reason)
    causal, window = visibility_of(window_size_left, window_size_right, is_causal=is_causal)
    lse = logsumexp.T
    no_grad_lse = torch.zeros_like(lse)
    masks: tuple[None, ...] = (None,) * 6  # CPU copies of the starts, mask, bias, sinks, ALiBi slopes
    params: tuple[Any, ...] = (causal, scale, window, None, True, [], "{}")
    grads = torch.ops.attnplug.attention_varlen_backward(
        grad_out, no_grad_lse, out, lse, query, key, value, cum_seq_q, cum_seq_k, *masks, *params
    )
    return "attnplug.dense", (grads[0], grads[1], grads[2])


def call_of(  # noqa: PLR0913, PLR0917 - the operator's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001 - likewise
    return_debug_mask: bool,  # noqa: FBT001 - likewise
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **unknown: object,
) -> PackedCall:
    """
    Return the call that torch's arguments describe.

    Raises:
        RefusedError: A backend cannot serve it, whichever it is.
    """
    unknown_arguments(unknown)
    for reason in common_reasons(query, dropout_p):
        raise RefusedError(reason)
    if cum_seq_q is None:
        raise RefusedError("the sequences are not packed: cum_seq_q is None")
    if return_debug_mask:
        raise RefusedError("return_debug_mask: backends of attnplug return no weights")
    if block_table is None and cum_seq_k is None:
        raise RefusedError("cu_seq_k is None without a block_table")
    if alibi_slopes is not None and (alibi_slopes.ndim != 1 or block_table is not None):
        raise RefusedError("alibi_slopes of each sequence, or with a block_table")
    without_gradient = {"alibi_slopes": alibi_slopes, "seqused_k": seqused_k, "block_table": block_table}
    used = [name for name, one in without_gradient.items() if one is not None]
    if used and records_gradients(query, key, value):
        raise RefusedError(f"{used[0]} where gradients are recorded: torch's backward has no such argument")
    return PackedCall(
        query=query,
        key=key,
        value=value,
        query_start_loc=cum_seq_q,
        key_start_loc=cum_seq_k,
        max_query_len=max_q,
        max_seq_len=max_k,
        visibility=visibility_of(window_size_left, window_size_right, is_causal=is_causal),
        scale=scale,
        seq_lens=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        max_num_splits=num_splits or None,  # 0 is the library's own choice in FlashAttention
    )


def attend(call: PackedCall) -> tuple[str, Tensor, Tensor]:
    """
    Return the candidate that ran, the output ``(tokens, heads, size)`` and the LSE ``(heads, tokens)``.

    Raises:
        RefusedError: No backend serves it.
        NoBackendError: The backend that was named does not.
        CacheError: A block is outside of the pool.
    """
    try:
        ran, output, lse = _run(call)
    except (*REFUSALS, TensorError, LimitsError) as error:
        raise refused(error) from error
    return ran, output, lse.T.contiguous()


def _run(call: PackedCall) -> tuple[str, Tensor, Tensor]:
    """Return the candidate, the output, and the LSE ``(tokens, heads)``."""
    if call.block_table is not None:
        return attend_pages(call)
    if call.seq_lens is not None:
        return _run(_used_keys(call, call.seq_lens))
    if call.max_num_splits is not None:
        return attend_split(call)
    if call.alibi_slopes is None:
        return attend_packed(call)
    ran = backend_of(call).id
    output, lse = attnplug.attention_varlen(
        call.query,
        call.key,
        call.value,
        call.query_start_loc,
        call.key_start_loc,
        causal=call.visibility.causal,
        sliding_window=call.visibility.window,
        scale=call.scale,
        alibi_slopes=call.alibi_slopes,
        return_lse=True,
    )
    return ran, output, lse


def _used_keys(call: PackedCall, seq_lens: Tensor) -> PackedCall:
    """Return the call with the first keys of each sequence alone: they are copied, one after another."""
    if call.query.is_cuda or call.key_start_loc is None:
        raise RefusedError("seqused_k without a block_table: torch's own operator reads the keys where they are")
    firsts, used = call.key_start_loc.tolist(), seq_lens.tolist()
    if seq_lens.ndim != 1 or len(used) != len(firsts) - 1 or seq_lens.dtype not in (torch.int32, torch.int64):
        raise TensorError(
            f"seqused_k of shape {tuple(seq_lens.shape)} and {seq_lens.dtype} was given",
            f"it is ({len(firsts) - 1},) int32: one number of keys for each sequence",
            "pass such lengths, at most cu_seq_k.diff()",
        )
    if any(not 0 <= length <= end - first for (first, end), length in zip(pairwise(firsts), used, strict=True)):
        raise TensorError(
            f"seqused_k={used} was given for keys that start at {firsts}",
            "a sequence uses at most the keys that it has, and at least none",
            "pass lengths of at most cu_seq_k.diff()",
        )
    parts = [slice(first, first + length) for first, length in zip(firsts[:-1], used, strict=True)]
    key, value = (torch.cat([rows[:0], *(rows[part] for part in parts)]) for rows in (call.key, call.value))
    starts = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).to(torch.int32)
    return evolve(call, key=key, value=value, key_start_loc=starts, seq_lens=None)
