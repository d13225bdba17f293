"""
torch's registry of flash attention on attnplug, as a host would write it: `activate_flash_attention_impl("attnplug")`.

What is activated replaces operators of aten for one device type. On the CPU that is the one of
`scaled_dot_product_attention`, and the packed one, which torch has for CUDA alone.

Backends of attnplug call torch's operators themselves: the built-in one does, and FlashAttention's variant inside of
torch. Inside a call of attnplug the replaced operator is therefore torch's own, which `torch.library.get_kernel`
returned before it was replaced. That holds for any backend, which knows nothing of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, get_kernel
from torch.nn.attention import register_flash_attention_impl

from attnplug import attention, attention_varlen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NAME = "attnplug"
_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
_torchs_own = get_kernel(f"aten::{_OPERATOR}", "CPU")  # before it is replaced
_inside: ContextVar[bool] = ContextVar("attnplug_inside", default=False)


@contextmanager
def _in_attnplug() -> Iterator[None]:
    token = _inside.set(True)
    try:
        with torch.no_grad():  # autograd is above this operator, and has its own formula for it
            yield
    finally:
        _inside.reset(token)


def attend(
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend: ``(batch, heads, tokens, size)``; and the LSE ``(batch, heads, tokens)``, for torch's backward."""
    # The first query is at the first key in torch: more causal queries than keys are no case of attnplug.
    is_other = dropout_p or (is_causal and query.shape[2] > key.shape[2])
    if _inside.get() or is_other:
        arguments = {"attn_mask": attn_mask, "scale": scale}
        return _torchs_own.call_boxed(keys, query, key, value, dropout_p, is_causal, **arguments)
    if is_causal:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    given = (one.transpose(1, 2) for one in (query, key, value))
    with _in_attnplug():
        output, lse = attention(*given, causal=is_causal, scale=scale, attn_mask=attn_mask, return_lse=True)
    return output.transpose(1, 2), lse.transpose(1, 2)


def attend_packed(  # noqa: PLR0917 - the operator's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Attend in packed sequences: ``(tokens, heads, size)``; and the LSE ``(heads, tokens)``."""
    left, right = (-1 if one is None else one for one in (window_size_left, window_size_right))
    causal, window = is_causal or right == 0, None if left < 0 else left + 1
    if (not causal and right != left) or seqused_k is not None or block_table is not None:
        raise NotImplementedError("windows of other forms, and KV caches, are not part of this adapter")
    features = {"causal": causal, "scale": scale, "sliding_window": window, "alibi_slopes": alibi_slopes}
    with _in_attnplug():
        output, lse = attention_varlen(query, key, value, cum_seq_q, cum_seq_k, return_lse=True, **features)
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse.T.contiguous(), state, state[:0], query.new_empty(0)


class Handle:
    """What `restore_flash_attention_impl` removes."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def remove(self) -> None:
        """Let torch's own operators be in force again."""
        self._library._destroy()


def activate() -> Handle:
    """Replace the operators."""
    library = Library("aten", "IMPL", "CPU")
    library.impl(_OPERATOR, attend, "CPU", with_keyset=True, allow_override=True)
    library.impl("_flash_attention_forward", attend_packed, "CPU")
    return Handle(library)


register_flash_attention_impl(NAME, register_fn=activate)
