"""One step over sequences that are spread over ranks: what each rank is given, what it returns, and what is right."""

from __future__ import annotations

import atexit
import random
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import PAD_SLOT_ID, Batch, GraphShape, Layer, Limits, Parallel, capture, torch_dtype
from attnplug.ops import quantize
from attnplug_flash_attn import packing
from attnplug_kit.oracle.attention import attend
from plugins.flash_attn.tests import mutants
from plugins.flash_attn.tests.conftest import NAME, pytest_unconfigure, stage
from plugins.flash_attn.tests.real import FLASH_ATTN
from plugins.flash_attn.tests.world import make_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Backend, Metadata, MetadataBuilder

CANARY: Final = 12288.0
SCALES: Final = {"q_scale": 0.25, "k_scale": 0.5, "v_scale": 0.125}
SPARE: Final = 3
"""By how much a host that knows upper bounds errs."""


@frozen(kw_only=True)
class Spread:
    """
    A step of all ranks.

    Attributes:
        ranks: Ranks; 1 computes the same model on one, with the query heads of all.
        interleave: Tokens that follow each other on a rank.
        new: New tokens of each request, decodes first.
        cached: Cached tokens of each request.
        kv_heads: KV heads, the same on all ranks.
        group: Query heads of a rank that read one KV head.
        asked: Further requirements.
        cap: Soft cap of the logits.
        reads: What the kernels take (`make_backend`).
        seed: Of the numbers.
        padding: Rows that the call has beyond its tokens.
        kv_cache_dtype: Of the cache.
        return_lse: Whether the host wants the LSE; where it does not, results have CANARY there.
        room: For how many keys there is room where they are packed, or as many as a request has; None for all.
    """

    ranks: int
    interleave: int
    new: tuple[int, ...]
    cached: tuple[int, ...]
    kv_heads: int = 2
    group: int = 2
    head_size: int = 8
    block_size: int = 16
    dtype: str = "float32"
    sinks: bool = False
    cap: float | None = None
    seq_lens_cpu_kind: str = "exact"
    batch_invariant: bool = False
    host_writes: bool = False
    reads: str = "pages"
    layout: str = "NHD"
    seed: int = 0
    padding: int = 0
    kv_cache_dtype: str = "auto"
    return_lse: bool = True
    buffers: int | None = None

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(new + cached for new, cached in zip(self.new, self.cached, strict=True))

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def is_narrow(self) -> bool:
        return self.kv_cache_dtype != "auto"

    def alone(self) -> Spread:
        """The same model on one rank."""
        return evolve(self, ranks=1, interleave=1, group=self.group * self.ranks)

    def holder(self, position: int) -> int:
        return position // self.interleave % self.ranks

    def place(self, position: int) -> int:
        """Where its holder has a token, among its own of the request."""
        return sum(self.holder(before) == self.holder(position) for before in range(position))


@frozen
class Result:
    """
    What a rank returns: its rows of output and LSE, and what its cache holds, NaN where nothing was written.

    Attributes:
        output: ``(tokens, q_heads, head_size)``.
        lse: ``(tokens, q_heads)``.
        keys: Per request, ``(positions, kv_heads, head_size)``; NaN at those that it does not hold.
        strays: Numbers in the cache that belong to no token of its own.
        is_padding_kept: Whether rows beyond the tokens are as they were.
    """

    output: Tensor
    lse: Tensor
    keys: tuple[Tensor, ...]
    strays: int
    is_padding_kept: bool


class Numbers:
    """The tensors of all ranks."""

    def __init__(self, spread: Spread) -> None:
        dtype, whole = torch_dtype(spread.dtype), spread.kv_heads * spread.group * spread.ranks
        generators = [torch.Generator().manual_seed(1000 * spread.seed + place) for place in range(len(spread.new) + 1)]

        def normal(place: int, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=generators[place]).to(dtype)

        def rows(lens: tuple[int, ...], heads: int) -> list[Tensor]:
            """A request has the same numbers whatever the others are."""
            return [normal(1 + request, count, heads, spread.head_size) for request, count in enumerate(lens)]

        self.queries = [2 * each for each in rows(spread.new, whole)]
        self.keys, self.values = rows(spread.lens, spread.kv_heads), rows(spread.lens, spread.kv_heads)
        self.sinks = normal(0, whole).float() if spread.sinks else None
        self.cached_keys, self.cached_values = (
            [_cached(rows, spread, scale) for rows in side]
            for side, scale in ((self.keys, SCALES["k_scale"]), (self.values, SCALES["v_scale"]))
        )


def _cached(rows: Tensor, spread: Spread, scale: float) -> Tensor:
    """Return rows as the cache holds them."""
    if not spread.is_narrow:
        return rows
    return quantize(rows, torch_dtype(spread.kv_cache_dtype), torch.tensor([scale]))


def heads_of(spread: Spread, rank: int) -> list[int]:
    """The query heads of a rank in the whole model: of each KV head's, the ranks have equal parts in turn."""
    width = spread.group * spread.ranks
    return [kv * width + rank * spread.group + head for kv in range(spread.kv_heads) for head in range(spread.group)]


