"""Makes the tensors of a case: its tokens, a poisoned cache, the batch, and what the oracle says about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract import PAD_SLOT_ID, Batch, Cache, Layer, is_narrow_float, torch_dtype
from attnplug.errors import NotNegotiatedError
from attnplug.ops import key_and_value_pages
from attnplug_kit.oracle.attention import Attended, attend
from attnplug_kit.oracle.block_table import shuffled_blocks
from attnplug_kit.oracle.byte_rounding import BYTES, ByteRounding, paged_tensors, rounding_for
from attnplug_kit.oracle.rounding import Rounding, nearest
from attnplug_kit.oracle.scales import as_host_gives, scales_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from attnplug.contract import Backend
    from attnplug_kit.oracle.cases import Case

CANARY: Final = 12288.0
"""What outputs hold before a call: exact in every dtype, and far from any attention output."""

_POISONED_BYTE: Final = 99

_SHAPING: Final = ("head_size", "head_size_v", "num_q_heads", "num_kv_heads", "dtype", "kv_cache_dtype")


@frozen(eq=False)
class Dense:
    """
    The arguments of one dense call; `output` and `lse` hold CANARY.

    Attributes:
        query: ``(tokens + padding, num_q_heads, head_size)``; padding rows hold NaN, here and in the other inputs.
        key: ``(keys, num_kv_heads, head_size)``, all keys of one request after another; None where all are cached.
        value: ``(keys, num_kv_heads, head_size_v)``, or None likewise.
        batch: The batch.
        output: ``(tokens + padding, num_q_heads * head_size_v)``.
        lse: ``(tokens + padding, num_q_heads)`` float32.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    batch: Batch
    output: Tensor
    lse: Tensor


@frozen(eq=False)
class Paged(Dense):
    """
    The arguments of one paged call: `key` and `value` are the new tokens' only, or those of new encoders.

    Attributes:
        cache: The K/V that do not come with the call; every other slot, those of the new tokens and the null block
            included, holds NaN.
    """

    cache: Cache


