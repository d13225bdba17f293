"""A fake of flash-attn 2.8: the signature of the release, and the truth in float64."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn_fake.exact import ScoreParams
from flash_attn_fake.generation2 import Build, Rows, varlen_fwd
from flash_attn_fake.keys import Keys
from flash_attn_fake.recording import recorded
from flash_attn_fake.refusal import require

__version__ = "2.8.3"

BUILD = Build(page_multiple=256, folded_lse="pages")


@recorded("fa2")
def flash_attn_varlen_func(  # noqa: PLR0917 - the library's own
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
) -> Any:
    """Attend packed rows: keys are packed, or in pages."""
    require(not dropout_p and not deterministic, "the fake does not support dropout")
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    params = ScoreParams(scale=scale, softcap=softcap, left=window_size[0], right=window_size[1], alibi=alibi_slopes)
    rows = Rows(query=q, starts=cu_seqlens_q, longest=max_seqlen_q, longest_keys=max_seqlen_k)
    used = None if block_table is None else cu_seqlens_k.diff()
    keys = Keys(key=k, value=v, starts=cu_seqlens_k, used=used, table=block_table)
    out, lse = varlen_fwd(BUILD, rows, keys, params, causal=causal)
    return (out, lse, torch.empty(0, dtype=q.dtype)) if return_attn_probs else out
