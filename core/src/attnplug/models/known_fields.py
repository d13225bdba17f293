"""Which fields of a configuration decide about attention, which do not, and which are unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.models.architectures import FORBIDDEN_FIELDS
from attnplug.models.patterns import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.models.fields import Fields

_DECIDING: Final = """
_sliding_window_pattern add_full_attention_sink_bias add_swa_attention_sink_bias alibi attention_chunk_size
attention_k_eq_v attention_multiplier attention_other_setting attention_window_size attn_config attn_layer_indices
attn_layer_offset attn_layer_period attn_logit_softcapping attn_type_list block_configs block_types
blocksparse_block_size blocksparse_homo_head_pattern blocksparse_num_local_blocks blocksparse_vert_stride causal
cross_attention_layers dense_attention_every_n_layers full_attention_interval full_attn_idxs
global_attn_every_n_layers global_head_dim hybrid_layer_pattern hybrid_override_pattern kv_n_heads layer_group_size
layer_types layers_block_type linear_attn_config local_attention multi_query multi_query_attention
multi_query_group_num mup_attn_multiplier n_kv_heads new_decoder_architecture num_attention_groups
num_attention_heads_per_layer num_global_key_value_heads num_key_value_heads num_kv_heads num_kv_shared_layers
num_query_groups num_sliding_attention_heads per_layer_config prefix_dense_sliding_window_pattern
query_pre_attn_scalar scale_attn_by_inverse_layer_idx sliding_window sliding_window_pattern sliding_window_size
swa_head_dim swa_num_attention_heads swa_num_key_value_heads swa_v_head_dim use_alibi v_head_dim
"""
DECIDING: Final = frozenset(_DECIDING.split())
"""Fields that a reader has to read where they are set: without one of them, another attention is computed."""

_SHAPES: Final = """
attention_head_dim attention_heads attention_hidden_size d_kv decoder_attention_heads encoder_attention_heads head_dim
head_size hybrid_layer_ids index_head_dim index_n_heads index_skip_topk_offset index_topk_freq index_topk_pattern
indexer_compress_ratio indexer_head_dim indexer_kv_heads indexer_types kv_channels kv_lora_rank logits_soft_cap
max_window_layers n_head n_heads no_rope_layer_interval no_rope_layers num_attention_heads num_heads num_layers
q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim relative_attention_max_distance
relative_attention_num_buckets scale_attn_weights use_bidirectional_attention use_mla use_sliding_window
"""
# Fields with a word of `_TOPICS` that change nothing that a backend is requested, and fields without any known word.
_HARMLESS: Final = """
_attn_implementation _name_or_path activation_sparsity_pattern add_bias_linear attention_bias attention_dropout
attention_in_multiplier attention_out_bias attention_out_multiplier attention_probs_dropout_prob
attention_softmax_in_fp32 attention_value_scale attn_bias attn_implementation attn_pdrop attn_scale
attn_temperature_tuning block_multiple_of block_size chunk_size chunk_size_feed_forward classifier_proj_size
compression_config d_model decoder_sparse_step deterministic_flash_attn dim emb_dim encoder_layers end_n_top
first_k_dense_replace floor_scale full_attn_alpha_factor full_attn_beta_factor heads_per_ngram hidden_size is_encoder
key_multiplier learnable_sink_init linear_attn_alpha_factor linear_attn_beta_factor linear_head_dim
linear_key_head_dim linear_num_heads linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias
lm_head_multiplier mamba_chunk_size mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads mamba_num_heads
mask_feature_length mask_feature_min_masks mask_feature_prob mask_index mask_time_length mask_time_min_masks
mask_time_prob mask_token_id max_source_positions max_target_positions model_max_length model_type moe_layer_end_index
moe_layer_start_index moe_layers_enum n_ctx n_embd n_group n_groups n_langs n_layer n_layers n_mamba_heads n_positions
num_hidden_layers num_ln_in_parallel_attn num_local_experts output_attentions parallel_attn prediction_head_size
quantization_config reorder_and_upcast_attn return_dict rope_theta scale_attention_softmax_in_fp32 scale_depth
share_q_dim shared_attention sparse_pred_ignore_index sparse_prediction start_n_top unk_index use_associative_scan
use_attention_gate use_cache use_cache_quantization use_flash_attn use_long_context use_mambapy use_mem_eff_path
use_shared_attention_adapter use_weighted_layer_sum vision_use_head
"""
_EXACT: Final = DECIDING | FORBIDDEN_FIELDS.keys() | {*_SHAPES.split(), *_HARMLESS.split()}
# A field with a word of `_ELSEWHERE` is about something else than attention, unless it has one of these too.
_TOPICS: Final = """
alibi attention attn bidirectional causal chunk chunked dilated dilation global head heads hybrid index indexer key kv
local mask pattern query select sink sinks sliding sparse sparsity swa value window windowed windows
"""
_ABOUT_ATTENTION: Final = frozenset(_TOPICS.split())
_ELSEWHERE: Final = """
act activation activations adapter afn altup architecture architectures asm audio augment auto beta bias bos capacity
cca clip cls codebook coef coefficient concat conv conv1d cutoff decoder dff dim dropout dtype emb embd embed
embedding embeddings enable eod eoh eos eps epsilon expand expansion expert experts feat feature feed ff ffn final
fp32 fused gate gated gating gelu hc id id2label ids image img init initializer inner input intermediate jitter kda
label2id labels lang language languages laurel layerdrop layernorm learned linear lm logit logits loss lru mamba
median mel mlp mlps moe mrope mtp mup ngram norm normalization num output pad parameters params patch pdrop ple
pooling pos prefixes pretraining problem projection projector prompt pronunciation qa qk qkv rank resid residual rms
rope rotary route routed router routing samples scalar score scoring seed seq shape shortcut slow softcapping ssm std
summary suppress swiglu task temperature text theta tie time token tokenizer tokens topk torch training transformers
tts unk video vision vit vocab vocabulary weight weights word z
"""
_WORDS: Final = frozenset(_ELSEWHERE.split())


def dropped(fields: Fields, name: str) -> str | None:
    """Return why a model type does not describe this attention: a field that decides was not looked up."""
    for each in sorted(DECIDING - fields.read):
        value = fields.data.get(each)
        if value and not (each in ("layer_types", "layers_block_type") and set(value) <= {FULL, "attention"}):
            return f"its {each} decides about attention, and is not read for {name!r}"
    return None


def unknown(fields: Fields, *, by_name: bool = False) -> Iterator[str]:
    """
    Yield the names of fields that are set, and of which it is not known whether they change attention.

    Args:
        fields: The configuration.
        by_name: Those alone whose name has a word of attention.
    """
    for name, value in fields.data.items():
        words = set(name.lower().strip("_").split("_"))
        is_elsewhere = (by_name or bool(words & _WORDS)) and not words & _ABOUT_ATTENTION
        if value and name not in _EXACT and not is_elsewhere:
            yield name
