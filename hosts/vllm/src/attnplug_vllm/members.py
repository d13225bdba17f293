"""What attnplug-vllm uses of vLLM, as data: classes, functions, parameters and fields, and the versions with them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from attrs import field, frozen
from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from packaging.version import Version

__all__ = ["MEMBERS", "Member", "Use", "members_of"]


class Use(Enum):
    """How a member is used, and so what a change of it would break."""

    READ = "read"  # the name exists
    CALLED = "called"  # by us, with these parameters: each exists, and no other is required
    OVERRIDDEN = "overridden"  # vLLM calls ours: the parameters are these, in this order


@frozen
class Member:
    """
    One thing that is used of vLLM.

    Attributes:
        path: The module, a colon, and the name in it: `"vllm.config:VllmConfig.model_config"`.
        use: How it is used.
        parameters: Names of parameters, without `self` and `cls`.
        versions: The versions where it is used.
    """

    path: str
    use: Use = Use.READ
    parameters: tuple[str, ...] = ()
    versions: SpecifierSet = field(factory=SpecifierSet)

    def __str__(self) -> str:
        return self.path if self.use is Use.READ else f"{self.path}({', '.join(self.parameters)})"


def members_of(version: Version) -> list[Member]:
    """Return what is used of one version."""
    return [each for each in MEMBERS if each.versions.contains(version, prereleases=True)]


def _read(path: str, *names: str, versions: str = "") -> tuple[Member, ...]:
    paths = [f"{path}.{name}" for name in names] or [path]
    return tuple(Member(each, versions=SpecifierSet(versions)) for each in paths)


def _called(path: str, *parameters: str, versions: str = "") -> tuple[Member, ...]:
    return (Member(path, Use.CALLED, parameters, SpecifierSet(versions)),)


def _overridden(path: str, *parameters: str, versions: str = "") -> tuple[Member, ...]:
    return (Member(path, Use.OVERRIDDEN, parameters, SpecifierSet(versions)),)


# The boundary between the two contracts: before it a backend states the shape of its KV cache, since then vLLM does.
_SHAPES: Final = "<0.32"
_LAYOUTS: Final = ">=0.32"

_CONTRACT: Final = "vllm.v1.attention.backend"
_BACKEND: Final = f"{_CONTRACT}:AttentionBackend"
_BUILDER: Final = f"{_CONTRACT}:AttentionMetadataBuilder"
_COMMON: Final = f"{_CONTRACT}:CommonAttentionMetadata"
_IMPL: Final = f"{_CONTRACT}:AttentionImpl"
_REGISTRY: Final = "vllm.v1.attention.backends.registry"
_SELECTOR: Final = "vllm.v1.attention.selector"
_KV_CACHE: Final = "vllm.v1.kv_cache_interface"

_SELECTION: Final = (
    *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix"),
    *("use_per_head_quant_scales", "device_capability", "attn_type", "has_sliding_window", "use_non_causal"),
    *("use_batch_invariant", "use_kv_connector", "use_pcp"),
)
_COMBINATION: Final = (
    *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix"),
    "device_capability",
)

MEMBERS: Final[tuple[Member, ...]] = (
    # registration
    *_read(f"{_REGISTRY}:AttentionBackendEnum", "CUSTOM", "CPU_ATTN"),
    *_called(f"{_REGISTRY}:AttentionBackendEnum.get_path", "include_classname"),
    *_called(f"{_REGISTRY}:AttentionBackendEnum.get_class"),
    *_called(f"{_REGISTRY}:AttentionBackendEnum.is_overridden"),
    *_called(f"{_REGISTRY}:AttentionBackendEnum.register", "name", "value", versions=_LAYOUTS),
    *_called(f"{_REGISTRY}:register_backend", "backend", "class_path"),
    # selection
    *_read(f"{_CONTRACT}:AttentionType", "DECODER", "ENCODER", "ENCODER_ONLY", "ENCODER_DECODER"),
    *_read(f"{_CONTRACT}:MultipleOf", "base"),
    *_overridden(f"{_BACKEND}.get_name"),
    *_overridden(f"{_BACKEND}.get_impl_cls"),
    *_overridden(f"{_BACKEND}.get_builder_cls"),
    *_overridden(f"{_BACKEND}.full_cls_name"),
    *_read(_BACKEND, "supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update"),
    *_overridden(f"{_BACKEND}.get_supported_kernel_block_sizes", versions=_SHAPES),
    *_overridden(f"{_BACKEND}.get_supported_kernel_block_sizes", "kv_cache_spec", versions=_LAYOUTS),
    *_overridden(f"{_BACKEND}.get_preferred_block_size", "default_block_size"),
    *_overridden(f"{_BACKEND}.supports_block_size", "block_size"),
    *_overridden(f"{_BACKEND}.get_supported_head_sizes"),
    *_overridden(f"{_BACKEND}.supports_head_size", "head_size"),
    *_overridden(f"{_BACKEND}.supports_dtype", "dtype"),
    *_overridden(f"{_BACKEND}.supports_kv_cache_dtype", "kv_cache_dtype"),
    *_overridden(f"{_BACKEND}.supports_attn_type", "attn_type"),
    *_overridden(f"{_BACKEND}.supports_compute_capability", "capability"),
    *_overridden(f"{_BACKEND}.supports_combination", *_COMBINATION),
    *_overridden(f"{_BACKEND}.validate_configuration", *_SELECTION, versions=_SHAPES),
    *_overridden(
        f"{_BACKEND}.validate_configuration",
        *_SELECTION,
        *("use_adaptive_verification", "use_dcp", "use_rswa"),
        versions=_LAYOUTS,
    ),
    *(
        member
        for name in (
            *("is_mla", "is_sparse", "is_ssm", "supports_sink", "supports_alibi_sqrt", "supports_mm_prefix"),
            *("supports_per_head_quant_scales", "supports_sliding_window", "supports_non_causal"),
            *("supports_batch_invariance", "supports_kv_connector", "supports_pcp"),
        )
        for member in _overridden(f"{_BACKEND}.{name}")
    ),
    *(
        member
        for name in (
            "supports_rswa",
            "supports_dcp",
            "supports_non_causal_dcp",
            "supports_device_cpu_query_lens_mismatch",
        )
        for member in _overridden(f"{_BACKEND}.{name}", versions=_LAYOUTS)
    ),
    *_read(
        f"{_SELECTOR}:AttentionSelectorConfig",
        *(name for name in _SELECTION if name != "device_capability"),
    ),
    *_called(f"{_SELECTOR}:get_attn_backend", "head_size", "dtype", "kv_cache_dtype"),
    *_called("vllm.config:get_current_vllm_config_or_none"),
    *_read("vllm.platforms:current_platform", "is_cuda", "is_cpu", "get_device_capability", "get_attn_backend_cls"),
    # the KV cache
    *_overridden(
        f"{_BACKEND}.get_kv_cache_shape",
        *("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
        versions=_SHAPES,
    ),
    *_overridden(f"{_BACKEND}.get_kv_cache_stride_order", "include_num_layers_dimension", versions=_SHAPES),
    *_overridden(f"{_BACKEND}.get_required_kv_cache_layout", versions=_SHAPES),
    *_overridden(f"{_BACKEND}.customize_spec", "spec", versions=_LAYOUTS),
    *_overridden(f"{_BACKEND}.supported_kv_cache_layouts", versions=_LAYOUTS),
    *_read(f"{_KV_CACHE}:KVCacheLayout", "LBNHC", "LBHNC", versions=_LAYOUTS),
    *_read(f"{_KV_CACHE}:AttentionSpec", "block_size", "num_kv_heads", "head_size", "dtype"),
    *_read(f"{_KV_CACHE}:AttentionSpec", "num_head_slots", "state_content_bytes", versions=_LAYOUTS),
    # metadata
    *_overridden(f"{_BUILDER}.__init__", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    *_overridden(f"{_BUILDER}.build", "common_prefix_len", "common_attn_metadata", "fast_build"),
    *_overridden(f"{_BUILDER}.build_for_cudagraph_capture", "common_attn_metadata"),
    *_overridden(f"{_BUILDER}.build_for_drafting", "common_attn_metadata", "draft_index"),
    *_overridden(f"{_BUILDER}.update_block_table", "metadata", "blk_table", "slot_mapping"),
    *_overridden(f"{_BUILDER}.get_cudagraph_support", "vllm_config", "kv_cache_spec"),
    *_overridden(
        f"{_BUILDER}.use_cascade_attention",
        *("common_prefix_len", "query_lens", "num_query_heads", "num_kv_heads", "use_alibi", "use_sliding_window"),
        *("use_local_attention", "num_sms", "dcp_world_size"),
        versions=_SHAPES,
    ),
    *_called(
        f"{_BUILDER}._init_reorder_batch_threshold",
        *("reorder_batch_threshold", "supports_spec_as_decode", "supports_dcp_with_varlen"),
    ),
    *_read(_BUILDER, "reorder_batch_threshold", "supports_update_block_table", "_cudagraph_support"),
    *_read(f"{_CONTRACT}:AttentionCGSupport", "ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER"),
    *_read(f"{_CONTRACT}:AttentionMetadata"),
    *_read(
        _COMMON,
        *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs", "causal"),
        *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping", "is_prefilling"),
        "dcp_local_seq_lens",
    ),
    # layers
    *_overridden(
        f"{_IMPL}.__init__",
        *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
        *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
    ),
    *_overridden(
        f"{_IMPL}.forward",
        *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
        "output_block_scale",
    ),
    *_overridden(f"{_IMPL}.fused_output_quant_supported", "quant_key"),
    *_overridden(f"{_IMPL}.process_weights_after_loading", "act_dtype"),
    *_read(_IMPL, "can_return_lse_for_decode", "need_to_return_lse_for_decode", "supports_quant_query_input"),
    *_read(_IMPL, "supports_pcp", "supports_dcp", "dcp_world_size", "dcp_rank"),
    *_read(
        f"{_CONTRACT}:AttentionLayer",
        *("_q_scale", "_k_scale", "_v_scale", "_q_scale_float", "_k_scale_float", "_v_scale_float"),
    ),
    *_read("vllm.config.compilation:CompilationConfig", "static_forward_context", "cudagraph_capture_sizes"),
    *_read("vllm.config:VllmConfig", "model_config", "cache_config", "parallel_config", "scheduler_config"),
)
