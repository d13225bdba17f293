"""Makes the tensors of a case: its tokens, a poisoned cache, the batch, and what the oracle says about them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract.batch import PAD_SLOT_ID, Batch
from attnplug.contract.dtypes import torch_dtype
from attnplug.contract.kv_cache import Cache
from attnplug.contract.layer import Layer
from attnplug.testing.cases import Case
from attnplug.testing.oracle import Attended, attend

if TYPE_CHECKING:
    from attnplug.contract.backend import Backend

CANARY: Final = 12288.0
"""What outputs hold before a call: exact in every dtype, and far from any attention output."""


@frozen(eq=False)
class Dense:
    """
    The arguments of one dense call; `output` and `lse` hold CANARY.

    Attributes:
        query: ``(tokens + padding, num_q_heads, head_size)``; padding rows hold NaN, here and in the other inputs.
        key: ``(keys, num_kv_heads, head_size)``, all keys of one request after another.
        value: ``(keys, num_kv_heads, head_size_v)``.
        batch: The batch.
        output: ``(tokens + padding, num_q_heads * head_size_v)``.
        lse: ``(tokens + padding, num_q_heads)`` float32.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    batch: Batch
    output: Tensor
    lse: Tensor


@frozen(eq=False)
class Paged(Dense):
    """
    The arguments of one paged call: `key` and `value` are the new tokens' only.

    Attributes:
        cache: The context's K/V; every other slot, those of the new tokens and the null block included, holds NaN.
    """

    cache: Cache


@frozen(eq=False)
class Scene:
    """
    The tensors of a case, on the CPU.

    Attributes:
        case: The case.
        queries: Per request, ``(query_len, num_q_heads, head_size)``.
        keys: Per request, ``(seq_len, num_kv_heads, head_size)``.
        values: Per request, ``(seq_len, num_kv_heads, head_size_v)``.
        sinks: ``(num_q_heads,)`` float32, or None.
        alibi_slopes: ``(num_q_heads,)`` float32, or None.
        block_table: ``(num_reqs, max_blocks)`` int32: shuffled blocks, never block 0. Unused entries name no block.
        num_blocks: Blocks of the cache, the null block included.
        scale: Factor of the scores.
    """

    case: Case
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    block_table: Tensor
    num_blocks: int
    scale: float
    _results: list[Attended] = field(init=False, factory=list)

    @property
    def largest_value(self) -> float:
        """The largest absolute value: what the tolerance of an output is relative to."""
        return max((float(value.abs().max()) for value in self.values if value.numel()), default=0.0)

    def expected(self) -> Attended:
        """Return the oracle's result for the whole batch, ``(tokens, ...)``. Computed once."""
        if not self._results:
            parts = [self._expected(request) for request in range(len(self.queries))]
            joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("output", "lse", "lse_with_sink"))
            self._results.append(Attended(*joined))
        return self._results[0]

    def _expected(self, request: int) -> Attended:
        case = self.case
        return attend(
            self.queries[request],
            self.keys[request],
            self.values[request],
            scale=self.scale,
            causal=case.causal,
            window=case.window,
            attention_chunk=case.attention_chunk,
            logits_soft_cap=case.logits_soft_cap,
            alibi=case.alibi,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )

    def layer(self, name: str = "layer", device: torch.device | str = "cpu", cache_write: str | None = None) -> Layer:
        """Return the layer, with everything that the case's requirements leave to it."""
        sinks = None if self.sinks is None else self.sinks.to(device)
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.to(device)
        return Layer(name=name, scale=self.scale, sinks=sinks, alibi_slopes=slopes, cache_write=cache_write)

    @property
    def slot_mapping(self) -> Tensor:
        """``(tokens + padding,)`` int64: the slot of each new token, PAD_SLOT_ID for padding."""
        case, slots = self.case, []
        for request, (query_len, context_len) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
            slots += [self._slot(request, context_len + i) for i in range(query_len)]
        return torch.tensor(slots + [PAD_SLOT_ID] * case.num_padding_tokens, dtype=torch.int64)

    def _slot(self, request: int, position: int) -> int:
        block, offset = divmod(position, self.case.block_size)
        return int(self.block_table[request, block]) * self.case.block_size + offset

    def dense(self, device: torch.device | str | None = None) -> Dense:
        """Return a dense call: all keys given whole."""
        batch = Batch.from_lengths(self.case.query_lens, self.case.seq_lens, device=device, causal=self.case.causal)
        query, output, lse = self._rows(device)
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        return Dense(query, keys.to(device), values.to(device), batch, output, lse)

    def paged(self, backend: Backend, device: torch.device | str | None = None, *, written: bool = False) -> Paged:
        """
        Return a paged call against a fresh cache of the backend's, in the layout that was agreed on.

        Args:
            backend: Makes the cache.
            device: Where everything lives; None is the CPU.
            written: Whether the new tokens are in the cache already, as hosts that write it themselves leave it.
        """
        cache = backend.make_cache(self.num_blocks, device="cpu" if device is None else device)
        self._fill_from_host(backend, cache, written=written)
        batch = Batch.from_lengths(
            self.case.query_lens,
            self.case.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            device=device,
            causal=self.case.causal,
        )
        query, output, lse = self._rows(device)
        key, value = (self._new_rows(rows).to(device) for rows in (self.keys, self.values))
        return Paged(query, key, value, batch, output, lse, cache)

    def _fill_from_host(self, backend: Backend, cache: Cache, *, written: bool) -> None:
        """Loops over slots are slow on a device: fill a cache on the CPU, and copy it over."""
        here = backend.make_cache(self.num_blocks, device="cpu")
        self.fill(here, written=written)
        for mine, theirs in zip(key_and_value_pages(here), key_and_value_pages(cache), strict=True):
            theirs.copy_(mine)

    def fill(self, cache: Cache, *, written: bool = False, poison: float = torch.nan) -> None:
        """
        Put the context of every request into a cache and poison all other slots, with plain loops.

        Args:
            cache: What `Backend.make_cache` returned for one role ``"kv"``, or for the roles ``"k"`` and ``"v"``.
            written: Whether the new tokens are put there too.
            poison: What the other slots get.
        """
        for pages, rows in zip(key_and_value_pages(cache), (self.keys, self.values), strict=True):
            pages.fill_(poison)
            for request, filled in enumerate(self.case.seq_lens if written else self.case.context_lens):
                for position in range(filled):
                    block, offset = divmod(self._slot(request, position), self.case.block_size)
                    pages[block, offset] = rows[request][position].to(pages)

    def _rows(self, device: torch.device | str | None) -> tuple[Tensor, Tensor, Tensor]:
        case = self.case
        query = self._padded(torch.cat(self.queries))
        rows = query.shape[0]
        width = case.num_q_heads * (case.head_size_v or case.head_size)
        output = torch.full((rows, width), CANARY, dtype=query.dtype, device=device)
        lse = torch.full((rows, case.num_q_heads), CANARY, dtype=torch.float32, device=device)
        return query.to(device), output, lse

    def _new_rows(self, rows: tuple[Tensor, ...]) -> Tensor:
        return self._padded(torch.cat([r[c:] for r, c in zip(rows, self.case.context_lens, strict=True)]))

    def _padded(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_full((self.case.num_padding_tokens, *rows.shape[1:]), torch.nan)])


