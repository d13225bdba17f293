"""
Functions of FlashAttention's shape, on the backend that a selection chooses.

Code that was written for `flash_attn_varlen_func` and `flash_attn_with_kvcache` of FlashAttention 2.8 calls them as
they are. Every argument is used, or refused with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnplug.dense.calls import lengths_of
from attnplug.dense.flash_arguments import (
    bound_of,
    check_deterministic,
    check_longest,
    check_no_gradients,
    check_slopes,
    one_sink,
    refuse,
    soft_cap_of,
    visibility_of,
)
from attnplug.dense.functions import attention_varlen
from attnplug.dense.pages import NewKeys, PagedCall, run_pages
from attnplug.dense.params import NO_OPTIONS, CallParams, encode_keywords
from attnplug.errors import TensorError, shown

if TYPE_CHECKING:
    from attnplug.request.settings import BackendNames, Options


def flash_attn_varlen_func(  # noqa: PLR0913, PLR0917 - FlashAttention's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002 - likewise
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,  # noqa: FBT001, FBT002 - likewise
    return_attn_probs: bool = False,  # noqa: FBT001, FBT002 - likewise
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
    cu_seqlens_q_cpu: Tensor | None = None,
    cu_seqlens_k_cpu: Tensor | None = None,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Any:
    """
    Attend in sequences that are packed one after another, with FlashAttention's arguments.

    Args:
        q: ``(query tokens, num_q_heads, head_size)``.
        k: ``(key tokens, num_kv_heads, head_size)``; with `block_table` the pages of a KV cache,
            ``(num_blocks, block_size, num_kv_heads, head_size)``.
        v: As `k`; its head size may differ.
        cu_seqlens_q: ``(sequences + 1,)`` int32, exclusive cumulative sum of the query lengths.
        cu_seqlens_k: The same of the keys.
        max_seqlen_q: An upper bound of the query lengths; None for the longest one.
        max_seqlen_k: An upper bound of the keys, likewise.
        dropout_p: 0 only.
        softmax_scale: Factor of the scores; None is ``head_size ** -0.5``.
        causal: Whether a token attends to no later one. The last query is at the position of the last key.
        window_size: Keys that a query attends to on its left and its right, itself not counted; -1 is no limit. Sides
            are equal, or the right one is closed, as `causal` does. Equal ones require as many queries as keys, and
            no pages.
        softcap: Scores become ``softcap * tanh(score / softcap)``; with 0 they are not capped.
        alibi_slopes: ``(num_q_heads,)`` float32: slope times distance is subtracted from the scores.
        deterministic: Every forward pass is; it is refused where gradients are recorded.
        return_attn_probs: False only.
        block_table: ``(sequences, blocks)`` int32; None where `k` and `v` are packed, too. Entries beyond a sequence's
            keys are not read. A sequence has no more queries than keys then.
        s_aux: ``(num_q_heads,)``, sinks: logits that join the softmax denominator.
        learnable_sink: Another name of `s_aux`.
        return_softmax_lse: Whether the log-sum-exp is returned, sinks included.
        cu_seqlens_q_cpu: CPU copy; without it the lengths are read from the device, which waits for it.
        cu_seqlens_k_cpu: CPU copy.
        backend: As for `select`.
        options: As for `select`.

    Returns:
        ``(query tokens, num_q_heads, head_size_v)``; with `return_softmax_lse` a pair of that and
        ``(num_q_heads, query tokens)`` float32.

    Raises:
        TensorError: A tensor has the wrong shape, dtype or device, or a sequence is longer than its bound.
        NotNegotiatedError: An argument is set that no backend takes, or gradients of pages are recorded.
        NoBackendError: Nothing can serve the call; it carries every verdict.
        CacheError: A block is outside of the cache; where `block_table` is on the CPU.
        BatchError: A sequence of pages has more queries than keys.
    """
    refuse(dropout_p=dropout_p, return_attn_probs=return_attn_probs)
    check_slopes(alibi_slopes)
    sinks = one_sink(s_aux, learnable_sink)
    check_deterministic(q, k, v, sinks, deterministic=deterministic)
    visibility = visibility_of(window_size, causal=causal, paged=block_table is not None)
    query_lens = lengths_of("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_cpu)
    key_lens = lengths_of("cu_seqlens_k", cu_seqlens_k, cu_seqlens_k_cpu)
    check_longest("max_seqlen_q", max(query_lens, default=0), max_seqlen_q)
    check_longest("max_seqlen_k", max(key_lens, default=0), max_seqlen_k)
    if block_table is None:
        result = attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            None if key_lens == query_lens else cu_seqlens_k,
            query_start_loc_cpu=cu_seqlens_q_cpu,
            key_start_loc_cpu=None if key_lens == query_lens else cu_seqlens_k_cpu,
            causal=visibility.causal,
            scale=softmax_scale,
            sliding_window=visibility.window,
            logits_soft_cap=soft_cap_of(softcap),
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            return_lse=return_softmax_lse,
            backend=backend,
            options=options,
        )
        return (result[0], result[1].T) if return_softmax_lse else result
    check_no_gradients(q, k, v, sinks, what="flash_attn_varlen_func with a block_table")
    names, table = ((), NO_OPTIONS) if backend is None and options is None else encode_keywords(backend, options)
    output, lse = run_pages(
        PagedCall(
            query=q,
            key_pages=k,
            value_pages=v,
            query_start_loc=cu_seqlens_q.to(torch.int32),
            seq_lens=cu_seqlens_k.diff().to(torch.int32),
            block_table=block_table,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(key_lens, default=0),
            params=CallParams(
                visibility.causal,
                softmax_scale,
                visibility.window,
                soft_cap_of(softcap),
                return_softmax_lse,
                names,
                table,
            ),
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
    )
    return (output, lse.T) if lse is not None else output


def flash_attn_with_kvcache(  # noqa: PLR0913, PLR0917 - FlashAttention's signature
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002 - likewise
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,  # noqa: FBT001, FBT002 - likewise
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,  # noqa: FBT001, FBT002 - likewise
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    max_seqlen_k: int | None = None,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Any:
    """
    Write new keys and values into a KV cache in place, and attend to it, with FlashAttention's arguments.

    Everything is decided and planned before the cache is written: a refused call leaves it as it was.

    Args:
        q: ``(sequences, queries, num_q_heads, head_size)``.
        k_cache: ``(num_blocks, block_size, num_kv_heads, head_size)`` with `block_table`, else
            ``(cached sequences, capacity, num_kv_heads, head_size)``.
        v_cache: As `k_cache`; its head size may differ.
        k: ``(sequences, new keys, num_kv_heads, head_size)``, written behind the keys of each sequence; or None.
        v: As `k`; None exactly where `k` is.
        rotary_cos: None only: rotate q and k first.
        rotary_sin: None only.
        cache_seqlens: ``(sequences,)`` int32, or one number for all: the keys of each sequence before the new ones.
            None is a full cache, without `block_table` and `k`.
        cache_batch_idx: ``(sequences,)``, which row of a cache without `block_table` each sequence has; None in order.
        cache_leftpad: None only.
        block_table: ``(sequences, blocks)`` int32; entries beyond a sequence's keys are not read.
        softmax_scale: As for `flash_attn_varlen_func`.
        causal: Likewise; the last query is at the last key, the new ones included.
        window_size: Likewise, but the right side is closed.
        softcap: Likewise.
        rotary_interleaved: Without meaning, as there are no rotary embeddings.
        alibi_slopes: Likewise.
        num_splits: Most parts that the keys of a sequence are split into; 0 is the backend's own choice.
        return_softmax_lse: Whether the log-sum-exp is returned, sinks included.
        s_aux: As for `flash_attn_varlen_func`.
        learnable_sink: Another name of `s_aux`.
        max_seqlen_k: An upper bound of the keys, new ones included; None is what the cache has room for.
        backend: As for `select`.
        options: As for `select`.

    Returns:
        ``(sequences, queries, num_q_heads, head_size_v)``; with `return_softmax_lse` a pair of that and
        ``(sequences, num_q_heads, queries)`` float32.

    Raises:
        TensorError: A tensor has the wrong shape, dtype or device, or new keys have no room.
        NotNegotiatedError: An argument is set that no backend takes, or gradients are recorded.
        NoBackendError: Nothing can serve the call; it carries every verdict.
        LimitsError: The backend does not keep `num_splits`.
        CacheError: A block is outside of the cache; where `block_table` is on the CPU.
    """
    del rotary_interleaved  # how a rotation pairs elements; rotations are refused
    refuse(rotary_cos=rotary_cos if rotary_cos is not None else rotary_sin, cache_leftpad=cache_leftpad)
    check_slopes(alibi_slopes)
    sinks = one_sink(s_aux, learnable_sink)
    check_no_gradients(q, k_cache, v_cache, k, v, sinks, what="flash_attn_with_kvcache")
    visibility = visibility_of(window_size, causal=causal, paged=True)
    _check_ranks(q, k_cache, v_cache, k, v)
    keys, values, table = _as_pages(q, k_cache, v_cache, block_table, cache_batch_idx)
    room = table.shape[1] * keys.shape[1]
    lengths = _cached_lengths(q, cache_seqlens, room, has_new=k is not None, paged=block_table is not None)
    new = None
    if k is not None and v is not None:
        new, lengths = _new_keys(k, v, lengths, table, keys.shape[1])
    names, encoded = ((), NO_OPTIONS) if backend is None and options is None else encode_keywords(backend, options)
    sequences, queries = q.shape[:2]
    output, lse = run_pages(
        PagedCall(
            query=q.flatten(0, 1),
            key_pages=keys,
            value_pages=values,
            query_start_loc=torch.arange(sequences + 1, dtype=torch.int32, device=q.device) * queries,
            seq_lens=lengths,
            block_table=table,
            max_query_len=queries,
            max_seq_len=_longest(lengths, room, max_seqlen_k),
            params=CallParams(
                visibility.causal,
                softmax_scale,
                visibility.window,
                soft_cap_of(softcap),
                return_softmax_lse,
                names,
                encoded,
            ),
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            max_num_splits=num_splits or None,
            new=new,
        )
    )
    output = output.view(sequences, queries, *output.shape[1:])
    return (output, lse.view(sequences, queries, -1).transpose(1, 2)) if lse is not None else output


def _check_ranks(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    if (k is None) != (v is None):
        raise TensorError("one of k and v was given", "new keys have new values", "pass both, or neither")
    for name, one in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if one is not None and one.ndim != 4:
            raise TensorError(
                f"{name} of shape {tuple(one.shape)} was given",
                "it has four axes, the heads and their sizes last",
                "pass (sequences, tokens, heads, head_size), or pages with a block_table",
            )
    if k is not None and v is not None and (k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0]):
        raise TensorError(
            f"k of shape {tuple(k.shape)} and v of shape {tuple(v.shape)} were given for {q.shape[0]} sequences",
            "each sequence has as many new keys as new values",
            "pass such tensors",
        )


def _as_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pages of keys and of values, and the block table: that of a cache without pages is made up."""
    if block_table is not None:
        if rows is not None:
            raise TensorError(
                "cache_batch_idx was given with a block_table",
                "a block table has a row for each sequence",
                "pass block_table[cache_batch_idx] alone",
            )
        return k_cache, v_cache, block_table.to(torch.int32)
    capacity = k_cache.shape[1]
    if v_cache.shape[:2] != k_cache.shape[:2] or not capacity:
        raise TensorError(
            f"k_cache of shape {tuple(k_cache.shape)} and v_cache of shape {tuple(v_cache.shape)} were given",
            "they have as many sequences and as much room, of at least one token",
            "pass two halves of one cache",
        )
    size = _page_size(k_cache, v_cache)
    shape = (-1, size)
    pages = [one if size == capacity else one.view(*shape, *one.shape[2:]) for one in (k_cache, v_cache)]
    rows = torch.arange(q.shape[0], device=q.device) if rows is None else rows
    each = capacity // size
    table = rows[:, None] * each + torch.arange(each, device=q.device)
    return pages[0], pages[1], table.to(torch.int32)