def requirements_of(spread: Spread) -> Requirements:
    return Requirements(
        head_size=spread.head_size,
        num_q_heads=spread.q_heads,
        num_kv_heads=spread.kv_heads,
        dtype=spread.dtype,
        sinks=spread.sinks,
        logits_soft_cap=spread.cap,
        dcp_size=spread.ranks,
        return_lse=spread.return_lse,
        block_size=spread.block_size,
        kv_layout=spread.layout,
        seq_lens_cpu_kind=spread.seq_lens_cpu_kind,
        batch_invariant=spread.batch_invariant,
        kv_cache_dtype=spread.kv_cache_dtype,
    )


def expected(spread: Spread) -> tuple[Tensor, Tensor]:
    """Return output and LSE of the whole model, sink counted, by the oracle."""
    numbers = Numbers(spread)
    found = [
        attend(
            *rows,
            scale=spread.head_size**-0.5,
            logits_soft_cap=spread.cap,
            sinks=numbers.sinks,
        )
        for rows in zip(numbers.queries, numbers.keys, numbers.values, strict=True)
    ]
    return torch.cat([each.output for each in found]), torch.cat([each.lse_with_sink for each in found])


def run(rank: int, group: Any, spread: Spread, mutant: str | None = None, *, replayed: bool = False) -> Result:
    """
    Do what a host does on one rank, and return what came out.

    Args:
        rank: The rank.
        group: The process group.
        spread: The step.
        mutant: The mistake that is made.
        replayed: Whether the step runs on what a graph would read: metadata of a capture, which a build wrote into.
    """
    per_key = 2 * spread.kv_heads * spread.head_size * torch_dtype(spread.dtype).itemsize
    with mutants.in_force(mutant), pytest.MonkeyPatch.context() as patch:
        if spread.buffers is not None:
            patch.setattr(packing, "AT_ONCE", spread.buffers * per_key)
        return run_on(backend_of(spread, replayed=replayed), rank, group, spread, replayed=replayed)


def run_on(backend: Backend, rank: int, group: Any, spread: Spread, *, replayed: bool = False) -> Result:
    """Do so on a backend."""
    numbers, heads, pages, device = Numbers(spread), heads_of(spread, rank), Pages(spread, rank), backend.device
    sinks = None if numbers.sinks is None else numbers.sinks[heads].to(device)
    scales = SCALES if spread.is_narrow else {}
    layer = Layer(name="layer", sinks=sinks, cache_write="host" if spread.host_writes else None, **scales)
    impl = backend.make_impl(layer)
    state = backend.make_state(limits_of(spread, pages), parallel_of(spread, rank, group))
    builder = backend.make_builder([impl], state)
    cache, batch = pages.fill(backend, numbers, device), pages.batch(device)
    query = _padded(torch.cat(numbers.queries)[:, heads], spread, device)
    new = [
        _padded(torch.cat([r[-n:] for r, n in zip(rows, spread.new, strict=True)]), spread, device)
        for rows in (numbers.keys, numbers.values)
    ]
    output = torch.full((query.shape[0], spread.q_heads * spread.head_size), CANARY, dtype=query.dtype, device=device)
    lse = torch.full((query.shape[0], spread.q_heads), CANARY, device=device)

    def forward(metadata: Metadata) -> None:
        impl.forward(query, *new, cache, metadata, output, lse=lse if spread.return_lse else None)

    if replayed:
        replay = _captured(builder, spread, forward)
        output.fill_(CANARY)
        lse.fill_(CANARY)
    metadata = builder.build(batch, graph=next(iter(state.graphs.values())) if replayed else None)
    if impl.host_writes:
        impl.write_kv(*new, cache, batch.slot_mapping)
    if replayed:
        replay()
    else:
        forward(metadata)
    return pages.result(output.cpu(), lse.cpu(), cache.cpu().float())


def _captured(builder: MetadataBuilder, spread: Spread, forward: Callable[[Metadata], None]) -> Callable[[], None]:
    """Return what replays a step of the rows of the call, and of one more request."""
    state = builder.state
    key = GraphShape(len(spread.new) + 1, sum(spread.new) + spread.padding, None, max(spread.lens) + SPARE)
    with state.graph_capture(key.num_reqs):
        graph = state.graph(key)
        metadata = builder.build(graph.dummy_batch(builder), graph=graph)
        return capture(lambda: forward(metadata), state.device)[1]


def run_real(rank: int, group: Any, spread: Spread, variant: str, *, replayed: bool = False) -> Result:
    """Do so on a kernel library."""
    asked = evolve(requirements_of(spread), cudagraph="always" if replayed else "never")
    with pytest.MonkeyPatch.context() as patch:
        FLASH_ATTN.register(patch)
        return run_on(FLASH_ATTN.load(asked, variant), rank, group, spread, replayed=replayed)


def run_doubled(rank: int, group: Any, spread: Spread, variant: str) -> Result:
    """Do so on the double of a kernel library."""
    with _stage().active():
        backend = attnplug.load(requirements_of(spread), Device.cpu(), backend=f"{NAME}/{variant}")
        return run_on(backend, rank, group, spread)


