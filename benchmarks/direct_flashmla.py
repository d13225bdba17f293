"""Direct calls of FlashMLA, as a host for one library writes them: the baseline of the plugin's benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import frozen

from attnplug.ops import quantize_queries, write_latents, write_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug_kit.bench import Planner, Rig


@frozen
class DirectFlashMLA:
    """
    One call for decodes of one query length, whose schedule is made ahead. `attnplug.ops.write_pages` writes latents.
    Of selected tokens, one call whose slots are not checked.

    The library returns a new tensor, which is copied into an output: hosts hand one to the next layer's product.
    """

    backend: ClassVar[str] = "flashmla"
    what: ClassVar[str] = "direct FlashMLA calls and a copy into the output"

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the cache write and the call of one step."""
        from flash_mla import flash_mla_interface as library  # noqa: PLC0415 - where it is measured

        if rig.indices is not None:
            return _selected(rig, rig.indices, library)
        step, requests = rig.step, rig.step.num_reqs
        query_len, pages = step.query_lens[0], rig.cache.k  # type: ignore[union-attr] # latents are paged
        fp8 = pages.dtype == torch.float8_e4m3fn
        scale = torch.ones(1, device=rig.query.device) if fp8 else None
        lens = torch.tensor(step.seq_lens, dtype=torch.int32, device=rig.query.device)
        schedule, splits = library.get_mla_decoding_metadata(
            lens, query_len * step.num_q_heads, 1, step.num_q_heads, is_fp8_kvcache=fp8, use_legacy=True
        )
        meta = library.FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits)
        given: dict[str, Any] = {"softmax_scale": step.scale, "causal": True, "is_fp8_kvcache": fp8, "use_legacy": True}
        output = rig.query.new_empty(step.num_tokens, step.num_q_heads * step.size_v)
        query, key, slots, table = rig.query, rig.key, rig.slots, rig.table

        def call() -> Tensor:
            write_pages(key, pages, slots, scale, padded=False)
            rows = query if scale is None else quantize_queries(query, scale)
            rows = rows.view(requests, query_len, step.num_q_heads, -1)
            found, _ = library.flash_mla_with_kvcache(
                rows, pages, table, lens, step.size_v, meta, descale_q=scale, descale_k=scale, **given
            )
            return output.copy_(found.view(output.shape))

        return call

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the same calls: all that they read keeps its address."""
        return self.layer(rig)

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """Return nothing: schedules are made on the device."""
        del planner, captured
        return {}


def _selected(rig: Rig, indices: Tensor, library: Any) -> Callable[[], Tensor]:
    """Return the cache write and the call of a step with selected tokens. The first call makes the schedule."""
    step, pages, key, slots = rig.step, rig.cache.k, rig.key, rig.slots  # type: ignore[union-attr] # latents are paged
    heads = 64 if step.num_q_heads <= 64 else 128
    # As a host with such weights has them.
    query = torch.nn.functional.pad(rig.query, (0, 0, 0, heads - step.num_q_heads))
    output = rig.query.new_empty(step.num_tokens, step.num_q_heads, step.size_v)
    meta = library.FlashMLASchedMeta()

    def decode() -> Tensor:
        write_latents(key, pages, slots, padded=False)
        given = {"softmax_scale": step.scale, "indices": indices.unsqueeze(1), "use_legacy": True}
        found, _ = library.flash_mla_with_kvcache(query.unsqueeze(1), pages, None, None, step.size_v, meta, **given)
        output.copy_(found.squeeze(1)[:, : step.num_q_heads])
        return output.flatten(1)

    def prefill() -> Tensor:
        write_pages(key, pages, slots, padded=False)
        rows = pages.view(-1, 1, step.head_size)
        found, _, _ = library.flash_mla_sparse_fwd(query, rows, indices.unsqueeze(1), step.scale, use_legacy=True)
        output.copy_(found[:, : step.num_q_heads])
        return output.flatten(1)

    return decode if pages.dtype == torch.uint8 else prefill
