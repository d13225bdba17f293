"""
Multi-head latent attention (MLA) in vLLM: its common classes with attnplug's attention over the latent KV cache.

vLLM owns the projections, absorbs them, expands long prefills to keys and values per head, and writes the KV cache.
attnplug attends with the absorbed queries, up to the length of `LatentBuilder.reorder_batch_threshold`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from attnplug.contract import torch_dtype
from attnplug.errors import NotNegotiatedError
from attnplug.ops import write_pages
from attnplug_vllm import advice, facts, prefill
from attnplug_vllm.builder import make_builder_class
from attnplug_vllm.impl import BoundLayer

if TYPE_CHECKING:
    from torch import Tensor

_ON_CPU = facts.platform_name() == "cpu"


class LatentImpl(BoundLayer, MLACommonImpl):  # type: ignore[misc]  # vLLM is no dependency, and untyped here
    """
    One layer with a latent per token.

    Attributes:
        prefills: Whether attnplug prefills where vLLM's configuration names no other backend.
    """

    prefills = False

    # With decode context parallelism vLLM gathers the heads of the ranks, and merges their outputs by LSE.
    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        further = {name: latent.pop(name) for name in list(latent) if name not in _OF_LATENTS}
        further |= {"indexer": latent.get("indexer"), "alibi_slopes": alibi_slopes, "sliding_window": sliding_window}
        further["logits_soft_cap"] = logits_soft_cap or None  # some models pass 0 for none
        refused = sorted(name for name, value in further.items() if value is not None)
        if refused:  # a window would hold for absorbed queries alone: vLLM's prefills have none
            raise NotNegotiatedError(
                f"vLLM's layer of latent attention has {', '.join(refused)}",
                "attention to all earlier tokens is served: vLLM's own prefills of latents apply none of these",
                advice.OWN,
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **latent,
        )
        self.supports_quant_query_input = False  # a backend quantizes queries itself, where it does
        self.sliding_window = self.logits_soft_cap = None
        self.decide(
            facts.layer_requirements(
                head_size=head_size,
                dtype=torch.get_default_dtype(),
                kv_cache_dtype=kv_cache_dtype,
                attn_type=attn_type,
                **facts.latent_fields(latent["kv_lora_rank"], num_heads),
            )
        )
        prefill.offer(self, torch.get_default_dtype())

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """
        Attend to the latents with absorbed queries.

        Args:
            q: ``(tokens, heads, kv_lora_rank + qk_rope_head_dim)``, or its two parts; the heads of all ranks with
                decode context parallelism.
            kv_c_and_k_pe_cache: The layer's pool, ``(blocks, block_size, kv_lora_rank + qk_rope_head_dim)``.
            attn_metadata: What the builder returned.
            layer: vLLM's layer, with the quantization scales.

        Returns:
            ``(tokens, heads, kv_lora_rank)``; and the natural LSE ``(tokens, heads)`` of a rank that merges, else None.

        Raises:
            ContractError: The pool does not fit, or a tensor does not.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        output = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if self.requirements.return_lse else None
        pool, held = kv_c_and_k_pe_cache, self._pool
        # vLLM views a pool of 8-bit floats as such in each call.
        if pool is not held and not (isinstance(held, torch.Tensor) and held.data_ptr() == pool.data_ptr()):
            self.take_pool(layer, pool)
        decode = attn_metadata.decode
        metadata = decode.step.parts[self._backend]
        self._attend(query, None, None, self._cache, metadata, output.view(-1, self._width), lse=lse)
        if lse is not None and decode.without_keys is not None:
            output.masked_fill_(decode.without_keys[:, None, None], 0)
            lse.masked_fill_(decode.without_keys[:, None], -torch.inf)
        return output, lse

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        **further: Any,
    ) -> None:
        """Write new latents and their rotary parts into the pool: by vLLM's operator, which a CPU does not have."""
        if not _ON_CPU:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, **further)
        elif kv_cache.numel():
            rows = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1).unsqueeze(1)
            # Bytes are 8-bit floats; other numbers are not scaled.
            pages = kv_cache.view(torch_dtype(self.requirements.kv_cache_dtype)).unsqueeze(2)
            scale = k_scale.view(1) if pages.itemsize == 1 else None
            write_pages(rows, pages, slot_mapping.flatten().long(), scale)


_OF_LATENTS = frozenset(
    {
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
        *("kv_b_proj", "indexer", "q_pad_num_heads"),
    }
)


@dataclass
class LatentMetadata(MLACommonMetadata):  # type: ignore[misc]  # see above
    """One step's metadata, of latents of any size: vLLM's own lists those of its kernels."""

    def __post_init__(self) -> None:
        """Check nothing: a candidate was decided on for the size."""


