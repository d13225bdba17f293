"""A double of flash-attn-4: the signature of the release, and the truth in float64. It refuses by assertions."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn_double.exact import Scores, attend
from flash_attn_double.keys import Keys, check_longest, spans
from flash_attn_double.noting import noted
from flash_attn_double.refusal import demand
from torch import Tensor

CAPABILITY = 9
"""Major compute capability of the device that it is on; tests set others."""

TILES = (64, 80, 96, 112, 128, 144)  # pages of a tile are loaded whole: what lies behind the last key must be finite


@noted("fa4")
def flash_attn_varlen_func(  # noqa: PLR0917 - the library's own
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
) -> Any:
    """Attend packed rows: keys are packed, or in pages. Always returns a pair."""
    unknown = (qv, min_seqlen_k, seqused_q, gather_kv_indices, pack_gqa, score_mod, score_mod_bwd, mask_mod)
    more = (block_sparse_tensors, aux_tensors, aux_scalars, scheduler_metadata, seqlen_k_per_split)
    demand(all(each is None for each in (*unknown, *more, gather_bwd_token_chunk)), "the double does not know these")
    demand(not (deterministic or disable_scheduler_metadata or gather_bwd_recompute_p), "the double does not know")
    demand(all(side is None or side >= 0 for side in window_size), f"window_size={window_size}: it wants None for none")
    starts, used = _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink)
    _check_splits(num_splits)
    left, right = (-1 if side is None else side for side in window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    terms = Scores(scale=scale, softcap=softcap, left=left, right=0 if causal else right, sink=learnable_sink)
    keys = Keys(key=k, value=v, starts=starts, used=used, table=page_table)
    demand(not softcap or softcap > 0, "a negative soft cap")
    check_longest(keys, max_seqlen_k)
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float64)
    for request, (at, found) in enumerate(
        zip(spans(cu_seqlens_q, len(q), max_seqlen_q), keys.of_requests(), strict=True)
    ):
        out[at], lse[:, at] = attend(q[at], *found, terms)
        if at.stop > at.start and not _is_finite_behind(keys, request):
            out[at] = torch.nan
    return out.to(q.dtype), lse.float() if return_lse else None


def _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink) -> Any:
    assert CAPABILITY in (8, 9, 10, 11, 12), "Unsupported compute capability"
    requests, (heads, size), (kv_heads, size_v) = len(cu_seqlens_q) - 1, q.shape[1:], v.shape[-2:]
    if page_table is not None:
        assert CAPABILITY not in (8, 12), f"paged KV not supported on SM {CAPABILITY}.0"
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
        assert len(page_table) == requests, "page_table must have a row of pages for each of the requests"
        demand(seqused_k is not None, "pages without seqused_k: all of each row of the table is read")
    assert k.shape == (*v.shape[:-1], size)
    assert v.dtype in (torch.float16, torch.bfloat16), (
        "FP8 is only supported on SM100, by a function that is not public"
    )
    assert q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype"
    for each in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        if each is not None:
            assert each.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
            assert each.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"
    assert cu_seqlens_k is None or cu_seqlens_k.shape == (requests + 1,)
    assert seqused_k is None or seqused_k.shape == (requests,)
    assert cu_seqlens_k is not None or page_table is not None, "k must have shape (batch_size, seqlen_k, ...)"
    assert heads % kv_heads == 0, "num_head must be divisible by num_head_kv"
    assert _has_kernel(size, size_v), f"(head_dim, head_dim_v)=({size}, {size_v}) is not supported"
    if learnable_sink is not None:
        assert learnable_sink.shape == (heads,)
        kinds = (torch.float16, torch.bfloat16, torch.float32)
        assert learnable_sink.dtype in kinds, "learnable_sink must be float16, bfloat16, or float32"
    return cu_seqlens_k, seqused_k


def _check_splits(num_splits: int) -> None:
    if CAPABILITY not in (10, 11):
        assert num_splits == 1, f"SplitKV not supported on SM {CAPABILITY}.0"  # 0 chooses several


def _has_kernel(size: int, size_v: int) -> bool:
    if size % 8 or size_v % 8:
        return False
    if CAPABILITY in (10, 11):
        return max(size, size_v) <= 128 or (size, size_v) in ((192, 128), (256, 256))
    return max(size, size_v) <= 256


def _is_finite_behind(keys: Keys, request: int) -> bool:
    """Whether what lies behind the last key in a page of a tile is finite: zero times NaN is NaN."""
    if keys.table is None or keys.key.shape[1] not in TILES:
        return True
    length, size = keys.lengths()[request], keys.key.shape[1]
    if not length % size:
        return True
    behind: Tensor = keys.value[int(keys.table[request, length // size]), length % size :]
    return bool(behind.isfinite().all())
