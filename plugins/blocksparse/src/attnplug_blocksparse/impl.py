"""One layer on the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from attnplug.contract import AttentionImpl
from attnplug.ops import key_and_value_pages, write_kv
from attnplug_blocksparse import decode, prefill
from attnplug_blocksparse.params import check_pattern
from attnplug_blocksparse.scales import Scales

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug.contract import Layer, Metadata
    from attnplug_blocksparse.backend import BlocksparseBackend
    from attnplug_blocksparse.plan import Plan

_KEY: Final = "blocksparse"


class BlocksparseImpl(AttentionImpl):
    """Runs the plan that its builder has made."""

    cache_write = "either"
    static_scales = frozenset({"k", "v"})
    backend: BlocksparseBackend

    def __init__(self, layer: Layer, backend: BlocksparseBackend) -> None:
        super().__init__(layer, backend)
        # Read here, where a layer is made: a pattern that means nothing is refused before a step is.
        pattern = dict(cast("tuple[tuple[str, Any], ...]", layer.block_sparse))
        check_pattern(pattern, num_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads)
        quantized = self.is_paged and self.agreement.kv_cache_dtype != self.agreement.requirements.dtype
        cached = (layer.k_scale_tensor, layer.v_scale_tensor) if quantized else ()
        self._scales = Scales(self.scale, *cached)

    @property
    def plan_key(self) -> Hashable:
        """Nothing that a layer brings: scale and scales are told with each call."""
        return _KEY

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the rows into the cache where forward does, then run the kernels of decodes and of prefills."""
        plan: Plan = metadata.plans.get(_KEY) or self.plan_of(metadata)
        out = output.view(-1, self.num_q_heads, self.head_size)
        pages = None if kv_cache is None else key_and_value_pages(kv_cache)
        if pages is not None and self.forward_writes:
            self.update_kv_cache(cast("Tensor", key), cast("Tensor", value), kv_cache, metadata.batch.slot_mapping)
        if plan.tokens is not None:
            rows = plan.decode_rows
            decode.attend(
                query[rows],
                *cast("tuple[Tensor, Tensor]", pages),
                out[rows],
                None if lse is None else lse[rows],
                plan.tokens,
                self._scales,
            )
        if plan.prompts is not None:
            rows = plan.prompt_rows
            keys, values = self._keys(key, value, rows, pages, plan)
            prefill.attend(
                query[rows],
                keys,
                values,
                out[rows],
                None if lse is None else lse[rows],
                plan.prompts,
                self._scales,
            )

    def _keys(
        self, key: Any, value: Any, rows: slice, pages: tuple[Tensor, Tensor] | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Rows are read faster than pages. Those of a dense call are numbered by `key_start_loc`."""
        if pages is None:
            return key, value
        return (key[rows], value[rows]) if plan.reads_rows else pages

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Any) -> None:
        """Write the rows into their slots, with the layer's scales."""
        write_kv(
            key,
            value,
            *key_and_value_pages(kv_cache),
            slot_mapping,
            self.layer.k_scale_tensor,
            self.layer.v_scale_tensor,
        )
