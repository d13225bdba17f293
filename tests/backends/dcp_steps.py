"""One step with decode context parallelism: the inputs of each rank, its results, and the expected ones."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug import Requirements
from attnplug.contract import PAD_SLOT_ID, Batch, GraphShape, Layer, Limits, Parallel, capture, torch_dtype
from attnplug.ops import quantize
from attnplug_kit.oracle import assert_close, attend
from attnplug_kit.oracle.rounding import by_row, paged_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import KVCache, LoadedBackend, Metadata, StepBuilder

CANARY: Final = 12288.0
SCALES: Final = {"q_scale": 0.25, "k_scale": 0.5, "v_scale": 0.125}
SPARE: Final = 3
"""By how much upper bounds of sequence lengths exceed the lengths."""


@frozen(kw_only=True)
class DcpStep:
    """
    A step of all ranks.

    Attributes:
        ranks: Ranks; 1 computes the same model on one, with the query heads of all.
        interleave: Tokens that follow each other on a rank.
        new: New tokens of each request, decodes first.
        cached: Cached tokens of each request.
        kv_heads: KV heads, the same on all ranks.
        group: Query heads of a rank that read one KV head.
        head_size: Of queries, keys and values.
        block_size: Slots per block.
        dtype: Of queries, and of the KV cache by default.
        sinks: Whether the layer has attention sinks.
        cap: Soft cap of the logits.
        seq_lens_cpu_kind: Which CPU sequence lengths the batch has.
        batch_invariant: Whether the layer is batch-invariant.
        host_writes: Whether the host writes the KV cache.
        window: Tokens that a token attends to; None for all.
        chunk: Tokens of a chunk; None for no chunks.
        causal: Whether attention is causal.
        kernel_kind: What the kernels take, where tests choose them.
        layout: The KV-cache layout.
        seed: Of the numbers.
        padding: Rows that the call has beyond its tokens.
        kv_cache_dtype: Of the cache.
        return_lse: Whether the host wants the LSE; where it does not, results have CANARY there.
        max_packed_keys: Keys that are packed at once, or as many as a request has; None for all.
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
    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    seq_lens_cpu_kind: str = "exact"
    batch_invariant: bool = False
    host_writes: bool = False
    kernel_kind: str = "pages"
    layout: str = "NHD"
    seed: int = 0
    padding: int = 0
    kv_cache_dtype: str = "auto"
    return_lse: bool = True
    max_packed_keys: int | None = None

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(new + cached for new, cached in zip(self.new, self.cached, strict=True))

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def is_narrow(self) -> bool:
        return self.kv_cache_dtype != "auto"

    @property
    def has_row_scales(self) -> bool:
        """Whether the KV cache has a scale per token and head."""
        return self.kv_cache_dtype.endswith("_per_token_head")

    def alone(self) -> DcpStep:
        """The same model on one rank."""
        return evolve(self, ranks=1, interleave=1, group=self.group * self.ranks)

    def holder(self, position: int) -> int:
        return position // self.interleave % self.ranks

    def first(self, request: int) -> int:
        """The first token that new tokens of a request attend to: pages before it may be freed."""
        cached = self.cached[request]
        of_window = 0 if self.window is None else cached + 1 - self.window
        return max(0, of_window, 0 if self.chunk is None else cached // self.chunk * self.chunk)

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
        strays: Numbers in the KV cache outside of this rank's tokens.
        is_padding_kept: Whether rows beyond the tokens are as they were.
    """

    output: Tensor
    lse: Tensor
    keys: tuple[Tensor, ...]
    strays: int
    is_padding_kept: bool


class StepTensors:
    """The tensors of all ranks."""

    def __init__(self, step: DcpStep) -> None:
        dtype, num_heads = torch_dtype(step.dtype), step.kv_heads * step.group * step.ranks
        generators = [torch.Generator().manual_seed(1000 * step.seed + place) for place in range(len(step.new) + 1)]

        def normal(place: int, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=generators[place]).to(dtype)

        def rows(lens: tuple[int, ...], heads: int) -> list[Tensor]:
            """A request has the same numbers whatever the others are."""
            return [normal(1 + request, count, heads, step.head_size) for request, count in enumerate(lens)]

        self.queries = [2 * each for each in rows(step.new, num_heads)]
        self.keys, self.values = rows(step.lens, step.kv_heads), rows(step.lens, step.kv_heads)
        self.sinks = normal(0, num_heads).float() if step.sinks else None
        self.cached_keys, self.cached_values = (
            [_cached(rows, step, scale) for rows in side]
            for side, scale in ((self.keys, SCALES["k_scale"]), (self.values, SCALES["v_scale"]))
        )


def _cached(rows: Tensor, step: DcpStep, scale: float) -> Tensor:
    """Return rows as the cache holds them."""
    if not step.is_narrow:
        return rows
    if step.has_row_scales:
        return by_row(rows, torch_dtype(step.kv_cache_dtype))[0].to(torch_dtype(step.kv_cache_dtype))
    return quantize(rows, torch_dtype(step.kv_cache_dtype), torch.tensor([scale]))


def heads_of(step: DcpStep, rank: int) -> list[int]:
    """The query heads of a rank in the full model: of each KV head's, the ranks have equal parts in turn."""
    width = step.group * step.ranks
    return [kv * width + rank * step.group + head for kv in range(step.kv_heads) for head in range(step.group)]


def requirements_of(step: DcpStep) -> Requirements:
    return Requirements(
        head_size=step.head_size,
        num_q_heads=step.q_heads,
        num_kv_heads=step.kv_heads,
        dtype=step.dtype,
        sinks=step.sinks,
        logits_soft_cap=step.cap,
        sliding_window=step.window,
        attention_chunk=step.chunk,
        causal=step.causal,
        dcp_size=step.ranks,
        return_lse=step.return_lse,
        block_size=step.block_size,
        kv_layout=step.layout,
        seq_lens_cpu_kind=step.seq_lens_cpu_kind,
        batch_invariant=step.batch_invariant,
        kv_cache_dtype=step.kv_cache_dtype,
    )


def expected(step: DcpStep) -> tuple[Tensor, Tensor]:
    """Return output and LSE of the full model, with the sink, by the oracle."""
    tensors = StepTensors(step)
    found = [
        attend(
            *rows,
            scale=step.head_size**-0.5,
            window=(-1 if step.window is None else step.window - 1, -1),
            attention_chunk=step.chunk,
            causal=step.causal,
            logits_soft_cap=step.cap,
            sinks=tensors.sinks,
        )
        for rows in zip(tensors.queries, tensors.keys, tensors.values, strict=True)
    ]
    return torch.cat([each.output for each in found]), torch.cat([each.lse_with_sink for each in found])


def run_on(backend: LoadedBackend, rank: int, group: Any, step: DcpStep, *, replayed: bool = False) -> Result:
    """
    Do what a host does on one rank, and return what came out.

    Args:
        backend: The backend.
        rank: The rank.
        group: The process group.
        step: The step.
        replayed: Whether the step runs on what a graph would read: metadata of a capture, which a build wrote into.
    """
    tensors, heads, pages, device = StepTensors(step), heads_of(step, rank), RankPages(step, rank), backend.device
    sinks = None if tensors.sinks is None else tensors.sinks[heads].to(device)
    applied = backend.impl_class.static_scales if step.is_narrow and not step.has_row_scales else ()
    scales = {name: scale for name, scale in SCALES.items() if name[0] in applied}
    layer = Layer(name="layer", sinks=sinks, cache_write="host" if step.host_writes else None, **scales)
    impl = backend.make_impl(layer)
    state = backend.make_state(limits_of(step, pages), parallel_of(step, rank, group))
    builder = backend.make_builder([impl], state)
    cache, batch = pages.fill(backend, tensors, device), pages.batch(device)
    query = _padded(torch.cat(tensors.queries)[:, heads], step, device)
    new = [
        _padded(torch.cat([r[-n:] for r, n in zip(rows, step.new, strict=True)]), step, device)
        for rows in (tensors.keys, tensors.values)
    ]
    output = torch.full((query.shape[0], step.q_heads * step.head_size), CANARY, dtype=query.dtype, device=device)
    lse = torch.full((query.shape[0], step.q_heads), CANARY, device=device)

    def forward(metadata: Metadata) -> None:
        impl.forward(query, *new, cache, metadata, output, lse=lse if step.return_lse else None)

    if replayed:
        replay = captured(builder, step, forward)
        output.fill_(CANARY)
        lse.fill_(CANARY)
    metadata = builder.build(batch, graph=next(iter(state.graphs.values())) if replayed else None)
    if impl.host_writes:
        impl.write_kv(*new, cache, batch.slot_mapping)
    if replayed:
        replay()
    else:
        forward(metadata)
    return pages.result(output.cpu(), lse.cpu(), cache)


def captured(builder: StepBuilder, step: DcpStep, forward: Callable[[Metadata], None]) -> Callable[[], None]:
    """Return what replays a step of the rows of the call, and of one more request."""
    state = builder.state
    key = GraphShape(len(step.new) + 1, sum(step.new) + step.padding, None, max(step.lens) + SPARE)
    with state.graph_capture(key.num_reqs):
        graph = state.graph(key)
        metadata = builder.build(graph.dummy_batch(builder), graph=graph)
        return capture(lambda: forward(metadata), state.device)[1]


def parallel_of(step: DcpStep, rank: int, group: Any) -> Parallel:
    if step.ranks == 1:
        return Parallel()
    return Parallel(dcp_rank=rank, dcp_size=step.ranks, dcp_interleave=step.interleave, dcp_group=group)


def limits_of(step: DcpStep, pages: RankPages) -> Limits:
    return Limits(
        max_num_reqs=len(step.new) + 1,
        max_num_tokens=sum(step.new) + step.padding,
        max_seq_len=max(step.lens) + SPARE,
        num_blocks=pages.num_blocks,
    )


def _padded(rows: Tensor, step: DcpStep, device: torch.device) -> Tensor:
    return torch.cat([rows, rows.new_full((step.padding, *rows.shape[1:]), torch.nan)]).to(device)


class RankPages:
    """The pages of one rank in random order, and the slot of each token."""

    def __init__(self, step: DcpStep, rank: int) -> None:
        self.step, self.rank = step, rank
        self.mine = [[p for p in range(count) if step.holder(p) == rank] for count in step.lens]
        counts = [-(-len(mine) // step.block_size) for mine in self.mine]
        self.num_blocks = 2 + sum(counts)
        free = list(range(1, self.num_blocks))
        random.Random(step.seed + rank).shuffle(free)
        wide = max(counts)
        if step.seq_lens_cpu_kind != "exact":  # without exact lengths, block tables hold the longest
            wide = max(wide, -(-(max(step.lens) + SPARE) // (step.ranks * step.block_size)))
        self.table = torch.full((len(counts), wide), 10**6, dtype=torch.int32)
        for request, count in enumerate(counts):
            self.table[request, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)

    def slot(self, request: int, position: int) -> int:
        block, offset = divmod(self.step.place(position), self.step.block_size)
        return int(self.table[request, block]) * self.step.block_size + offset

    def batch(self, device: torch.device) -> Batch:
        step = self.step
        slots = [
            self.slot(request, position) if step.holder(position) == self.rank else PAD_SLOT_ID
            for request, (new, length) in enumerate(zip(step.new, step.lens, strict=True))
            for position in range(length - new, length)
        ]
        held = torch.tensor([len(mine) for mine in self.mine], dtype=torch.int32)
        batch = Batch.from_lengths(
            step.new,
            step.lens,
            block_table=self.table,
            slot_mapping=torch.tensor(slots + [PAD_SLOT_ID] * step.padding),
            device=device,
            causal=step.causal,
            **({} if step.ranks == 1 else {"dcp_local_seq_lens": held.to(device), "dcp_local_seq_lens_cpu": held}),
        )
        if step.seq_lens_cpu_kind == "exact":
            return batch
        return evolve(batch, **_loose(batch, step))

    def fill(self, backend: LoadedBackend, tensors: StepTensors, device: torch.device) -> KVCache:
        """Return a cache with the cached tokens that this rank holds and a step attends to, NaN elsewhere."""
        cache = backend.make_cache(self.num_blocks, device="cpu")
        sides = [(cache.k, tensors.cached_keys), (cache.v, tensors.cached_values)]
        if self.step.has_row_scales:
            pages, given = paged_tensors(cache), (("key scale", tensors.keys), ("value scale", tensors.values))
            dtype = torch_dtype(self.step.kv_cache_dtype)
            sides += [(pages[name], [by_row(each, dtype)[1] for each in rows]) for name, rows in given]
        for pages, rows in sides:
            pages.copy_(torch.full(pages.shape, torch.nan))
            for request, mine in enumerate(self.mine):
                for position in mine:
                    if self.step.first(request) <= position < self.step.cached[request]:
                        self._token(pages, request, position).copy_(rows[request][position])
        there = backend.make_cache(self.num_blocks, device=device)
        backend.swap_blocks(cache, there, [(block, block) for block in range(self.num_blocks)])
        return there

    def _token(self, pages: Tensor, request: int, position: int) -> Tensor:
        block, offset = divmod(self.slot(request, position), self.step.block_size)
        return pages[block, offset]

    def result(self, output: Tensor, lse: Tensor, cache: KVCache) -> Result:
        step, tokens = self.step, sum(self.step.new)
        keys, sides = [], [pages.cpu().float() for pages in (cache.k, cache.v)]
        for request, mine in enumerate(self.mine):
            rows = torch.full((step.lens[request], step.kv_heads, step.head_size), torch.nan)
            for position in mine:
                key, value = (self._token(side, request, position) for side in sides)
                rows[position] = key
                key.fill_(torch.nan)
                value.fill_(torch.nan)
            keys.append(rows)
        return Result(
            output[:tokens].view(tokens, step.q_heads, -1),
            lse[:tokens],
            tuple(keys),
            sum(int((~side.isnan()).sum()) for side in sides),
            bool((output[tokens:] == CANARY).all() and (lse[tokens:] == CANARY).all()),
        )


def assert_results(
    step: DcpStep, results: list[Result], known: list[tuple[Tensor, Tensor]], *, replayed: bool = False
) -> None:
    """Assert that output and LSE are the `known` ones, and that each token is in its holder's KV cache only."""
    dtype, tensors = torch_dtype(step.dtype), StepTensors(step)
    largest = max(float(rows.abs().max()) for rows in tensors.values)
    for rank, result in enumerate(results):
        heads = heads_of(step, rank)
        for wanted, sums in known:
            assert_close(result.output, wanted[:, heads], dtype=dtype, scale=largest)
            if step.return_lse:
                assert_close(result.lse, sums[:, heads], dtype=dtype, what="lse")
        assert result.is_padding_kept or replayed  # a graph computes its padded rows, too
        assert not result.strays
        for request, rows in enumerate(result.keys):
            for position, row in enumerate(rows):
                mine = step.holder(position) == rank and position >= step.first(request)
                held = tensors.cached_keys[request][position].float()
                assert torch.equal(row, held) if mine else row.isnan().all()


def _loose(batch: Batch, step: DcpStep) -> dict[str, Any]:
    """The lengths of a batch without exact CPU sequence lengths."""
    if step.seq_lens_cpu_kind == "absent":
        return {"seq_lens": batch.seq_lens, "seq_lens_cpu": None}
    return {"seq_lens_cpu": batch.seq_lens_cpu + SPARE, "max_seq_len": batch.max_seq_len + SPARE}
