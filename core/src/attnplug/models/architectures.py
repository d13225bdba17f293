"""The attention of each architecture of transformers: a table, compared with the library's modules by the tests."""

from __future__ import annotations

from typing import Any, Final, Literal

import attrs
from attrs import field, frozen

from attnplug.models.patterns import (
    FULL,
    SLIDING,
    KvHeads,
    Pattern,
    block_sparse,
    chunked_with_rope,
    dbrx_kv_heads,
    every,
    falcon_kv_heads,
    first_of,
    full,
    jamba,
    late,
    listed,
    mpt,
    sliding_without_rope,
    uniform,
)

Family = Literal["decoder", "encoder", "encoder_decoder"]


def _words(names: str | frozenset[str]) -> frozenset[str]:
    return frozenset(names.split()) if isinstance(names, str) else names


@frozen(kw_only=True)
class Architecture:
    """
    How the configuration of one model type is read.

    Attributes:
        family: Whether its layers decode, encode, or both with cross attention.
        path: The end of an attention module's name in `named_modules()`, ``{}`` for the layer's number;
            encoder-decoders fill in the stack too.
        cross: The same for the cross attention of encoder-decoders.
        pattern: The rule that says which layers are windowed, chunked or full.
        spelled: Fields that the configuration has to have: transformers has another default for each of them.
        soft_cap: The field that holds the soft cap of the scores.
        sinks: The layer kinds that have learned sinks.
        alibi: The form of the ALiBi bias.
        alibi_switch: The field that switches ALiBi on; empty where the architecture always has it, or never.
        kv_heads: What reads the number of key and value heads, where that is no field of its usual name.
        floors: Whether the module rounds the size of its heads down where the heads do not divide the hidden size.
    """

    family: Family = "decoder"
    path: str = "layers.{}.self_attn"
    cross: str = ""
    pattern: Pattern = full
    spelled: frozenset[str] = field(default="", converter=_words)
    soft_cap: str = ""
    sinks: frozenset[str] = frozenset()
    alibi: str | None = None
    alibi_switch: str = ""
    kv_heads: KvHeads | None = None
    floors: bool = False


def _each(names: str, architecture: Architecture) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), architecture)


def _decoder(pattern: Pattern = full, spelled: str = "", **rest: Any) -> Architecture:
    return Architecture(pattern=pattern, spelled=spelled, **rest)


