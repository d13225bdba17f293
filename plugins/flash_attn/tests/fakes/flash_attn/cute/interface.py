"""A fake of flash-attn-4: the signatures of the release, and the truth in float64. It refuses by assertions."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from flash_attn_fake.exact import ScoreParams, attend
from flash_attn_fake.keys import Keys, check_longest, spans
from flash_attn_fake.recording import recorded
from flash_attn_fake.refusal import require
from torch import Tensor

CAPABILITY = 9
"""Major compute capability of the device that it is on; tests set others."""

TILES = (
    64,
    80,
    96,
    112,
    128,
    144,
)  # pages as large as a tile are loaded completely: values behind the last key must be finite


@recorded("fa4")
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
    _require_defaults(*unknown, *more, gather_bwd_token_chunk)
    require(not (deterministic or disable_scheduler_metadata or gather_bwd_recompute_p), "the fake does not support it")
    starts, used = _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink)
    rows = _Rows(q, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    keys = Keys(key=k, value=v, starts=starts, used=used, table=page_table)
    _require_whole_tiles(keys, window_size, causal=causal)
    params = _params_of(q, softmax_scale, softcap, window_size, learnable_sink, causal=causal)
    out, lse = _attend(rows, keys, params, num_splits)
    return out.to(q.dtype), lse.float() if return_lse else None


@recorded("fa4")
def _flash_attn_fwd(  # noqa: PLR0917 - the library's own
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    tile_mn=None,
    mma_pv_is_rs=None,
    intra_wg_overlap=None,
    num_threads=384,
    num_splits=1,
    pack_gqa=None,
    _arch=None,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    return_lse=False,
    out=None,
    lse=None,
    aux_tensors=None,
    aux_scalars=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    gather_kv_indices=None,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
) -> Any:
    """Attend as the public function does, into tensors that are given. What training needs is None behind the two."""
    unknown = (qv, min_seqlen_k, seqused_q, tile_mn, mma_pv_is_rs, intra_wg_overlap, pack_gqa, _arch, score_mod)
    more = (mask_mod, block_sparse_tensors, aux_tensors, aux_scalars, q_descale, k_descale, v_descale)
    _require_defaults(*unknown, *more, gather_kv_indices, scheduler_metadata, seqlen_k_per_split)
    require(not (disable_scheduler_metadata or gather_bwd_recompute_p), "the fake does not support it")
    require(num_threads == 384, "the fake does not support it")
    starts, used = _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink)
    rows = _Rows(q, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    keys = Keys(key=k, value=v, starts=starts, used=used, table=page_table)
    if out is not None:
        _check_result("out", out, (*q.shape[:2], v.shape[-1]), q.dtype, q.device, step=16)
    if lse is not None:
        _check_result("lse", lse, (q.shape[1], q.shape[0]), torch.float32, q.device, step=4)
    window = (window_size_left, window_size_right)
    _require_whole_tiles(keys, window, causal=causal)
    params = _params_of(q, softmax_scale, softcap or 0.0, window, learnable_sink, causal=causal)
    found, sums = _attend(rows, keys, params, num_splits)
    out = torch.full_like(found, torch.nan, dtype=q.dtype) if out is None else out
    if lse is None and (return_lse or any(t is not None and t.requires_grad for t in (q, k, v, learnable_sink))):
        lse = torch.full_like(sums, torch.nan, dtype=torch.float32)
    written = int(cu_seqlens_q[-1])  # rows of no request are not written
    out[:written] = found[:written].to(out.dtype)
    if lse is not None:
        lse[:, :written] = sums[:, :written].float()
    return out, lse, None, None, None


class _Rows(NamedTuple):
    """The query side of a call."""

    query: Tensor
    starts: Tensor
    longest: int
    longest_keys: int


def _require_defaults(*given: Any) -> None:
    require(all(each is None for each in given), "the fake does not support these")


def _params_of(q, softmax_scale, softcap, window, learnable_sink, *, causal: bool) -> ScoreParams:
    require(all(side is None or side >= 0 for side in window), f"window_size={window}: no bound is None")
    require(not softcap or softcap > 0, "a negative soft cap")
    left, right = (-1 if side is None else side for side in window)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return ScoreParams(scale=scale, softcap=softcap, left=left, right=0 if causal else right, sink=learnable_sink)


def _attend(rows: _Rows, keys: Keys, params: ScoreParams, num_splits: int) -> tuple[Tensor, Tensor]:
    """Return output ``(rows, heads, head_size_v)`` and LSE ``(heads, rows)``, NaN where nothing is written."""
    _check_splits(num_splits)
    check_longest(keys, rows.longest_keys)
    query = rows.query
    out = torch.full((*query.shape[:2], keys.value.shape[-1]), torch.nan, dtype=torch.float64)
    lse = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=torch.float64)
    for request, (at, found) in enumerate(
        zip(spans(rows.starts, len(query), rows.longest), keys.of_requests(), strict=True)
    ):
        out[at], lse[:, at] = attend(query[at], *found, params)
        if at.stop > at.start and not _is_finite_behind(keys, request):
            out[at] = torch.nan
    return out, lse


def _check_result(name: str, given: Tensor, shape: Any, dtype: Any, device: Any, *, step: int) -> None:
    """Refuse as 4.0.0b36 does. Earlier releases check the first three, and write to wrong addresses."""
    assert given.shape == shape, f"{name} shape {tuple(given.shape)} != expected {shape}"
    assert given.dtype == dtype, f"{name} dtype {given.dtype} != expected {dtype}"
    assert given.device == device, f"{name} device {given.device} != expected {device}"
    assert 0 not in given.stride(), f"{name} must not have broadcast dimensions"
    places = [given.data_ptr(), *(given.itemsize * each for each in given.stride()[:-1])]
    if given.is_contiguous():
        del places[1:]
    is_right = given.is_contiguous() or given.stride(-1) == 1
    message = f"{name} must have aligned strides and a contiguous last dimension"
    assert is_right and all(place % step == 0 for place in places), message  # noqa: PT018 - one message for both


def _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, learnable_sink) -> Any:
    assert CAPABILITY in (8, 9, 10, 11, 12), "Unsupported compute capability"
    requests, (heads, size), (kv_heads, size_v) = len(cu_seqlens_q) - 1, q.shape[1:], v.shape[-2:]
    if page_table is not None:
        assert CAPABILITY not in (8, 12), f"paged KV not supported on SM {CAPABILITY}.0"
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert page_table.dtype == torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
        assert len(page_table) == requests, "page_table must have a row of pages for each of the requests"
        require(seqused_k is not None, "pages without seqused_k: all of each row of the table is read")
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


def _require_whole_tiles(keys: Keys, window: tuple[Any, Any], *, causal: bool) -> None:
    """On Hopper 128 threads copy a tile of pages, 16 bytes each: the remainder of full steps is not copied."""
    if keys.table is None or CAPABILITY != 9:
        return
    size = -(-keys.key.shape[-1] // 16) * 16
    tile = _tile(size, is_local=any(side is not None and side >= 0 for side in window), causal=causal)
    step = 128 // (gcd(size, 64) // 8)
    is_whole = keys.key.shape[1] == tile or tile % step == 0
    require(is_whole, f"tiles of {tile} keys in pages are copied {step} keys at a time: those left over are not")


def _tile(size: int, *, is_local: bool, causal: bool) -> int:
    """Keys of a tile on Hopper, of 4.0.0b36."""
    if size <= 128:
        return 144 if 64 < size <= 96 and not (causal or is_local) else 128
    if size <= 192:
        return 96 if is_local else 112
    return 64 if is_local else 80


def _is_finite_behind(keys: Keys, request: int) -> bool:
    """Whether the values behind the last key, in a page as large as a tile, are finite: zero times NaN is NaN."""
    if keys.table is None or keys.key.shape[1] not in TILES:
        return True
    length, size = keys.lengths()[request], keys.key.shape[1]
    if not length % size:
        return True
    behind: Tensor = keys.value[int(keys.table[request, length // size]), length % size :]
    return bool(behind.isfinite().all())
