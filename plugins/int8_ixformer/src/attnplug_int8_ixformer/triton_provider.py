"""
This project's own kernels, in Triton.

Queries are quantized where they are attended, and new rows of decodes by the kernel that attends them: a decode is one
launch, or two where sequences are split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import torch
import triton
from attrs import frozen
from torch import Tensor

from attnplug.ops import Kernel
from attnplug_int8_ixformer.forms import INTERPRETED, forms_of, page_strides, width_of
from attnplug_int8_ixformer.prompts import UNIT, Prompts, attend_prompts, column_bytes, in_groups, in_units
from attnplug_int8_ixformer.provider import Provider
from attnplug_int8_ixformer.tiles import MOST_SPLITS, DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_decode import _decode, _merge
from attnplug_int8_ixformer.triton_prefill import _write

if TYPE_CHECKING:
    from attnplug.contract import GraphBuffers, Limits, MetadataBuilder, Phase
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.pages import Pages
    from attnplug_int8_ixformer.terms import Terms

_LARGEST_DESCRIBED: Final = 128
"""Head size up to which the kernel for descriptors has registers enough."""

_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200, where a device does not say."""

_LEAST: Final = 16
"""Rows, and keys, that a matrix product has at least."""

_SPARE: Final = 64
"""Units of columns beyond the tokens of a step: as many of its sequences may end inside one."""

_WORTH_DESCRIPTORS: Final = 512
"""Rows of a prompt from which on its keys are copied out of their pages, for descriptors to load."""

