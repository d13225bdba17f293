"""The heads of multi-head latent attention (MLA), absorbed and expanded, and its indexer in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import RequirementsError
from attnplug.models.patterns import FULL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.models.architectures import Architecture
    from attnplug.models.fields import Fields
    from attnplug.models.layers import ModelLayer

_INDEXER_TYPES: Final = frozenset({"full", "shared", FULL})


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


def sparse_selection(fields: Fields, architecture: Architecture | None) -> str:
    """Return what no requirements express of layers whose keys an indexer chooses."""
    is_paged = architecture is not None and architecture.indexers is not None
    return (
        f"sparse selection is {'served in paged KV caches only' if is_paged else 'not served yet'}: {_indexer(fields)}"
    )


def _indexer(fields: Fields) -> str:
    chosen = fields.integer("index_topk", least=0)
    heads, size = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    made = f" of {heads} heads of {size}" if heads and size else ""
    keys = f"the {chosen} keys" if chosen else "the keys"
    return f"a learned indexer{made} chooses {keys} of each query (top-k)"


def no_latents(fields: Fields, attn_type: str) -> RequirementsError:
    """Return the refusal of layers whose tokens an indexer selects, and that have no latents in pages."""
    rank = fields.get("kv_lora_rank")
    return RequirementsError(
        f"{fields.origin} has layers whose tokens an indexer selects, kv_lora_rank={rank!r}, attn_type={attn_type!r}",
        "they are a decoder's, with latents of 'kv_lora_rank' elements: tokens are selected from a KV cache of latents",
        "correct the configuration, or describe it with paged=False",
    )


def indexing_layers(fields: Fields, architecture: Architecture, count: int) -> list[int]:
    """
    Return for each layer the layer whose indexer selects its tokens: itself, or the last one before it that has it.

    Raises:
        RequirementsError: The first layer has none, or there are fewer layers than the configuration names.
    """
    kinds = architecture.indexers(fields, count) if architecture.indexers is not None else ()
    found: list[int] = []
    for index, kind in enumerate(kinds[:count]):
        found.append(found[-1] if kind == "shared" and found else index)
    first = next(iter(kinds), None)
    wrong = sorted({str(kind) for kind in kinds[:count]} - _INDEXER_TYPES)
    if len(found) < count or first == "shared" or wrong:
        others = f", and {', '.join(map(repr, wrong))} among them" if wrong else ""
        raise RequirementsError(
            f"{fields.origin} has indexer types of {len(kinds)} layers for {count}, the first one {first!r}{others}",
            "each layer has an indexer ('full'), or reuses the selection of an earlier layer ('shared')",
            "correct 'indexer_types' in the configuration",
        )
    return found


def indexer_note(fields: Fields, layers: Sequence[ModelLayer]) -> str:
    """Return what the engine does for layers of selected tokens; empty where there are none."""
    sparse = [layer for layer in layers if layer.indexer is not None]
    own = sum(layer.indexer == layer.name for layer in sparse)
    if not sparse:
        return ""
    size = fields.integer("index_head_dim")
    reuse = f"; {len(sparse) - own} reuse the selection of an earlier layer" if own < len(sparse) else ""
    kept = f" ({size} per token and layer, {2 * size} bytes in bfloat16, not counted here)" if size else ""
    return (
        f"{own} layers have an indexer{reuse}: {_indexer(fields)}. The engine runs it, keeps its keys{kept}, and "
        "passes the slots of the selected tokens with each call"
    )
