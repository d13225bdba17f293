"""
The provider of this project's Triton kernels.

The attention kernels quantize queries, and the decode kernel quantizes and writes the new rows: a step of decodes is
one launch, or two where sequences are split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from attnplug.ops import split_bytes
from attnplug_int8_ixformer.provider import Provider, ScoreParams
from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_launch import (
    INTERPRETED,
    UNIT,
    DecodePlan,
    PrefillPlan,
    aligned,
    attend_decode,
    attend_prefill,
    column_bytes,
    group_requests,
    write_rows,
)

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import GraphBuffers, Limits, MetadataBuilder, Phase
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.pages import Pages

_MAX_TMA_HEAD: Final = 128
"""The largest head size of the TMA kernel: larger ones need too many registers."""

_MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 or H200, for devices that do not report theirs."""

_SPARE_UNITS: Final = 64
"""Units of columns beyond the tokens of a step: up to 64 of its sequences may end inside a unit."""

_MIN_TMA_ROWS: Final = 512
"""New tokens from which on gathering the keys for TMA descriptors is faster than reading their pages."""

_TMA: Final = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities with TMA descriptors for tiles of these sizes."""


class TritonProvider(Provider):
    """Triton kernels on NVIDIA GPUs, or on any device in Triton's interpreter."""

    fuses_mixed_writes = True
    supports_max_num_splits = True

    def __init__(self, backend: Int8Backend) -> None:
        super().__init__(backend)
        size = backend.agreement.requirements.head_size
        self.decode_tiles, self.prefill_tiles = DecodeTiles.of(size), PrefillTiles.of(size)
        device = backend.device_properties
        self.multiprocessors = device.num_multiprocessors or _MULTIPROCESSORS
        capability = device.compute_capability
        has_tma = INTERPRETED if capability is None else capability.number in _TMA
        self.uses_tma = has_tma and backend.level == 1 and size <= _MAX_TMA_HEAD
        if self.uses_tma:
            self.warmup_lens = (1, _MIN_TMA_ROWS)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of split decodes, or of gathered prefills: they do not run at the same time."""
        requested = self.backend.agreement.requirements
        splits = self.decode_tiles.max_parts(
            requests=limits.max_num_reqs, kv_heads=requested.num_kv_heads, multiprocessors=self.multiprocessors
        )
        partial = split_bytes(splits * requested.decode_query_len, requested.num_q_heads, requested.head_size)
        gathered = 0
        if self.backend.level == 1:
            each = column_bytes(requested.num_kv_heads, requested.head_size, with_keys=self.uses_tma)
            gathered = self._columns(limits) * each
        return max(partial if "decode" in requested.phases else 0, gathered if "prefill" in requested.phases else 0)

    def _columns(self, limits: Limits) -> int:
        """Return the tokens that are gathered at once: those of a step, or of one sequence."""
        return aligned(max(limits.max_num_tokens + _SPARE_UNITS * UNIT, limits.max_seq_len))

    def plan_decodes(
        self, decodes: Phase, builder: MetadataBuilder, graph: GraphBuffers | None, *, mixed: bool
    ) -> DecodePlan:
        """Return the plan, with enough splits to fill the device. A graph keeps the number of its capture."""
        del graph, mixed
        requested = self.backend.agreement.requirements
        return DecodePlan(
            query_starts=decodes.query_start_loc.contiguous(),
            seq_lens=decodes.seq_lens.contiguous(),
            table=cast("Tensor", decodes.block_table),
            max_query_len=requested.decode_query_len,
            num_splits=self.decode_tiles.splits(
                sequences=decodes.num_reqs * requested.num_kv_heads,
                keys=decodes.max_seq_len,
                multiprocessors=self.multiprocessors,
                most=builder.limits.max_num_splits,
            ),
            scratch=builder.state.workspace,
            tiles=self.decode_tiles,
        )

    def plan_prefills(self, prefills: Phase, builder: MetadataBuilder) -> list[PrefillPlan]:
        """Return launches whose gathered tokens fit the workspace: nearly always one."""
        groups = [(0, prefills.num_reqs)]
        starts = lens = prefills.seq_lens.contiguous()
        if self.backend.level == 1:
            columns = (lens + (UNIT - 1)) // UNIT * UNIT
            starts = (columns.cumsum(0) - columns).int()
            groups = group_requests(cast("Tensor", prefills.seq_lens_cpu).tolist(), self._columns(builder.limits))
        return [
            PrefillPlan(
                query_starts=prefills.query_start_loc.contiguous(),
                seq_lens=lens,
                table=cast("Tensor", prefills.block_table),
                key_starts=starts if first == 0 else starts - starts[first],
                first=first,
                count=count,
                max_query_len=prefills.max_query_len,
                max_seq_len=prefills.max_seq_len,
                scratch=builder.state.workspace,
                tiles=self.prefill_tiles,
                uses_tma=self.uses_tma and prefills.max_query_len >= _MIN_TMA_ROWS,
            )
            for first, count in groups
        ]

    def write(self, key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
        """Launch one program per token."""
        write_rows(key, value, pages, slots)

    def decode(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        pages: Pages,
        out: Tensor,
        plan: DecodePlan,
        params: ScoreParams,
    ) -> None:
        """Launch the kernel of all splits, and the merge where there are several."""
        attend_decode(query, new, pages, out, plan, params)

    def prefill(self, query: Tensor, pages: Pages, out: Tensor, plan: list[PrefillPlan], params: ScoreParams) -> None:
        """Launch attention; at level 1 after a launch that transposes values, as int8 MMAs require."""
        for launch in plan:
            attend_prefill(query, pages, out, launch, params)