@cache
def _stage() -> Any:
    """The stage of this process, which ends without pytest."""
    found = stage()
    atexit.register(pytest_unconfigure)
    return found


def backend_of(spread: Spread, *, replayed: bool = False) -> Backend:
    return make_backend(requirements_of(spread), spread.reads, cudagraph="always" if replayed else "never")


def parallel_of(spread: Spread, rank: int, group: Any) -> Parallel:
    if spread.ranks == 1:
        return Parallel()
    return Parallel(dcp_rank=rank, dcp_size=spread.ranks, dcp_interleave=spread.interleave, dcp_group=group)


def limits_of(spread: Spread, pages: Pages) -> Limits:
    return Limits(
        max_num_reqs=len(spread.new) + 1,
        max_num_tokens=sum(spread.new) + spread.padding,
        max_seq_len=max(spread.lens) + SPARE,
        num_blocks=pages.num_blocks,
    )


def _padded(rows: Tensor, spread: Spread, device: torch.device) -> Tensor:
    return torch.cat([rows, rows.new_full((spread.padding, *rows.shape[1:]), torch.nan)]).to(device)


class Pages:
    """The pages of one rank, dealt out in no order, and where each token lies in them."""

    def __init__(self, spread: Spread, rank: int) -> None:
        self.spread, self.rank = spread, rank
        self.mine = [[p for p in range(count) if spread.holder(p) == rank] for count in spread.lens]
        counts = [-(-len(mine) // spread.block_size) for mine in self.mine]
        self.num_blocks = 2 + sum(counts)
        free = list(range(1, self.num_blocks))
        random.Random(spread.seed + rank).shuffle(free)
        wide = max(counts)
        if spread.seq_lens_cpu_kind != "exact":  # who does not know the lengths has tables for any
            wide = max(wide, -(-(max(spread.lens) + SPARE) // (spread.ranks * spread.block_size)))
        self.table = torch.full((len(counts), wide), 10**6, dtype=torch.int32)
        for request, count in enumerate(counts):
            self.table[request, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)

    def slot(self, request: int, position: int) -> int:
        block, offset = divmod(self.spread.place(position), self.spread.block_size)
        return int(self.table[request, block]) * self.spread.block_size + offset

    def batch(self, device: torch.device) -> Batch:
        spread = self.spread
        slots = [
            self.slot(request, position) if spread.holder(position) == self.rank else PAD_SLOT_ID
            for request, (new, length) in enumerate(zip(spread.new, spread.lens, strict=True))
            for position in range(length - new, length)
        ]
        held = torch.tensor([len(mine) for mine in self.mine], dtype=torch.int32)
        batch = Batch.from_lengths(
            spread.new,
            spread.lens,
            block_table=self.table,
            slot_mapping=torch.tensor(slots + [PAD_SLOT_ID] * spread.padding),
            device=device,
            **({} if spread.ranks == 1 else {"dcp_local_seq_lens": held.to(device), "dcp_local_seq_lens_cpu": held}),
        )
        if spread.seq_lens_cpu_kind == "exact":
            return batch
        return evolve(batch, **_loose(batch, spread))

    def fill(self, backend: Backend, numbers: Numbers, device: torch.device) -> Tensor:
        """Return a cache with the cached tokens that this rank holds, NaN elsewhere."""
        cache = backend.make_cache(self.num_blocks, device="cpu")
        cache.copy_(torch.full(cache.shape, torch.nan))
        for side, rows in enumerate((numbers.cached_keys, numbers.cached_values)):
            for request, mine in enumerate(self.mine):
                for position in mine:
                    if position < self.spread.cached[request]:
                        self._token(cache[side], request, position).copy_(rows[request][position])
        return cache.to(device)

    def _token(self, pages: Tensor, request: int, position: int) -> Tensor:
        block, offset = divmod(self.slot(request, position), self.spread.block_size)
        return pages[block, offset]

    def result(self, output: Tensor, lse: Tensor, cache: Tensor) -> Result:
        spread, tokens = self.spread, sum(self.spread.new)
        keys = []
        for request, mine in enumerate(self.mine):
            rows = torch.full((spread.lens[request], spread.kv_heads, spread.head_size), torch.nan)
            for position in mine:
                key, value = (self._token(side, request, position) for side in cache)
                rows[position] = key
                key.fill_(torch.nan)
                value.fill_(torch.nan)
            keys.append(rows)
        return Result(
            output[:tokens].view(tokens, spread.q_heads, -1),
            lse[:tokens],
            tuple(keys),
            int((~cache.isnan()).sum()),
            bool((output[tokens:] == CANARY).all() and (lse[tokens:] == CANARY).all()),
        )


def _loose(batch: Batch, spread: Spread) -> dict[str, Any]:
    """What a host says that knows upper bounds."""
    if spread.seq_lens_cpu_kind == "absent":
        return {"seq_lens": batch.seq_lens, "seq_lens_cpu": None}
    return {"seq_lens_cpu": batch.seq_lens_cpu + SPARE, "max_seq_len": batch.max_seq_len + SPARE}
