"""The launches of a step. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
from attrs import frozen
from triton.tools.tensor_descriptor import TensorDescriptor

from attnplug.ops import Kernel, merge_splits
from attnplug_triton.tiles import width_of
from attnplug_triton.triton_decode import _decode
from attnplug_triton.triton_ops import INTERPRETED
from attnplug_triton.triton_prefill import _prefill
from attnplug_triton.triton_write import _write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract import Batch, KVCache
    from attnplug.ops import Ranks
    from attnplug_triton.tiles import Tiles


@frozen(eq=False, kw_only=True)
class Params:
    """
    A layer, as the kernels take it.

    Attributes:
        numbers: Left window, chunk, softmax scale, and soft cap; 0 for those that the layer does not have.
        tensors: ALiBi slopes, sinks, scales of keys, and scales of values; None likewise, and for scales that
            the KV cache has.
        constants: Constants of the layer: ``kv_heads`` to ``width_v`` of the kernels. The size of latents is that of
            their rotary part.
        forms: Constants of its scores: ``is_causal`` to ``has_sinks`` of the kernels.
        cache_forms: Constants of its KV cache: ``is_scaled`` to ``is_by_token``.
    """

    numbers: tuple[int, int, float, float]
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    constants: tuple[int, ...]
    forms: tuple[bool | int, ...]
    cache_forms: tuple[bool, bool, bool, bool, bool, bool]


@frozen(eq=False)
class Requests:
    """
    The requests of a launch, where they are not those of the batch: a shared prefix, or what follows it.

    Attributes:
        num_reqs: Requests.
        query_start_loc: ``(num_reqs + 1,)`` int32, where the rows of each begin.
        seq_lens: ``(num_reqs,)`` int32 keys.
        block_table: ``(num_reqs, blocks)`` int32.
    """

    num_reqs: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


@frozen(eq=False, kw_only=True)
class Plan:
    """
    The launches of a step, for all layers of a builder.

    Attributes:
        requests: The requests; None for those of the batch.
        prefix: The launches of a shared prefix, which all rows attend to; None without.
        short: The most new tokens of a request that the kernel of short queries computes.
        row_tiles: Its tiles of rows of each request.
        part_rows: Rows of each request in `parts`; None for those of the step, one after the other.
        num_splits: Its splits of each request; 0 where no request is short.
        num_selections: New tokens of the step where each has separate keys; 0 where requests have keys.
        num_tokens: New tokens of the step, or an upper bound; 0 where all requests are short.
        parts: Memory of partial outputs and their LSEs, of `attnplug.ops.split_views`; None for a single split.
        shard: The rank of decode context parallelism whose keys are in the KV cache, how many ranks there are, and how
            many tokens that follow each other one has.
        ranks: The ranks that exchange queries and partial outputs; None for a single one.
        in_order: Whether sums over ranks may not depend on the rest of the batch.
        mask_starts: ``(num_reqs,)`` int64, where the custom mask of each request begins; None without masks.
        mask_stride: Entries of a custom mask for each query token; 0 for as many as a request has keys.
        decode_tiles: Tile sizes of the kernel of short queries.
        prefill_tiles: Tile sizes of the kernel of longer ones.
    """

    requests: Requests | None = None
    prefix: Plan | None = None
    short: int
    row_tiles: int
    part_rows: int | None
    num_splits: int
    num_selections: int
    num_tokens: int
    parts: tuple[Tensor, Tensor] | None
    shard: tuple[int, int, int]
    ranks: Ranks | None
    in_order: bool
    mask_starts: Tensor | None
    mask_stride: int
    decode_tiles: Tiles
    prefill_tiles: Tiles


_ROTARY: Final = 528
"""Bytes of a record of fp8_ds_mla before its rotary elements: 512 codes, and 4 scales."""

_ALIGNMENT: Final = 16
"""Bytes that the address and the strides of a tensor descriptor are multiples of."""

_decode_kernel, _prefill_kernel, _write_kernel = Kernel(_decode), Kernel(_prefill), Kernel(_write)


def run(
    query: Tensor,
    kv: KVCache | tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    batch: Batch,
    plan: Plan,
    params: Params,
    selection: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """
    Compute attention of a step over its keys and values: those in the KV cache, or the contiguous ones of the call.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, heads contiguous. Rows of no request are neither read nor written.
        kv: Pages of keys and values, or contiguous ones, ``(keys, num_kv_heads, head_size)`` and ``(keys, num_kv_heads,
            head_size_v)``: of any strides but the last.
        out: ``(tokens, num_q_heads, head_size_v)``, heads contiguous; written.
        lse: ``(tokens, num_q_heads)`` float32, natural logarithms; written. None where it is not needed.
        batch: The requests.
        plan: The launches.
        params: The layer.
        selection: The slots that each token attends to, ``(tokens, topk)`` int32, and how many of them, ``(tokens,)``
            int32 or None for all. None attends to the keys of the requests.
    """
    is_contiguous = isinstance(kv, tuple)
    keys, values = (kv[0].unsqueeze(0), kv[1].unsqueeze(0)) if isinstance(kv, tuple) else _pages(kv, params)
    own = batch if plan.requests is None else plan.requests
    requests, (kv_heads, group), short = own.num_reqs, params.constants[:2], plan.short
    members, topk, has_lens = requests, 0, True
    table = cast("Tensor", batch.key_start_loc if is_contiguous else own.block_table)
    lens = own.seq_lens if batch.encoder_seq_lens is None else batch.encoder_seq_lens
    if selection is not None:
        table, index_lens = selection
        members, topk, has_lens = plan.num_selections, table.shape[1], index_lens is not None
        lens = table if index_lens is None else index_lens
    mask = (lens, lens)
    if batch.custom_mask is not None:
        mask = batch.custom_mask.view(torch.uint8), cast("Tensor", plan.mask_starts)
    of_layer, scale_strides = params.tensors, [0] * 4
    if params.cache_forms[-1] and not isinstance(kv, tuple):
        k_scale, v_scale = kv["k_scale"], kv["v_scale"]
        of_layer, scale_strides = (*of_layer[:2], k_scale, v_scale), [*k_scale.stride()[:2], *v_scale.stride()[:2]]
    tensors = (
        query, keys, values, out,
        *[query if tensor is None else tensor for tensor in (lse, *of_layer)],  # such an argument is not read
        own.query_start_loc, lens, table, lens if batch.mm_prefix_range is None else batch.mm_prefix_range, *mask,
    )  # fmt: skip
    lse_strides = (0, 0) if lse is None else lse.stride()
    strides = (
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], out.stride(0), *lse_strides, *scale_strides
    )  # fmt: skip
    rank, ranks, interleave = plan.shard
    numbers = (table.stride(0), requests, plan.mask_stride, rank, *params.numbers)
    constants = (
        *params.constants, 0 if is_contiguous else keys.shape[1], short, *params.forms, lse is not None,
        batch.mm_prefix_range is not None, batch.custom_mask is not None, *params.cache_forms, INTERPRETED, ranks,
        interleave,
    )  # fmt: skip
    # A mask is in every tile, and a rank without keys may have no page that could be loaded ahead.
    may_describe = not is_contiguous and batch.custom_mask is None and table.shape[1] > 0

    def describe(tiles: Tiles) -> tuple[TensorDescriptor, ...]:
        return _descriptors(pages, query, params, tiles.keys) if may_describe and tiles.descriptors else ()

    pages = keys, values  # kernels with descriptors do not read these
    splits, tiles = plan.num_splits, plan.decode_tiles
    if splits:
        parts = (out, out) if plan.parts is None else plan.parts  # the kernel does not read those of a single split
        has_plain_rows = topk == 0 and ranks == 1 and batch.mm_prefix_range is None and not any(params.forms[1:3])
        descriptors = describe(tiles) if has_plain_rows else ()
        _decode_kernel.run(
            members * kv_heads * splits * plan.row_tiles,
            (*(() if descriptors else pages), *tensors, *parts),
            strides,
            (*numbers, splits, members, keys.shape[0] * keys.shape[1]),
            (*constants, tiles.rows, tiles.keys, tiles.stages, splits > 1, topk, has_lens, bool(descriptors)),
            descriptors=descriptors,
            **tiles.launch_options,
        )
        if splits > 1:
            merge_splits(*parts, out, lse, own.query_start_loc, query_len=plan.part_rows)
    if plan.num_tokens:
        tiles = plan.prefill_tiles
        descriptors = describe(tiles)
        num_tiles = plan.num_tokens * group // tiles.rows + requests  # at least as many as all requests need
        _prefill_kernel.run(
            num_tiles * kv_heads,
            (*(() if descriptors else pages), *tensors),
            strides,
            (*numbers, num_tiles),
            (*constants, tiles.rows, tiles.keys, tiles.stages, bool(tiles.joins_diagonal), bool(descriptors)),
            descriptors=descriptors,
            **tiles.launch_options,
        )


def _pages(kv_cache: KVCache, params: Params) -> tuple[Tensor, Tensor]:
    """Return keys and values as the kernels read them: of latents, the rotary elements, and those before."""
    keys, values = kv_cache.k, kv_cache.v
    _, _, by_bits, is_latent, is_records, _ = params.cache_forms
    if is_records:
        return keys[..., _ROTARY:].view(torch.bfloat16), values if by_bits else values.view(torch.float8_e4m3fn)
    if by_bits:  # Triton has no e4m3 here
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    return keys[..., params.constants[3] :] if is_latent else keys, values


def write_rows(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    """
    Write keys and values with the scale of each token and head into their slots, in one launch.

    Args:
        key: ``(tokens, num_kv_heads, head_size)``, of any strides; rows beyond the slots are not read.
        value: ``(tokens, num_kv_heads, head_size_v)``, likewise.
        cache: A KV cache of int8 or float8_e4m3 with the roles ``"k_scale"`` and ``"v_scale"``; written.
        slots: ``(n,)`` of integers; rows with a negative one are not written.
    """
    key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value))
    keys, values = (pages if pages.dtype == torch.int8 else pages.view(torch.uint8) for pages in (cache.k, cache.v))
    scales = cache["k_scale"], cache["v_scale"]
    strides = [step for tensor in (key, value, *scales) for step in tensor.stride()[:2]]
    strides += [step for pages in (keys, values) for step in pages.stride()[:3]]
    _, heads, size = key.shape
    _write_kernel.run(
        slots.shape[0] * heads,
        (key, value, keys, values, *scales, slots),
        strides,
        (),
        (heads, size, value.shape[2], width_of(size), width_of(value.shape[2]), keys.shape[1]),
        num_warps=1,
    )


def _descriptors(caches: Sequence[Tensor], query: Tensor, params: Params, count: int) -> tuple[TensorDescriptor, ...]:
    """Return tensor descriptors that load so many keys or values of a KV head; none where these cannot be made."""
    if caches[0].shape[1] % count or not all(pages.dtype == query.dtype and _is_aligned(pages) for pages in caches):
        return ()
    return tuple(
        TensorDescriptor(pages, list(pages.shape), list(pages.stride()), [1, count, 1, width])
        for pages, width in zip(caches, params.constants[-2:], strict=True)
    )


def _is_aligned(pages: Tensor) -> bool:
    size = pages.element_size()
    return pages.data_ptr() % _ALIGNMENT == 0 and all(step * size % _ALIGNMENT == 0 for step in pages.stride()[:-1])
