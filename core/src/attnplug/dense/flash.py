"""
Functions of FlashAttention's shape, on the backend that a selection chooses.

Code that was written for `flash_attn_varlen_func` and `flash_attn_with_kvcache` of FlashAttention 2.8 calls them as
they are. Every argument is used, or refused with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.dense.calls import lengths_of
from attnplug.dense.flash_arguments import (
    check_deterministic,
    check_longest,
    check_no_gradients,
    check_queries,
    check_slopes,
    one_sink,
    refuse,
    soft_cap_of,
    uncompiled,
    visibility_of,
)
from attnplug.dense.flash_cache import as_int32, as_pages, cached_lengths, check_cache, longest, new_keys
from attnplug.dense.functions import attention_varlen
from attnplug.dense.pages import PagedCall, run_pages
from attnplug.dense.params import NO_OPTIONS, CallParams, check_plain, encode_keywords

if TYPE_CHECKING:
    from torch import Tensor

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
        cu_seqlens_q_cpu: CPU copy; without it each call reads the lengths from the device, which waits for it.
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
    check_plain(q, k, v)
    refuse(dropout_p=dropout_p, return_attn_probs=return_attn_probs)
    check_slopes(alibi_slopes)
    sinks = one_sink(s_aux, learnable_sink)
    check_deterministic(q, k, v, sinks, deterministic=deterministic)
    visibility = visibility_of(window_size, causal=causal, paged=block_table is not None)
    features = (visibility.causal, softmax_scale, visibility.window, soft_cap_of(softcap), return_softmax_lse)
    starts, copies, bounds = (
        (cu_seqlens_q, cu_seqlens_k),
        (cu_seqlens_q_cpu, cu_seqlens_k_cpu),
        (max_seqlen_q, max_seqlen_k),
    )
    if block_table is not None:
        return _attend_pages(
            q,
            k,
            v,
            starts,
            copies,
            bounds,
            features,
            (sinks, alibi_slopes),
            block_table,
            backend=backend,
            options=options,
        )
    key_starts: Tensor | None = cu_seqlens_k
    key_starts_cpu = cu_seqlens_k_cpu
    if not torch.compiler.is_compiling():  # a graph reads the lengths when it runs
        copies = _on_cpu(starts, copies)
        query_lens, key_lens = _checked_lengths(starts, copies, bounds)
        cu_seqlens_q_cpu, key_starts_cpu = copies
        if key_lens == query_lens:
            key_starts = key_starts_cpu = None
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        key_starts,
        query_start_loc_cpu=cu_seqlens_q_cpu,
        key_start_loc_cpu=key_starts_cpu,
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


def _on_cpu(starts: tuple[Any, Any], copies: tuple[Tensor | None, Tensor | None]) -> tuple[Any, Any]:
    """Return CPU copies of both start locations, so that each is read from the device once."""
    of_queries, of_keys = (
        one.cpu() if copy is None and isinstance(one, torch.Tensor) else copy
        for one, copy in zip((starts[0], None if starts[0] is starts[1] else starts[1]), copies, strict=True)
    )
    return of_queries, of_queries if of_keys is None and starts[0] is starts[1] else of_keys


def _checked_lengths(
    starts: tuple[Tensor, Tensor], copies: tuple[Tensor | None, Tensor | None], bounds: tuple[Any, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of queries and of keys, none of them above its bound."""
    query_lens = lengths_of("cu_seqlens_q", starts[0], copies[0])
    key_lens = lengths_of("cu_seqlens_k", starts[1], copies[1])
    check_longest("max_seqlen_q", max(query_lens, default=0), bounds[0])
    check_longest("max_seqlen_k", max(key_lens, default=0), bounds[1])
    return query_lens, key_lens


@uncompiled
def _attend_pages(  # noqa: PLR0913, PLR0917 - what `flash_attn_varlen_func` has made of its arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    copies: tuple[Tensor | None, Tensor | None],
    bounds: tuple[Any, Any],
    features: tuple[bool, float | None, int | None, float | None, bool],
    learned: tuple[Tensor | None, Tensor | None],
    block_table: Tensor,
    *,
    backend: BackendNames | None,
    options: Options | None,
) -> Any:
    """Attend to pages; `features` are the first of `CallParams`, and `learned` are sinks and slopes."""
    query_lens, key_lens = _checked_lengths(starts, _on_cpu(starts, copies), bounds)
    check_queries(q, query_lens)
    check_no_gradients(q, k, v, learned[0], what="flash_attn_varlen_func with a block_table")
    names, table = ((), NO_OPTIONS) if backend is None and options is None else encode_keywords(backend, options)
    output, lse = run_pages(
        PagedCall(
            query=q,
            key_pages=k,
            value_pages=v,
            query_start_loc=as_int32("cu_seqlens_q", starts[0]),
            seq_lens=as_int32("cu_seqlens_k", starts[1].diff()),
            block_table=block_table,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(key_lens, default=0),
            params=CallParams(*features, names, table),
            sinks=learned[0],
            alibi_slopes=learned[1],
        )
    )
    return (output, lse.T) if lse is not None else output


@uncompiled
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
    check_plain(q, k_cache, v_cache)
    check_cache(q, k_cache, v_cache, k, v)
    keys, values, table = as_pages(q, k_cache, v_cache, block_table, cache_batch_idx)
    room = table.shape[1] * keys.shape[1]
    lengths = cached_lengths(q, cache_seqlens, room, has_new=k is not None, paged=block_table is not None)
    new = None
    if k is not None and v is not None:
        new, lengths = new_keys(k, v, lengths, table, keys.shape[:2])
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
            max_seq_len=longest(lengths, room, max_seqlen_k),
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
