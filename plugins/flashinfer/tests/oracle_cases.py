"""Requests compared with the oracle, output and LSE, on the fake and on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug_kit.oracle import Case, check, materialize

if TYPE_CHECKING:
    from collections.abc import Callable

MIXED: Final = Case(
    query_lens=(1, 1, 40, 3),
    context_lens=(77, 16, 0, 33),
    num_q_heads=8,
    num_kv_heads=2,
    head_size=64,
    dtype="bfloat16",
)
DECODES: Final = evolve(MIXED, query_lens=(1, 1, 1), context_lens=(77, 16, 0))
PROMPTS: Final = evolve(MIXED, query_lens=(40, 16, 2), context_lens=(0, 0, 0))
LATENTS: Final = evolve(
    MIXED, latent=True, head_size=576, head_size_v=512, num_q_heads=16, num_kv_heads=1, scale=192**-0.5
)
SCALES: Final = {"k_scale": 0.25, "v_scale": 3.0}

CASES: Final[dict[str, tuple[Case, dict[str, Any]]]] = {
    "a decode": (evolve(DECODES, query_lens=(1,), context_lens=(77,)), {}),
    "a batch of decodes": (DECODES, {}),
    "paged prefill": (PROMPTS, {}),
    "prefill without a KV cache": (PROMPTS, {"paged": False}),
    "chunked prefill and prefix cache hits": (evolve(MIXED, query_lens=(40, 16, 2), context_lens=(40, 7, 32)), {}),
    "decodes and prefills": (MIXED, {}),
    "a window": (evolve(MIXED, sliding_window=9), {}),
    "a soft cap": (evolve(MIXED, logits_soft_cap=2.0), {}),
    "groups of 1": (evolve(MIXED, num_q_heads=2), {}),
    "groups of 4": (MIXED, {}),
    "groups of 8": (evolve(MIXED, num_q_heads=16), {}),
    "head size 64": (evolve(MIXED, head_size=64), {}),
    "head size 256": (evolve(MIXED, head_size=256), {}),
    "an fp8_e4m3 KV cache": (evolve(MIXED, kv_cache_dtype="fp8_e4m3", **SCALES), {}),
    "an fp8_e5m2 KV cache": (evolve(MIXED, kv_cache_dtype="fp8_e5m2", **SCALES), {}),
    "sinks": (evolve(MIXED, sinks=True, head_size=64), {}),
    "sinks in decodes only": (evolve(DECODES, sinks=True, head_size=64), {}),
    "NHD": (MIXED, {"kv_layout": "NHD"}),
    "HND": (MIXED, {"kv_layout": "HND"}),
    "HND and an fp8_e4m3 KV cache": (evolve(MIXED, kv_cache_dtype="fp8_e4m3", **SCALES), {"kv_layout": "HND"}),
    "a shared prefix": (evolve(MIXED, context_lens=(77, 40, 33, 33)).with_shared_prefix(2), {}),
    "a shared prefix of decodes": (evolve(DECODES, context_lens=(77, 40, 33)).with_shared_prefix(2), {}),
    "a shared prefix in an fp8_e4m3 KV cache": (
        evolve(MIXED, context_lens=(77, 40, 33, 33), kv_cache_dtype="fp8_e4m3", **SCALES).with_shared_prefix(2),
        {},
    ),
    "K/V of another layer": (evolve(MIXED, kv_sharing=True), {}),
    "no causal mask": (evolve(MIXED, causal=False), {}),
    "latents of 512": (LATENTS, {}),
    "latents of 512, 128 heads": (evolve(LATENTS, num_q_heads=128), {}),
    "latents of 512, 20 heads": (evolve(LATENTS, num_q_heads=20), {}),
    "latents of 256": (evolve(LATENTS, head_size=320, head_size_v=256), {}),
    "latents of 128": (evolve(LATENTS, head_size=192, head_size_v=128), {}),
    "latents on pages of one token": (evolve(LATENTS, block_size=1), {}),
    "latents in HND": (LATENTS, {"kv_layout": "HND"}),
    "latents without a mask": (evolve(LATENTS, causal=False), {}),
    "decodes of latents": (evolve(LATENTS, query_lens=(1, 1, 1), context_lens=(77, 16, 0)), {}),
    "keys of 192 and values of 128": (
        evolve(PROMPTS, head_size=192, head_size_v=128, num_kv_heads=8),
        {"paged": False},
    ),
    "decodes of several tokens": (evolve(DECODES, query_lens=(3, 1, 3), decode_query_len=3), {}),
    "padded requests": (evolve(MIXED, query_lens=(1, 0, 40, 0), context_lens=(77, 0, 0, 0), num_padding_tokens=3), {}),
}


SERVED: Final = tuple(
    (variant, name)
    for variant in ("fa2", "fa3")
    for name, (case, _) in CASES.items()
    if variant == "fa2" or (case.kv_cache_dtype == "auto" and not (case.latent and case.head_size_v != 512))
)
"""Each variant with the names of the cases that it supports."""


def check_case(load: Callable[..., Any], variant: str, name: str) -> None:
    """Run a case, and compare output and LSE with the oracle's."""
    case, required = CASES[name]
    check(load(case.requirements(return_lse=True, **required), variant), materialize(case))
