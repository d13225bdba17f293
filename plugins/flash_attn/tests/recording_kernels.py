"""Kernels that compute with the oracle, check every number of a call, and record the calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug_flash_attn.kernels.interface import Kernels, LayerParams, VarlenCall
from attnplug_kit.oracle import attend
from plugins.flash_attn.tests.exact_backend import make_backend

if TYPE_CHECKING:
    from attnplug import Agreement, Requirements
    from attnplug.contract import LoadedBackend


@frozen(eq=False)
class RecordedCall:
    """
    A call of `Kernels.attend`.

    Attributes:
        num_heads: Query heads.
        query_dtype: Their dtype.
        call: Whose rows, which keys.
        params: The layer's.
        lse: Where the LSE went.
        key: The keys, in pages or packed.
    """

    num_heads: int
    query_dtype: torch.dtype
    call: VarlenCall
    params: LayerParams
    lse: Tensor | None
    key: Tensor


class Pages(Kernels):
    """Reads pages of any size."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.calls: list[RecordedCall] = []
        self.scheduled: list[VarlenCall] = []

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        self.calls.append(RecordedCall(query.shape[1], query.dtype, call, params, lse, key))
        self._check(query, key, value, out, call, params)
        starts = call.cu_seqlens_q.tolist()
        for request in range(len(starts) - 1):
            rows = slice(starts[request], starts[request + 1])
            keys, values = (self._keys(given, request, call) for given in (key, value))
            found = attend(
                _scaled(query[rows], params.q_descale, keys.shape[1]),
                _scaled(keys, params.k_descale, keys.shape[1]),
                _scaled(values, params.v_descale, keys.shape[1]),
                scale=params.softmax_scale,
                causal=call.causal,
                window=params.window,
                logits_soft_cap=params.softcap or None,
                alibi=None if params.alibi_slopes is None else "linear",
                alibi_slopes=params.alibi_slopes,
                sinks=params.sinks,
            )
            out[rows] = found.output.to(out.dtype)
            if lse is not None:
                lse[rows] = found.lse_with_sink.float()

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: VarlenCall, params: LayerParams
    ) -> None:
        required = self.agreement.requirements
        numbers = (call.cu_seqlens_q, call.seqused_k, call.cu_seqlens_k, call.block_table, call.leftpad_k)
        assert all(tensor is None or tensor.dtype == torch.int32 for tensor in numbers)
        assert all(tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in numbers)
        assert query.dtype == key.dtype == value.dtype
        assert query.shape[:2] == out.shape[:2]
        assert query.shape[1] in {required.num_q_heads, required.num_q_heads * required.dcp_size}
        assert int(call.cu_seqlens_q[-1]) <= query.shape[0]  # less where a graph is padded
        assert int(call.cu_seqlens_q.diff().amax()) <= call.max_seqlen_q
        assert params.sinks is None or params.sinks.dtype == out.dtype
        assert params.alibi_slopes is None or params.alibi_slopes.dtype == torch.float32
        assert self.paged or call.block_table is None
        assert (call.seqused_k is None) == (call.block_table is None)
        assert (call.cu_seqlens_k is None) == (call.block_table is not None and not self.cumulative_keys)
        assert (call.leftpad_k is None) == (call.block_table is None or not self.wants_leftpad)
        if call.leftpad_k is not None:
            assert call.leftpad_k.tolist() == [0] * (len(call.cu_seqlens_q) - 1)
        if call.block_table is not None and call.seqused_k is not None:
            assert int(call.seqused_k.amax()) <= call.max_seqlen_k
            if call.cu_seqlens_k is not None:
                assert torch.equal(call.cu_seqlens_k.diff(), call.seqused_k)
        if call.scheduler_metadata is not None:
            assert torch.equal(call.scheduler_metadata, self._schedule_of(call, params))

    def _keys(self, given: Tensor, request: int, call: VarlenCall) -> Tensor:
        if call.block_table is None or call.seqused_k is None:
            first, last = call.cu_seqlens_k[request : request + 2].tolist()
            assert last - first <= call.max_seqlen_k
            return given[first:last]
        count = int(call.seqused_k[request])
        blocks = call.block_table[request, : -(-count // given.shape[1])].long()
        return given[blocks].flatten(0, 1)[:count]

    def _schedule_of(self, call: VarlenCall, params: LayerParams) -> Tensor:
        """A schedule that holds what it was made of, so that an old one is noticed."""
        lens = call.seqused_k
        facts = [len(lens), call.max_seqlen_q, call.max_seqlen_k, call.causal, call.num_splits, *params.window]
        schedule = torch.full((1 + -(-len(lens) // 4) * 4 * 4,), len(lens), dtype=torch.int32)
        schedule[: len(facts)] = torch.tensor(facts, dtype=torch.int32)
        schedule[len(facts) : len(facts) + len(lens)] = lens
        return schedule


class Cumulative(Pages):
    """Takes the numbers of keys as a cumulative sum, with pages too."""

    cumulative_keys = True


class Packed(Pages):
    """Reads no pages."""

    paged = False


class Padded(Pages):
    """Wants a padding to the left, of 0 slots."""

    wants_leftpad = True


class Scheduled(Pages):
    """Makes schedules ahead, like FlashAttention 3."""

    schedules = True

    def schedule(self, call: VarlenCall, params: LayerParams, *, num_heads_q: int) -> Tensor | None:
        assert call.scheduler_metadata is None
        assert num_heads_q == self.agreement.requirements.num_q_heads
        self.scheduled.append(call)
        return None if call.seqused_k is None else self._schedule_of(call, params)


def _scaled(rows: Tensor, scale: Tensor | None, kv_heads: int) -> Tensor:
    if scale is None:
        return rows.double()
    assert scale.dtype == torch.float32
    assert scale.shape in ((1,), (kv_heads,))
    each = scale.double().expand(kv_heads).repeat_interleave(rows.shape[1] // kv_heads)
    return rows.double() * each[:, None]


KINDS: Final = {"pages": Pages, "cumulative": Cumulative, "packed": Packed, "padded": Padded, "scheduled": Scheduled}


def load(requirements: Requirements, variant: str = "pages") -> LoadedBackend:
    """Return the plugin's backend on one of these, at the requested graph level."""
    backend = make_backend(requirements, cudagraph=requirements.cudagraph or "never")
    backend.wrapped.kernels = KINDS[variant](backend.agreement)
    return backend
