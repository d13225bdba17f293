"""Prefill attention."""

from __future__ import annotations

import torch

from ixformer import exact
from ixformer.journal import record, require, require_pages


def flash_attn_varlen_int8_func(
    *,
    q, k, v, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    window_size, alibi_slopes, softcap, sqrt_alibi, out, block_table, output_dtype,
):  # fmt: skip
    record("flash_attn_varlen_int8_func", dict(locals()))
    tokens, heads, size = q.shape
    requests = len(cu_seqlens_q) - 1
    require_pages(k, v, k_scale, mixed=v_scale is None)
    require(q, (tokens, heads, size), torch.int8, "q")
    require(q_scale, (heads, tokens), torch.float32, "q_scale")
    if v_scale is not None:
        require(v_scale, (k.shape[1], size), torch.float32, "v_scale")
    require(out, (tokens, heads, size), output_dtype, "out")
    require(cu_seqlens_q, (requests + 1,), torch.int32, "cu_seqlens_q")
    require(cu_seqlens_k, (requests + 1,), torch.int32, "cu_seqlens_k")
    require(block_table, (requests, block_table.shape[1]), torch.int32, "block_table")
    assert (int(cu_seqlens_q[0]), int(cu_seqlens_k[0]), int(cu_seqlens_q[-1])) == (0, 0, tokens)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    params = {"causal": causal, "window": window_size, "scale": softmax_scale, "cap": softcap, "sqrt": sqrt_alibi}
    for request in range(requests):
        rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        length = int(cu_seqlens_k[request + 1] - cu_seqlens_k[request])
        if rows.start == rows.stop:
            continue
        keys = exact.gather(k, k_scale, block_table[request], length)
        values = exact.gather(v, None, block_table[request], length)
        values = values if v_scale is None else values * v_scale.double()
        queries = q[rows].double() * q_scale.T[rows].double()[..., None]
        out[rows] = exact.attention(queries, keys, values, params, alibi_slopes).to(out)