def _page_size(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return the tokens of a page of a cache without pages: 256 or 16 where that fits, and at least two pages."""
    rows, capacity = k_cache.shape[:2]
    if rows > 1 and any(one.stride(0) != capacity * one.stride(1) for one in (k_cache, v_cache)):
        return capacity  # what is between the rows is in no page
    divisors = (size for size in range(capacity // 2, 0, -1) if capacity % size == 0)
    sizes = (*(size for size in (256, 16) if capacity % size == 0), capacity, *divisors)  # 256: FlashAttention 2's
    return next((size for size in sizes if rows * capacity // size > 1), capacity)


def _cached_lengths(q: Tensor, cache_seqlens: object, room: int, *, has_new: bool, paged: bool) -> Tensor:
    """Return the keys of each sequence before the new ones."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.shape != q.shape[:1] or cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise TensorError(
                f"cache_seqlens of shape {tuple(cache_seqlens.shape)} and {cache_seqlens.dtype} was given",
                f"it is ({q.shape[0]},) int32",
                "pass the keys of each sequence before the new ones",
            )
        return cache_seqlens.to(torch.int32)
    if cache_seqlens is None:
        if has_new or paged:
            raise TensorError(
                "cache_seqlens=None was given with " + ("new keys" if has_new else "a block_table"),
                "the number of keys before the call is needed",
                "pass cache_seqlens",
            )
        cache_seqlens = room
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int) or cache_seqlens < 0:
        raise TensorError(
            f"cache_seqlens={shown(cache_seqlens)} was given", "it is a number of keys, or a tensor", "pass such"
        )
    return torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)


def _new_keys(k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, size: int) -> tuple[NewKeys, Tensor]:
    """Return what is written where, and the lengths with the new keys."""
    count, after = k.shape[1], lengths + k.shape[1]
    _longest(after, table.shape[1] * size, None)  # where it is on the CPU, a slot outside of the table is refused
    positions = lengths[:, None].long() + torch.arange(count, device=k.device)
    blocks = table.long().gather(1, positions.div(size, rounding_mode="floor").clamp(max=table.shape[1] - 1))
    slots = blocks * size + positions % size
    return NewKeys(key=k.flatten(0, 1), value=v.flatten(0, 1), slots=slots.flatten()), after


def _longest(lengths: Tensor, room: int, bound: int | None) -> int:
    """Return the longest sequence, or an upper bound on a device, which is not waited for."""
    most = room if bound is None else min(room, bound_of("max_seqlen_k", bound))
    if not lengths.is_cpu:
        return most
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > most:
        raise TensorError(
            f"a sequence of {longest} keys was given",
            f"the cache and max_seqlen_k have room for {most}, the new ones included",
            "pass a larger cache, a wider block_table or a larger max_seqlen_k",
        )
    return longest
