"""
The dense kernels for Hopper in float64. Checks are those of ``api/dense_decode.h``, in its order, and of TMA.

Of the FP8 kernels, those of ``extension/sm90/dense_fp8`` and what these do without checking.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flash_mla.journal import Call, check, journal, require

_MULTIPROCESSORS = 64
_PAGE = 64


@dataclasses.dataclass
class FlashMLASchedMeta:
    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_ops(use_legacy: bool) -> Any:
    return SimpleNamespace(is_legacy=use_legacy)


def get_mla_decoding_metadata(
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, use_legacy=False
):
    require(use_legacy and topk is None, "the fake has the dense kernels")
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(seqlens_k.is_contiguous(), "seqlens_k must be contiguous")
    require(h_k == 1 and h_q is not None and num_q_tokens_per_head_k % h_q == 0, "rows of each head")
    require(len(seqlens_k) < (4096 if is_fp8_kvcache else 11_000), "the scheduler has shared memory for fewer requests")
    journal.schedules += 1
    # The contents are not the library's: a call compares them with its lengths.
    parts = _parts(num_q_tokens_per_head_k, is_fp8_kvcache)
    schedule = torch.full((parts, 8), num_q_tokens_per_head_k, dtype=torch.int32)
    return schedule, torch.nn.functional.pad(seqlens_k.cumsum(0, dtype=torch.int32), (1, 0))


def flash_mla_with_kvcache(  # noqa: PLR0917 - the library's signature
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None,
    extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
    use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
):  # fmt: skip
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    assert num_splits is None
    unused = (indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length, kv_format)
    require(all(one is None for one in unused), "the fake has the dense kernels")
    require(use_legacy and not enable_batch_invariant, "the fake has the dense kernels")
    _check_tensors(q, k_cache, block_table, cache_seqlens, bool(is_fp8_kvcache))
    requests, query_len, heads, size = q.shape
    factors = _check_fp8(q, cache_seqlens, causal, descale_q, descale_k) if is_fp8_kvcache else (1.0, 1.0)
    check(is_fp8_kvcache or descale_q is descale_k is None, "descale_q/descale_k apply to the dense fp8 path only")
    check(size in (576, 512), "Only head_size_k == 576 or 512 is supported")
    check(head_dim_v == 512, "Only head_size_v == 512 is supported")
    check(k_cache.shape[1] == _PAGE, "Currently page_block_size must be 64")
    check(requests > 0, "batch size must be positive")
    check(k_cache.shape[2:] == (1, size), "kcache must have shape (num_blocks, 64, 1, head_size_k)")
    check(cache_seqlens.shape == (requests,), "seqlens_k must have shape (batch_size)")
    check(block_table.shape[0] == requests, "block_table must have shape (batch_size, max_num_blocks_per_seq)")
    parts = _parts(query_len * heads, bool(is_fp8_kvcache))
    _check_schedule(tile_scheduler_metadata, cache_seqlens, query_len * heads, parts)
    journal.calls.append(Call(requests, query_len, tuple(cache_seqlens.tolist())))
    out = torch.empty(requests, query_len, heads, head_dim_v, dtype=torch.bfloat16 if is_fp8_kvcache else q.dtype)
    lse = torch.empty(requests, query_len, heads)  # the library returns a view of this form
    for request, length in enumerate(cache_seqlens.tolist()):
        keys = _keys(k_cache, block_table[request], length).double() * factors[1]
        query = q[request].double() * factors[0]
        found = _attend(query, keys, head_dim_v, softmax_scale, causal and query_len > 1, bool(is_fp8_kvcache))
        out[request], lse[request] = found
    return out, lse.transpose(1, 2)


def _attend(
    query: Tensor, keys: Tensor, value_size: int, scale: float, causal: bool, is_fp8: bool
) -> tuple[Tensor, Tensor]:
    scores = scale * torch.einsum("qhd,kd->qhk", query, keys)
    if causal:
        last = torch.arange(len(query))[:, None] + len(keys) - len(query)
        scores = scores.masked_fill((torch.arange(len(keys)) > last)[:, None], -torch.inf)
    if not len(keys):
        return query.new_zeros(*query.shape[:2], value_size), torch.full(query.shape[:2], torch.inf)
    sums = scores.logsumexp(-1)
    sums = torch.where(sums == -torch.inf, torch.inf, sums)  # of rows without a key
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - largest).exp()
    if is_fp8:
        weights = weights.to(torch.float8_e4m3fn).double()
    weights *= (largest - sums[..., None]).exp()
    return torch.einsum("qhk,kd->qhd", weights, keys[:, :value_size]), sums


def _keys(pages: Tensor, row: Tensor, length: int) -> Tensor:
    require(length >= 0, f"a request has {length} keys")
    count = -(-length // _PAGE)
    require(0 < max(count, 1) <= len(row), f"a request has {length} keys, and its row of the table ends")
    blocks = row[: max(count, 1)].long()  # the first page is loaded for a request without a key too
    require(((blocks >= 0) & (blocks < len(pages))).all(), f"a request has pages {blocks.tolist()}")
    return pages[blocks[:count], :, 0].flatten(0, 1)[:length]


def _check_fp8(
    q: Tensor, lens: Tensor, causal: bool, descale_q: Tensor | None, descale_k: Tensor | None
) -> tuple[float, float]:
    check(q.shape[-1] == 576, "Only head_size_k == 576 is supported")
    check(descale_q is not None and descale_k is not None, "descale is required when input dtype is fp8")
    for one in (descale_q, descale_k):
        check(one.dtype == torch.float32 and one.shape == (1,), "descale must be float32 and have shape (1)")
    require(lens.amin() > 0, "for a request without a key the kernel reads the entry before its first page")
    require(not causal or q.shape[1] <= 65, "the kernel masks the last two pages of a request only")
    return float(descale_q), float(descale_k)


def _check_tensors(q: Tensor, k_cache: Tensor, block_table: Tensor, lens: Tensor, is_fp8: bool) -> None:
    dtypes = (torch.float8_e4m3fn,) if is_fp8 else (torch.bfloat16, torch.float16)
    check(q.dtype in dtypes, f"q must be of {dtypes}")
    check(k_cache.dtype == q.dtype, "query and key must have the same dtype")
    check(lens.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(len({one.device for one in (q, k_cache, block_table, lens)}) == 1, "tensors must be on one device")
    check(q.stride(-1) == 1, "q must have contiguous last dimension")
    check(k_cache.stride(-1) == 1, "kcache must have contiguous last dimension")
    check(lens.is_contiguous(), "seqlens_k must be contiguous")
    check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    for name, rows in (("q", q), ("kcache", k_cache)):  # TMA descriptors
        steps = [rows.data_ptr(), *(step * rows.itemsize for step in rows.stride()[:-1])]
        require(all(step % 16 == 0 for step in steps), f"{name} is at {steps} bytes, which 16 does not divide")


def _check_schedule(meta: FlashMLASchedMeta, lens: Tensor, rows: int, parts: int) -> None:
    schedule, splits = meta.tile_scheduler_metadata, meta.num_splits
    require(schedule is not None and splits is not None, "a call without a schedule makes one, once per layer")
    check(schedule.dtype == splits.dtype == torch.int32, "tile_scheduler_metadata must have dtype int32")
    check(schedule.shape == (parts, 8), "tile_scheduler_metadata must have shape (num_sm_parts, 8)")
    check(splits.shape == (len(lens) + 1,), "num_splits must have shape (batch_size + 1)")
    check(schedule.is_contiguous() and splits.is_contiguous(), "tile_scheduler_metadata must be contiguous")
    require((schedule == rows).all(), "the schedule is of calls with another query length")
    require(torch.equal(splits.diff(), lens), f"the schedule is of {splits.diff().tolist()} keys, not {lens.tolist()}")


def _parts(rows: int, is_fp8: bool) -> int:
    parts = _MULTIPROCESSORS // -(-rows // 64)
    require(parts or not is_fp8, f"{rows} rows are more tiles than there are multiprocessors")
    return max(parts, 1)
