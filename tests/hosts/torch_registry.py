"""
torch's registry of flash attention on attnplug, as a host would write it: `activate_flash_attention_impl("attnplug")`.

What is activated replaces operators of aten for one device type. On the CPU that is the one of
`scaled_dot_product_attention`, and the packed one, which torch has for CUDA alone. With a block table, the latter reads
a KV cache of two tensors that the caller owns and has written: it is bound where it is, and no new K/V are passed.

What the host cannot say of such a call, and what is done instead:

* Lengths on the CPU. ``seq_lens_cpu_kind`` and ``query_lens_cpu_kind`` say that they are absent: each build reads them.
* Which layer calls, and which calls share a step: layers of one request and scale share an implementation, and each
  call builds its metadata.
* Limits: they are the next powers of two.

Backends of attnplug call torch's operators themselves: the built-in one does, and FlashAttention's variant inside of
torch. Inside a call of attnplug the replaced operator is therefore torch's own, which `torch.library.get_kernel`
returned before it was replaced. That holds for any backend, which knows nothing of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.library import Library, get_kernel
from torch.nn.attention import register_flash_attention_impl

import attnplug
from attnplug import attention, attention_varlen

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch import Tensor

    from attnplug.contract import AttentionImpl, MetadataBuilder

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
    cum_seq_k: Tensor | None,
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
    if dropout_p or (not causal and right != left):
        raise NotImplementedError("dropout, and windows of other forms, are not part of this adapter")
    features = {"causal": causal, "scale": scale, "sliding_window": window}
    with _in_attnplug():
        if block_table is not None and seqused_k is not None and alibi_slopes is None:
            pages = {"seq_lens": seqused_k, "block_table": block_table}
            limits = {"max_query_len": max_q, "max_seq_len": max_k, "max_num_splits": num_splits}
            output, lse = attend_pages(query, key, value, cum_seq_q, **pages, **limits, **features)
        elif block_table is None and seqused_k is None and num_splits is None:
            features["alibi_slopes"] = alibi_slopes
            output, lse = attention_varlen(query, key, value, cum_seq_q, cum_seq_k, return_lse=True, **features)
        else:
            raise NotImplementedError("this adapter has pages with seqused_k and no ALiBi, or neither pages nor splits")
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse.T.contiguous(), state, state[:0], query.new_empty(0)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    max_num_splits: int | None,
    causal: bool,
    scale: float | None,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor]:
    """Attend to a KV cache ``(blocks, block_size, heads, size)``; return output, and LSE ``(tokens, heads)``."""
    tokens, heads, size = query.shape
    request = attnplug.Requirements(
        head_size=size,
        num_q_heads=heads,
        num_kv_heads=key.shape[2],
        dtype=str(query.dtype),
        head_size_v=value.shape[3],
        causal=causal,
        sliding_window=sliding_window,
        block_size=key.shape[1],
        kv_layout="NHD",
        kv_cache_form="independent" if key.shape == value.shape and key.stride() != value.stride() else "split",
        kv_in_cache=True,
        return_lse=True,
        seq_lens_cpu_kind="absent",
        query_lens_cpu_kind="absent",
    )
    batch = attnplug.Batch(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=None,
        seq_lens=seq_lens,
        num_reqs=len(seq_lens),
        num_actual_tokens=tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        block_table=block_table,
        causal=causal,
    )
    least = tuple(1 << max(0, one - 1).bit_length() for one in (len(seq_lens), tokens, max_seq_len))
    where = (attnplug.scope_key(), get_ident())
    impl, builder = _layer(request, str(query.device), scale, least, max_num_splits, where)
    cache = impl.backend.bind_cache({"k": key, "v": value})
    output, lse = query.new_empty(tokens, heads * value.shape[3]), query.new_empty(tokens, heads, dtype=torch.float32)
    impl.forward(query, None, None, cache, builder.build(batch), output, lse=lse)
    return output.view(tokens, heads, -1), lse


@lru_cache(maxsize=256)
def _layer(
    request: attnplug.Requirements,
    device: str,
    scale: float | None,
    least: tuple[int, int, int],
    max_num_splits: int | None,
    where: Hashable,
) -> tuple[AttentionImpl, MetadataBuilder]:
    """Return what serves a request in a scope and a thread, for batches within the limits."""
    del where  # a part of the key: another scope decides anew, and a builder serves one thread
    backend = attnplug.load(request, device=attnplug.Device.cpu() if device == "cpu" else device)
    impl = backend.make_impl(attnplug.Layer(name="torch", scale=scale))
    names = ("max_num_reqs", "max_num_tokens", "max_seq_len")
    limits = attnplug.Limits(**dict(zip(names, least, strict=True)), max_num_splits=max_num_splits)
    return impl, backend.make_builder([impl], backend.make_state(limits))


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
