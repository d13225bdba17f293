"""One layer of level 1 or 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.contract import AttentionImpl
from attnplug.errors import LayerError
from attnplug_int8_ixformer.pages import Pages
from attnplug_int8_ixformer.provider import ScoreParams
from attnplug_int8_ixformer.value_scales import load_layer
from attnplug_int8_ixformer.warmup import LAYER

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug.contract import Layer
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.builder import Int8Metadata


class Int8Impl(AttentionImpl):
    """
    Quantizes, writes and computes attention by the provider.

    At level 1 the layer reads its value scales from the calibration file, and `init_cache` copies them to its cache.
    No step changes them.
    """

    cache_write = {"prefill": "either", "decode": "forward"}  # noqa: RUF012 - read once, by the core
    backend: Int8Backend

    def __init__(self, layer: Layer, backend: Int8Backend) -> None:
        super().__init__(layer, backend)
        self._params, self._provider = ScoreParams.of(self), backend.provider
        path = str(self.agreement.options["value_scales"])
        self._value_scales: Tensor | None = None
        if backend.level == 1 and path and layer.kv_sharing_target is None and layer.name != LAYER:
            self._value_scales = load_layer(path, layer.name, self.num_kv_heads, self.head_size, layer.parallel)

    @property
    def plan_key(self) -> Hashable:
        """One key for all layers: a plan does not depend on their score parameters."""
        return "int8"

    def init_cache(self, kv_cache: Any) -> None:
        """
        Copy the value scales of this layer to its cache, at level 1.

        Raises:
            LayerError: No calibration file was configured.
        """
        if "v_scale" not in kv_cache.tensors:
            return
        if self._value_scales is None:
            raise LayerError(
                f"the KV cache of layer {self.layer.name!r} has no value scales",
                "level 1 quantizes values with the scales of a calibration",
                "select with options={'int8_ixformer': {'value_scales': PATH}}, or with an 'int8_k' cache, which "
                "needs no scales",
            )
        kv_cache["v_scale"].copy_(self._value_scales)

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Int8Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the rows that decode does not write itself, then run decodes and prefills."""
        del lse  # the manifest refuses return_lse
        provider, pages = self._provider, Pages.of(kv_cache)
        out = output.view(-1, self.num_q_heads, self.head_size)
        decodes, prefills = metadata.decodes, metadata.prefills
        new = None if key is None or value is None else (key, value)
        fused = decodes is not None and not metadata.skips_rows and (prefills is None or provider.fuses_mixed_writes)
        if new is not None:
            self._write_rows(*new, pages, metadata, fused=fused)
        if decodes is not None:
            rows = decodes.rows
            writes = fused and new is not None and "decode" in self.forward_writes
            own = (new[0][rows], new[1][rows]) if writes and new is not None else None
            provider.decode(query[rows], own, pages, out[rows], metadata.decode_plan, self._params)
        if prefills is not None:
            rows = prefills.rows
            provider.prefill(query[rows], pages, out[rows], metadata.prefill_plan, self._params)

    def _write_rows(self, key: Tensor, value: Tensor, pages: Pages, metadata: Int8Metadata, *, fused: bool) -> None:
        """Write the rows that forward writes, except those that decode writes itself."""
        decoded, slots = metadata.num_decode_tokens, metadata.batch.slot_mapping
        first = 0 if "decode" in self.forward_writes and not fused else decoded
        last = decoded + metadata.num_prefill_tokens if "prefill" in self.forward_writes else decoded
        if first < last and slots is not None:
            self._provider.write(key[first:last], value[first:last], pages, slots[first:last])

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor) -> None:
        """Quantize rows, and write them to their slots."""
        self._provider.write(key, value, Pages.of(kv_cache), slot_mapping)
