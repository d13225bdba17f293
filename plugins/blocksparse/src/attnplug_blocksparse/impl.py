"""One layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from attnplug.contract import AttentionImpl
from attnplug.ops import write_kv
from attnplug_blocksparse import decode, prefill
from attnplug_blocksparse.pattern import check_pattern
from attnplug_blocksparse.plan import Scales

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug.contract import KVCache, Layer, Metadata
    from attnplug_blocksparse.backend import BlocksparseBackend
    from attnplug_blocksparse.plan import StepPlan

_KEY: Final = "blocksparse"


class BlocksparseImpl(AttentionImpl):
    """Runs the plan of its builder: the decodes, then the prefills."""

    cache_write = "either"
    static_scales = frozenset({"k", "v"})
    graphs_read_scales = True  # kernels take the scale tensors by pointer
    backend: BlocksparseBackend

    def __init__(self, layer: Layer, backend: BlocksparseBackend) -> None:
        super().__init__(layer, backend)
        # An invalid pattern is refused when the layer is made, before any step.
        pattern = dict(cast("tuple[tuple[str, Any], ...]", layer.block_sparse))
        check_pattern(pattern, num_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Take over the scale tensors of the layer."""
        quantized = self.is_paged and self.agreement.kv_cache_dtype != self.agreement.requirements.dtype
        cached = (self.layer.k_scale_tensor, self.layer.v_scale_tensor) if quantized else ()
        self._scales = Scales(self.scale, *cached)

    @property
    def plan_key(self) -> Hashable:
        """One key for all layers: a plan does not depend on their scales."""
        return _KEY

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
        """Write the new rows to the KV cache if forward writes them, then run decodes and prefills."""
        plan: StepPlan = metadata.plans.get(_KEY) or self.plan_of(metadata)
        out = output.view(-1, self.num_q_heads, self.head_size)
        pages = None if kv_cache is None else (kv_cache.k, kv_cache.v)
        if kv_cache is not None and self.forward_writes and key is not None and value is not None:
            self.update_kv_cache(key, value, kv_cache, metadata.batch.slot_mapping)
        if plan.decode is not None:
            rows = plan.decode_rows
            decode.attend(
                query[rows],
                *cast("tuple[Tensor, Tensor]", pages),
                out[rows],
                None if lse is None else lse[rows],
                plan.decode,
                self._scales,
            )
        if plan.prefill is not None:
            rows = plan.prefill_rows
            keys, values = self._keys(key, value, rows, pages, plan)
            prefill.attend(
                query[rows],
                keys,
                values,
                out[rows],
                None if lse is None else lse[rows],
                plan.prefill,
                self._scales,
            )

    def _keys(
        self, key: Any, value: Any, rows: slice, pages: tuple[Tensor, Tensor] | None, plan: StepPlan
    ) -> tuple[Tensor, Tensor]:
        """Return contiguous K/V where the plan reads them, which is faster, or the KV cache."""
        if pages is None:  # a non-paged call: its keys are numbered by `key_start_loc`
            return key, value
        return (key[rows], value[rows]) if plan.contiguous_kv else pages

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: KVCache, slot_mapping: Any) -> None:
        """Write rows to their slots, with the layer's scales."""
        write_kv(
            key,
            value,
            kv_cache.k,
            kv_cache.v,
            slot_mapping,
            self.layer.k_scale_tensor,
            self.layer.v_scale_tensor,
        )