@frozen(eq=False)
class Scene:
    """
    The tensors of a case, on the CPU.

    Attributes:
        case: The case.
        queries: Per request, ``(query_len, num_q_heads, head_size)``.
        keys: Per request, ``(key_len, num_kv_heads, head_size)``.
        values: Per request, ``(key_len, num_kv_heads, head_size_v)``.
        sinks: ``(num_q_heads,)`` float32, or None.
        alibi_slopes: ``(num_q_heads,)`` float32, or None.
        masks: Per request, ``(query_len, key_len)`` bool, or None.
        block_table: ``(num_reqs, max_blocks)`` int32: shuffled blocks, never block 0. Unused entries name no block.
        num_blocks: Blocks of the cache, the null block included.
        scale: Factor of the scores.
        rounding: What a cache of 8-bit floats makes of keys and values; None where they are cached otherwise.
        byte_rounding: What an int8 cache makes of queries, keys and values, likewise.
    """

    case: Case
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    masks: tuple[Tensor, ...] | None
    block_table: Tensor
    num_blocks: int
    scale: float
    rounding: Rounding | None = None
    byte_rounding: ByteRounding | None = None
    _results: list[Attended] = field(init=False, factory=list)

    @property
    def largest_value(self) -> float:
        """The largest absolute value: what the tolerance of an output is relative to."""
        return max((float(value.abs().max()) for value in self.seen[1] if value.numel()), default=0.0)

    @property
    def seen(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values as attention sees them: those of an 8-bit cache rounded, whichever step brings them."""
        rounding, by_bytes = self.rounding, self.byte_rounding
        if by_bytes is not None:
            return tuple(map(by_bytes.rows, self.keys)), tuple(map(by_bytes.values, self.values))
        if rounding is None:
            return self.keys, self.values
        return (
            tuple(rounding.seen(rows, rounding.key_scale) for rows in self.keys),
            tuple(rounding.seen(rows, rounding.value_scale) for rows in self.values),
        )

    @property
    def has_byte_weights(self) -> bool:
        """Whether values are bytes, so that kernels may round their weights to bytes too."""
        return self.byte_rounding is not None and self.byte_rounding.value_scales is not None

    def expected(self) -> Attended:
        """Return the oracle's result for the whole batch, ``(tokens, ...)``. Computed once."""
        if not self._results:
            keys, values = self.seen
            parts = [self._expected(request, keys[request], values[request]) for request in range(len(self.queries))]
            joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("output", "lse", "lse_with_sink"))
            self._results.append(Attended(*joined))
        return self._results[0]

    def _expected(self, request: int, keys: Tensor, values: Tensor) -> Attended:
        case, by_bytes = self.case, self.byte_rounding
        return attend(
            self.queries[request] if by_bytes is None else by_bytes.rows(self.queries[request]),
            keys,
            values,
            scale=self.scale,
            causal=case.causal,
            window=case.window,
            attention_chunk=case.attention_chunk,
            logits_soft_cap=case.logits_soft_cap,
            alibi=case.alibi,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            custom_mask=None if self.masks is None else self.masks[request],
            block_sparse=None if case.block_sparse is None else dict(case.block_sparse),
        )

    def layer(
        self,
        name: str = "layer",
        device: torch.device | str = "cpu",
        cache_write: str | None = None,
        scales: Collection[str] = "kv",
    ) -> Layer:
        """
        Return the layer, with everything that the case's requirements leave to it.

        Args:
            name: Its name.
            device: Where its tensors go.
            cache_write: As of `Layer`.
            scales: The scales that a quantized cache has here, as `AttentionImpl.static_scales` says.
        """
        sinks = None if self.sinks is None else self.sinks.to(device)
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.to(device)
        return Layer(
            name=name,
            scale=self.scale,
            sinks=sinks,
            alibi_slopes=slopes,
            kv_sharing_target="earlier" if self.case.kv_sharing else None,
            cache_write=cache_write,
            **scales_of(self.rounding, scales, device, per_head=self.case.per_head_scales),
        )

    @property
    def slot_mapping(self) -> Tensor:
        """``(tokens + padding,)`` int64: the slot of each new K/V row, PAD_SLOT_ID for padding."""
        case, slots = self.case, []
        for request, (first, last) in enumerate(zip(case.first_new_keys, case.key_lens, strict=True)):
            slots += [self._slot(request, position) for position in range(first, last)]
        return torch.tensor(slots + [PAD_SLOT_ID] * case.num_padding_tokens, dtype=torch.int64)

    def _slot(self, request: int, position: int) -> int:
        block, offset = divmod(position, self.case.block_size)
        return int(self.block_table[request, block]) * self.case.block_size + offset

    def dense(self, device: torch.device | str | None = None) -> Dense:
        """Return a dense call: all keys given whole."""
        batch = Batch.from_lengths(
            self.case.query_lens,
            self.case.key_lens,
            device=device,
            causal=self.case.causal,
            custom_mask=self._custom_mask(device),
        )
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

        Raises:
            NotNegotiatedError: The backend was loaded for something else than the case.
        """
        self._check_agreed(backend)
        cache = backend.make_cache(self.num_blocks, device="cpu" if device is None else device)
        self._fill_from_host(backend, cache, written=written)
        batch = Batch.from_lengths(
            self.case.query_lens,
            self.case.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            device=device,
            causal=self.case.causal,
            common_prefix_len=self.case.common_prefix_len,
            custom_mask=self._custom_mask(device),
            **self._encoder(device),
        )
        query, output, lse = self._rows(device)
        query = as_host_gives(query, backend, self.rounding)
        key, value = (self._new_rows(rows, device) for rows in (self.keys, self.values))
        return Paged(query, key, value, batch, output, lse, cache)

    def _check_agreed(self, backend: Backend) -> None:
        """The tensors fit no other agreement: slots are counted in the case's blocks."""
        agreement, case = backend.agreement, self.case
        agreed = {name: getattr(agreement.requirements, name) for name in _SHAPING}
        asked = {name: getattr(case.requirements(), name) for name in _SHAPING}
        agreed["block_size"], asked["block_size"] = agreement.block_size, case.block_size
        wrong = [name for name, value in asked.items() if agreed[name] != value]
        if wrong:
            raise NotNegotiatedError(
                f"a scene of {', '.join(f'{name}={asked[name]!r}' for name in wrong)} was given to {agreement.id}",
                f"this backend agreed on {', '.join(f'{name}={agreed[name]!r}' for name in wrong)}",
                "load the backend for scene.case.requirements(...)",
            )

    def _encoder(self, device: torch.device | str | None) -> dict[str, Tensor]:
        if not self.case.is_cross:
            return {}
        lens = torch.tensor(self.case.encoder_lens, dtype=torch.int32)
        return {"encoder_seq_lens": lens.to(device), "encoder_seq_lens_cpu": lens}

    def _custom_mask(self, device: torch.device | str | None) -> Tensor | None:
        return None if self.masks is None else torch.cat([mask.flatten() for mask in self.masks]).to(device)

    def _fill_from_host(self, backend: Backend, cache: Cache, *, written: bool) -> None:
        """Loops over slots are slow on a device: fill a cache on the CPU, and copy it over."""
        here = backend.make_cache(self.num_blocks, device="cpu")
        self.fill(here, written=written or self.case.kv_sharing)
        for mine, theirs in zip(paged_tensors(here).values(), paged_tensors(cache).values(), strict=True):
            theirs.copy_(mine)
        if self.has_byte_weights and isinstance(here, Mapping) and isinstance(cache, Mapping):
            cache["v_scale"].copy_(here["v_scale"])

    def fill(self, cache: Cache, *, written: bool = False, poison: float = torch.nan) -> None:
        """
        Put what is cached of every request into a cache and poison all other slots, with plain loops.

        Args:
            cache: What `Backend.make_cache` returned for one role ``"kv"``, or for the roles ``"k"`` and ``"v"``; of an
                int8 cache, with those of `ByteRounding`.
            written: Whether the new tokens are put there too, as where a cache is shared.
            poison: What the other slots get; bytes cannot, and have their key scales poisoned.
        """
        if self.byte_rounding is not None:
            self._fill_bytes(cache, self.byte_rounding, written=written, poison=poison)
            return
        for pages, rows in zip(key_and_value_pages(cache), self._cached(), strict=True):
            pages.copy_(torch.tensor(poison).to(pages.dtype))
            for request, filled in enumerate(self.case.key_lens if written else self.case.first_new_keys):
                for position in range(filled):
                    block, offset = divmod(self._slot(request, position), self.case.block_size)
                    pages[block, offset] = rows[request][position].to(pages)

    def _fill_bytes(self, cache: Cache, rounding: ByteRounding, *, written: bool, poison: float) -> None:
        for tensor in paged_tensors(cache).values():
            tensor.fill_(poison if tensor.dtype.is_floating_point else _POISONED_BYTE)
        for request, filled in enumerate(self.case.key_lens if written else self.case.first_new_keys):
            slots = torch.tensor([self._slot(request, position) for position in range(filled)], dtype=torch.int64)
            places = slots // self.case.block_size, slots % self.case.block_size
            rounding.fill(cache, places, self.keys[request][:filled], self.values[request][:filled])

    def _cached(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        rounding = self.rounding
        if rounding is None:
            return self.keys, self.values
        return (
            tuple(rounding.cached(rows, rounding.key_scale) for rows in self.keys),
            tuple(rounding.cached(rows, rounding.value_scale) for rows in self.values),
        )

    def _rows(self, device: torch.device | str | None) -> tuple[Tensor, Tensor, Tensor]:
        case = self.case
        query = self._padded(torch.cat(self.queries))
        rows = query.shape[0]
        width = case.num_q_heads * (case.head_size_v or case.head_size)
        output = torch.full((rows, width), CANARY, dtype=query.dtype, device=device)
        lse = torch.full((rows, case.num_q_heads), CANARY, dtype=torch.float32, device=device)
        return query.to(device), output, lse

    def _new_rows(self, rows: tuple[Tensor, ...], device: torch.device | str | None) -> Tensor | None:
        new = torch.cat([r[first:] for r, first in zip(rows, self.case.first_new_keys, strict=True)])
        return None if self.case.kv_sharing or not new.shape[0] else self._padded(new).to(device)

    def _padded(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_full((self.case.num_padding_tokens, *rows.shape[1:]), torch.nan)])


