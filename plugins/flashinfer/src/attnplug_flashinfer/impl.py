"""One layer on FlashInfer's wrappers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch

from attnplug.contract import AttentionImpl
from attnplug.ops import write_kv
from attnplug_flashinfer import library
from attnplug_flashinfer.routes import check_decode_kernel
from attnplug_flashinfer.warmup import run_dense

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug.contract import Backend, KVCache, Layer, Metadata
    from attnplug_flashinfer.plan import Part, Plan

_LN2: Final = math.log(2.0)

_HIDDEN: Final = 5e4
"""Hidden keys have the score -50,000 in the kernels, before it is scaled (``inf`` in the library's ``math.cuh``)."""

_NO_KEY: Final = -2e4
"""Natural LSE at most of rows without a key: the decode kernels have -50,000 there, of base 2 (an H200, 0.6.12)."""

_LOWEST: Final = 1e3
"""What the score of hidden keys has to be below, scaled: scores of other keys are above -900, in any model."""

_SMALLEST_FACTORS: Final = {"float16": 2.0**-11, "bfloat16": 2.0**-64}
"""The smallest factors of queries that leave as many bits as rounding does where a query is near 1."""


class FlashInferImpl(AttentionImpl):
    """
    Runs the wrappers that its builder has planned.

    What does not change between calls is made here, once. The library's LSE has base 2, that of `forward` is natural.
    """

    cache_write = "either"
    lse_includes_sink = True
    needs_finite_null_block = True  # FlashInfer 0.6.12's fa2 let NaN through on an H200
    static_scales: ClassVar[frozenset[str]] = frozenset("kv")

    def __init__(self, layer: Layer, backend: Backend) -> None:
        super().__init__(layer, backend)
        check_decode_kernel(self.agreement)
        self._key = super().plan_key
        self._heads = (self.num_q_heads, self.head_size_v)
        self._is_latent = self.agreement.requirements.latent
        self._is_hnd = self.agreement.kv_layout == "HND"
        self._writes = bool(self.forward_writes)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Make the arguments of the kernels that depend on the layer's scales and sinks."""
        layer = self.layer
        # The wrapper for attention sinks takes both by position, and no scales. The others take neither.
        self._extra = () if layer.sinks is None else (layer.sinks.float().contiguous(), self.scale)
        self._scale_tensors = (layer.k_scale_tensor, layer.v_scale_tensor)
        quantized = layer.k_scale_tensor is not None
        k_scale = 1.0 if layer.k_scale is None else layer.k_scale
        self._query_factor = 1.0
        self._scales: dict[str, float | None] = {}
        if quantized and self._is_latent:  # the kernels dequantize keys before they compute scores
            self._scales = {"ckv_scale": k_scale, "kpe_scale": k_scale}
        elif quantized:
            self._query_factor = self._factor_of_queries(k_scale)
            self._scales = {"k_scale": k_scale / self._query_factor, "v_scale": layer.v_scale}

    def _factor_of_queries(self, k_scale: float) -> float:
        """
        Return a power of two that queries are multiplied by, and the scale of keys is divided by: 1 for most scales.

        With a small scale of keys, -50,000 is no low score, and hidden keys would be seen.
        """
        if self.logits_soft_cap or not 0 < _HIDDEN * self.scale * k_scale < _LOWEST or k_scale >= 1:
            return 1.0  # a soft cap bounds the scores of other keys, and hidden ones stay below
        return max(2.0 ** math.floor(math.log2(k_scale)), _SMALLEST_FACTORS[self.agreement.requirements.dtype])

    @property
    def plan_key(self) -> Hashable:
        """The contract's key, made once."""
        return self._key

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write K/V into the cache unless the host does, then run the wrappers of the plan."""
        plan: Plan = metadata.plans.get(self._key) or self.plan_of(metadata)
        if self._query_factor != 1.0:
            query = query * self._query_factor
        if kv_cache is None:
            keys, values, rows = cast("Tensor", key), cast("Tensor", value), metadata.num_key_rows
            operands: tuple[Any, ...] = (keys, values) if keys.shape[0] == rows else (keys[:rows], values[:rows])
        elif self._is_latent:
            if self._writes and key is not None:
                self.update_kv_cache(key, key, kv_cache, cast("Tensor", metadata.batch.slot_mapping))
            operands = (kv_cache.k.squeeze(2),)  # one KV head
        else:
            halves = pages = (kv_cache.k, kv_cache.v)
            if self._is_hnd:  # the library's shape is the order in memory
                pages = (halves[0].transpose(1, 2), halves[1].transpose(1, 2))
            if self._writes and key is not None and value is not None:
                write_kv(key, value, *halves, cast("Tensor", metadata.batch.slot_mapping), *self._scale_tensors)
            operands = (pages, *self._extra)
        if output.is_contiguous() and (lse is None or lse.is_contiguous()):
            self._attend(plan, query, operands, output.view(-1, *self._heads), lse)
        else:
            self._attend_and_copy(plan, metadata.batch.num_actual_tokens, query, operands, output, lse)

    def _attend(self, plan: Plan, query: Tensor, operands: tuple[Any, ...], out: Tensor, lse: Tensor | None) -> None:
        if plan.prefix is not None:
            self._attend_with_prefix(plan.parts, plan.prefix, query, operands, out, lse)
            return
        for part in plan.parts:
            sums = self._run(part, query, operands, out, lse)
            if sums is not None:
                _make_natural(sums)

    def _run(
        self, part: Part, query: Tensor, operands: tuple[Any, ...], out: Tensor, lse: Tensor | None
    ) -> Tensor | None:
        """Run the wrapper of a part, and return the LSE of its rows, of base 2."""
        if part.first or part.last != query.shape[0]:
            rows = slice(part.first, part.last)
            query, out, lse = query[rows], out[rows], None if lse is None else lse[rows]
        if lse is None:
            part.run(query, *operands, out=out, **self._scales)
        else:
            part.run(query, *operands, out=out, lse=lse, return_lse=True, **self._scales)
        return lse

    def _attend_with_prefix(
        self,
        parts: tuple[Part, ...],
        prefix: Part,
        query: Tensor,
        operands: tuple[Any, ...],
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Run prefix and suffix, and merge by LSE: the library's cascade returns no LSE and takes no scales."""
        tokens = prefix.last
        query, out = query[:tokens], out[:tokens]
        sums = query.new_empty(query.shape[:2], dtype=torch.float32) if lse is None else lse[:tokens]
        for part in parts:
            self._run(part, query, operands, out, sums)
        shared, shared_sums = torch.empty_like(out), torch.empty_like(sums)
        self._run(prefix, query, operands, shared, shared_sums)
        library.merge(out, sums, shared, shared_sums)
        if lse is not None:
            _make_natural(sums)

    def _attend_and_copy(
        self,
        plan: Plan,
        tokens: int,
        query: Tensor,
        operands: tuple[Any, ...],
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend into new memory, and copy: the kernels ignore the strides of outputs."""
        query = query[:tokens]
        out = query.new_empty((tokens, *self._heads))
        sums = None if lse is None else lse.new_empty(query.shape[:2])
        self._attend(plan, query, operands, out, sums)
        output[:tokens] = out.flatten(1)
        if lse is not None and sums is not None:
            lse[:tokens] = sums

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        """Write K/V into their slots, with the layer's scales."""
        key_pages, value_pages = kv_cache.k, kv_cache.v
        if self._is_latent:  # the value is a part of its key: one launch writes the two halves of a key instead
            key, value = torch.tensor_split(key, 2, -1)
            key_pages, value_pages = torch.tensor_split(kv_cache.k, 2, -1)
        write_kv(key, value, key_pages, value_pages, slot_mapping, *self._scale_tensors)

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Run dense attention over the K/V, with the memory of a step of as many rows."""
        del lse
        if key is not None and query.shape[0] and key.shape[0]:
            run_dense(self, query, key, value, output)


def _make_natural(sums: Tensor) -> None:
    """Turn LSE of base 2 into natural ones, -inf where a row has no key."""
    torch.threshold_(sums.mul_(_LN2), _NO_KEY, -torch.inf)
