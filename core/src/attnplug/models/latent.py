"""The heads of multi-head latent attention (MLA), absorbed and expanded, and its indexer in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug.models.architectures import Architecture
    from attnplug.models.fields import Fields


def has_latents(fields: Fields, architecture: Architecture | None) -> bool:
    """
    Whether attention is MLA: of some model types, the configuration decides.

    Raises:
        RequirementsError: `kv_lora_rank` is invalid.
    """
    is_latent = architecture is not None and architecture.latent and not fields.is_off("use_mla")
    return is_latent and bool(fields.integer("kv_lora_rank", least=0))


def expanded_heads(fields: Fields) -> dict[str, Any]:
    """
    Return the heads where latents are expanded to the keys and values of every query head.

    A key is a part that is projected from the latent (`qk_nope_head_dim`) and a rotated part that all heads share
    (`qk_rope_head_dim`).

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Raises:
        RequirementsError: A field that decides is missing or invalid.
    """
    heads = fields.need_integer("num_attention_heads")
    nope, rope = (fields.need_integer(f"qk_{part}_head_dim", least=0) for part in ("nope", "rope"))
    value = fields.integer("v_head_dim") or fields.need_integer("hidden_size") // heads
    return {"num_q_heads": heads, "num_kv_heads": heads, "head_size": nope + rope, "head_size_v": value}


def absorbed_heads(fields: Fields, *, is_indexed: bool = False) -> dict[str, Any]:
    """
    Return the heads where queries and outputs are projected instead: every query head attends to the latents.

    Args:
        fields: The configuration.
        is_indexed: Whether an indexer selects the tokens that a token attends to.

    Raises:
        RequirementsError: A field that decides is missing or invalid.
    """
    rank = fields.need_integer("kv_lora_rank")
    rope = fields.need_integer("qk_rope_head_dim", least=0)
    topk = {"topk": fields.need_integer("index_topk")} if is_indexed else {}
    return {"latent": True, "num_kv_heads": 1, "head_size": rank + rope, "head_size_v": rank, **topk}


def index_keys(fields: Fields, count: int) -> str:
    """Return what an engine stores for the indexers of so many layers, beside their latents."""
    kinds = fields.get("indexer_types")
    own = count - (kinds[:count].count("shared") if isinstance(kinds, list) else 0)
    size = fields.integer("index_head_dim")
    keys = f"keys of {size} elements" if size else "keys"
    return f"{own} of {count} layers have an indexer, whose {keys} an engine stores for each token beside the latents"


def sparse_selection(fields: Fields, architecture: Architecture | None) -> str:
    """Return what no requirements express of layers whose keys an indexer chooses."""
    chosen = fields.integer("index_topk", least=0)
    heads, size = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    made = f" of {heads} heads of {size}" if heads and size else ""
    keys = f"the {chosen} keys" if chosen else "the keys"
    served = "served in paged KV caches only" if architecture is not None and architecture.selects else "not served yet"
    return f"sparse selection is {served}: a learned indexer{made} chooses {keys} of each query (top-k)"
