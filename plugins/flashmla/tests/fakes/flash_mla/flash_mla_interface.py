"""
The kernels for Hopper in float64. Checks are those of ``api/dense_decode.h``, in its order, and of TMA.

Of the FP8 kernels, those of ``extension/sm90/dense_fp8`` and what these do without checking. Of the sparse kernels,
those of ``api/sparse_decode.h`` and ``api/sparse_fwd.h`` and of their templates for ``sm90``.
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
    unused = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length, kv_format)
    require(all(one is None for one in unused), "V3.2 does not support extra KV cache or dynamic topk length")
    require(use_legacy and not enable_batch_invariant, "the fake has the kernels for Hopper")
    if indices is not None:
        require(not causal and is_fp8_kvcache is not False, "causal must be False, is_fp8_kvcache must be True")
        require(descale_q is descale_k is None, "descale_q/descale_k apply to the dense fp8 path only")
        return _sparse_decode(q, k_cache, indices, head_dim_v, softmax_scale, tile_scheduler_metadata)
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


def flash_mla_sparse_fwd(  # noqa: PLR0917 - the library's signature
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False, return_log2_lse=None
):
    require(use_legacy and attn_sink is None and return_log2_lse is None, "the fake has the kernels for Hopper")
    check(q.ndim == kv.ndim == indices.ndim == 3, "q, kv and indices must have 3 dimensions")
    (tokens, heads, size), topk = q.shape, indices.shape[2]
    check(size in (576, 512), "Invalid d_qk")
    _check_sparse(q, kv, indices, d_v)
    check(kv.dtype == torch.bfloat16, "kv must have dtype bfloat16")
    check(kv.shape[1:] == (1, size), "kv must have shape (s_kv, h_kv, d_qk)")
    check(indices.shape == (tokens, 1, topk), "indices must have shape (s_q, h_kv, topk)")
    check(topk > 0 and topk % 128 == 0, "params.topk % (2*B_TOPK) == 0")
    check(topk_length is None or topk_length.dtype == torch.int32, "topk_length must have dtype Int")
    check(topk_length is None or topk_length.shape == (tokens,), "topk_length must have shape (s_q)")
    require(kv.stride(0) * 2 % 16 == 0 and kv.data_ptr() % 16 == 0, "cp.async loads 16 bytes at multiples of them")
    lens = [topk] * tokens if topk_length is None else topk_length.tolist()
    require(all(0 <= one <= topk for one in lens), "the kernel reads as many indices as topk_length says")
    journal.sparse.append((tokens, heads, topk))
    out, lse = torch.empty(tokens, heads, d_v, dtype=q.dtype), torch.empty(tokens, heads)
    for token, (row, length) in enumerate(zip(indices[:, 0].tolist(), lens, strict=True)):
        slots = [slot for slot in row[:length] if 0 <= slot < len(kv)]
        out[token], lse[token] = _attend_one(q[token], kv[slots, 0], d_v, sm_scale)
    return out, torch.full_like(lse, torch.nan), lse


def _sparse_decode(
    q: Tensor, pages: Tensor, indices: Tensor, value_size: int, scale: float, meta: FlashMLASchedMeta
) -> tuple[Tensor, Tensor]:
    check(q.ndim == pages.ndim == 4 and indices.ndim == 3, "q and kv must have 4 dimensions, indices 3")
    (requests, query_len, heads, size), topk = q.shape, indices.shape[2]
    check(requests > 0 and query_len > 0, "b > 0, s_q > 0")
    check(size == 576, "Unsupported head sizes for is_fp8_kvcache == True")
    _check_sparse(q, pages, indices, value_size)
    check(
        pages.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn), "key must have dtype fp8_e4m3fn, int8 or uint8"
    )
    check(pages.shape[2:] == (1, 656), "kv must have shape (num_blocks, page_block_size, h_kv, bytes_per_token)")
    check(pages.stride(1) == 656, "The whole block must be contiguous when is_fp8_cache is True for kv cache")
    check(indices.shape == (requests, query_len, topk), "indices must have shape (b, s_q, topk)")
    check(topk > 0 and topk % 64 == 0, "params.topk % TOPK_BLOCK_SIZE == 0")
    require(all(step % 2 == 0 for step in indices.stride()[:-1]), "the kernel loads two indices at once")
    require(pages.stride(0) % 16 == 0 and pages.data_ptr() % 16 == 0, "the kernel loads 16 bytes at multiples of them")
    parts, config = max(_MULTIPROCESSORS // query_len // (heads // 64), 1), (requests, query_len, heads, topk)
    if meta.have_initialized:
        assert meta.config == config, "Your input arguments are inconsistent with sched_meta."
    else:
        journal.schedules += 1
        meta.have_initialized, meta.config = True, config
        meta.tile_scheduler_metadata = torch.full((parts, 8), topk, dtype=torch.int32)
        meta.num_splits = torch.arange(requests + 1, dtype=torch.int32)
    require(meta.tile_scheduler_metadata.shape == (parts, 8), "tile_scheduler_metadata must have shape")
    journal.sparse.append((requests * query_len, heads, topk))
    slots = pages.shape[0] * pages.shape[1]
    out, lse = q.new_empty(requests, query_len, heads, value_size), torch.empty(requests, query_len, heads)
    for place in [(request, row) for request in range(requests) for row in range(query_len)]:
        chosen = [slot for slot in indices[place].tolist() if slot != -1]
        require(all(0 <= slot < slots for slot in chosen), "the kernel loads from wild addresses")
        keys = [_record(pages[slot // pages.shape[1], slot % pages.shape[1], 0]) for slot in chosen]
        out[place], lse[place] = _attend_one(q[place], torch.stack(keys) if keys else q[place][:0], value_size, scale)
    return out, lse.transpose(1, 2)


def _record(record: Tensor) -> Tensor:
    """Dequantize as the kernel does: scale and product are rounded to bfloat16."""
    record = record.view(torch.uint8)
    scales = record[512:528].clone().view(torch.float32).bfloat16()
    codes = record[:512].view(torch.float8_e4m3fn).float().bfloat16()
    return torch.cat([codes * scales.repeat_interleave(128), record[528:].clone().view(torch.bfloat16)])


def _attend_one(query: Tensor, keys: Tensor, value_size: int, scale: float) -> tuple[Tensor, Tensor]:
    found = _attend(query.double().unsqueeze(0), keys.double(), value_size, scale, causal=False, is_fp8=False)
    return found[0][0], found[1][0]


def _check_sparse(q: Tensor, kv: Tensor, indices: Tensor, value_size: int) -> None:
    check(q.shape[-2] in (64, 128), f"Unsupported h_q: {q.shape[-2]}")
    check(value_size == 512, "Only head_size_v == 512 is supported for sparse decoding")
    check(q.dtype == torch.bfloat16, "q must have dtype bfloat16")
    check(indices.dtype == torch.int32, "indices must have dtype Int")
    check(len({one.device for one in (q, kv, indices)}) == 1, "tensors must be on one device")
    for one in (q, kv, indices):
        check(one.stride(-1) == 1, "tensors must have contiguous last dimension")
    steps = [q.data_ptr(), *(step * q.itemsize for step in q.stride()[:-1])]
    require(all(step % 16 == 0 for step in steps), f"q is at {steps} bytes, which 16 does not divide")
