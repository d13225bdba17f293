"""Long prefills of latents: they attend to keys and values per head, which are expanded in bounded memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from attrs import frozen
from torch import Tensor, nn

from attnplug import Requirements, select
from attnplug.contract import Batch
from attnplug.dense import device_of, latent_prefill
from attnplug.errors import NoBackendError
from attnplug.ops import write_latents, write_pages
from attnplug_transformers.engine.latent import expand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug import Selection
    from attnplug.contract import KVCache, Limits
    from attnplug.request import BackendNames, Options
    from attnplug_transformers.engine.layers import PagedLayer

_MAX_ROWS: Final = 65_536
"""Most cached tokens that are expanded at once, as in vLLM."""


def most_rows(limits: Limits) -> int:
    """
    Return the most cached tokens that are expanded at once.

    Chunks of four times a step's tokens take a small share of the memory of weights, and merging their outputs takes a
    small share of the time of their attention.
    """
    return min(_MAX_ROWS, 4 * limits.max_num_tokens, limits.max_num_reqs * limits.max_seq_len)


@frozen
class LatentSizes:
    """
    The sizes that two forms of attention to latents are compared by.

    Attributes:
        rank: ``kv_lora_rank``.
        nope: ``qk_nope_head_dim``.
        value: ``v_head_dim``.
    """

    rank: int
    nope: int
    value: int

    def is_long(self, query_len: int, context_len: int) -> bool:
        """
        Return whether a prefill takes fewer operations with keys and values per head than absorbed.

        Source: counted from DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C. Per head, a query and a key
        take ``2 * rank + rope`` products absorbed, ``nope + rope + value`` expanded. A cached token takes
        ``rank * (nope + value)`` more to be expanded. New tokens are multiplied by the up-projections once in both.
        From ``rank * (nope + value) / (2 * rank - nope - value)`` new tokens on, 171 of DeepSeek-V3, no prefix is too
        long; without a prefix, every prefill is long where the divisor is positive.

        Args:
            query_len: New tokens.
            context_len: Cached tokens.
        """
        pairs = query_len * context_len + query_len * (query_len + 1) // 2
        expanded = self.nope + self.value
        return query_len > 1 and pairs * (2 * self.rank - expanded) > context_len * self.rank * expanded


@frozen(eq=False)
class LatentPrefills:
    """
    How the prefills of a model's latents run: the long ones with keys and values per head.

    Attributes:
        layers: The layers with latents, by their modules.
        selections: The decisions for the calls of long prefills, by their `attn_type`; empty where all are absorbed.
        why_absorbed: Why all are absorbed; None where long ones are not, or no layer has latents.
        max_rows: Most cached tokens that are expanded at once.
        backend: As for `select`.
        options: As for `select`.
    """

    layers: Mapping[nn.Module, PagedLayer]
    selections: Mapping[str, Selection]
    why_absorbed: str | None
    max_rows: int
    backend: BackendNames | None
    options: Options | None
    _sizes: frozenset[LatentSizes]

    @classmethod
    def decide(
        cls,
        layers: Sequence[PagedLayer],
        device: torch.device,
        max_rows: int,
        backend: BackendNames | None = None,
        options: Options | None = None,
    ) -> LatentPrefills:
        """
        Choose backends for the calls of `latent_prefill`, by the same names and options as for the layers.

        Args:
            layers: The layers of the model.
            device: Its device.
            max_rows: Most cached tokens that are expanded at once.
            backend: As for `select`: the layers stay absorbed where it cannot serve the calls.
            options: As for `select`.
        """
        latent = {layer.spec.module: layer for layer in layers if layer.spec.requirements.latent}
        selections: dict[str, Selection] = {}
        why_absorbed = None
        if any(layer.spec.requirements.topk is not None for layer in latent.values()):
            why_absorbed = "an indexer selects the tokens of each query, from latents in pages"
            return cls(latent, selections, why_absorbed, max_rows, backend, options, frozenset())
        try:
            for one in {_dense_requirements(layer): None for layer in latent.values()}:
                for attn_type in ("decoder", "encoder_only", "encoder_decoder"):  # new tokens; a chunk of cached ones
                    requirements = one.evolve(attn_type=attn_type)
                    selections[attn_type] = select(requirements, device_of(device), backend=backend, options=options)
        except NoBackendError as error:
            selections, why_absorbed = {}, f"no backend serves keys and values per head: {error}"
        sizes = frozenset(map(_sizes_of, latent)) if selections else frozenset()
        return cls(latent, selections, why_absorbed, max_rows, backend, options, sizes)

    def is_long(self, query_len: int, context_len: int) -> bool:
        """Return whether a request attends to keys and values per head: see `LatentSizes.is_long`."""
        return bool(self._sizes) and all(one.is_long(query_len, context_len) for one in self._sizes)


@frozen(eq=False)
class PrefillStep:
    """
    The long prefills of a step: its last requests.

    Attributes:
        prefills: How they run.
        batch: These requests alone.
        first_token: Their first token in the step.
        caches: The KV cache of each layer, by name; None for a profile run.
    """

    prefills: LatentPrefills
    batch: Batch
    first_token: int
    caches: Mapping[str, KVCache] | None

    @classmethod
    def profile(cls, prefills: LatentPrefills, num_tokens: int, device: torch.device) -> PrefillStep:
        """Return a step of one request that takes the most memory: so many new tokens behind a whole chunk."""
        length = num_tokens + prefills.max_rows
        table = torch.zeros(1, length, dtype=torch.int32, device=device)  # pages of one token
        return cls(prefills, Batch.from_lengths([num_tokens], [length], block_table=table), 0, None)

    def attend(self, module: nn.Module, query: Tensor, latents: Tensor) -> Tensor:
        """
        Write the latents of the requests to the KV cache, and attend with keys and values per head.

        Args:
            module: The attention module.
            query: ``(tokens, num_heads, nope + rope)``.
            latents: ``(tokens, 1, kv_lora_rank + rope)``.

        Returns:
            ``(tokens, num_heads, v_head_dim)``.
        """
        spec, slots = self.prefills.layers[module].spec, self.batch.slot_mapping
        if self.caches is None or slots is None:
            pages = latents.new_zeros(1, 1, *latents.shape[1:])
        else:
            pages = self.caches[spec.cache_name].k
            if pages.dtype == torch.uint8:  # records of fp8_ds_mla
                write_latents(latents, pages, slots, padded=False)
            else:
                write_pages(latents, pages, slots, spec.k_scale, padded=False)
        output, _ = latent_prefill(
            query,
            *expand(module, latents.squeeze(1)),
            pages,
            self.batch,
            partial(expand, module),
            scale=spec.scale or query.shape[-1] ** -0.5,
            k_scale=spec.k_scale,
            max_rows=self.prefills.max_rows,
            backend=self.prefills.backend,
            options=self.prefills.options,
        )
        return output


def part_of(batch: Batch, first: int, last: int) -> Batch:
    """
    Return a batch of some requests of a step, whose tensors are views but for starts.

    Args:
        batch: The step, with CPU lengths.
        first: The first request.
        last: The request behind the last one.
    """
    requests, ends = slice(first, last), batch.query_start_loc_cpu
    assert ends is not None  # noqa: S101 - the assembler has made them
    tokens = slice(*ends[[first, last]].tolist())
    starts = ends[first : last + 1] - tokens.start
    of_requests = ("seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu", "block_table", "block_table_cpu")
    parts = {name: getattr(batch, name)[requests] for name in of_requests if getattr(batch, name) is not None}
    parts |= {name: getattr(batch, name)[tokens] for name in ("slot_mapping", "slot_mapping_cpu")}
    return attrs.evolve(
        batch,
        query_start_loc=batch.query_start_loc[first : last + 1] - tokens.start,
        query_start_loc_cpu=starts,
        num_reqs=last - first,
        num_actual_tokens=tokens.stop - tokens.start,
        max_query_len=int(starts.diff().amax()),
        max_seq_len=int(parts["seq_lens_cpu"].amax()),
        **parts,
    )


def _sizes_of(module: Any) -> LatentSizes:
    return LatentSizes(module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim)


def _dense_requirements(layer: PagedLayer) -> Requirements:
    """Return what the calls of a long prefill require; their `attn_type` differs."""
    module: Any = layer.spec.module
    return Requirements(
        head_size=module.qk_nope_head_dim + module.qk_rope_head_dim,
        head_size_v=module.v_head_dim,
        num_q_heads=module.num_heads,
        num_kv_heads=module.num_heads,
        dtype=layer.spec.requirements.dtype,
        paged=False,
        phases=("prefill",),
        return_lse=True,
    )
