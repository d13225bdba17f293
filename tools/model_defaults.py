"""
Writes what transformers' configuration classes assume for the fields that `attnplug.models` reads.

``python -m tools.model_defaults --write``, with transformers installed. A config.json leaves out what its class has as
a default; a test compares this table with the classes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).parents[1] / "core/src/attnplug/models/defaults.json"

_NAMES: Final = """
_sliding_window_pattern alibi attention_chunk_size attention_head_dim attention_heads attention_multiplier
attention_window_size attn_config attn_layer_indices attn_layer_offset attn_layer_period attn_logit_softcapping
cross_attention_layers d_kv d_model decoder_attention_heads decoder_layers dim emb_dim encoder_attention_heads
encoder_layers first_k_dense_replace full_attn_idxs global_attn_every_n_layers head_dim hidden_size index_head_dim
index_n_heads index_topk kv_lora_rank layer_group_size local_attention logits_soft_cap max_window_layers multi_query
n_embd n_head n_heads n_layer n_layers new_decoder_architecture no_rope_layer_interval num_attention_heads
num_attention_heads_per_layer num_decoder_layers num_heads num_hidden_layers num_key_value_heads num_kv_heads
num_kv_shared_layers num_layers num_sliding_attention_heads prefix_dense_sliding_window_pattern q_lora_rank
qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar scale_attn_by_inverse_layer_idx scale_attn_weights
sliding_window sliding_window_pattern swa_head_dim swa_num_attention_heads swa_num_key_value_heads swa_v_head_dim
use_mla use_sliding_window v_head_dim
"""
READ: Final = frozenset(_NAMES.split())
"""Every field that decides about attention and that a configuration may leave out."""


def declared(cls: Any) -> dict[str, Any]:
    """Return the defaults that a configuration class declares for these fields; those of None are left out."""
    found = {}
    for item in fields(cls) if is_dataclass(cls) else ():
        value = item.default if item.default is not MISSING else None
        if item.name in READ and value is not None:
            found[item.name] = value
    for name in READ - found.keys():
        value = vars(cls).get(name)
        if isinstance(value, (bool, int, float, str)):
            found[name] = value
    parts = getattr(cls, "sub_configs", None) or {}
    if "text_config" in parts:  # files from before the parts were separated have the text's fields in the whole
        found |= declared(parts["text_config"])
    if "attn_config" in parts:
        found["attn_config"] = {k: v for k, v in parts["attn_config"]().to_dict().items() if k in _ATTN_CONFIG}
    return dict(sorted(found.items()))


_ATTN_CONFIG: Final = frozenset(
    {"alibi", "alibi_bias_max", "attn_type", "clip_qkv", "kv_n_heads", "prefix_lm", "qk_ln", "softmax_scale"}
)


def described_types() -> list[str]:
    """Return the model types whose fields `attnplug.models` reads and that transformers has a class for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - takes seconds

    from attnplug.models.architectures import ARCHITECTURES, BIASED  # noqa: PLC0415 - only this reads the package

    return sorted({*ARCHITECTURES, *BIASED} & set(CONFIG_MAPPING))


def table() -> str:
    """Return the file's text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415 - takes seconds

    lines = [f"  {json.dumps(name)}: {json.dumps(declared(CONFIG_MAPPING[name]))}" for name in described_types()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def stale() -> bool:
    """Whether the table differs from what the classes declare now."""
    return not FILE.exists() or FILE.read_text(encoding="utf-8") != table()


def main(arguments: list[str]) -> int:
    """Write the table, or say whether it is stale."""
    if arguments == ["--write"]:
        FILE.write_text(table(), encoding="utf-8")
        return 0
    is_stale = stale()
    print(f"stale: {FILE.name}" if is_stale else f"{FILE.name} is up to date")
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
