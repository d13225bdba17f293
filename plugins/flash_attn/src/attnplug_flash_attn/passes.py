"""The calls of a step, and what they are made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from attnplug_flash_attn.kernels.interface import VarlenCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Limits
    from attnplug_flash_attn.dcp import DcpPlan
    from attnplug_flash_attn.kernels.interface import Kernels


@frozen(eq=False, kw_only=True)
class Rows:
    """
    Requests that are attended in one call, with their keys in pages.

    Attributes:
        first: The first query row.
        last: The row behind the last one.
        starts: ``(requests + 1,)`` int32 from 0: where the query rows of each request start.
        starts_cpu: Host copy.
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
    starts_cpu: Tensor
    longest_query: int
    lens: Tensor
    lens_cpu: Tensor | None
    longest: int
    table: Tensor
    causal: bool


@frozen(eq=False)
class KernelPass:
    """
    One call: whose rows attend which keys. The same for all layers of a plan key.

    Attributes:
        call: What the kernels are told.
        first: The first query row.
        last: The row behind the last one.
        slots: ``(keys,)`` int64: the slots of the cache that are packed for a library that reads no pages; None where
            it reads them, or keys come with the call.
        room: Where these keys and values are packed, ``(keys, kv_heads, size)`` each; used again by the next call.
        rest: Further calls, of other requests, whose keys the room does not hold beside these.
        is_first: Whether the keys of a paged step are those that come with the call, in the same rows: no request has
            any in the cache from before.
    """

    call: VarlenCall
    first: int
    last: int
    slots: Tensor | None = None
    reads_new_kv: bool = False
    buffers: tuple[Tensor, Tensor] | None = None
    rest: tuple[KernelPass, ...] = ()

    @property
    def calls(self) -> tuple[KernelPass, ...]:
        """All calls: this one, and the rest."""
        return (self, *self.rest)


@frozen(eq=False, kw_only=True)
class Plan:
    """
    The passes of a step.

    Attributes:
        decode: The rows of the decodes; None where there are none.
        prefill: The rows of the prefills, of all requests in dense calls; None where there are none.
        prefix: All rows, over the keys that all requests share; `decode` and `prefill` then have the other keys.
        sharded: All rows, where sequences are spread over ranks, in place of the others.
        shard: Its pass over the cached keys, for a library that reads no pages; None where it reads them.
        parts: `decode` and `prefill`, as far as they are there, with all their calls: each row once.
    """

    decode: KernelPass | None = None
    prefill: KernelPass | None = None
    prefix: KernelPass | None = None
    dcp: DcpPlan | None = None
    packed_context: KernelPass | None = None
    parts: tuple[KernelPass, ...] = field(init=False)

    @parts.default
    def _present(self) -> tuple[KernelPass, ...]:
        return tuple(call for part in (self.decode, self.prefill) if part is not None for call in part.calls)


def call_of(rows: Rows, num_splits: int) -> VarlenCall:
    """Return the call of requests, for a library that reads pages and is told the number of keys of each."""
    return VarlenCall(
        cu_seqlens_q=rows.starts,
        max_seqlen_q=rows.longest_query,
        max_seqlen_k=rows.longest,
        seqused_k=rows.lens,
        block_table=rows.table,
        causal=rows.causal,
        num_splits=num_splits,
    )


def leftpad_of(kernels: Kernels, requests: int, device: torch.device) -> Tensor | None:
    """Return `Call.leftpad_k` of so many requests; None where the library wants none. Nobody writes it again."""
    return torch.zeros(requests, dtype=torch.int32, device=device) if kernels.wants_leftpad else None


def adapted(
    call: VarlenCall, kernels: Kernels, leftpad: Tensor | None, keep: Callable[[str, Tensor], Tensor]
) -> VarlenCall:
    """
    Return a call on pages as a library that reads pages takes it.

    Args:
        call: As `call_of` returns it.
        kernels: The library.
        leftpad: As `leftpad_of` has returned it, of the call's requests or more.
        keep: Takes a tensor of this step by name, and returns it as a graph may read it.
    """
    if leftpad is not None:
        call = evolve(call, leftpad_k=leftpad[: call.cu_seqlens_q.shape[0] - 1])
    if call.seqused_k is None or not kernels.cumulative_keys:
        return call
    return evolve(call, cu_seqlens_k=keep("cu_seqlens_k", cumulative(call.seqused_k)))


LIBRARYS_CHOICE: Final = 0
UNSPLIT: Final = 1


def num_splits(limits: Limits, tokens: int, *, batch_invariant: bool) -> int:
    """
    Return the most parts that a step of so many tokens may have; 0 leaves it to the library.

    The partial results of parts are summed in an order that follows from their number, which the library chooses by
    what else is in the batch: only one part is the same everywhere. A graph holds memory for partial results, so that
    batches as small as those that are captured have the host's bound, and larger ones none: of a large batch the
    library would make as many parts as it is told, and not fewer. A bound of one part costs nothing, and holds for all.

    Args:
        limits: With the host's bound, and the sizes that it captures.
        tokens: Query rows of the step, padding included.
        batch_invariant: Whether results may not depend on what else is in the batch.
    """
    if batch_invariant or limits.max_num_splits == UNSPLIT:
        return UNSPLIT
    captured = max(limits.capture_sizes, default=0)
    return limits.max_num_splits or LIBRARYS_CHOICE if tokens <= captured else LIBRARYS_CHOICE


def cumulative(lens: Tensor) -> Tensor:
    """
    Return where the keys of each request start when they are packed, computed on the device.

    Args:
        lens: ``(requests,)`` int32.

    Returns:
        ``(requests + 1,)`` int32 from 0.
    """
    starts = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
    return starts
