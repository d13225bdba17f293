"""The arguments of the kernels, in their order, and the launches of a step. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from attnplug_triton import decode, prefill

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
        constants: Constants of the layer: ``kv_heads`` to ``width_v`` of the kernels.
        forms: Constants of its scores: ``is_causal`` to ``has_sinks`` of the kernels.
        scale_forms: Constants of its KV cache: ``is_scaled`` to ``by_bits``.
    """

    numbers: tuple[int, int, float, float]
    tensors: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    constants: tuple[int, ...]
    forms: tuple[bool | int, ...]
    scale_forms: tuple[bool, bool, bool]


@frozen(eq=False, kw_only=True)
class Plan:
    """
    The launches of a step, for all layers of a builder.

    Attributes:
        short: The most new tokens of a request that the kernel of short queries computes.
        num_splits: Its splits of each request; 0 where no request is short.
        num_tokens: New tokens of the step, or an upper bound; 0 where all requests are short.
        scratch: Memory of partial outputs, uint8.
        decode_tiles: Tile sizes of the kernel of short queries.
        prefill_tiles: Tile sizes of the kernel of longer ones.
    """

    short: int
    num_splits: int
    num_tokens: int
    scratch: Tensor
    decode_tiles: Tiles
    prefill_tiles: Tiles


@frozen(eq=False)
class Call:
    """
    Both kernels' common arguments for one layer in one step.

    Attributes:
        out: ``(tokens, num_q_heads, head_size_v)``.
        lse: ``(tokens, num_q_heads)``, or None.
        query_starts: ``(num_reqs + 1,)`` int32.
        num_reqs: Requests.
        kv_heads: KV heads.
        group: Query heads per KV head.
        short: As in `Plan`.
        decode_tiles: As in `Plan`.
        prefill_tiles: As in `Plan`.
        tensors: ``query`` to ``table`` of the kernels.
        strides: ``q_token`` to ``lse_head``.
        numbers: ``table_stride`` to ``soft_cap``.
        constants: ``kv_heads`` to ``by_bits``.
    """

    out: Tensor
    lse: Tensor | None
    query_starts: Tensor
    num_reqs: int
    kv_heads: int
    group: int
    short: int
    decode_tiles: Tiles
    prefill_tiles: Tiles
    tensors: tuple[Tensor, ...] = field()
    strides: tuple[int, ...]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]


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
    call = _call(query, kv_cache, out, lse, batch, plan, params)
    if plan.num_splits:
        decode.launch(call, plan.scratch, plan.num_splits)
    if plan.num_tokens:
        prefill.launch(call, plan.num_tokens)


def _call(
    query: Tensor, kv_cache: KVCache, out: Tensor, lse: Tensor | None, batch: Batch, plan: Plan, params: Params
) -> Call:
    keys, values, table = kv_cache.k, kv_cache.v, batch.block_table
    assert table is not None  # noqa: S101 - the agreement has pages
    if params.scale_forms[2]:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    lse_strides = (0, 0) if lse is None else lse.stride()
    kv_heads, group = params.constants[:2]
    return Call(
        out,
        lse,
        batch.query_start_loc,
        batch.num_reqs,
        kv_heads,
        group,
        plan.short,
        plan.decode_tiles,
        plan.prefill_tiles,
        (
            query, keys, values, out,
            *[query if tensor is None else tensor for tensor in (lse, *params.tensors)],  # such an argument is not read
            batch.query_start_loc, batch.seq_lens, table,
        ),
        (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], out.stride(0), *lse_strides),
        (table.stride(0), batch.num_reqs, *params.numbers),
        (*params.constants, keys.shape[1], plan.short, *params.forms, lse is not None, *params.scale_forms),
    )  # fmt: skip
