"""The needs of multi-head latent attention (MLA) and of its indexer, in words: no requirements express them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.models.patterns import MLA

if TYPE_CHECKING:
    from attnplug.models.fields import Fields

_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def latent_attention(fields: Fields, dtype: str) -> str | None:
    """
    Return the needs of latent attention in words, None where the configuration has none.

    A token's keys and values are one latent of `kv_lora_rank` values, and `qk_rope_head_dim` rotated values, which all
    query heads share; the up-projections of keys and values are part of the attention or of the model.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Args:
        fields: The configuration.
        dtype: Dtype of the KV cache, for its size.

    Raises:
        RequirementsError: A field that decides is missing or invalid.
    """
    rank = fields.integer("kv_lora_rank", least=0)
    if not rank or fields.is_off("use_mla"):
        return None
    heads = fields.need_integer("num_attention_heads")
    rope, nope = fields.need_integer("qk_rope_head_dim", least=0), fields.need_integer("qk_nope_head_dim", least=0)
    value = fields.integer("v_head_dim") or fields.need_integer("hidden_size") // heads
    size = (rank + rope) * _BYTES.get(dtype, 2)
    text = (
        f"{MLA} (MLA): {heads} query heads over one latent per token of {rank} values and {rope} "
        f"rotated ones, a KV cache of {size} bytes per token and layer that every tensor-parallel rank holds whole; "
        f"decode with absorbed projections has queries and keys of {rank + rope} and values of {rank}, prefill with "
        f"expanded ones {heads} heads of {nope + rope} and values of {value}. "
        "Contract 1.0 has no such KV cache, so no backend of attnplug serves it yet"
    )
    return text + _indexer(fields)


def _indexer(fields: Fields) -> str:
    chosen = fields.integer("index_topk", least=0)
    if not chosen:
        return ""
    heads, size = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    made = f" of {heads} heads of {size}" if heads and size else ""
    return f"; besides, an indexer{made} chooses {chosen} keys for each query, with a KV cache of its own"
