"""The tensors of a case: its tokens, a poisoned KV cache, the batch, and the oracle's result for them."""

from __future__ import annotations

import random
from inspect import signature
from itertools import islice
from typing import TYPE_CHECKING, Final

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract import PAD_SLOT_ID, Batch, KVCache, Layer
from attnplug.errors import NotNegotiatedError
from attnplug_kit.oracle.attention import OracleResult, attend
from attnplug_kit.oracle.case import OF_LAYER
from attnplug_kit.oracle.host_memory import bind_pool
from attnplug_kit.oracle.padding import with_inexact_lens, with_strides
from attnplug_kit.oracle.rounding import (
    Fp8Rounding,
    Int8Rounding,
    as_host_gives,
    paged_tensors,
    scales_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from attnplug.contract import LoadedBackend
    from attnplug_kit.oracle.case import Case


CANARY: Final = 12288.0
"""What outputs hold before a call: exact in every dtype, and larger than any attention output."""

_POISONED_BYTE: Final = 99

_POISONED_RECORD: Final = 0xFF
"""Every code, scale and rotary element of these bytes is NaN."""

_RESULTS: Final = ("output", "lse", "lse_with_sink", "spread", "peak")

_OF_ORACLE: Final = tuple(name for name in signature(attend).parameters if name in OF_LAYER)

_SHAPING: Final = ("head_size", "head_size_v", "num_q_heads", "num_kv_heads", "dtype", "kv_cache_dtype")


@frozen(eq=False)
class Dense:
    """
    The arguments of one dense call; `output` and `lse` hold CANARY.

    Attributes:
        query: ``(tokens + padding, num_q_heads, head_size)``; padding rows hold NaN, here and in the other inputs.
        key: ``(keys, num_kv_heads, head_size)``, all keys of one request after another; None if all are cached.
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

    @property
    def selection(self) -> dict[str, Tensor]:
        """The selected tokens, as arguments of `Attention.forward`: none where all K/V come with the call."""
        return {}


@frozen(eq=False)
class Paged(Dense):
    """
    The arguments of one paged call: `key` and `value` are those of the new tokens, or of new encoder tokens, only.

    Attributes:
        cache: The K/V that do not come with the call. All other slots hold NaN, those of the new tokens and of the
            null block included.
        indices: ``(tokens + padding, topk)`` int32: the slots of each token's selected tokens, in any order and at any
            places; None without `topk`. Entries that are not read are slots of the null block.
        index_lens: ``(tokens + padding,)`` int32, how many entries are read; None where all are.
    """

    cache: KVCache
    indices: Tensor | None = None
    index_lens: Tensor | None = None

    @property
    def selection(self) -> dict[str, Tensor]:
        """The selected tokens, as arguments of `Attention.forward`."""
        found = {"indices": self.indices, "index_lens": self.index_lens}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


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
        masks: Per request, ``(query_len, key_len)`` bool, or None. With `topk` the selected tokens, which alone are
            attended to.
        biases: Per request, ``(1 or num_q_heads, query_len, key_len)``, or None.
        spans: Per request, ``(query_len, 2)`` int32, as of `Batch.mm_prefix_range`, or None.
        block_table: ``(num_reqs, max_blocks)`` int32: shuffled blocks, never block 0. Unused entries name blocks that
            do not exist.
        num_blocks: Blocks of the cache, the null block included.
        scale: Factor of the scores.
        rounding: What an FP8 cache makes of keys and values; None for another cache.
        int8_rounding: What a cache with scales per token makes of queries, keys and values; None for another cache.
    """

    case: Case
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    masks: tuple[Tensor, ...] | None
    biases: tuple[Tensor, ...] | None
    spans: tuple[Tensor, ...] | None
    block_table: Tensor
    num_blocks: int
    scale: float
    rounding: Fp8Rounding | None = None
    int8_rounding: Int8Rounding | None = None
    _results: list[OracleResult] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        if self.case.latent:
            size = self.case.head_size_v
            object.__setattr__(self, "values", tuple(rows[..., :size] for rows in self.keys))

    @property
    def largest_value(self) -> float:
        """The largest absolute value, to which the tolerance of an output is relative."""
        return max((float(value.abs().max()) for value in self.seen[1] if value.numel()), default=0.0)

    @property
    def seen(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values as attention reads them: rounded if the cache is quantized, those of this step too."""
        rounding, int8 = self.rounding, self.int8_rounding
        if int8 is not None:
            return tuple(map(int8.keys, self.keys)), tuple(map(int8.values, self.values))
        if rounding is None:
            return self.keys, self.values
        return (
            tuple(rounding.seen(rows, rounding.key_scale) for rows in self.keys),
            tuple(rounding.seen(rows, rounding.value_scale) for rows in self.values),
        )

    @property
    def has_byte_weights(self) -> bool:
        """Whether values are int8, so that kernels may round the softmax weights to int8 too."""
        return self.int8_rounding is not None and self.int8_rounding.has_byte_weights

    def expected(self) -> OracleResult:
        """Return the oracle's result for the whole batch, ``(tokens, ...)``. It is computed once."""
        if not self._results:
            keys, values = self.seen
            parts = [self._expected(request, keys[request], values[request]) for request in range(len(self.queries))]
            joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _RESULTS}
            self._results.append(OracleResult(**joined))
        return self._results[0]

    def _expected(self, request: int, keys: Tensor, values: Tensor) -> OracleResult:
        case, int8 = self.case, self.int8_rounding
        own = {
            "window": case.window,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "custom_mask": None if self.masks is None else self.masks[request],
            "causal": case.causal and case.topk is None,
            "attn_bias": None if self.biases is None else self.biases[request],
            "spans": None if self.spans is None else self.spans[request],
            "block_sparse": None if case.block_sparse is None else dict(case.block_sparse),
        }
        queries = self.queries[request] if int8 is None else int8.queries(self.queries[request])
        return attend(queries, keys, values, scale=self.scale, **{**{n: getattr(case, n) for n in _OF_ORACLE}, **own})

    def layer(
        self,
        name: str = "layer",
        device: torch.device | str = "cpu",
        cache_write: str | None = None,
        scales: Collection[str] = "kv",
    ) -> Layer:
        """
        Return the layer, with all that is a layer's own: scale, sinks, slopes, cache scales.

        Args:
            name: Its name.
            device: The device of its tensors.
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
        spans = enumerate(zip(self.case.first_new_keys, self.case.key_lens, strict=True))
        padding = torch.full((self.case.num_padding_tokens,), PAD_SLOT_ID, dtype=torch.int64)
        return torch.cat([*(self._slots(request, *span) for request, span in spans), padding])

    def _slots(self, request: int, first: int, last: int) -> Tensor:
        """Return the slots of the positions from `first` to before `last`, int64."""
        positions, size = torch.arange(first, max(first, last)), self.case.block_size
        return self.block_table[request].long()[positions // size] * size + positions % size

    def dense(self, device: torch.device | str | None = None) -> Dense:
        """Return a dense call: all K/V come with it, contiguous."""
        batch = Batch.from_lengths(
            self.case.query_lens,
            self.case.key_lens,
            device=device,
            causal=self.case.causal,
            custom_mask=self._custom_mask(device),
            attn_bias=None if self.biases is None else torch.cat([one.flatten(1) for one in self.biases], 1).to(device),
            **self._ranges(device),
        )
        query, output, lse = self._rows(device)
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        if self.case.lens_on_cpu == "exact":  # where only the device knows the lengths, all rows are keys
            keys, values = self._padded(keys), self._padded(values)
        dense = Dense(query, keys.to(device), values.to(device), self._as_known(batch), output, lse)
        return with_strides(dense, self.case.strides)

    def paged(
        self,
        backend: LoadedBackend,
        device: torch.device | str | None = None,
        *,
        written: bool = False,
        cache: KVCache | None = None,
    ) -> Paged:
        """
        Return a paged call with a new KV cache in memory of the host, in the form and the layout of the agreement.

        Args:
            backend: Binds the cache.
            device: The device of all tensors; None for the CPU.
            written: Whether the new tokens are in the cache already, as after the cache write of a host.
            cache: A KV cache that earlier steps have written, in place of a new one.

        Raises:
            NotNegotiatedError: The backend was loaded for other requirements than the case's.
        """
        self._check_agreed(backend)
        if cache is None:
            cache = bind_pool(backend, self.num_blocks, "cpu" if device is None else device)
            self._fill_from_host(backend, cache, written=written or self.case.kv_written)
        batch = Batch.from_lengths(
            self.case.query_lens,
            self.case.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            device=device,
            causal=self.case.causal,
            common_prefix_len=self.case.common_prefix_len,
            custom_mask=self._custom_mask(device),
            **self._ranges(device),
            **self._encoder(device),
        )
        query, output, lse = self._rows(device)
        query = as_host_gives(query, backend, self.rounding)
        key, value = (self._new_rows(rows, device) for rows in (self.keys, self.values))
        if self.case.latent:
            value = None
        if self.case.kv_written:
            key = value = None
        paged = Paged(query, key, value, self._as_known(batch), output, lse, cache, *self._selection(device))
        return with_strides(paged, self.case.strides)

    def _as_known(self, batch: Batch) -> Batch:
        return batch if self.case.lens_on_cpu == "exact" else with_inexact_lens(batch, self.case.lens_on_cpu)

    def _check_agreed(self, backend: LoadedBackend) -> None:
        """The tensors fit no other agreement: slots are counted in the case's blocks."""
        agreement, case, requirements = backend.agreement, self.case, self.case.requirements()
        agreed = {name: getattr(agreement.requirements, name) for name in _SHAPING}
        wanted = {name: getattr(requirements, name) for name in _SHAPING}
        agreed["block_size"], wanted["block_size"] = agreement.block_size, case.block_size
        wrong = [name for name, value in wanted.items() if agreed[name] != value]
        if wrong:
            raise NotNegotiatedError(
                f"a scene of {', '.join(f'{name}={wanted[name]!r}' for name in wrong)} was given to {agreement.id}",
                f"the agreement has {', '.join(f'{name}={agreed[name]!r}' for name in wrong)}",
                "load the backend for scene.case.requirements(...)",
            )

    def _encoder(self, device: torch.device | str | None) -> dict[str, Tensor]:
        if not self.case.is_cross:
            return {}
        lens = torch.tensor(self.case.encoder_lens, dtype=torch.int32)
        return {"encoder_seq_lens": lens.to(device), "encoder_seq_lens_cpu": lens}

    def _custom_mask(self, device: torch.device | str | None) -> Tensor | None:
        if self.masks is None or self.case.topk is not None:
            return None
        return torch.cat([mask.flatten() for mask in self.masks]).to(device)

    def _ranges(self, device: torch.device | str | None) -> dict[str, Tensor]:
        if self.spans is None:
            return {}
        ranges = torch.cat(self.spans)
        return {"mm_prefix_range": ranges.to(device), "mm_prefix_range_cpu": ranges}

    def _selection(self, device: torch.device | str | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the slots that the masks show, and how many entries are read; rows of padding have none."""
        if self.case.topk is None or self.masks is None:
            return None, None
        indices = torch.full((self.case.num_tokens + self.case.num_padding_tokens, self.case.topk), -1)
        lens = torch.zeros(len(indices), dtype=torch.int32)
        requests = ((mask, self._slots(n, 0, mask.shape[1])) for n, mask in enumerate(self.masks))
        shown = [(row, slots) for mask, slots in requests for row in mask]
        for number, (row, slots) in enumerate(shown):
            source = random.Random(row.numpy().tobytes())  # the same places in each batch with this token
            chosen = slots[row]
            lens[number] = read = source.randint(len(chosen), self.case.topk)
            if self.case.index_lens:
                indices[number, read:] = 0
            places = source.sample(range(read if self.case.index_lens else self.case.topk), len(chosen))
            indices[number, torch.tensor(places, dtype=torch.int64)] = chosen
        return indices.int().to(device), lens.to(device) if self.case.index_lens else None

    def _fill_from_host(self, backend: LoadedBackend, cache: KVCache, *, written: bool) -> None:
        """Fill a cache on the CPU, and copy it: loops over slots are slow on a device."""
        here = backend.make_cache(self.num_blocks, device="cpu")
        self.fill(here, written=written or self.case.kv_sharing)
        for mine, theirs in zip(paged_tensors(here).values(), paged_tensors(cache).values(), strict=True):
            theirs.copy_(mine)
        if self.has_byte_weights:
            cache["v_scale"].copy_(here["v_scale"])

    def fill(self, cache: KVCache, *, written: bool = False, poison: float = torch.nan) -> None:
        """
        Write what is cached of every request into a cache, and poison all other slots, those of tokens that no token
        selects included.

        Args:
            cache: The KV cache; one with scales per token has those of `Int8Rounding` besides.
            written: Whether the new tokens are written too, as where a cache is shared.
            poison: The value of the other slots. Int8 numbers cannot hold NaN: their scales do. Records hold NaN.
        """
        if self.int8_rounding is not None:
            self._fill_int8(cache, self.int8_rounding, written=written, poison=poison)
            return
        both = zip((cache.k, cache.v), self._cached(), strict=True)
        for pages, rows in islice(both, 1 if self.case.latent else 2):  # the values of latents are in their keys
            if pages.dtype == torch.uint8:  # records
                pages.fill_(_POISONED_RECORD)
            else:
                pages.copy_(torch.tensor(poison).to(pages.dtype))
            poisoned = pages[0, 0].clone()
            for request, filled in enumerate(self.case.key_lens if written else self.case.first_new_keys):
                self._place(pages, self._slots(request, 0, filled), rows[request][:filled].to(pages))
            self._place(pages, self._unselected(), poisoned)

    def _place(self, pages: Tensor, slots: Tensor, held: Tensor) -> None:
        """Write rows into slots of pages; torch assigns no narrow floats to places."""
        if pages.itemsize == 1:
            pages, held = pages.view(torch.uint8), held.view(torch.uint8)
        pages[slots // self.case.block_size, slots % self.case.block_size] = held

    def _unselected(self) -> Tensor:
        """Return the slots of cached tokens that no token selects; none without `topk`."""
        if self.case.topk is None or self.masks is None:
            return torch.empty(0, dtype=torch.int64)
        masks = list(enumerate(self.masks))
        selected = torch.cat([self._slots(request, 0, mask.shape[1])[mask.any(0)] for request, mask in masks])
        cached = torch.cat([self._slots(request, 0, self.case.first_new_keys[request]) for request, _ in masks])
        return cached[~torch.isin(cached, selected)]  # requests may share a block

    def _fill_int8(self, cache: KVCache, rounding: Int8Rounding, *, written: bool, poison: float) -> None:
        for tensor in paged_tensors(cache).values():
            tensor.copy_(torch.tensor(poison if tensor.dtype.is_floating_point else _POISONED_BYTE).to(tensor.dtype))
        for request, filled in enumerate(self.case.key_lens if written else self.case.first_new_keys):
            slots = self._slots(request, 0, filled)
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
