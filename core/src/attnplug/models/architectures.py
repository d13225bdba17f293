"""The attention of each architecture of transformers: a table, compared with the library's modules by the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import frozen

from attnplug.models.patterns import (
    CROSS,
    FULL,
    INDEXED,
    LINEAR,
    SLIDING,
    KvHeads,
    Pattern,
    at,
    baichuan_has_alibi,
    block_sparse,
    chatglm_kv_heads,
    chunked_with_rope,
    cohere2_moe,
    dbrx_kv_heads,
    early_alternating,
    every,
    every_layer,
    falcon_has_alibi,
    falcon_kv_heads,
    first_of,
    flint,
    full,
    glm_indexers,
    hy_indexers,
    indexed,
    jamba,
    kimi_linear,
    lara_mini,
    last_full,
    last_group_full,
    late,
    late_windows,
    lfm3,
    listed,
    mimo,
    minimax_m1,
    mpt,
    nas_blocks,
    repeated,
    sliding_without_rope,
    spelled_out,
    two_per_layer,
    uniform,
    windowed_if_set,
    windowed_or_full,
    zamba_hybrid,
    zaya,
)
from attnplug.models.scales import (
    Scale,
    granite,
    inverse_root,
    mistral4,
    mpt_scale,
    mup,
    pre_attn_scalar,
    unit,
    weights_switch,
    yarn,
    zamba,
)
from attnplug.models.shapes import (
    LayerFields,
    gemma4,
    heads_per_layer,
    mimo_heads,
    nas,
    own,
    windowed_heads,
    zamba_heads,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.models.fields import Fields

Family = Literal["decoder", "encoder", "encoder_decoder"]


@frozen(kw_only=True)
class Architecture:
    """
    How the configuration of a model type is read.

    Attributes:
        family: Whether its layers decode, encode, or both with cross attention.
        path: The end of an attention module's name in `named_modules()`, ``{}`` for the layer's number;
            encoder-decoders fill in the stack too. A second ``{}`` is the module's number inside its layer.
        cross: The same for cross attention.
        pattern: The rule that says which layers are windowed, chunked or full.
        scale: The factor of the scores.
        latent: Whether attention is multi-head latent attention (MLA) where the configuration has a `kv_lora_rank`.
        indexers: Where tokens of such layers are selected from a paged KV cache, the rule that says which layers have
            an indexer, and which are ``"shared"``: they reuse the selection of an earlier layer.
        per_layer: The attention modules of one layer.
        layer: What a single layer has instead of the model's fields.
        soft_cap: The field that holds the soft cap of the scores.
        sinks: The layer kinds that have learned sinks.
        alibi: The form of the ALiBi bias.
        has_alibi: Whether a configuration has ALiBi; None where the architecture always has it, or never.
        kv_heads: What reads the number of key and value heads, where that is no field of its usual name.
        floors: Whether the module rounds the size of its heads down where the heads do not divide the hidden size.
        window: The field that holds the window.
        value_size: The field that holds the size of a value head, where that is another than of keys.
        both_sides: Whether every token attends to later ones too with `use_bidirectional_attention`, and windows
            are written as their whole width.
        beside: What a layer has beside its attention, for messages; empty where that is a feed-forward layer alone.
    """

    family: Family = "decoder"
    path: str = "layers.{}.self_attn"
    cross: str = ""
    pattern: Pattern = full
    scale: Scale = inverse_root
    latent: bool = False
    indexers: Pattern | None = None
    per_layer: int = 1
    layer: LayerFields = own
    soft_cap: str = ""
    sinks: frozenset[str] = frozenset()
    alibi: str | None = None
    has_alibi: Callable[[Fields], bool] | None = None
    kv_heads: KvHeads | None = None
    floors: bool = False
    window: str = "sliding_window"
    value_size: str = ""
    beside: str = ""
    both_sides: bool = False


def _because(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


def _each(names: str, architecture: Architecture) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), architecture)


def _decoder(pattern: Pattern = full, **rest: Any) -> Architecture:
    return Architecture(pattern=pattern, **rest)


_EVERYWHERE: Final = frozenset({FULL, SLIDING})
_BERT: Final = Architecture(family="encoder", path="encoder.layer.{}.attention.self")
_BART: Final = Architecture(
    family="encoder_decoder", path="{stack}.layers.{}.self_attn", cross="decoder.layers.{}.encoder_attn"
)
_MODERN_BERT: Final = Architecture(
    path="layers.{}.attn", pattern=listed(first_of(3, field="global_attn_every_n_layers")), window="local_attention"
)

_PLAIN: Final = (
    _each(
        "apertus apertus1p5_text arcee aria_text biogpt bitnet cohere emu3_text_model ernie4_5 ernie4_5_moe"
        " ernie4_5_vl_moe_text exaone flex_olmo gemma glm glm4 glm4_moe glm4v_moe_text glm4v_text helium"
        " hunyuan_v1_dense hunyuan_v1_moe hy_v3"
        " internlm3 iquestcoder jais2 llama minimax_m2 nanochat nemotron olmo olmo2 olmoe persimmon phi"
        " qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text sarvam_moe seed_oss solar_open stablelm xglm",
        _decoder(),
    )
    | _each("granite granitemoe granitemoeshared hyperclovax", _decoder(scale=granite))
    | _each("gpt2 gpt-sw3", _decoder(path="h.{}.attn", scale=weights_switch))
    | _each("gpt_bigcode", _decoder(path="h.{}.attn", scale=weights_switch))
    | _each("gpt_neox gpt_neox_japanese", _decoder(path="layers.{}.attention"))
    | _each("ctrl", _decoder(path="h.{}.multi_head_attention"))
    | _each("opt", _decoder(path="decoder.layers.{}.self_attn"))
    | _each("clip_text_model", _decoder(path="encoder.layers.{}.self_attn"))
    | _each("bloom", _decoder(path="h.{}.self_attention", alibi="linear"))
    | _each("mpt", _decoder(mpt, path="blocks.{}.attn", alibi="linear", scale=mpt_scale))
    | _each(
        "falcon",
        _decoder(path="h.{}.self_attention", alibi="linear", has_alibi=falcon_has_alibi, kv_heads=falcon_kv_heads),
    )
    | _each("dbrx", _decoder(path="blocks.{}.norm_attn_norm.attn", kv_heads=dbrx_kv_heads))
    | _each("gptj codegen openai-gpt", _decoder(path="h.{}.attn"))
    | _each(
        "mllama_text_model",
        _decoder(at("cross_attention_layers", CROSS, FULL, default=range(3, 39, 5)), cross="layers.{}.cross_attn"),
    )
)

_WINDOWED: Final = (
    _each("phi3 phi4_multimodal", _decoder(uniform))
    | _each("mistral mixtral phimoe qwen3_moe starcoder2 ministral3", _decoder(uniform))
    | _each("ministral", _decoder(listed(uniform)))
    | _each("qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text qwen3", _decoder(listed(late)))
    | _each("dots1", _decoder(listed(late_windows)))
    | _each("qwen2_moe", _decoder(listed(early_alternating)))
    | _each("exaone4 exaone_moe", _decoder(listed(windowed_or_full(every(4, field="sliding_window_pattern")))))
    | _each("cohere2", _decoder(listed(every(4, field="sliding_window_pattern"))))
    | _each("olmo3", _decoder(listed(every(4))))
    | _each("afmoe", _decoder(listed(every(4, field="global_attn_every_n_layers"))))
    | _each("cohere2_moe", _decoder(listed(cohere2_moe)))
    | _each("mellum cohere_compass_text", _decoder(listed(every_layer)))
    | _each("laguna", _decoder(listed(every_layer), layer=heads_per_layer))
    | _each("step3p5", _decoder(listed(every_layer), layer=windowed_heads, scale=pre_attn_scalar))
    | _each("beam", _decoder(listed(last_full(every(6)))))
    | _each("kolibri1", _decoder(listed(every(5))))
    | _each("cwm", _decoder(listed(first_of(4))))
    | _each("smollm3", _decoder(listed(sliding_without_rope)))
    | _each("llama4_text", _decoder(listed(chunked_with_rope)))
    | _each(
        "gemma2 vaultgemma",
        _decoder(listed(every(2)), soft_cap="attn_logit_softcapping", scale=pre_attn_scalar),
    )
    | _each(
        "gemma3_text",
        _decoder(listed(every(6, field="sliding_window_pattern")), scale=pre_attn_scalar, both_sides=True),
    )
    | _each("gemma3n_text", _decoder(listed(every(5)), scale=unit))
    | _each(
        "gemma4_text gemma4_unified_text",
        _decoder(last_full(listed(every(6))), scale=unit, layer=gemma4),
    )
    | _each("gpt_oss", _decoder(listed(every(2)), sinks=_EVERYWHERE))
    | _each(
        "mimo_v2_flash",
        _decoder(listed(mimo), sinks=frozenset({SLIDING}), layer=mimo_heads, value_size="v_head_dim"),
    )
    | _each("flint", _decoder(listed(flint), sinks=_EVERYWHERE))
    | _each("granite_swa granitemoe_swa", _decoder(listed(first_of(4)), sinks=_EVERYWHERE, scale=granite))
    | _each("modernbert-decoder", _MODERN_BERT)
)

_BAILING: Final = "layers.{}.attention"

# Published with their own code, or in a release after `LIBRARY`. Their configurations are read as that code reads them.
REMOTE: Final = (
    _each("phi3small", _decoder(block_sparse, scale=mup))
    | _each("aquila internlm internlm2 minicpm orion step3_text xverse yi", _decoder())
    | _each(
        "bailing_moe_linear", _decoder(last_group_full(every(8, field="layer_group_size", other=LINEAR)), path=_BAILING)
    )
    | _each("minimax_m1 minimax_text_01", _decoder(minimax_m1))
    | _each("kimi_k2", _decoder(scale=yarn, latent=True))
    | _each("chatglm", _decoder(path="encoder.layers.{}.self_attention", kv_heads=chatglm_kv_heads))
    | _each("baichuan", _decoder(alibi="linear", has_alibi=baichuan_has_alibi))
    | _each("qwen", _decoder(path="h.{}.attn"))
    | _each("bailing_moe bailing_moe_v2", _decoder(path=_BAILING))
    | _each("nemotron-nas", _decoder(nas_blocks, layer=nas))
)
"""Model types that transformers has no class for: no default of theirs is known."""

_LETTERS: Final = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_GRIFFIN: Final = {"recurrent": LINEAR, "attention": SLIDING}
_HYBRID: Final = (
    _each(
        "qwen3_next qwen3_5_text qwen3_5_moe_text",
        _decoder(listed(every(4, field="full_attention_interval", other=LINEAR))),
    )
    | _each("lfm2", _decoder(listed(at("full_attn_idxs", other="conv"))))
    | _each("lfm2_moe", _decoder(listed()))
    | _each("lara_mini", _decoder(listed(lara_mini)))
    | _each("lfm3", _decoder(listed(lfm3)))
    | _each("zaya", _decoder(zaya, beside="a convolution over queries and keys"))
    | _each("granitemoehybrid", _decoder(listed(), scale=granite))
    | _each("olmo_hybrid", _decoder(listed(every(4, other=LINEAR))))
    | _each("minimax", _decoder(windowed_if_set(listed(first_of(2, other=LINEAR)))))
    | _each("jamba", _decoder(listed(jamba)))
    | _each("bamba", _decoder(listed(at("attn_layer_indices", default=()))))
    | _each("falcon_h1", _decoder(beside="a Mamba-2 mixer"))
    | _each("nemotron_h", _decoder(listed(spelled_out("hybrid_override_pattern", _LETTERS)), path="layers.{}.mixer"))
    | _each(
        "recurrent_gemma",
        _decoder(
            repeated("block_types", _GRIFFIN, ("recurrent", "recurrent", "attention")),
            path="layers.{}.temporal_block",
            window="attention_window_size",
        ),
    )
    | _each(
        "zamba",
        _decoder(
            listed(zamba_hybrid),
            path="layers.{}.shared_transf.self_attn",
            scale=zamba,
            layer=zamba_heads,
            beside="a Mamba mixer",
        ),
    )
    | _each(
        "zamba2",
        _decoder(
            listed(),
            path="layers.{}.shared_transformer.self_attn",
            scale=zamba,
            layer=zamba_heads,
            beside="a Mamba-2 mixer",
        ),
    )
)

_LATENT: Final = (
    _each(
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 sarvam_mla youtu",
        _decoder(scale=yarn, latent=True),
    )
    | _each("mistral4", _decoder(scale=mistral4, latent=True))
    | _each(
        "longcat_flash",
        _decoder(two_per_layer, path="layers.{}.self_attn.{}", scale=yarn, latent=True, per_layer=2),
    )
    | _each("kimi_linear", _decoder(listed(kimi_linear), latent=True))
    | _each(
        "bailing_hybrid",
        _decoder(listed(every(6, field="layer_group_size", other=LINEAR)), scale=yarn, latent=True),
    )
    # An indexer chooses the keys of each query: without pages their layers are named, and not described.
    | _each("axk2 deepseek_v32", _decoder(indexed(every_layer), scale=yarn, latent=True, indexers=every_layer))
    | _each("glm_moe_dsa", _decoder(indexed(every_layer), scale=yarn, latent=True, indexers=glm_indexers))
    | _each(
        "hy_v4",
        _decoder(indexed(every_layer), scale=yarn, latent=True, indexers=hy_indexers, sinks=frozenset({INDEXED})),
    )
    | _each("qwen4_exp_text", _decoder(indexed(listed(every(4, field="full_attention_interval", other=LINEAR)))))
)

_ENCODERS: Final = (
    _each(
        "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm"
        " roc_bert xlm-roberta xlm-roberta-xl xmod",
        _BERT,
    )
    | _each("distilbert", Architecture(family="encoder", path="transformer.layer.{}.attention"))
    | _each("xlm", Architecture(family="encoder", path="attentions.{}"))
    | _each("eurobert nomic_bert", Architecture(family="encoder"))
    | _each("modernbert", attrs.evolve(_MODERN_BERT, family="encoder"))
    | _each("ultrabert", Architecture(family="encoder", pattern=listed()))
    | _each("clip_vision_model siglip_vision_model", Architecture(family="encoder", path="encoder.layers.{}.self_attn"))
)

_ENCODER_DECODERS: Final = _each(
    "bart blenderbot blenderbot-small m2m_100 marian mbart mvp pegasus plbart speech_to_text whisper", _BART
)

_ALL_TYPES: Final = {**_PLAIN, **_WINDOWED, **REMOTE, **_HYBRID, **_LATENT, **_ENCODERS, **_ENCODER_DECODERS}
_FLOORING_NAMES: Final = """
apertus cohere ernie4_5 ernie4_5_moe exaone4 exaone_moe glm4_moe glm4v_moe_text granite granite_swa granitemoe
granitemoe_swa granitemoeshared lfm2 lfm2_moe mistral mixtral nanochat nemotron nomic_bert olmo olmo2 olmo3 phi phi3
phimoe qwen2 qwen2_moe qwen3_moe qwen3_omni_moe_text seed_oss smollm3 starcoder2
"""
_FLOORING: Final = frozenset(_FLOORING_NAMES.split())

ARCHITECTURES: Final[dict[str, Architecture]] = {
    name: attrs.evolve(architecture, floors=name in _FLOORING) for name, architecture in _ALL_TYPES.items()
}
"""Model type -> how its configuration is read."""

_T5: Final = Architecture(
    family="encoder_decoder",
    path="{stack}.block.{}.layer.0.SelfAttention",
    cross="decoder.block.{}.layer.1.EncDecAttention",
    scale=unit,
)
BIASED: Final[dict[str, Architecture]] = _each("t5 mt5 umt5", _T5)
"""Model type -> how it is read where every self-attention call has an additive bias; hosts do not pass it on."""

TEXT_TYPES: Final = {
    **{name: f"{name}_text" for name in ("cohere_compass", "dots3_note", "gemma3", "gemma3n", "gemma4", "llama4")},
    **{name: f"{name}_text" for name in ("gemma4_unified", "qwen3_5", "qwen3_5_moe", "qwen4_exp")},
    "emu3": "emu3_text_model",
    "exaone4_5_text": "exaone4",
    "fuyu": "persimmon",
    "got_ocr2": "qwen2",
    "mllama": "mllama_text_model",
    "moss_transcribe_diarize": "qwen3",
    "phi4mm": "phi4_multimodal",
}
"""Model type -> the type that its text is read as, as transformers does; phi4mm is published with its own code."""

_RELATIVE: Final = "it adds a learned bias of relative position to the scores"
STATE: Final = "it is a recurrence over a state, not attention over keys"
_PREFIX: Final = "the tokens of its prefix attend to each other in both directions"
_INDEXER: Final = "a learned indexer chooses the keys"
_LOOPED: Final = "its layers run several times for a token, each time with a separate KV cache"
_ELSEWHERE: Final = "the encoder of its cross attention is another model"
_SHARED: Final = "its layers read the KV cache of another model"
_SPARSE: Final = "its sparsity pattern is neither a window nor a chunk"

REFUSED: Final[dict[str, str]] = {
    **_because(
        "t5 mt5 umt5 longt5 switch_transformers pop2piano pix2struct udop mpnet deberta deberta-v2 prophetnet xlnet"
        " cpmant inkling_text inkling2_text inkling2_loop_text",
        _RELATIVE,
    ),
    **_because("mamba mamba2 falcon_mamba rwkv xlstm", STATE),
    **_because("big_bird bigbird_pegasus longformer led reformer gpt_neo minimax_m3_vl_text", _SPARSE),
    "deepseek_v4": "it attends to compressed keys beside the windowed ones",
    **_because("paligemma git", _PREFIX),
    **_because("dory hrm_text", _LOOPED),
    **_because("musicgen musicgen_melody musicgen_decoder musicgen_melody_decoder trocr", _ELSEWHERE),
    **_because("gemma4_assistant gemma4_unified_assistant", _SHARED),
    "blt": "its bytes are grouped into patches, which attend to each other and to bytes",
    "dots3_note_text": "its windowed layers have multi-head latent attention (MLA) of another size than the others",
    "jetmoe": "a query head reads the KV head of its number modulo theirs, instead of that of its group",
    "moshi": "its window bounds the KV cache alone: prefill attends to all earlier tokens",
    "diffllama": "it subtracts one attention from another",
    "doge": "it learns which keys to mask",
    "roformer": "it rotates the scores' positions differently",
}
"""Model type -> why no requirements describe its attention."""

FORBIDDEN_FIELDS: Final[dict[str, str]] = {
    "kv_lora_rank": "multi-head latent attention (MLA) is not known of this model type",
    **_because("index_topk indexer_budget indexer_n_heads sparse_attention_config", _INDEXER),
    "dual_chunk_attention_config": "dual chunk attention rotates the keys of other chunks in another way",
    **_because("sparse_config moba_topk nsa_config", "each query reads blocks of keys that a score chooses"),
    **_because("num_query_heads", "the number of query heads differs by layer"),
    "prefix_lm": _PREFIX,
    "relative_attention_num_buckets": _RELATIVE,
    "use_bidirectional_attention": "its tokens attend to later ones",
    "add_cross_attention": "the encoder of its cross attention is not in this configuration",
}
"""Field -> why no requirements describe the attention where it is set; 0 and false count as not set."""
