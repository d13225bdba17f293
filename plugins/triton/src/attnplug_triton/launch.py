"""The launches of a step. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from attrs import frozen

from attnplug.ops import Kernel, merge_splits
from attnplug_triton.triton_decode import _decode
from attnplug_triton.triton_ops import INTERPRETED
from attnplug_triton.triton_prefill import _prefill

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import Batch, KVCache
    from attnplug_triton.tiles import Tiles


@frozen(eq=False, kw_only=True)
class Params:
    """
    A layer, as the kernels take it.

    Attributes:
        numbers: Left window, chunk, softmax scale, and soft cap; 0 for those that the layer does not have.
        tensors: ALiBi slopes, sinks, scales of keys, and scales of values; None likewise.
        constants: Constants of the layer: ``kv_heads`` to ``width_v`` of the kernels. The size of latents is that of
            their rotary part.
        forms: Constants of its scores: ``is_causal`` to ``has_sinks`` of the kernels.
        cache_forms: Constants of its KV cache: ``is_scaled`` to ``is_latent``.
    """

    numbers: tuple[int, int, float, float]
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    constants: tuple[int, ...]
    forms: tuple[bool | int, ...]
    cache_forms: tuple[bool, bool, bool, bool]


@frozen(eq=False, kw_only=True)
class Plan:
    """
    The launches of a step, for all layers of a builder.

    Attributes:
        short: The most new tokens of a request that the kernel of short queries computes.
        num_splits: Its splits of each request; 0 where no request is short.
        num_tokens: New tokens of the step, or an upper bound; 0 where all requests are short.
        parts: Memory of partial outputs and their LSEs, of `attnplug.ops.split_views`; None for a single split.
        decode_tiles: Tile sizes of the kernel of short queries.
        prefill_tiles: Tile sizes of the kernel of longer ones.
    """

    short: int
    num_splits: int
    num_tokens: int
    parts: tuple[Tensor, Tensor] | None
    decode_tiles: Tiles
    prefill_tiles: Tiles


_decode_kernel, _prefill_kernel = Kernel(_decode), Kernel(_prefill)


def run(
    query: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None, batch: Batch, plan: Plan, params: Params
) -> None:
    """
    Compute attention of a step over the KV cache, which has its keys and values.

    Args:
        query: ``(tokens, num_q_heads, head_size)``, heads contiguous. Rows of no request are neither read nor written.
        kv_cache: Pages of keys and values, of any strides but the last.
        out: ``(tokens, num_q_heads, head_size_v)``, heads contiguous; written.
        lse: ``(tokens, num_q_heads)`` float32, natural logarithms; written. None where it is not needed.
        batch: The requests.
        plan: The launches.
        params: The layer.
    """
    keys, values, table = kv_cache.k, kv_cache.v, cast("Tensor", batch.block_table)
    if params.cache_forms[2]:  # Triton has no e4m3 here
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if params.cache_forms[3]:
        keys = keys[..., params.constants[3] :]
    requests, (kv_heads, group), short = batch.num_reqs, params.constants[:2], plan.short
    tensors = (
        query, keys, values, out,
        *[query if tensor is None else tensor for tensor in (lse, *params.tensors)],  # such an argument is not read
        batch.query_start_loc, batch.seq_lens, table,
    )  # fmt: skip
    lse_strides = (0, 0) if lse is None else lse.stride()
    strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], out.stride(0), *lse_strides)
    numbers = (table.stride(0), requests, *params.numbers)
    constants = (
        *params.constants, keys.shape[1], short, *params.forms, lse is not None, *params.cache_forms, INTERPRETED,
    )  # fmt: skip
    splits, tiles = plan.num_splits, plan.decode_tiles
    if splits:
        parts = (out, out) if plan.parts is None else plan.parts  # the kernel does not read those of a single split
        _decode_kernel.run(
            requests * kv_heads * splits * -(-short * group // tiles.rows),
            (*tensors, *parts),
            strides,
            (*numbers, splits),
            (*constants, tiles.rows, tiles.keys, tiles.stages, splits > 1),
            num_warps=tiles.warps,
        )
        if splits > 1:
            merge_splits(*parts, out, lse, batch.query_start_loc, query_len=short)
    if plan.num_tokens:
        tiles = plan.prefill_tiles
        num_tiles = plan.num_tokens * group // tiles.rows + requests  # at least as many as all requests need
        _prefill_kernel.run(
            num_tiles * kv_heads,
            tensors,
            strides,
            (*numbers, num_tiles),
            (*constants, tiles.rows, tiles.keys, tiles.stages),
            num_warps=tiles.warps,
        )
