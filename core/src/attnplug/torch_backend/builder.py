"""Plans a batch once per step for all layers of a cache group."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve, field, frozen

from attnplug.contract.inputs.kv_cache import is_narrow_float, torch_dtype
from attnplug.contract.vendor import MetadataBuilder
from attnplug.request.domains import FP8_DS_MLA, FP8_DS_MLA_BYTES
from attnplug.torch_backend.captured import CapturedPlan
from attnplug.torch_backend.masks import Visibility
from attnplug.torch_backend.plan import Budget, make_plan
from attnplug.torch_backend.sdpa import TileKernel, choose_kernel, flex_kernel

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.vendor import AttentionImpl, Backend, Metadata, State
    from attnplug.negotiation.agreement import Agreement
    from attnplug.torch_backend.plan import Plan


_SHORTEST: Final = 256
_CAPTURED_KEYS: Final = 2**22  # the slot numbers of so many keys take 32 MiB, in each captured shape


class TorchBuilder(MetadataBuilder):
    """Makes one `Plan` per plan key: the kernel calls of a step, with their indices and masks."""

    supports_graphs = True

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        keys = state.workspace.numel() // bytes_per_key(self.agreement) or None
        self._params: dict[Hashable, PlanParams] = {
            key: plan_params_of(self.agreement, group[0].window, backend.device.type, keys)
            for key, group in self.plan_groups.items()
            if self.agreement.requirements.topk is None  # selected tokens come with the call: nothing is planned
        }

    @property
    def graph_lengths(self) -> tuple[int, ...]:
        """Doubling lengths: a captured forward gathers and masks as many keys as its longest sequence may have."""
        if not self._params:
            return super().graph_lengths
        most = min(self.limits.max_seq_len, max(_SHORTEST, _CAPTURED_KEYS // self.limits.max_num_reqs))
        lengths = takewhile(lambda length: length < most, (_SHORTEST << power for power in count()))
        return (*lengths, most)

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Make one plan per plan key. Those of a graph are made once, and `prepare_in_graph` writes each step."""
        del split, fast
        return {"plans": {key: self._plan(key, params, batch, graph) for key, params in self._params.items()}}

    def prepare_in_graph(self, metadata: Metadata) -> None:
        """Write the step into the plans of its graph."""
        if metadata.graph is not None:
            for key in self._params:
                self._captured(key, metadata.graph).write(metadata.batch)

    @property
    def replays_without_build(self) -> bool:
        """Yes: plans follow from lengths and pages on the device. Custom masks and spans come with each build."""
        requested = self.agreement.requirements
        return not (requested.custom_mask or requested.mm_prefix)

    def _plan(self, key: Hashable, params: PlanParams, batch: Batch, graph: GraphBuffers | None) -> Plan:
        if graph is None:
            return make_plan(params, batch, batch.query_start_loc.device)
        return self._captured(key, graph).plan

    def _captured(self, key: Hashable, graph: GraphBuffers) -> CapturedPlan:
        return self.per_graph(graph, key, lambda: CapturedPlan(self._params[key], graph, self.state.device))


class FlexBuilder(TorchBuilder):
    """The same without graphs: block masks are new tensors at each step."""

    supports_graphs = False


@frozen
class Sizes:
    """
    How large the pieces of a step become on a type of device.

    Attributes:
        gathered: Most bytes of keys and values that are gathered at once, unless one request has more.
        mask: Most elements of the mask of one group.
        scores: Most scores that the unfused kernel holds at once.
        rows: Most rows of a tile, the query heads of a KV head counted as rows.
        call: Multiplications that take as long as one more kernel call.
    """

    gathered: int
    mask: int
    scores: int
    rows: int
    call: float


# CPU: what one core's part of the caches holds, so that gathered keys and scores are still there when they are read. A
# call costs about 50 us, in which one core multiplies 2e6 times.
# Elsewhere: large enough to fill a GPU; a call's launches cost about as long as 1e9 multiplications.
_SIZES: Final = {"cpu": Sizes(gathered=2**23, mask=2**22, scores=2**21, rows=256, call=2e6)}
_SIZES_ELSEWHERE: Final = Sizes(gathered=2**30, mask=2**26, scores=2**27, rows=2048, call=1e9)


def sizes_on(device_type: str) -> Sizes:
    """Return the sizes for a type of device."""
    return _SIZES.get(device_type, _SIZES_ELSEWHERE)


def bytes_per_key(agreement: Agreement) -> int:
    """Return the bytes of a gathered key and value of all heads, decoded copies included where the cache is FP8."""
    requested, cached = agreement.requirements, torch_dtype(agreement.kv_cache_dtype)
    if agreement.kv_cache_dtype == FP8_DS_MLA:
        return FP8_DS_MLA_BYTES + requested.head_size * torch_dtype(requested.dtype).itemsize
    width = requested.num_kv_heads * (requested.head_size + (requested.head_size_v or requested.head_size))
    return width * (cached.itemsize + (torch_dtype(requested.dtype).itemsize if is_narrow_float(cached) else 0))