def materialize(case: Case) -> Scene:
    """Return the tensors of a case; the same case gives the same tensors."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = torch_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size_v = case.head_size_v or case.head_size
    queries = (case.gain * normal(n, case.num_q_heads, case.head_size) for n in case.query_lens)
    keys = (normal(n, case.num_kv_heads, case.head_size) for n in case.key_lens)
    values = (normal(n, case.num_kv_heads, size_v) for n in case.key_lens)
    slopes: dict[str, Any] = {"start": -1.0, "end": -4.0, "steps": case.num_q_heads}
    block_table, num_blocks = shuffled_blocks(case)
    own_values = _shared(case, (rows.to(dtype) for rows in values))
    return Scene(
        case=case,
        queries=tuple(_representable(case, rows).to(dtype) for rows in queries),
        keys=_shared(case, (rows.to(dtype) for rows in keys)),
        values=own_values,
        sinks=normal(case.num_q_heads) if case.sinks else None,
        alibi_slopes=torch.logspace(base=2.0, **slopes) if case.alibi else None,
        masks=_masks(case) if case.custom_mask else None,
        block_table=block_table,
        num_blocks=num_blocks,
        scale=case.head_size**-0.5,
        rounding=_rounding(case),
        byte_rounding=rounding_for(case.kv_cache_dtype, own_values),
    )


def _representable(case: Case, queries: Tensor) -> Tensor:
    """Return queries that an 8-bit cache could hold too: some kernels read queries and keys of one dtype alone."""
    if case.kv_cache_dtype in BYTES:
        return queries
    dtype = torch_dtype(case.requirements().kv_cache_dtype)
    return nearest(queries.double(), dtype) if is_narrow_float(dtype) else queries


def _rounding(case: Case) -> Rounding | None:
    if case.kv_cache_dtype in BYTES:
        return None
    dtype = torch_dtype(case.requirements().kv_cache_dtype)  # the canonical name
    if not is_narrow_float(dtype):
        return None
    heads = case.num_kv_heads if case.per_head_scales else 1
    spread = torch.linspace(0.5, 1.5, heads) if heads > 1 else torch.ones(1)
    return Rounding(dtype, case.k_scale * spread, case.v_scale * spread.flip(0))


def _masks(case: Case) -> tuple[Tensor, ...]:
    """Masks that hide about half of the keys, and from some rows all of them."""
    generator = torch.Generator().manual_seed(case.seed)

    def mask(rows: int, keys: int) -> Tensor:
        share = torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (rows, 1), generator=generator)]
        return torch.rand(rows, keys, generator=generator) < share

    return tuple(mask(rows, keys) for rows, keys in zip(case.query_lens, case.key_lens, strict=True))


def _shared(case: Case, rows: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Give the requests that compute something the first one's rows where they share a prefix."""
    mine, length = list(rows), case.common_prefix_len
    running = [request for request, count in enumerate(case.query_lens) if count]
    for request in running:
        mine[request][:length] = mine[running[0]][:length]
    return tuple(mine)
