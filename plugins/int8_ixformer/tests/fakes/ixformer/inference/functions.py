"""Quantization, cache writes and decode attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ixformer import exact
from ixformer.journal import record, require, require_pages


def scaled_int8_quant_for_attn(x, mode, transpose_scale=False, scale=None):
    record("scaled_int8_quant_for_attn", dict(locals()))
    assert mode in (0, 2)
    tokens, heads, size = x.shape
    require(x, (tokens, heads, size), x.dtype, "x")
    assert x.dtype in (torch.bfloat16, torch.float16)
    if mode == 0:
        require(scale, (heads, size), torch.float32, "scale")
        assert transpose_scale is False
        return exact.quantize(x, scale), scale
    assert scale is None
    absmax = x.float().abs().amax(-1)
    found = torch.where(absmax > 0, absmax, 1.0) / 127
    return exact.quantize(x, found[..., None]), found.T.contiguous() if transpose_scale else found


def _write(given, *, mixed: bool) -> None:
    key, value, slots = given["key"], given["value"], given["slot_mapping"]
    require_pages(given["key_cache"], given["value_cache"], given["key_scale_cache"], mixed=mixed)
    tokens, heads, size = key.shape
    require(key, (tokens, heads, size), torch.int8, "key")
    require(value, (tokens, heads, size), given["value_cache"].dtype, "value")
    require(given["k_scale"], (tokens, heads), torch.float32, "k_scale")
    require(slots, (tokens,), torch.int64, "slot_mapping")
    assert given["kv_cache_dtype"] == ""
    page = given["key_cache"].shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            _put(given, slot // page, slot % page, key[token], value[token], given["k_scale"][token])


def _put(given, block: int, slot: int, key: Tensor, value: Tensor, scale: Tensor) -> None:
    given["key_cache"][block, :, slot] = key
    given["value_cache"][block, :, slot] = value
    given["key_scale_cache"][block, :, slot] = scale


def reshape_and_cache_flash_int8(
    key, value, k_scale, key_cache, value_cache, key_scale_cache, slot_mapping, kv_cache_dtype=""
):
    record("reshape_and_cache_flash_int8", dict(locals()))
    _write(dict(locals()), mixed=False)


def reshape_and_cache_flash_mix(
    key, value, k_scale, key_cache, value_cache, key_scale_cache, slot_mapping, kv_cache_dtype=""
):
    record("reshape_and_cache_flash_mix", dict(locals()))
    _write(dict(locals()), mixed=True)


def vllm_paged_attention_int8(
    *,
    output, query, key_cache, value_cache, query_scale, key_scale_cache, value_scale_cache, num_kv_heads, scale,
    block_tables, context_lens, block_size, softcap, alibi_slopes, causal, window_left, window_right, use_sqrt_alibi,
    use_cuda_graph, max_context_len, cu_query_lens, max_query_len, save_key=None, save_value=None, save_key_scale=None,
):  # fmt: skip
    record("vllm_paged_attention_int8", dict(locals()))
    require(value_scale_cache, (num_kv_heads, query.shape[2]), torch.float32, "value_scale_cache")
    _attend(dict(locals()), value_scale_cache)


def vllm_paged_attention_mix(
    *,
    output, query, key_cache, value_cache, query_scale, key_scale_cache, num_kv_heads, scale,
    block_tables, context_lens, block_size, softcap, alibi_slopes, causal, window_left, window_right, use_sqrt_alibi,
    use_cuda_graph, max_context_len, cu_query_lens, max_query_len, save_key=None, save_value=None, save_key_scale=None,
):  # fmt: skip
    record("vllm_paged_attention_mix", dict(locals()))
    _attend(dict(locals()), None)


def _attend(given, value_scales: Tensor | None) -> None:
    query, key_cache, lens, starts = given["query"], given["key_cache"], given["context_lens"], given["cu_query_lens"]
    tokens, heads, size = query.shape
    requests = len(lens)
    require_pages(key_cache, given["value_cache"], given["key_scale_cache"], mixed=value_scales is None)
    assert (key_cache.shape[1], key_cache.shape[2]) == (given["num_kv_heads"], given["block_size"])
    require(query, (tokens, heads, size), torch.int8, "query")
    require(given["query_scale"], (tokens, heads), torch.float32, "query_scale")
    require(given["output"], (tokens, heads, size), given["output"].dtype, "output")
    require(starts, (requests + 1,), torch.int32, "cu_query_lens")
    require(lens, (requests,), torch.int32, "context_lens")
    require(given["block_tables"], (requests, given["block_tables"].shape[1]), torch.int32, "block_tables")
    assert int(lens.min()) >= 1
    assert int(lens.max()) <= given["max_context_len"]
    assert int(starts.diff().max()) <= given["max_query_len"]
    assert isinstance(given["use_cuda_graph"], bool)
    if given["save_key"] is not None:
        _save(given)
    params = {
        "causal": given["causal"],
        "window": (given["window_left"], given["window_right"]),
        "scale": given["scale"],
        "cap": given["softcap"],
        "sqrt": given["use_sqrt_alibi"],
    }
    for request, length in enumerate(lens.tolist()):
        rows = slice(int(starts[request]), int(starts[request + 1]))
        if rows.start == rows.stop:
            continue
        table = given["block_tables"][request]
        keys = exact.gather(key_cache, given["key_scale_cache"], table, length)
        values = exact.gather(given["value_cache"], None, table, length)
        values = values if value_scales is None else values * value_scales.double()
        queries = query[rows].double() * given["query_scale"][rows].double()[..., None]
        given["output"][rows] = exact.attention(queries, keys, values, params, given["alibi_slopes"]).to(
            given["output"]
        )


def _save(given) -> None:
    """Write new rows: slots are derived from lengths and block tables, and padding is written too."""
    tokens, heads, size = given["save_key"].shape
    require(given["save_key"], (tokens, heads, size), torch.int8, "save_key")
    require(given["save_value"], (tokens, heads, size), given["value_cache"].dtype, "save_value")
    require(given["save_key_scale"], (tokens, heads), torch.float32, "save_key_scale")
    starts, page = given["cu_query_lens"].tolist(), given["block_size"]
    garbage = torch.tensor(99, dtype=torch.int8), given["value_cache"].new_tensor(99), torch.tensor(torch.nan)
    for request, length in enumerate(given["context_lens"].tolist()):
        if starts[request] == starts[request + 1]:
            _put(given, int(given["block_tables"][request, (length - 1) // page]), (length - 1) % page, *garbage)
        for token in range(starts[request], starts[request + 1]):
            place = length - starts[request + 1] + token
            block = int(given["block_tables"][request, place // page])
            rows = (given[name][token] for name in ("save_key", "save_value", "save_key_scale"))
            _put(given, block, place % page, *rows)


def merge_attn_states(out, lse, other, other_lse, output):
    record("merge_attn_states", dict(locals()))
    require(lse, tuple(out.shape[:2]), torch.float32, "lse")
    require(other_lse, tuple(out.shape[:2]), torch.float32, "other_lse")
    share = torch.sigmoid((lse - other_lse).double())[..., None]
    output.copy_(out.double() * share + other.double() * (1 - share))
