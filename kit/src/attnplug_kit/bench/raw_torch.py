"""Attention over a paged cache in raw torch calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug_kit.bench.rig import Planner, Rig


@frozen
class RawTorch:
    """
    torch's public calls, at their best: whole blocks are gathered, into memory that is used again, and the query heads
    of a decode stand as rows of their KV head, so that no key is repeated.
    """

    backend: ClassVar[str] = "torch"
    what: ClassVar[str] = "raw torch calls"

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the calls; prompts are read as they come, whatever else from the pages."""
        pages = _pages(rig)
        if rig.step.is_decode:
            return _decode(rig, pages)
        return _mixed(rig, pages) if 1 in rig.step.query_lens else _prefill(rig, pages)

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the same calls: nothing that they read moves."""
        return self.layer(rig)

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """Return nothing: torch plans nothing."""
        del planner, captured
        return {}


def _pages(rig: Rig) -> tuple[Tensor, Tensor]:
    """Return pages ``(num_blocks, block_size, num_kv_heads, head_size)`` of keys and of values, which hold the past."""
    key, value, slots = rig.cached
    shape = (rig.num_blocks, rig.block_size, *rig.key.shape[1:])
    pages = rig.key.new_zeros(shape), rig.key.new_zeros(shape)
    for rows, cache in zip((key, value), pages, strict=True):
        cache.view(-1, *rows.shape[1:]).index_copy_(0, slots, rows)
    return pages


def _mixed(rig: Rig, pages: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    """Return the calls of a step that begins with decodes: theirs, and those of the prompts."""
    from torch import cat  # noqa: PLC0415 - only who measures pays

    first = rig.step.query_lens.count(1)
    decode, prefill = (
        _decode(_part(rig, slice(first)), pages),
        _prefill(_part(rig, slice(first, None)), pages),
    )
    return lambda: cat((decode(), prefill()))


def _part(rig: Rig, requests: slice) -> Rig:
    """Return some of the requests, those before the first prompt or those from it on, without their past."""
    planner, whole = rig.planner, rig.step
    step = evolve(whole, query_lens=whole.query_lens[requests], cached_lens=whole.cached_lens[requests])
    blocks = planner.blocks[requests]
    rows = slice(step.num_tokens) if requests.start is None else slice(whole.num_tokens - step.num_tokens, None)
    return evolve(
        rig,
        planner=evolve(planner, step=step, blocks=blocks),
        query=rig.query[rows],
        key=rig.key[rows],
        value=rig.value[rows],
        metadata=planner.builder.build(planner.batch(step, blocks)),
    )


def _prefill(rig: Rig, pages: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    from torch.nn.functional import scaled_dot_product_attention as attend  # noqa: PLC0415 - only who measures pays

    step, slots = rig.step, rig.slots
    shape = (step.num_reqs, step.query_lens[0])
    keys, values = (cache.view(-1, *rig.key.shape[1:]) for cache in pages)
    query, key, value = rig.query, rig.key, rig.value

    def call() -> Tensor:
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        out = attend(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape[0], -1)

    return call


def _decode(rig: Rig, pages: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    from torch import index_select  # noqa: PLC0415 - only who measures pays
    from torch.nn.functional import scaled_dot_product_attention as attend  # noqa: PLC0415 - only who measures pays

    slots, query, key, value = rig.slots, rig.query, rig.key, rig.value
    folded = (rig.step.num_reqs, rig.step.num_kv_heads, -1, rig.step.head_size)
    keys, values = (cache.view(-1, *key.shape[1:]) for cache in pages)
    blocks, mask = rig.table.reshape(-1), _mask(rig)
    gathered = [cache.new_empty(len(blocks), *cache.shape[1:]) for cache in pages]
    longest = rig.table.shape[1] * rig.block_size if rig.step.is_ragged else rig.step.seq_lens[0]
    k, v = (rows.view(rig.step.num_reqs, -1, *key.shape[1:])[:, :longest].transpose(1, 2) for rows in gathered)

    def call() -> Tensor:
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        for cache, rows in zip(pages, gathered, strict=True):
            index_select(cache, 0, blocks, out=rows)
        out = attend(query.view(folded), k, v, attn_mask=mask)
        return out.reshape(len(out), -1)

    return call


def _mask(rig: Rig) -> Tensor | None:
    """Return an additive mask over the gathered slots, ``(num_reqs, 1, 1, slots)``; None where all are equally long."""
    if not rig.step.is_ragged:
        return None
    mask = rig.query.new_zeros(rig.step.num_reqs, 1, 1, rig.table.shape[1] * rig.block_size)
    for row, length in zip(mask, rig.step.seq_lens, strict=True):
        row[..., length:] = float("-inf")
    return mask