def _because(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


_KV: Final = "num_key_value_heads"
_HEADS: Final = "head_dim num_key_value_heads"
_WINDOW: Final = "num_key_value_heads sliding_window"
_ALL: Final = "head_dim num_key_value_heads sliding_window"
_EVERYWHERE: Final = frozenset({FULL, SLIDING})
_BERT: Final = Architecture(family="encoder", path="encoder.layer.{}.attention.self")
_BART: Final = Architecture(
    family="encoder_decoder", path="{stack}.layers.{}.self_attn", cross="decoder.layers.{}.encoder_attn"
)

_PLAIN: Final = (
    _each(
        "apertus arcee aria_text biogpt cohere flex_olmo granite granitemoe granitemoeshared hunyuan_v1_dense"
        " hunyuan_v1_moe hyperclovax jais2 llama nanochat nemotron olmo olmo2 olmoe persimmon phi",
        _decoder(),
    )
    | _each("bitnet ernie4_5_moe glm4_moe stablelm", _decoder(spelled=_KV))
    | _each(
        "ernie4_5 gemma glm glm4 helium hy_v3 internlm3 minimax_m2 qwen3_vl_text seed_oss solar_open",
        _decoder(spelled=_HEADS),
    )
    | _each("gpt2 gpt-sw3 gpt_bigcode", _decoder(path="h.{}.attn"))
    | _each("gpt_neox", _decoder(path="layers.{}.attention"))
    | _each("opt", _decoder(path="decoder.layers.{}.self_attn"))
    | _each("clip_text_model", _decoder(path="encoder.layers.{}.self_attn"))
    | _each("bloom", _decoder(path="h.{}.self_attention", alibi="linear"))
    | _each("mpt", _decoder(mpt, path="blocks.{}.attn", alibi="linear"))
    | _each(
        "falcon",
        _decoder(
            spelled="alibi multi_query new_decoder_architecture",
            path="h.{}.self_attention",
            alibi="linear",
            alibi_switch="alibi",
            kv_heads=falcon_kv_heads,
        ),
    )
    | _each("dbrx", _decoder(path="blocks.{}.norm_attn_norm.attn", spelled="attn_config", kv_heads=dbrx_kv_heads))
    | _each("gptj codegen", _decoder(path="h.{}.attn"))
    | _each("xglm", _decoder())
)

_WINDOWED: Final = (
    _each("phi3", _decoder(uniform))
    | _each("mistral mixtral phimoe qwen3_moe starcoder2", _decoder(uniform, _WINDOW))
    | _each("ministral3", _decoder(uniform, _ALL))
    | _each("ministral", _decoder(listed(uniform), _WINDOW))
    | _each("qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text", _decoder(listed(late), _WINDOW))
    | _each("qwen3", _decoder(listed(late), _ALL))
    | _each("dots1 qwen2_moe exaone4 exaone_moe", _decoder(listed(), _WINDOW))
    | _each("cohere2", _decoder(listed(every(4, field="sliding_window_pattern")), "sliding_window"))
    | _each("olmo3", _decoder(listed(every(4)), "sliding_window"))
    | _each("afmoe", _decoder(listed(every(4, field="global_attn_every_n_layers")), "head_dim sliding_window"))
    | _each("cohere2_moe", _decoder(listed(), "head_dim sliding_window"))
    | _each("kolibri1", _decoder(listed(every(5)), _ALL))
    | _each("cwm", _decoder(listed(first_of(4)), _ALL))
    | _each("mellum", _decoder(listed(), _ALL))
    | _each("smollm3", _decoder(listed(sliding_without_rope), _WINDOW))
    | _each("llama4_text", _decoder(listed(chunked_with_rope), "head_dim num_key_value_heads attention_chunk_size"))
    | _each(
        "gemma2 vaultgemma",
        _decoder(listed(every(2)), _ALL + " attn_logit_softcapping", soft_cap="attn_logit_softcapping"),
    )
    | _each("gemma3_text", _decoder(listed(every(6, field="sliding_window_pattern")), _ALL))
    | _each("gemma3n_text", _decoder(listed(every(5)), _ALL + " num_kv_shared_layers"))
    | _each("gemma4_text", _decoder(listed(), _ALL + " num_kv_shared_layers per_layer_config"))
    | _each("gpt_oss", _decoder(listed(every(2)), _ALL, sinks=_EVERYWHERE))
    | _each("flint", _decoder(listed(), _ALL, sinks=_EVERYWHERE))
    | _each("granite_swa", _decoder(listed(first_of(4)), _WINDOW, sinks=_EVERYWHERE))
    | _each("granitemoe_swa", _decoder(listed(first_of(4)), "sliding_window", sinks=_EVERYWHERE))
    | _each(
        "modernbert-decoder",
        _decoder(listed(first_of(3, field="global_attn_every_n_layers")), "local_attention", path="layers.{}.attn"),
    )
)

# Published with its own code, and not in transformers. Its configuration is read as that code reads it.
_BLOCK_SPARSE: Final = _each(
    "phi3small",
    _decoder(block_sparse, "blocksparse_block_size blocksparse_num_local_blocks blocksparse_vert_stride " + _KV),
)

_HYBRID: Final = (
    _each("qwen3_next qwen3_5_text qwen3_5_moe_text", _decoder(listed(), _HEADS))
    | _each("lfm2 lfm2_moe granitemoehybrid", _decoder(listed(), _KV))
    | _each("olmo_hybrid", _decoder(listed()))
    | _each("jamba", _decoder(jamba, "num_key_value_heads attn_layer_period attn_layer_offset"))
)

_ENCODERS: Final = (
    _each(
        "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm roc_bert xlm-roberta"
        " xlm-roberta-xl",
        _BERT,
    )
    | _each("distilbert", Architecture(family="encoder", path="transformer.layer.{}.attention"))
    | _each("eurobert nomic_bert", Architecture(family="encoder"))
    | _each(
        "modernbert",
        Architecture(
            family="encoder",
            path="layers.{}.attn",
            pattern=listed(first_of(3, field="global_attn_every_n_layers")),
            spelled="local_attention",
        ),
    )
    | _each("ultrabert", Architecture(family="encoder", pattern=listed(), spelled="sliding_window"))
    | _each("clip_vision_model siglip_vision_model", Architecture(family="encoder", path="encoder.layers.{}.self_attn"))
)

_ENCODER_DECODERS: Final = _each(
    "bart blenderbot blenderbot-small m2m_100 marian mbart pegasus plbart speech_to_text whisper", _BART
)

_ALL_TYPES: Final = {**_PLAIN, **_WINDOWED, **_BLOCK_SPARSE, **_HYBRID, **_ENCODERS, **_ENCODER_DECODERS}
_FLOORING: Final = _words(
    "apertus cohere ernie4_5 ernie4_5_moe exaone4 exaone_moe glm4_moe granite granite_swa granitemoe granitemoe_swa"
    " granitemoeshared lfm2 lfm2_moe mistral mixtral nanochat nemotron nomic_bert olmo olmo2 olmo3 phi phi3 phimoe"
    " qwen2 qwen2_moe qwen3_moe seed_oss smollm3 starcoder2"
)

ARCHITECTURES: Final[dict[str, Architecture]] = {
    name: attrs.evolve(architecture, floors=name in _FLOORING) for name, architecture in _ALL_TYPES.items()
}
"""Model type -> how its configuration is read."""

_RELATIVE: Final = "it adds a learned bias of relative position to the scores"
_STATE: Final = "it is a recurrence over a state, not attention over keys"
_SPARSE: Final = "its sparsity pattern is neither a window nor a chunk"

REFUSED: Final[dict[str, str]] = {
    **_because(
        "t5 mt5 umt5 longt5 switch_transformers pop2piano pix2struct udop mpnet deberta deberta-v2 prophetnet xlnet"
        " cpmant inkling_text inkling2_text",
        _RELATIVE,
    ),
    **_because("mamba mamba2 falcon_mamba rwkv xlstm", _STATE),
    **_because("big_bird bigbird_pegasus longformer led reformer gpt_neo minimax_m3_vl_text", _SPARSE),
    "deepseek_v4": "it attends to compressed keys beside the windowed ones",
    "diffllama": "it subtracts one attention from another",
    "doge": "it learns which keys to mask",
    "roformer": "it rotates the scores' positions differently",
    "paligemma": "the tokens of its prefix attend to each other in both directions",
}
"""Model type -> why no requirements describe its attention."""

FORBIDDEN_FIELDS: Final[dict[str, str]] = {
    "kv_lora_rank": "multi-head latent attention (MLA) has a compressed KV cache, which contract 1.0 does not express",
    "index_topk": "a learned indexer chooses the keys",
    "relative_attention_num_buckets": _RELATIVE,
    "use_bidirectional_attention": "some of its tokens attend to later ones",
    "add_cross_attention": "the encoder of its cross attention is not in this configuration",
}
"""Field -> why no requirements describe the attention where it is set; 0 and false count as not set."""
