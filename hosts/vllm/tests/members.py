"""What attnplug-vllm uses of vLLM, as data: classes, functions, parameters and fields, and the versions with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.drift import called, overridden, read

if TYPE_CHECKING:
    from packaging.version import Version

    from tests.drift import Member


def members_of(version: Version) -> list[Member]:
    """Return what is used of one version."""
    return [each for each in MEMBERS if each.versions.contains(version, prereleases=True)]


def _each_overridden(path: str, *names: str, versions: str = "") -> tuple[Member, ...]:
    """Return class methods without parameters."""
    return tuple(member for name in names for member in overridden(f"{path}.{name}", versions=versions))


# Before this version a backend states the shape of its KV cache; since then vLLM does, and the backend names layouts.
_SHAPES: Final = "<0.29"
_LAYOUTS: Final = ">=0.29"
_DTYPES: Final = ">=0.33"  # names of KV-cache dtypes that plugins register

_CONTRACT: Final = "vllm.v1.attention.backend"
_BACKEND: Final = f"{_CONTRACT}:AttentionBackend"
_BUILDER: Final = f"{_CONTRACT}:AttentionMetadataBuilder"
_COMMON: Final = f"{_CONTRACT}:CommonAttentionMetadata"
_IMPL: Final = f"{_CONTRACT}:AttentionImpl"
_REGISTRY: Final = "vllm.v1.attention.backends.registry"
_SELECTOR: Final = "vllm.v1.attention.selector"
_ATTENTION: Final = "vllm.model_executor.layers.attention"
_KV_CACHE: Final = "vllm.v1.kv_cache_interface"

_SELECTION: Final = (
    *("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix"),
    *("use_per_head_quant_scales", "device_capability", "attn_type", "has_sliding_window", "use_non_causal"),
    *("use_batch_invariant", "use_kv_connector", "use_pcp"),
)
# Further fields of a request, each with the first version that has it. One that attnplug-vllm does not know is refused.
_FURTHER: Final = {"use_adaptive_verification": "0.28", "use_dcp": "0.29", "use_rswa": "0.30"}

_PREFILL: Final = "vllm.v1.attention.backends.mla.prefill"

_REGISTRATION: Final = (
    *read(f"{_REGISTRY}:AttentionBackendEnum", "CUSTOM", "CPU_ATTN"),
    *read(f"{_REGISTRY}:AttentionBackendEnum", "CPU_MLA", "AMX_MLA", versions=">=0.32"),
    *called(f"{_REGISTRY}:AttentionBackendEnum.get_path"),
    *called(f"{_REGISTRY}:AttentionBackendEnum.get_class"),
    *called(f"{_REGISTRY}:AttentionBackendEnum.is_overridden"),
    *called(f"{_REGISTRY}:AttentionBackendEnum.register", "name", "value", versions=">=0.32"),
    *called(f"{_REGISTRY}:register_backend", "backend", "class_path"),
    *read(f"{_PREFILL}.registry:MLAPrefillBackendEnum", "CUSTOM"),
    *called(f"{_PREFILL}.registry:MLAPrefillBackendEnum.get_path"),
    *called(f"{_PREFILL}.registry:MLAPrefillBackendEnum.is_overridden"),
    *called(f"{_PREFILL}.registry:register_mla_prefill_backend", "backend", "class_path"),
    *called("vllm.plugins:load_general_plugins"),
)

_PLATFORM: Final = (
    *read("vllm.envs:VLLM_BATCH_INVARIANT"),
    *read("vllm.platforms:current_platform", "device_type"),
    *called("vllm.platforms:current_platform.is_rocm"),
    *called("vllm.platforms:current_platform.get_device_capability"),
    *called("vllm.platforms:current_platform.get_device_name"),
    # It returns CPU_ATTN, CPU_MLA or AMX_MLA whatever was chosen, which is why these members are ours.
    *called("vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls", "selected_backend", "attn_selector_config"),
)

# What vLLM picks by itself is seen on a stand-in device: its CUDA platform with the capability of a request.
_STAND_IN: Final = (
    *overridden("vllm.platforms.cuda:CudaPlatformBase.get_device_capability", "device_id"),
    *overridden("vllm.platforms.cuda:CudaPlatformBase.get_device_name", "device_id"),
    *overridden("vllm.platforms.cuda:CudaPlatformBase.get_device_total_memory", "device_id"),
    *read("vllm.platforms.cuda:CudaPlatformBase.is_fully_connected"),
    *called(
        "vllm.platforms.cuda:CudaPlatformBase.get_valid_backends",
        *("device_capability", "attn_selector_config", "num_heads"),
    ),
    *called("vllm.platforms.interface:DeviceCapability", "major", "minor"),
    *read(f"{_SELECTOR}:AttentionSelectorConfig"),
    *called("vllm.config:VllmConfig"),
    *called("vllm.config:set_current_vllm_config", "vllm_config"),
    *read("vllm.config:cache", "CacheDType"),
    *read("vllm.v1.attention.backends.fa_utils:get_flash_attn_version"),
    *called("vllm.utils.flashinfer:can_use_trtllm_attention", "num_qo_heads", "num_kv_heads"),
    *read("vllm.vllm_flash_attn:flash_attn_interface", "FA4_AVAILABLE"),
    *read("vllm:__version__"),
)

_SELECTION_MEMBERS: Final = (
    *read(f"{_CONTRACT}:AttentionType", "DECODER", "ENCODER", "ENCODER_ONLY", "ENCODER_DECODER"),
    *called(f"{_CONTRACT}:MultipleOf", "base"),
    *overridden(f"{_BACKEND}.get_name"),
    *overridden(f"{_BACKEND}.get_impl_cls"),
    *overridden(f"{_BACKEND}.get_builder_cls"),
    *overridden(f"{_BACKEND}.full_cls_name"),
    *read(_BACKEND, "forward_includes_kv_cache_update"),
    *overridden(f"{_BACKEND}.get_supported_kernel_block_sizes", versions="<0.31"),
    *overridden(f"{_BACKEND}.get_supported_kernel_block_sizes", "kv_cache_spec", versions=">=0.31"),
    *overridden(f"{_BACKEND}.supports_head_size", "head_size"),
    *overridden(f"{_BACKEND}.supports_dtype", "dtype"),
    *overridden(f"{_BACKEND}.supports_kv_cache_dtype", "kv_cache_dtype"),
    *overridden(f"{_BACKEND}.supports_attn_type", "attn_type"),
    *overridden(f"{_BACKEND}.supports_compute_capability", "capability"),
    *_each_overridden(
        _BACKEND,
        *("is_mla", "is_sparse", "is_ssm", "supports_sink", "supports_alibi_sqrt", "supports_mm_prefix"),
        *("supports_per_head_quant_scales", "supports_sliding_window", "supports_non_causal"),
        *("supports_batch_invariance", "supports_kv_connector", "supports_pcp"),
    ),
    *_each_overridden(_BACKEND, "supports_device_cpu_query_lens_mismatch", versions=">=0.28"),
    *_each_overridden(_BACKEND, "supports_non_causal_dcp", versions=">=0.29"),
    *_each_overridden(_BACKEND, "supports_dcp", "supports_rswa", versions=">=0.30"),
    *(
        member
        for known, versions in (
            (0, "<0.28"),
            (1, ">=0.28,<0.29"),
            (2, ">=0.29,<0.30"),
            (3, ">=0.30"),
        )
        for member in overridden(
            f"{_BACKEND}.validate_configuration", *_SELECTION, *tuple(_FURTHER)[:known], versions=versions
        )
    ),
    *read(f"{_SELECTOR}:AttentionSelectorConfig", *(name for name in _SELECTION if name != "device_capability")),
    *(
        member
        for name, first in _FURTHER.items()
        for member in read(f"{_SELECTOR}:AttentionSelectorConfig", name, versions=f">={first}")
    ),
)

_MLA: Final = f"{_ATTENTION}.mla_attention"
_LATENT: Final = (
    *called(
        f"{_MLA}:MLACommonImpl.__init__",
        *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
        *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "q_lora_rank", "kv_lora_rank"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj"),
    ),
    *overridden(f"{_MLA}:MLACommonImpl.forward_mqa", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"),
    *overridden(
        f"{_MLA}:MLACommonImpl.do_kv_cache_update",
        *("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale"),
        versions="<0.33",
    ),
    *overridden(
        f"{_MLA}:MLACommonImpl.do_kv_cache_update",
        *("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "skip_scale"),
        versions=">=0.33",
    ),
    *read(f"{_MLA}:MLACommonBackend", "is_mla"),
    *overridden(f"{_MLA}:MLACommonMetadata.__post_init__"),
    *called(
        f"{_MLA}:MLACommonMetadataBuilder.__init__",
        *("kv_cache_spec", "layer_names", "vllm_config", "device", "metadata_cls"),
    ),
    *overridden(f"{_MLA}:MLACommonMetadataBuilder.build", "common_prefix_len", "common_attn_metadata", "fast_build"),
    *overridden(f"{_MLA}:MLACommonMetadataBuilder.build_for_cudagraph_capture", "common_attn_metadata"),
    *read(f"{_MLA}:QueryLenSupport", "VARLEN"),
    *called("vllm.v1.attention.backends.utils:get_dcp_local_seq_lens", "seq_lens", "dcp_size", "dcp_rank"),
    *read("vllm.config.attention:AttentionConfig", "mla_prefill_backend", "use_prefill_query_quantization"),
    *overridden(f"{_PREFILL}.base:MLAPrefillBackend.get_name"),
    *overridden(f"{_PREFILL}.base:MLAPrefillBackend.validate_configuration", "device_capability", "selector_config"),
    *overridden(
        f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_new_tokens",
        *("q", "k", "v", "return_softmax_lse", "out", "output_scale"),
    ),
    *overridden(
        f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_context_chunk", "chunk_idx", "q", "k", "v", versions="<0.32"
    ),
    *overridden(
        f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_context_chunk", "chunk", "q", "k", "v", "out", versions=">=0.32"
    ),
)

_CACHES: Final = (
    *overridden(
        f"{_BACKEND}.get_kv_cache_shape",
        *("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str"),
        versions=_SHAPES,
    ),
    *overridden(f"{_BACKEND}.get_kv_cache_stride_order", "include_num_layers_dimension", versions=_SHAPES),
    *called("vllm.v1.attention.backends.utils:get_kv_cache_layout", versions=_SHAPES),
    *overridden(f"{_BACKEND}.supported_kv_cache_layouts", versions=_LAYOUTS),
    *overridden(f"{_BACKEND}.customize_spec", "spec", versions=">=0.28"),
    *read(
        f"{_KV_CACHE}:KVCacheLayout",
        *("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC"),
        versions=_LAYOUTS,
    ),
    *called(f"{_KV_CACHE}:compute_layout_strides", "spec", "num_blocks", "num_layers", "layout", versions=_LAYOUTS),
    *read(f"{_KV_CACHE}:AttentionSpec", "block_size", "num_kv_heads", "head_size", "dtype", "page_size_padded"),
    *read(
        f"{_KV_CACHE}:AttentionSpec",
        *("num_head_slots", "state_content_bytes", "num_heads", "num_states", "state_content_size_bytes"),
        versions=_LAYOUTS,
    ),
)

_METADATA: Final = (
    *overridden(f"{_BUILDER}.__init__", "kv_cache_spec", "layer_names", "vllm_config", "device"),
    *overridden(f"{_BUILDER}.build", "common_prefix_len", "common_attn_metadata", "fast_build"),
    *overridden(f"{_BUILDER}.build_for_cudagraph_capture", "common_attn_metadata"),
    *overridden(f"{_BUILDER}.update_block_table", "metadata", "blk_table", "slot_mapping"),
    *overridden(f"{_BUILDER}.get_cudagraph_support", "vllm_config", "kv_cache_spec"),
    *overridden(
        f"{_BUILDER}.use_cascade_attention",
        *("common_prefix_len", "query_lens", "num_query_heads", "num_kv_heads", "use_alibi", "use_sliding_window"),
        *("use_local_attention", "num_sms", "dcp_world_size"),
        versions="<0.32",
    ),
    *called(
        f"{_BUILDER}._init_reorder_batch_threshold",
        "reorder_batch_threshold",
        "supports_spec_as_decode",
        "supports_dcp_with_varlen",
    ),
    *read(_BUILDER, "supports_update_block_table", "kv_cache_spec", "vllm_config"),
    *read(f"{_CONTRACT}:AttentionCGSupport", "ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER"),
    *read(f"{_CONTRACT}:AttentionMetadata"),
    *read(
        _COMMON,
        *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs", "causal"),
        *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping"),
        "dcp_local_seq_lens",
    ),
    *read(_COMMON, "_seq_lens_cpu", versions="<0.28"),
    *read(_COMMON, "dcp_local_seq_lens_cpu", versions="<0.30"),
    *read(_COMMON, "dcp_local_seq_lens_cpu_upper_bound", versions=">=0.30"),
    *called(f"{_COMMON}.replace", "block_table_tensor", "slot_mapping"),
)

_LAYERS: Final = (
    *overridden(
        f"{_IMPL}.__init__",
        *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
        *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
    ),
    *overridden(
        f"{_IMPL}.forward",
        *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale"),
        "output_block_scale",
    ),
    *overridden(f"{_IMPL}.process_weights_after_loading", "act_dtype"),
    *read(_IMPL, "can_return_lse_for_decode", "supports_dcp", "dcp_world_size", "dcp_rank"),
    *read(f"{_CONTRACT}:AttentionLayer", "_q_scale", "_k_scale", "_v_scale"),
    *read(f"{_ATTENTION}:Attention", "attn_backend", "impl", "kv_cache", "head_size_v"),
)

_CONFIGURATION: Final = (
    *called("vllm.config:get_current_vllm_config_or_none"),
    *read(
        "vllm.config:VllmConfig",
        *("attention_config", "cache_config", "compilation_config", "model_config", "parallel_config"),
        *("scheduler_config", "speculative_config"),
    ),
    *read("vllm.config:AttentionConfig", "backend", "flash_attn_max_num_splits_for_cuda_graph"),
    *read("vllm.config:AttentionConfig", "backend_per_kind", versions=">=0.28"),
    *read("vllm.config:CacheConfig", "kv_cache_layout", versions=_LAYOUTS),
    *read("vllm.config:CacheConfig", "calculate_kv_scales", versions="<0.28"),
    *read("vllm.config:CompilationConfig", "static_forward_context", "cudagraph_capture_sizes", "cudagraph_mode"),
    *called("vllm.config:CUDAGraphMode.has_full_cudagraphs"),
    *called("vllm.config:CUDAGraphMode.separate_routine"),
    *read(
        "vllm.config:ModelConfig",
        *(
            "disable_cascade_attn",
            "dtype",
            "enable_cumem_allocator",
            "hf_config",
            "hf_text_config",
            "max_model_len",
            "use_mla",
        ),
    ),
    *called("vllm.config:ModelConfig.get_head_size"),
    *called("vllm.config:ModelConfig.get_num_attention_heads", "parallel_config"),
    *called("vllm.config:ModelConfig.get_num_kv_heads", "parallel_config"),
    *called("vllm.config:ModelConfig.get_sliding_window"),
    *read(
        "vllm.config:ParallelConfig",
        *("cp_kv_cache_interleave_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
        *("tensor_parallel_size", "use_ubatching"),
    ),
    *read("vllm.config:SchedulerConfig", "async_scheduling", "max_num_batched_tokens", "max_num_seqs"),
    *read("vllm.config:SpeculativeConfig", "num_speculative_tokens"),
    *read("vllm.distributed:parallel_state"),
    *called("vllm.distributed.parallel_state:get_dcp_group"),
    *called("vllm.distributed.parallel_state:get_tensor_model_parallel_rank"),
)

_INT8: Final = (
    *read("vllm.config:VllmConfig", "additional_config"),
    *read("vllm.config:CacheConfig", "cache_dtype", "kv_cache_dtype_skip_layers"),
    *called("vllm.config.cache:register_kv_cache_dtype", "name", versions=_DTYPES),
    *called("vllm.config.cache:is_known_kv_cache_dtype", "name", versions=_DTYPES),
    *overridden("vllm.config.cache:KVCacheDTypeHandler.torch_dtype", versions=_DTYPES),
    *overridden("vllm.config.cache:KVCacheDTypeHandler.quant_mode", versions=_DTYPES),
    *read("vllm.v1.kv_cache_interface:KVQuantMode", "INT8_PER_TOKEN_HEAD"),
    *read("vllm.v1.kv_cache_interface:KVQuantMode", "CUSTOM", versions=_DTYPES),
)

_LAYER_PACKAGE: Final = "vllm.model_executor.layers"
_MODEL: Final = (
    *called("vllm.compilation.decorators:support_torch_compile", "dynamic_arg_dims"),
    *called("vllm.distributed:get_pp_group"),
    *called("vllm.distributed:get_tensor_model_parallel_world_size"),
    *read("vllm.config:VllmConfig", "quant_config"),
    *read("vllm.model_executor.layers.attention:Attention"),
    *called(
        f"{_LAYER_PACKAGE}.linear:MergedColumnParallelLinear",
        *("input_size", "output_sizes", "bias", "quant_config", "prefix"),
    ),
    *called(
        f"{_LAYER_PACKAGE}.linear:QKVParallelLinear",
        *("hidden_size", "head_size", "total_num_heads", "total_num_kv_heads", "bias", "quant_config", "prefix"),
    ),
    *called(
        f"{_LAYER_PACKAGE}.linear:RowParallelLinear", "input_size", "output_size", "bias", "quant_config", "prefix"
    ),
    *called(f"{_LAYER_PACKAGE}.logits_processor:LogitsProcessor", "vocab_size", "scale"),
    *called(f"{_LAYER_PACKAGE}.rotary_embedding:get_rope", "head_size", "max_position", "rope_parameters"),
    *called(f"{_LAYER_PACKAGE}.vocab_parallel_embedding:VocabParallelEmbedding", "num_embeddings", "embedding_dim"),
    *called(
        f"{_LAYER_PACKAGE}.vocab_parallel_embedding:ParallelLMHead",
        *("num_embeddings", "embedding_dim", "quant_config", "prefix"),
    ),
    *called(f"{_LAYER_PACKAGE}.vocab_parallel_embedding:ParallelLMHead.tie_weights", "embed_tokens"),
    *called("vllm.model_executor.model_loader.weight_utils:default_weight_loader", "param", "loaded_weight"),
    *read("vllm.model_executor.models.interfaces:SupportsPP"),
    *called("vllm.model_executor.models.utils:is_pp_missing_parameter", "name", "model"),
    *called("vllm.model_executor.models.utils:make_empty_intermediate_tensors_factory", "keys", "hidden_size"),
    *called("vllm.model_executor.models.utils:make_layers", "num_hidden_layers", "layer_fn", "prefix"),
    *called("vllm.model_executor.models.utils:maybe_prefix", "prefix", "name"),
    *read("vllm.model_executor.models.registry:ModelRegistry"),
    *called("vllm.model_executor.models.registry:_ModelRegistry.register_model", "model_arch", "model_cls"),
    *called("vllm.model_executor.models.registry:_ModelRegistry.get_supported_archs"),
    *read("vllm.sequence:IntermediateTensors"),
)

_BENCH: Final = (*read("vllm:LLM", "collective_rpc", "llm_engine"), *read("vllm:SamplingParams"))

MEMBERS: Final[tuple[Member, ...]] = (
    *_REGISTRATION,
    *_PLATFORM,
    *_STAND_IN,
    *_SELECTION_MEMBERS,
    *_LATENT,
    *_CACHES,
    *_METADATA,
    *_LAYERS,
    *_CONFIGURATION,
    *_INT8,
    *_MODEL,
    *_BENCH,
)
