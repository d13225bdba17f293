"""Requests whose values contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.errors import RequirementsError
from attnplug.request.domains import ENCODERS, FP8_DS_MLA, LATENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.request.requirements import Requirements


def refuse_contradictions(r: Requirements) -> None:
    """
    Refuse values that contradict each other.

    Raises:
        RequirementsError: Two do.
    """
    for holds, given, allowed, fix in _CONTRADICTIONS:
        if holds(r):
            raise RequirementsError(given(r), allowed, fix)


_BY_POSITION: Final = (
    "sliding_window",
    "attention_chunk",
    "alibi",
    "block_sparse",
    "custom_mask",
    "mm_prefix",
    "cascade",
)


def _is_given(r: Requirements, name: str) -> bool:
    return getattr(r, name) not in (None, False)


_CONTRADICTIONS: tuple[tuple[Callable[[Requirements], bool], Callable[[Requirements], str], str, str], ...] = (
    (
        lambda r: bool(r.late) and any(getattr(r, name) is not None for name in r.late),
        lambda r: f"late={r.late} and {', '.join(f'{n}={getattr(r, n)}' for n in r.late)} were given",
        "what is late has no value yet: Selection.bind gives it one",
        "leave the value out, or take its name out of late",
    ),
    (
        lambda r: not r.paged and "block_size" in r.late,
        lambda r: f"paged=False and late={r.late} were given",
        "only a paged KV cache has a block size to bind later",
        "take 'block_size' out of late, or request paged=True",
    ),
    (
        lambda r: None not in (r.num_q_heads, r.num_kv_heads) and r.num_q_heads % r.num_kv_heads != 0,
        lambda r: f"num_q_heads={r.num_q_heads} and num_kv_heads={r.num_kv_heads} were given",
        "num_q_heads is a multiple of num_kv_heads: each KV head serves a whole group of query heads",
        "pass the head counts of one tensor-parallel rank",
    ),
    (
        lambda r: bool(r.causal) and r.attn_type != "decoder",
        lambda r: f"causal=True and attn_type={r.attn_type!r} were given",
        "encoder and cross attention attend to every key",
        "leave causal out, or request attn_type='decoder'",
    ),
    (
        lambda r: r.mm_prefix and not r.causal,
        lambda r: f"mm_prefix=True and causal={r.causal} were given",
        "spans show later tokens, which only a causal mask hides",
        "leave mm_prefix out, or request causal=True",
    ),
    (
        lambda r: bool(r.paged) and r.attn_type in ENCODERS,
        lambda r: f"paged=True and attn_type={r.attn_type!r} were given",
        "encoder attention has no KV cache",
        "leave paged out, or request attn_type='decoder'",
    ),
    (
        lambda r: not r.paged and (r.block_size, r.kv_layout, r.kv_cache_form) != (None, None, None),
        lambda r: (
            f"paged=False, block_size={r.block_size}, kv_layout={r.kv_layout!r} and kv_cache_form={r.kv_cache_form!r} "
            "were given"
        ),
        "block size, layout and form describe a paged KV cache",
        "leave block_size, kv_layout and kv_cache_form out, or request paged=True",
    ),
    (
        lambda r: not r.paged and r.kv_cache_dtype != r.dtype,
        lambda r: f"paged=False and kv_cache_dtype={r.kv_cache_dtype!r} were given",
        "only a paged KV cache has another dtype than the layer",
        "leave kv_cache_dtype out, or request paged=True",
    ),
    (
        lambda r: not r.paged and (r.cascade or r.dcp_size > 1 or r.kv_sharing),
        lambda r: f"paged=False, cascade={r.cascade}, dcp_size={r.dcp_size} and kv_sharing={r.kv_sharing} were given",
        "cascade, decode context parallelism and KV sharing need a paged KV cache",
        "request paged=True",
    ),
    (
        lambda r: bool(r.paged) and r.attn_bias,
        lambda r: f"paged={r.paged} and attn_bias={r.attn_bias} were given",
        "an additive mask comes with calls that have contiguous (non-paged) K/V",
        "request paged=False",
    ),
    (
        lambda r: not r.paged and r.kv_in_cache,
        lambda r: f"paged=False and kv_in_cache={r.kv_in_cache} were given",
        "only a paged KV cache can have the K/V of a call already",
        "request paged=True, or leave kv_in_cache out",
    ),
    (
        lambda r: r.latent and r.num_kv_heads not in (1, None),
        lambda r: f"latent=True and num_kv_heads={r.num_kv_heads} were given",
        "all query heads attend to one latent per token",
        "pass num_kv_heads=1",
    ),
    (
        lambda r: r.latent and (r.head_size_v or r.head_size) > r.head_size,
        lambda r: f"latent=True, head_size={r.head_size} and head_size_v={r.head_size_v} were given",
        "a value is the first head_size_v elements of its key: the latent without its rotary part",
        "pass head_size=kv_lora_rank + qk_rope_head_dim and head_size_v=kv_lora_rank",
    ),
    (
        lambda r: r.latent and not r.paged,
        lambda r: f"latent=True and paged={r.paged} were given",
        "absorbed attention reads latents from a paged KV cache; dense calls have keys and values per head",
        "leave latent out and pass the sizes of keys and values per head, or request paged=True",
    ),
    (
        lambda r: r.latent and r.attn_type != "decoder",
        lambda r: f"latent=True and attn_type={r.attn_type!r} were given",
        "only decoders have latent attention",
        "leave attn_type out",
    ),
    (
        lambda r: bool(r.paged) and (r.kv_cache_form == LATENT) is not r.latent,
        lambda r: f"latent={r.latent} and kv_cache_form={r.kv_cache_form!r} were given",
        "latents are in a KV cache of the form 'latent', and nothing else is",
        "leave kv_cache_form out",
    ),
    (
        lambda r: r.latent and r.per_head_scales,
        lambda r: f"latent={r.latent} and per_head_scales={r.per_head_scales} were given",
        "there is one latent per token, and so one scale",
        "leave per_head_scales out",
    ),
    (
        lambda r: (
            r.kv_cache_dtype == FP8_DS_MLA
            and (r.latent, r.dtype, r.head_size, r.head_size_v) != (True, "bfloat16", 576, 512)
        ),
        lambda r: (
            f"kv_cache_dtype={r.kv_cache_dtype!r}, latent={r.latent}, dtype={r.dtype!r}, head_size={r.head_size} and "
            f"head_size_v={r.head_size_v} were given"
        ),
        "its records of 656 bytes hold latents of 512 elements with 64 rotary ones, of bfloat16 layers",
        "pass latent=True, dtype='bfloat16', head_size=576 and head_size_v=512, or another kv_cache_dtype",
    ),
    (
        lambda r: r.topk is not None and not r.latent,
        lambda r: f"topk={r.topk} and latent={r.latent} were given",
        "tokens are selected from a KV cache of latents",
        "request latent=True, or leave topk out",
    ),
    (
        lambda r: r.topk is not None and any(_is_given(r, name) for name in _BY_POSITION),
        lambda r: f"topk={r.topk} and {' and '.join(n for n in _BY_POSITION if _is_given(r, n))} were given",
        "selected tokens are slots, whose positions no backend is told: the selection alone hides tokens",
        "leave the others out, and select tokens that they let through",
    ),
    (
        lambda r: r.decode_query_len > 1 and "decode" not in r.phases,
        lambda r: f"decode_query_len={r.decode_query_len} and phases={r.phases} were given",
        "only the decode phase has a decode query length",
        "leave decode_query_len out, or add 'decode' to phases",
    ),
)