def keys_per_gather(agreement: Agreement, device_type: str) -> int:
    """Return how many keys are gathered at once at most, unless one request has more."""
    shares = torch.get_num_threads() if device_type == "cpu" else 1
    return max(1, shares * sizes_on(device_type).gathered // bytes_per_key(agreement))


@frozen(kw_only=True)
class PlanParams:
    """
    What planning needs to know of layers and their device.

    Attributes:
        window: Positions attended to on the left and on the right, -1 for all.
        causal: Whether no later position is attended to.
        ratio: Query heads per KV head, which are folded into rows.
        num_kv_heads: Key and value heads.
        chunk: Positions per chunk of chunked-local attention, or None.
        alibi: Form of the ALiBi distances, or None.
        reads_call: Whether keys that come with the call are read there; a layer that shares a KV cache reads only that,
            and so does one whose calls may come without K/V.
        block_size: Slots per block; None for dense calls.
        row_strides: The strides of rows of `head_size` elements in the cache, see `SlotKeys.strides`; None where whole
            slots are gathered.
        kernel: What computes a tile.
        mask_dtype: Dtype of the masks.
        tile_rows: Most query positions of a tile.
        tile_scores: Most scores of a tile, all its heads and members counted; None where the kernel keeps none.
        budget: Sizes of the groups.
        cascade: The same for batches with a shared prefix, whose kernel has to return LSEs; None without cascades.
        visibility: Which positions attend to which, from `window` and `causal`.
    """

    window: tuple[int, int]
    causal: bool
    ratio: int
    num_kv_heads: int
    chunk: int | None
    alibi: str | None
    reads_call: bool
    block_size: int | None
    row_strides: tuple[int, int, int] | None
    kernel: TileKernel
    mask_dtype: torch.dtype
    tile_rows: int
    tile_scores: int | None
    budget: Budget
    cascade: PlanParams | None = None
    visibility: Visibility = field(init=False)

    @visibility.default
    def _visibility(self) -> Visibility:
        left, right = self.window
        return Visibility(left, 0 if self.causal else right)

    def members_per_gather(self, members: int, keys: int) -> int:
        """Return how many of these members of a uniform group are gathered at once, each with so many keys."""
        if not self.budget.divisible:
            return members
        size = self.block_size or 1
        return max(1, min(members, self.budget.keys // (-(-keys // size) * size)))

    def row_cuts(self, members: int, rows: int, keys: int) -> list[tuple[int, int]]:
        """Return the rows ``(start, end)`` of each tile of a group."""
        step = self.tile_rows
        if self.tile_scores is not None:
            step = max(1, min(step, self.tile_scores // (members * self.num_kv_heads * self.ratio * keys)))
        return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def plan_params_of(
    agreement: Agreement, window: tuple[int, int], device_type: str, keys: int | None = None
) -> PlanParams:
    """
    Return what planning needs to know of the layers of an agreement that have the same window.

    Args:
        agreement: The agreement.
        window: Positions attended to on the left and on the right, -1 for all.
        device_type: The type of device.
        keys: How many keys the workspace holds; None without a workspace.
    """
    requested, sizes = agreement.requirements, sizes_on(device_type)
    kernel = choose_kernel(requested, device_type) if agreement.variant == "sdpa" else flex_kernel()
    tile_rows = max(1, sizes.rows // requested.gqa_ratio)
    is_masked = requested.custom_mask or requested.attn_bias
    per_score = requested.num_q_heads * (requested.head_size + (requested.head_size_v or requested.head_size))
    params = PlanParams(
        window=window,
        causal=bool(requested.causal),
        ratio=requested.gqa_ratio,
        num_kv_heads=requested.num_kv_heads,
        chunk=requested.attention_chunk,
        alibi=requested.alibi,
        # A plan serves calls with K/V and without: where there may be none, all keys are read from the KV cache.
        reads_call=not (requested.kv_sharing or requested.kv_in_cache) and requested.attn_type != "encoder_decoder",
        block_size=agreement.block_size,
        row_strides=_row_strides(agreement, kernel),
        kernel=kernel,
        mask_dtype=torch_dtype(requested.dtype) if kernel.fused else torch.float32,
        tile_rows=tile_rows,
        tile_scores=None if kernel.fused else sizes.scores,
        budget=Budget(
            keys or keys_per_gather(agreement, device_type),
            sizes.mask // (requested.num_q_heads if requested.attn_bias else requested.gqa_ratio),
            int(sizes.call / per_score),
            tile_rows,
            kernel.least_keys,
            uniform=not is_masked,
            divisible=kernel.make_mask is None and not is_masked,
            block_size=agreement.block_size or 1,
        ),
    )
    if not requested.cascade:
        return params
    with_lse = evolve(agreement, requirements=evolve(requested, return_lse=True, cascade=False))
    return evolve(params, cascade=plan_params_of(with_lse, window, device_type, keys))


def _row_strides(agreement: Agreement, kernel: TileKernel) -> tuple[int, int, int] | None:
    """In HND pages the rows of one head are contiguous, in NHD pages whole slots are."""
    heads, size, heads_first = agreement.requirements.num_kv_heads, agreement.block_size, agreement.kv_layout == "HND"
    if size is None or kernel.order == "tokens" or (kernel.order == "any" and not heads_first):
        return None
    return (size * heads, 1, size) if heads_first else (size * heads, heads, 1)
