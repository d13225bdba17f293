"""The calls of a step, and what they are made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen
from torch import Tensor

from attnplug_flash_attn.dcp import Sharded
from attnplug_flash_attn.gathering import cumulative, slots_of_keys
from attnplug_flash_attn.kernels.interface import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug_flash_attn.kernels.interface import Kernels


@frozen(eq=False, kw_only=True)
class Rows:
    """
    Requests that are attended in one call, with their keys in pages.

    Attributes:
        first: The first query row.
        last: The row behind the last one.
        starts: ``(requests + 1,)`` int32 from 0: where the query rows of each request start.
        longest_query: At least the longest query.
        lens: ``(requests,)`` int32: keys of each request.
        lens_cpu: Host copy, as exact as the batch's; None where the host does not know them.
        longest: At least the most keys of a request.
        table: ``(requests, blocks)`` int32: the pages of those keys.
        causal: Whether a row sees no later key.
    """

    first: int
    last: int
    starts: Tensor
    longest_query: int
    lens: Tensor
    lens_cpu: Tensor | None
    longest: int
    table: Tensor
    causal: bool

    @property
    def num_keys(self) -> int:
        """At least the keys of all requests."""
        if self.lens_cpu is None:
            return int(self.lens.shape[0]) * self.longest
        return int(self.lens_cpu.sum())


@frozen(eq=False)
class Pass:
    """
    One call: whose rows attend which keys. The same for all layers of a plan key.

    Attributes:
        call: What the kernels are told.
        first: The first query row.
        last: The row behind the last one.
        slots: ``(keys,)`` int64: the slots of the cache that are packed for a library that reads no pages; None where
            it reads them, or keys come with the call.
        is_first: Whether the keys of a paged step are those that come with the call, in the same rows: no request has
            any in the cache from before.
    """

    call: Call
    first: int
    last: int
    slots: Tensor | None = None
    is_first: bool = False


@frozen(eq=False, kw_only=True)
class Plan:
    """
    The passes of a step.

    Attributes:
        decode: The rows of the decodes; None where there are none.
        prefill: The rows of the prefills, of all requests in dense calls; None where there are none.
        prefix: All rows, over the keys that all requests share; `decode` and `prefill` then have the other keys.
        sharded: All rows, where sequences are spread over ranks, in place of the others.
        shard_slots: The slots that are packed for its cached keys, as of `Pass`.
        parts: `decode` and `prefill`, as far as they are there: each row once.
    """

    decode: Pass | None = None
    prefill: Pass | None = None
    prefix: Pass | None = None
    sharded: Sharded | None = None
    shard_slots: Tensor | None = None
    parts: tuple[Pass, ...] = field(init=False)

    @parts.default
    def _present(self) -> tuple[Pass, ...]:
        return tuple(part for part in (self.decode, self.prefill) if part is not None)


def call_of(rows: Rows, num_splits: int) -> Call:
    """Return the call of requests, for a library that reads pages and is told the number of keys of each."""
    return Call(
        cu_seqlens_q=rows.starts,
        max_seqlen_q=rows.longest_query,
        max_seqlen_k=rows.longest,
        seqused_k=rows.lens,
        block_table=rows.table,
        causal=rows.causal,
        num_splits=num_splits,
    )


def as_taken(
    call: Call, num_keys: int, kernels: Kernels, block_size: int, keep: Callable[[str, Tensor], Tensor]
) -> tuple[Call, Tensor | None]:
    """
    Return a call on pages as the library takes it, and the slots that are packed for it, if it reads no pages.

    Args:
        call: As `call_of` returns it.
        num_keys: At least the keys of all requests.
        kernels: The library.
        block_size: Slots per block.
        keep: Takes a tensor of this step by name, and returns it as a graph may read it.
    """
    lens, table = call.seqused_k, call.block_table
    if lens is None or table is None or (kernels.paged and not kernels.cumulative_keys):
        return call, None
    starts = keep("cu_seqlens_k", cumulative(lens))
    if kernels.paged:
        return evolve(call, cu_seqlens_k=starts), None
    slots = keep("slots", slots_of_keys(table, starts, num_keys, block_size))
    return evolve(call, cu_seqlens_k=starts, seqused_k=None, block_table=None), slots