class LatentBuilder(MLACommonMetadataBuilder):  # type: ignore[misc]  # see above
    """
    The builder of a group of layers: vLLM's own for long prefills, and one of the contract for all other requests.

    Attributes:
        choice: The identifiers of the candidates that may be chosen; empty where attnplug decides.
    """

    choice: ClassVar[tuple[str, ...]] = ()
    query_len_support = QueryLenSupport.VARLEN
    # The longest query that is absorbed: on a GPU that of vLLM's FLASH_ATTN_MLA, whose kernels have the same costs.
    reorder_batch_threshold = 1 if _ON_CPU else 512

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **further: Any
    ) -> None:
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        impl = layer.impl
        if isinstance(layer.prefill_backend, prefill.LatentPrefill):
            # On Blackwell vLLM would select a prefill backend once more to find out, and may have none.
            self.determine_prefill_query_data_type: Any = lambda _config, dtype: dtype
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, LatentMetadata, **further)
        self._prefill_backend: Any = prefill.prepared(self._prefill_backend, impl, vllm_config, kv_cache_spec)
        self._inner = make_builder_class(self.choice)(kv_cache_spec, layer_names, vllm_config, device)
        self._is_local, self._dcp_rank = impl.requirements.return_lse, impl.dcp_rank
        reqs = vllm_config.scheduler_config.max_num_seqs
        # Graphs read them: each step writes them anew.
        self._local_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self._without_keys = torch.zeros(reqs, dtype=torch.bool, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return the highest graph level that the backends of all layers of this class support."""
        return make_builder_class(cls.choice).get_cudagraph_support(vllm_config, kv_cache_spec)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:  # noqa: FBT001, FBT002 - vLLM's signature
        """
        Return the metadata of a step. Arguments are vLLM's.

        Raises:
            ContractError: The batch contradicts the agreement, the limits or a captured graph.
        """
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if found.prefill is not None and isinstance(self._prefill_backend, prefill.LatentPrefill):
            starts = common_attn_metadata.query_start_loc_cpu[found.num_decodes : common_attn_metadata.num_reqs + 1]
            self._prefill_backend.plan(found.prefill, starts - starts[0])
        if found.decode is not None:
            common = self._decodes(common_attn_metadata, found, is_captured=False)
            found.decode.step = self._inner.build(0, common, fast_build)
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """
        Return metadata that a CUDA graph of decodes is captured with, or that of a dummy step.

        Raises:
            ContractError: The agreed graph level does not allow the shape.
        """
        found = super().build(0, common_attn_metadata)
        if found.num_prefills:
            raise NotNegotiatedError(
                f"vLLM captures a graph with {found.num_prefills} prefills of latent attention",
                "graphs have decodes alone: prefills are expanded to keys and values per head",
                "leave the sizes of captured steps to vLLM",
            )
        common = self._decodes(common_attn_metadata, found, is_captured=True)
        found.decode.step = self._inner.build_for_cudagraph_capture(common)
        return found

    def _decodes(self, common: Any, found: Any, *, is_captured: bool) -> Any:
        """Return vLLM's metadata of the requests whose queries are absorbed, with the lengths of this rank's keys."""
        first = _first_requests(common, found)
        if not self._is_local:
            return first
        reqs, local = first.num_reqs, first.dcp_local_seq_lens[: first.num_reqs]
        lens, without_keys = self._local_lens[:reqs], self._without_keys[:reqs]
        torch.eq(local, 0, out=without_keys)
        _with_a_key(local, first.seq_lens[:reqs], lens)
        whole = {name: getattr(first, name, None) for name in ("_seq_lens_cpu", "seq_lens_cpu_upper_bound")}
        known = {name: each[:reqs] for name, each in whole.items() if each is not None}
        parts = {name: self._local(each) for name, each in known.items()}
        may_lack = is_captured or not parts or any(bool((each == 0).any()) for each in parts.values())
        found.decode.without_keys = without_keys if may_lack else None
        bounds = {name: _with_a_key(each, known[name]) for name, each in parts.items()}
        return first.replace(seq_lens=lens, max_seq_len=found.max_seq_len, **bounds)

    def _local(self, seq_lens: Tensor) -> Tensor:
        """Return how many keys of sequences this rank has."""
        interleave = self.cp_kv_cache_interleave_size
        local: Tensor = get_dcp_local_seq_lens(seq_lens, self.dcp_world_size, self._dcp_rank, interleave)
        return local


def _with_a_key(local: Tensor, whole: Tensor, out: Tensor | None = None) -> Tensor:
    """
    Return the lengths of a rank's keys, at least one where a sequence has any.

    A sequence of the contract has its query. A rank without a key of it reads one in vain: the output is then replaced.
    """
    return torch.maximum(local, whole.clamp(max=1), out=out)


def _first_requests(common: Any, found: Any) -> Any:
    """Return vLLM's metadata of the requests whose queries are absorbed; the same object where those are all."""
    reqs, tokens = found.num_decodes, found.num_decode_tokens
    if not found.num_prefills:
        return common
    starts = common.query_start_loc_cpu[: reqs + 1]
    return common.replace(
        num_reqs=reqs,
        num_actual_tokens=tokens,
        query_start_loc=common.query_start_loc[: reqs + 1],
        query_start_loc_cpu=starts,
        max_query_len=int(starts.diff().max()),
        seq_lens=common.seq_lens[:reqs],
        block_table_tensor=common.block_table_tensor[:reqs],
        slot_mapping=common.slot_mapping[:tokens],
    )


@cache
def latent_classes(choice: tuple[str, ...] = ()) -> tuple[type[LatentImpl], type[LatentBuilder]]:
    """
    Return the classes of the layers and of the builders of a choice.

    Args:
        choice: The identifiers of the candidates that may be chosen; empty leaves it to attnplug and its settings.
    """
    members = {"choice": choice, "__module__": __name__}
    return type("AttnplugLatentImpl", (LatentImpl,), members), type("AttnplugLatentBuilder", (LatentBuilder,), members)


def latent_base() -> type:
    """Return vLLM's class of backends for latent attention."""
    return MLACommonBackend  # type: ignore[no-any-return]
