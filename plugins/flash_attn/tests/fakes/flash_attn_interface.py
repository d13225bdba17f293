"""A fake of FlashAttention 3's own package: the signatures of the release, and the truth in float64."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn_fake.exact import ScoreParams
from flash_attn_fake.generation3 import Rows, fwd
from flash_attn_fake.keys import Keys
from flash_attn_fake.recording import recorded
from flash_attn_fake.refusal import require
from flash_attn_fake.tiles import OWN


@recorded("fa3")
def flash_attn_varlen_func(  # noqa: PLR0917 - the library's own
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
) -> Any:
    """Attend packed rows and keys."""
    require(seqused_q is None and qv is None and pack_gqa is None, "the fake does not support these")
    require(not attention_chunk and not deterministic and not sm_margin, "the fake does not support these")
    rows = Rows(
        query=q, starts=cu_seqlens_q, longest=max_seqlen_q, longest_keys=max_seqlen_k,
        descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip
    keys = Keys(key=k, value=v, starts=cu_seqlens_k, used=seqused_k)
    params = ScoreParams(scale=softmax_scale, softcap=softcap, left=window_size[0], right=window_size[1])
    found = fwd(OWN, rows, keys, params, causal=causal)
    return found if return_attn_probs else found[0]


@recorded("fa3")
def flash_attn_with_kvcache(  # noqa: PLR0917 - the library's own
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
) -> Any:
    """Attend packed rows, and keys in pages."""
    unknown = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cu_seqlens_k_new, rotary_seqlens)
    require(all(each is None for each in (*unknown, scheduler_metadata, pack_gqa)), "the fake does not support these")
    require(not attention_chunk and rotary_interleaved and not sm_margin, "the fake does not support these")
    require(cu_seqlens_q is not None and page_table is not None, "the fake supports only packed rows and pages")
    rows = Rows(
        query=q, starts=cu_seqlens_q, longest=max_seqlen_q, longest_keys=page_table.shape[1] * k_cache.shape[1],
        descales=(q_descale, k_descale, v_descale),
    )  # fmt: skip
    keys = Keys(key=k_cache, value=v_cache, used=cache_seqlens, table=page_table, leftpad=cache_leftpad)
    params = ScoreParams(scale=softmax_scale, softcap=softcap, left=window_size[0], right=window_size[1])
    found = fwd(OWN, rows, keys, params, causal=causal)
    return (*found, torch.empty(0), torch.empty(0)) if return_softmax_lse else found[0]
