"""Agreements as negotiation makes them, for tests that load no backend."""

from __future__ import annotations

from typing import Any

from attnplug import Agreement, Requirements


def agreed(variant: str = "fa2", kv_cache_dtype: str = "bfloat16", kernel: str = "auto", **required: Any) -> Agreement:
    """Return the agreement for layers of 32 query and 8 KV heads, head size 128, in bfloat16."""
    model = {"head_size": 128, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}
    requirements = Requirements(**{**model, "kv_cache_dtype": kv_cache_dtype, **required})
    options = {"decode_kernel": kernel, "workspace_mib": 256}
    return Agreement("flashinfer", variant, requirements, 16, "NHD", "interleaved", kv_cache_dtype, "never", options)
