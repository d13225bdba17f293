"""What attnplug-sglang uses of SGLang, as data: classes, functions, parameters and fields, and their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.drift import called, overridden, read

if TYPE_CHECKING:
    from packaging.version import Version

    from tests.drift import Member


def members_of(version: Version) -> list[Member]:
    """Return what is used of one version."""
    return [each for each in MEMBERS if each.versions.contains(version, prereleases=True)]


_SRT: Final = "sglang.srt"
_BASE: Final = f"{_SRT}.layers.attention.base_attn_backend:AttentionBackend"
_REGISTRY: Final = f"{_SRT}.layers.attention.attention_registry"
_LAYER: Final = f"{_SRT}.layers.radix_attention:RadixAttention"
_POOL: Final = f"{_SRT}.mem_cache.memory_pool"
_SWA: Final = f"{_SRT}.mem_cache.swa_memory_pool:SWAKVPool"
_BATCH: Final = f"{_SRT}.model_executor.forward_batch_info"
_ARGS: Final = f"{_SRT}.server_args"
_CHOICES: Final = f"{_SRT}.arg_groups.choices"
_HANDLERS: Final = f"{_SRT}.models.deepseek_common.attention_backend_handler"
_HOOKS: Final = f"{_SRT}.plugins.hook_registry"
_CALL: Final = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")

MEMBERS: Final[tuple[Member, ...]] = (
    # registration
    *read(f"{_REGISTRY}:ATTENTION_BACKENDS"),
    *called(f"{_REGISTRY}:register_attention_backend", "name"),
    *read(f"{_ARGS}:ATTENTION_BACKEND_CHOICES"),
    *read(f"{_ARGS}:DETERMINISTIC_ATTENTION_BACKEND_CHOICES"),
    *read(f"{_ARGS}:DRAFT_ATTENTION_BACKEND_CHOICES", versions=">=0.5.20"),
    *called(f"{_ARGS}:add_attention_backend_choices", "choices", versions="<0.5.20"),
    *called(f"{_ARGS}:add_deterministic_attention_backend_choices", "choices", versions="<0.5.20"),
    *read(f"{_CHOICES}:add_attention_backend_choices", versions=">=0.5.20"),
    *read(f"{_CHOICES}:add_deterministic_attention_backend_choices", versions=">=0.5.20"),
    *read(f"{_CHOICES}:add_draft_attention_backend_choices", versions=">=0.5.20"),
    *called(f"{_SRT}.plugins:load_plugins"),
    # the default page size
    *called(f"{_HOOKS}:HookRegistry.register", "target", "hook", "hook_type"),
    *read(f"{_HOOKS}:HookType.AFTER"),
    *called(f"{_SRT}.arg_groups.overrides:_page_size_default", "view"),
    *called(f"{_SRT}.arg_groups.pipeline:_page_size_default", "view", versions=">=0.5.20"),
    # options
    *called(f"{_SRT}.arg_groups.overrides:resolved_view", "server_args"),
    # the backend
    *overridden(f"{_BASE}.init_forward_metadata", "forward_batch"),
    *overridden(f"{_BASE}.init_forward_metadata_out_graph", "forward_batch", "in_capture"),
    *overridden(f"{_BASE}.init_forward_metadata_in_graph", "forward_batch"),
    *overridden(f"{_BASE}.init_cuda_graph_state", "max_bs", "max_num_tokens"),
    *overridden(f"{_BASE}.get_cuda_graph_seq_len_fill_value"),
    *overridden(f"{_BASE}.forward_extend", *_CALL),
    *overridden(f"{_BASE}.forward_decode", *_CALL),
    *overridden(f"{_BASE}.update_verify_buffers_to_fill_after_draft", "spec_info", "cuda_graph_bs"),
    *overridden(f"{_BASE}.support_triton"),
    *read(_BASE, "needs_cpu_seq_lens"),
    # layers
    *read(
        _LAYER,
        *("layer_id", "qk_head_dim", "v_head_dim", "tp_q_head_num", "tp_k_head_num", "scaling", "sliding_window_size"),
        *("logit_cap", "logit_capping_method", "is_cross_attention", "use_irope", "xai_temperature_len"),
        *("pos_encoding_mode", "attn_type", "k_scale", "v_scale", "k_scale_float", "v_scale_float"),
    ),
    *read(f"{_SRT}.layers.radix_attention:AttentionType", "DECODER", "DECODER_BIDIRECTIONAL", "ENCODER_ONLY"),
    # pools
    *read(f"{_POOL}:ReqToTokenPool.req_to_token"),
    *read(f"{_POOL}:MHATokenToKVPool", "size", "dtype", "layer_transfer_counter"),
    *called(f"{_POOL}:MHATokenToKVPool.get_key_buffer", "layer_id"),
    *called(f"{_POOL}:MHATokenToKVPool.get_value_buffer", "layer_id"),
    *read(_SWA, "full_kv_pool", "swa_kv_pool", "layers_mapping", "full_to_swa_index_mapping"),
    *called(f"{_SWA}.get_key_buffer", "layer_id"),
    *called(f"{_SWA}.get_value_buffer", "layer_id"),
    *called(f"{_SWA}.translate_loc_from_full_to_swa", "kv_indices"),
    *read(
        f"{_POOL}:MLATokenToKVPool",
        "size",
        "dtype",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "use_dsa",
        "layer_transfer_counter",
    ),
    *called(f"{_POOL}:MLATokenToKVPool.get_key_buffer", "layer_id"),
    # latents
    *read(f"{_ARGS}:CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", versions=">=0.5.20"),
    *read(f"{_SRT}.model_executor.model_runner:CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS", versions="<0.5.20"),
    *called(f"{_HANDLERS}:AttentionBackendRegistry.register", "backend_name", "handler_func"),
    *called(f"{_HANDLERS}:handle_attention_fa3", "attn", "forward_batch"),
    *called(f"{_HANDLERS}:_dispatch_mla_subtype", "attn", "forward_batch"),
    *read(f"{_HANDLERS}:AttnForwardMethod", "MHA_ONE_SHOT", "MHA_CHUNKED_KV"),
    # steps
    *read(
        f"{_BATCH}:ForwardBatch",
        *("forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"),
        *("extend_seq_lens", "extend_seq_lens_cpu", "spec_info", "_original_forward_mode", "global_num_tokens_cpu"),
        *("extend_prefix_lens_cpu", "mha_return_lse", "mha_one_shot", "attn_attend_prefix_cache", "prefix_chunk_idx"),
        "prefix_chunk_seq_lens_cpu",
    ),
    *(
        member
        for name in ("is_idle", "is_decode", "is_decode_or_idle", "is_target_verify")
        for member in called(f"{_BATCH}:ForwardMode.{name}")
    ),
    *read(
        f"{_ARGS}:ServerArgs",
        *("chunked_prefill_size", "max_prefill_tokens", "speculative_num_draft_tokens", "page_size"),
        *("enable_deterministic_inference", "attention_backend", "prefill_attention_backend"),
        *("decode_attention_backend", "enable_unified_memory", "dcp_size", "enable_prefill_cp", "attn_cp_size"),
        "speculative_eagle_topk",
    ),
    # the benchmark
    *read(f"{_SRT}.configs.model_config:ModelConfig", "from_server_args"),
    *read(f"{_SRT}.model_executor.model_runner:ModelRunner"),
    *read(f"{_ARGS}:PortArgs", "init_new"),
    *read(f"{_SRT}.model_executor.forward_context:ForwardContext"),
    *read(f"{_SRT}.model_executor.forward_context:forward_context"),
    *called(
        f"{_SRT}.distributed.bootstrap:init_parallel_runtime", "server_args", "device", "dist_port", versions=">0.5.20"
    ),
    *called(f"{_SRT}.distributed.bootstrap:init_layer_runtime", "model_config", versions=">0.5.20"),
    *read(f"{_SRT}.runtime_context:SpawnRanks", versions=">0.5.20"),
    *called(f"{_SRT}.runtime_context:publish", "server_args", "role", "ranks", versions=">0.5.20"),
)
"""What is used. A parameter that SGLang adds with a default to what is called changes nothing."""