_WITH_DESCRIPTORS: Final = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities whose descriptors load tiles as large as these."""

_FEW: Final = 8
"""Parts that the smaller of two kernels merges."""

_decode_kernel, _merge_kernel = Kernel(_decode), Kernel(_merge)
_write_kernel = Kernel(_write)


@frozen(eq=False, kw_only=True)
class Tokens:
    """
    The decodes of a step.

    Attributes:
        query_starts: ``(num_reqs + 1,)`` int32: the rows of each request; one without rows is padding.
        seq_lens: ``(num_reqs,)`` int32 keys per request, the new ones included.
        table: ``(num_reqs, max_blocks)`` int32 pages.
        longest_query: New tokens of a request, at most.
        num_splits: Parts of each sequence.
        scratch: ``(scratch_bytes,)`` uint8; what it holds before and after means nothing.
        tiles: How it is computed.
    """

    query_starts: Tensor
    seq_lens: Tensor
    table: Tensor
    longest_query: int
    num_splits: int
    scratch: Tensor
    tiles: DecodeTiles


class TritonProvider(Provider):
    """Triton kernels on NVIDIA GPUs, and by Triton's interpreter anywhere."""

    fuses_in_mixed = True
    supports_max_num_splits = True

    def __init__(self, backend: Int8Backend) -> None:
        super().__init__(backend)
        size = backend.agreement.requirements.head_size
        self.decode_tiles, self.prefill_tiles = DecodeTiles.of(size), PrefillTiles.of(size)
        device = backend.device_properties
        self.multiprocessors = device.num_multiprocessors or _MULTIPROCESSORS
        capability = device.compute_capability
        has_descriptors = INTERPRETED if capability is None else capability.number in _WITH_DESCRIPTORS
        self.uses_descriptors = has_descriptors and backend.level == 1 and size <= _LARGEST_DESCRIBED
        if self.uses_descriptors:
            self.prompt_lens = (1, _WORTH_DESCRIPTORS)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the parts of decodes, or of what prompts gather: one follows the other."""
        asked = self.backend.agreement.requirements
        most = self.decode_tiles.most_parts(
            requests=limits.max_num_reqs, kv_heads=asked.num_kv_heads, multiprocessors=self.multiprocessors
        )
        parts = scratch_bytes(most * asked.decode_query_len, asked.num_q_heads, asked.head_size)
        gathered = 0
        if self.backend.level == 1:
            each = column_bytes(asked.num_kv_heads, asked.head_size, with_keys=self.uses_descriptors)
            gathered = self._columns(limits) * each
        return max(parts if "decode" in asked.phases else 0, gathered if "prefill" in asked.phases else 0)

    def _columns(self, limits: Limits) -> int:
        """Tokens that are gathered at once: those of a step of whole prompts, or one sequence at least."""
        return in_units(max(limits.max_num_tokens + _SPARE * UNIT, limits.max_seq_len))

    def plan_decodes(
        self, decodes: Phase, builder: MetadataBuilder, graph: GraphBuffers | None, *, mixed: bool
    ) -> Tokens:
        """Split sequences until the device is full. A slot's numbers are those of its capture."""
        del graph, mixed
        asked = self.backend.agreement.requirements
        return Tokens(
            query_starts=decodes.query_start_loc.contiguous(),
            seq_lens=decodes.seq_lens.contiguous(),
            table=cast("Tensor", decodes.block_table),
            longest_query=asked.decode_query_len,
            num_splits=self.decode_tiles.splits(
                sequences=decodes.num_reqs * asked.num_kv_heads,
                keys=decodes.max_seq_len,
                multiprocessors=self.multiprocessors,
                most=builder.limits.max_num_splits,
            ),
            scratch=builder.state.workspace,
            tiles=self.decode_tiles,
        )

    def plan_prefills(self, prefills: Phase, builder: MetadataBuilder) -> list[Prompts]:
        """Return launches whose gathered tokens fit the workspace, nearly always one."""
        turns = self.backend.level == 1
        groups = [(0, prefills.num_reqs)]
        starts = lens = prefills.seq_lens.contiguous()
        if turns:
            units = (lens + (UNIT - 1)) // UNIT * UNIT
            starts = (units.cumsum(0) - units).int()
            groups = in_groups(cast("Tensor", prefills.seq_lens_cpu).tolist(), self._columns(builder.limits))
        return [
            Prompts(
                query_starts=prefills.query_start_loc.contiguous(),
                seq_lens=lens,
                table=cast("Tensor", prefills.block_table),
                key_starts=starts if first == 0 else starts - starts[first],
                first=first,
                count=count,
                longest_query=prefills.max_query_len,
                longest_seq=prefills.max_seq_len,
                scratch=builder.state.workspace,
                tiles=self.prefill_tiles,
                by_descriptors=self.uses_descriptors and prefills.max_query_len >= _WORTH_DESCRIPTORS,
            )
            for first, count in groups
        ]

    def write(self, key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
        """One program a token."""
        scales = pages.value_scales
        size, kv_heads = key.shape[2], key.shape[1]
        tensors = (
            key, value, pages.keys, pages.values, pages.key_scales, pages.key_scales if scales is None else scales,
            slots.contiguous(),
        )  # fmt: skip
        constants = (
            *page_strides(pages), kv_heads, triton.next_power_of_2(kv_heads), size, width_of(size), pages.keys.shape[1],
            scales is not None,
        )  # fmt: skip
        strides = (*key.stride()[:2], *value.stride()[:2])
        _write_kernel.run(slots.shape[0], tensors, strides, (), constants, num_warps=4)

    def decode(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        pages: Pages,
        out: Tensor,
        plan: Tokens,
        terms: Terms,
    ) -> None:
        """One launch for all parts, and one that merges them where there are several."""
        attend_tokens(query, new, pages, out, plan, terms)

    def prefill(self, query: Tensor, pages: Pages, out: Tensor, plan: list[Prompts], terms: Terms) -> None:
        """One launch, and at level 1 one before it that lays values the way that tensor cores multiply bytes."""
        for prompts in plan:
            attend_prompts(query, pages, out, prompts, terms)


def scratch_bytes(parts: int, heads: int, head_size: int) -> int:
    """Return the size of the partial results, outputs and their sums in float32, of so many parts of sequences."""
    return 4 * parts * heads * (head_size + 1)


def attend_tokens(
    query: Tensor, new: tuple[Tensor, Tensor] | None, pages: Pages, out: Tensor, tokens: Tokens, terms: Terms
) -> None:
    """
    Attend decodes, and write their new rows where they are given. Arguments as of `Provider.decode`.

    Rows of `query` behind those of the last request are padding: neither read nor written.
    """
    (rows, heads, size), kv_heads = query.shape, pages.keys.shape[2]
    requests, splits, tiles = tokens.seq_lens.shape[0], tokens.num_splits, tokens.tiles
    key, value = (query, query) if new is None else new
    scales, group = pages.value_scales, heads // kv_heads
    parts = tokens.scratch[: scratch_bytes(rows * splits, heads, size)].view(torch.float32) if splits > 1 else None
    sums = pages.key_scales if parts is None else parts[rows * heads * splits * size :]
    tensors = (
        query, key, value, out, sums if parts is None else parts, sums, pages.keys, pages.values, pages.key_scales,
        pages.key_scales if scales is None else scales, pages.key_scales if terms.slopes is None else terms.slopes,
        tokens.query_starts, tokens.seq_lens, tokens.table,
    )  # fmt: skip
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], out.stride(0))
    numbers = (tokens.table.stride(0), requests, splits, terms.left, terms.scale, terms.soft_cap)
    constants = (
        kv_heads, group, max(_LEAST, triton.next_power_of_2(group * tokens.longest_query)),
        max(_LEAST, triton.next_power_of_2(tokens.longest_query)), size, width_of(size), pages.keys.shape[1],
        *page_strides(pages), *forms_of(terms), scales is not None, new is not None, splits > 1, tiles.keys,
        tiles.stages, INTERPRETED,
    )  # fmt: skip
    _decode_kernel.run(requests * kv_heads * splits, tensors, strides, numbers, constants, num_warps=tiles.warps)
    if parts is not None:
        _merge_kernel.run(
            rows * heads,
            (parts, sums, out, tokens.query_starts),
            (out.stride(0),),
            (requests, splits),
            (heads, size, width_of(size), _FEW if splits <= _FEW else MOST_SPLITS),
            num_warps=4,
        )