def key_and_value_pages(cache: Cache) -> tuple[Tensor, Tensor]:
    """Return the pages of keys and of values, each ``(num_blocks, block_size, num_kv_heads, head_size)``, as views."""
    if isinstance(cache, Mapping):
        return cache["k"], cache["v"]
    return cache[0], cache[1]


def realise(case: Case) -> Scene:
    """Return the tensors of a case; the same case gives the same tensors."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = torch_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size_v = case.head_size_v or case.head_size
    queries = (case.gain * normal(n, case.num_q_heads, case.head_size) for n in case.query_lens)
    keys = (normal(n, case.num_kv_heads, case.head_size) for n in case.seq_lens)
    values = (normal(n, case.num_kv_heads, size_v) for n in case.seq_lens)
    slopes: dict[str, Any] = {"start": -1.0, "end": -4.0, "steps": case.num_q_heads}
    block_table, num_blocks = _shuffled_blocks(case)
    return Scene(
        case=case,
        queries=tuple(rows.to(dtype) for rows in queries),
        keys=tuple(rows.to(dtype) for rows in keys),
        values=tuple(rows.to(dtype) for rows in values),
        sinks=normal(case.num_q_heads) if case.sinks else None,
        alibi_slopes=torch.logspace(base=2.0, **slopes) if case.alibi else None,
        block_table=block_table,
        num_blocks=num_blocks,
        scale=case.head_size**-0.5,
    )


def _shuffled_blocks(case: Case) -> tuple[Tensor, int]:
    counts = [-(-max(length, 0) // case.block_size) for length in case.seq_lens]
    num_blocks = 1 + sum(counts) + case.num_spare_blocks
    blocks = list(range(1, num_blocks))
    random.Random(case.seed).shuffle(blocks)
    nowhere = num_blocks + 10**6
    table = torch.full((len(counts), max(counts, default=0)), nowhere, dtype=torch.int32)

    def give(free: list[int], row: int) -> list[int]:
        table[row, : counts[row]] = torch.tensor(free[: counts[row]], dtype=torch.int32)
        return free[counts[row] :]

    reduce(give, range(len(counts)), blocks)
    return table, num_blocks
