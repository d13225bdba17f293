"""FlashAttention's own calls, as a host that knows one library alone writes them: the plugin is held against them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.ops import write_kv
from attnplug_flash_attn.raw_calls import CALLS, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnplug_kit.bench.rig import Planner, Rig

SCHEDULE: Final = "the raw `get_scheduler_metadata`"


@frozen
class RawFlashAttention:
    """
    One call for the decodes and one for the prompts, of the library that the variant is. Prompts in one piece are read
    as they come, and all else from the pages.

    The new K/V are written by `attnplug.ops.write_kv`, in one launch: most of these libraries write no cache, and what
    is compared is attention.
    """

    backend: ClassVar[str] = "flash_attn"
    what: ClassVar[str] = "raw FlashAttention calls"

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the write and the calls of one step, scheduled ahead where the library can."""
        calls, (key_pages, value_pages) = CALLS[rig.planner.backend.variant], _pages(rig)
        query, key, value, slots = rig.query, rig.key, rig.value, rig.slots
        output = torch.empty_like(query)
        runs = []
        for rows in _rows(rig.planner):
            keys, values = key_pages, value_pages
            if not rows.past:
                keys, values = key[rows.where], value[rows.where]
            runs.append(calls.bind(query[rows.where], keys, values, output[rows.where], rows, calls.schedule(rows)))

        def write() -> None:
            write_kv(key, value, key_pages, value_pages, slots, padded=False)

        return _in_turn(write, runs, output if calls.fills_output else None)

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the same calls: nothing that they read moves."""
        return self.layer(rig)

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """Return the schedules of a step where the library has such a thing, from lengths that are on the device."""
        del captured
        calls = CALLS[planner.backend.variant]
        parts = [rows for rows in _rows(planner) if rows.past and calls.schedules]
        if not parts:
            return {}
        return {SCHEDULE: lambda: [calls.schedule(rows) for rows in parts]}


def _in_turn(
    write: Callable[[], None], runs: list[Callable[[], Tensor]], output: Tensor | None
) -> Callable[[], Tensor]:
    """Return what writes and runs; results that the library has put into tensors of its own are joined."""

    def call() -> Tensor:
        write()
        found = [run() for run in runs]
        if output is not None:
            return output.flatten(1)
        return (found[0] if len(found) == 1 else torch.cat(found)).flatten(1)

    return call


def _rows(planner: Planner) -> list[Rows]:
    """Return the decodes of a step and its prompts, what there is of them."""
    first = planner.step.query_lens.count(1)
    parts = (slice(0, first), slice(first, planner.step.num_reqs))
    return [_of(planner, part) for part in parts if planner.step.query_lens[part]]


def _of(planner: Planner, part: slice) -> Rows:
    step, device = planner.step, planner.backend.device
    query_lens, seq_lens = step.query_lens[part], step.seq_lens[part]
    begin, count = sum(step.query_lens[: part.start]), sum(query_lens)
    tables = [torch.tensor(blocks, dtype=torch.int32) for blocks in planner.blocks[part]]
    size = planner.block_size
    pairs = zip(planner.blocks[part], seq_lens, strict=True)
    slots = [blocks[i // size] * size + i % size for blocks, length in pairs for i in range(length)]

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return Rows(
        where=slice(begin, begin + count),
        past=any(step.cached_lens[part]),
        num_q_heads=step.num_q_heads,
        num_kv_heads=step.num_kv_heads,
        head_size=step.head_size,
        block_size=size,
        dtype=getattr(torch, planner.backend.agreement.requirements.dtype),
        max_query=max(query_lens),
        max_keys=max(seq_lens),
        query_starts=on_device([0, *query_lens]).cumsum(0, dtype=torch.int32),
        keys=on_device(list(seq_lens)),
        key_starts=on_device([0, *seq_lens]).cumsum(0, dtype=torch.int32),
        table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(device),
        slots=on_device(slots),
    )


def _pages(rig: Rig) -> Tensor:
    """Return a cache ``(2, num_blocks, block_size, num_kv_heads, head_size)`` that holds the past."""
    key, value, slots = rig.cached
    pages = rig.key.new_zeros(2, rig.num_blocks, rig.block_size, *rig.key.shape[1:])
    for rows, cache in zip((key, value), pages, strict=True):
        cache.view(-1, *rows.shape[1:]).index_copy_(0, slots, rows)
    return pages
