"""The kernel calls of a step."""

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
    Requests with consecutive query rows that one call processes, with a paged KV cache.

    Attributes:
        first: The first query row.
        last: The row after the last one.
        starts: ``(requests + 1,)`` int32, the first query row of each request, from 0.
        starts_cpu: CPU copy.
        longest_query: The rows of the longest query, or an upper bound.
        lens: ``(requests,)`` int32, the keys of each request.
        lens_cpu: CPU copy, as exact as the batch's; None if absent there.
        longest: The most keys of a request, or an upper bound.
        table: ``(requests, blocks)`` int32, the pages of the keys.
        causal: Whether a causal mask applies.
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
    One kernel call over consecutive query rows. It is the same for all layers of a plan key.

    Attributes:
        call: The arguments of the call.
        first: The first query row.
        last: The row after the last one.
        slots: ``(keys,)`` int64, the KV-cache slots that are packed for a library without paged kernels; None if
            nothing is packed.
        reads_new_kv: Whether a paged step reads the K/V of the call, in the same rows as the queries, since no request
            has cached keys.
        buffers: The memory of the packed K/V, ``(keys, kv_heads, size)`` each. The next pass reuses it.
        rest: Further passes of other requests, whose keys do not fit into the buffers together with these.
        padding: ``(last - first,)`` bool in a graph: rows that the call leaves out; None where it writes all.
    """

    call: VarlenCall
    first: int
    last: int
    slots: Tensor | None = None
    reads_new_kv: bool = False
    buffers: tuple[Tensor, Tensor] | None = None
    rest: tuple[KernelPass, ...] = ()
    padding: Tensor | None = None

    @property
    def calls(self) -> tuple[KernelPass, ...]:
        """This pass and the rest."""
        return (self, *self.rest)


@frozen(eq=False)
class Plan:
    """
    The passes of a step.

    Attributes:
        decode: The decodes; None if the step has none.
        prefill: The prefills, or all requests of a dense call; None if the step has none.
        prefix: All rows, over the shared prefix; `decode` and `prefill` then have the other keys.
        dcp: All rows, with decode context parallelism; the other passes are None then.
        packed_context: The pass over this rank's cached keys, for a library without paged kernels.
        parts: The passes of `decode` and `prefill`, which contain each row once.
    """

    decode: KernelPass | None = None
    prefill: KernelPass | None = None
    prefix: KernelPass | None = None
    dcp: DcpPlan | None = None
    packed_context: KernelPass | None = None
    parts: tuple[KernelPass, ...] = field(init=False)

    @parts.default
    def _present(self) -> tuple[KernelPass, ...]:
        decode, prefill = self.decode, self.prefill
        if decode is None or prefill is None:
            part = decode or prefill
            return () if part is None else (part, *part.rest)
        return (decode, *decode.rest, prefill, *prefill.rest)


def call_of(rows: Rows, num_splits: int) -> VarlenCall:
    """Return the call of requests with pages and the number of keys of each."""
    return VarlenCall(
        cu_seqlens_q=rows.starts,
        max_seqlen_q=rows.longest_query,
        max_seqlen_k=rows.longest,
        seqused_k=rows.lens,
        block_table=rows.table,
        causal=rows.causal,
        num_splits=num_splits,
    )


def with_schedule(call: VarlenCall, schedule: Tensor | None) -> VarlenCall:
    """Return a call with a schedule. `attrs.evolve` takes three times as long, and each step has a call or two."""
    return VarlenCall(
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        seqused_k=call.seqused_k,
        cu_seqlens_k=call.cu_seqlens_k,
        block_table=call.block_table,
        leftpad_k=call.leftpad_k,
        causal=call.causal,
        num_splits=call.num_splits,
        scheduler_metadata=schedule,
    )


def leftpad_of(kernels: Kernels, requests: int, device: torch.device) -> Tensor | None:
    """Return `VarlenCall.leftpad_k`, which is never written again; None if the library does not want it."""
    return torch.zeros(requests, dtype=torch.int32, device=device) if kernels.wants_leftpad else None


def adapted(
    call: VarlenCall, kernels: Kernels, leftpad: Tensor | None, key_starts: Callable[[Tensor], Tensor] | None = None
) -> VarlenCall:
    """
    Return a call with the arguments that a library with paged kernels expects.

    Args:
        call: From `call_of`.
        kernels: The kernel library.
        leftpad: From `leftpad_of`, for at least the requests of the call.
        key_starts: Returns the cumulative lengths of keys; None computes them. In a graph, memory that is written when
            the graph is prepared.
    """
    if leftpad is not None:
        call = evolve(call, leftpad_k=leftpad[: call.cu_seqlens_q.shape[0] - 1])
    if call.seqused_k is None or not kernels.cumulative_keys:
        return call
    return evolve(call, cu_seqlens_k=(key_starts or cumulative)(call.seqused_k))


LIBRARY_CHOICE: Final = 0
UNSPLIT: Final = 1


def num_splits(limits: Limits, tokens: int, *, batch_invariant: bool) -> int:
    """
    Return the split-KV limit of a step; 0 leaves it to the library.

    The number of splits decides the order in which partial outputs are merged, and libraries choose it by the whole
    batch. So batch invariance requires one split. A graph holds memory for partial outputs, so batches up to the
    largest captured size have the host's limit. Larger ones have none: the library would make exactly as many splits,
    which is slow for large batches. A limit of one split costs nothing, and applies to all.

    Args:
        limits: The host's split-KV limit, and its capture sizes.
        tokens: The number of query rows of the step, with padding.
        batch_invariant: Whether results may not depend on the rest of the batch.
    """
    if batch_invariant or limits.max_num_splits == UNSPLIT:
        return UNSPLIT
    captured = max(limits.capture_sizes, default=0)
    return limits.max_num_splits or LIBRARY_CHOICE if tokens <= captured else LIBRARY_CHOICE


def cumulative(lens: Tensor) -> Tensor:
    """
    Return the first packed key of each request, computed on the device of `lens`.

    Args:
        lens: ``(requests,)`` int32.

    Returns:
        ``(requests + 1,)`` int32, from 0.
    """
    starts = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    write_cumulative(lens, starts)
    return starts


def write_cumulative(lens: Tensor, starts: Tensor) -> None:
    """Write the cumulative lengths of requests, ``(requests + 1,)`` int32; the first stays 0."""
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
