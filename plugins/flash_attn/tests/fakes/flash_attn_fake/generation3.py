"""The kernels of FlashAttention 3 with their peculiarities, as two packages ship them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen
from torch import Tensor

from flash_attn_fake.exact import ScoreParams, attend
from flash_attn_fake.keys import Keys, check_index, check_leftpad, check_longest, check_rows, spans
from flash_attn_fake.refusal import check

if TYPE_CHECKING:
    from flash_attn_fake.tiles import Build

FP8 = torch.float8_e4m3fn


@frozen(eq=False, kw_only=True)
class Rows:
    """
    The query side of a call, with the descales ``(requests, kv_heads)`` of queries, keys and values.

    `latent` is ``(rows, heads, head_size_v)``: scores have its products with the values too.
    """

    query: Tensor
    starts: Tensor
    longest: int
    longest_keys: int
    descales: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    latent: Tensor | None = None

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.starts) - 1


def fwd(build: Build, rows: Rows, keys: Keys, params: ScoreParams, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output ``(rows, heads, head_size_v)``, NaN where nothing is written, and LSE ``(heads, rows)``."""
    check_call(rows, keys, params)
    tile = tile_of(build, rows, keys, params, causal=causal)
    params, _ = resolved(rows, params, causal=causal)
    heads, kv_heads = rows.query.shape[1], keys.key.shape[-2]
    out = torch.full((len(rows.query), heads, keys.value.shape[-1]), torch.nan, dtype=torch.float64)
    lse = torch.full((heads, len(rows.query)), torch.nan, dtype=torch.float64)
    query_scale, key_scale, value_scale = (_scales(rows, each, kv_heads) for each in rows.descales)
    where = spans(rows.starts, len(rows.query), rows.longest)
    for request, (at, (key, value)) in enumerate(zip(where, keys.of_requests(), strict=True)):
        query = rows.query[at].double() * query_scale[request].repeat_interleave(heads // kv_heads)[:, None]
        scaled, values = key.double() * key_scale[request][:, None], value.double() * value_scale[request][:, None]
        if rows.latent is not None:
            query, scaled = torch.cat([query, rows.latent[at].double()], -1), torch.cat([scaled, values], -1)
        out[at], lse[:, at] = attend(query, scaled, values, params)
        if tile:  # what has no weight is 0 times what is there; here for all rows, not those of the last tile alone
            behind = keys.behind(request, tile).double().sum(0)
            out[at] += 0.0 * behind.repeat_interleave(heads // kv_heads, 0)
        if not len(key):
            lse[:, at] = torch.inf if not len(keys.key) else -torch.inf  # a sink is not looked at
    return out.to(torch.bfloat16 if rows.query.dtype == FP8 else rows.query.dtype), lse.float()


def tile_of(build: Build, rows: Rows, keys: Keys, params: ScoreParams, *, causal: bool) -> int:
    """Return the keys of the tiles that pages are loaded by, as `Build.tile` does."""
    heads, size = rows.query.shape[1:]
    resolved_terms, is_causal = resolved(rows, params, causal=causal)
    return build.tile(
        (size, keys.value.shape[-1]),
        0 if keys.table is None else keys.key.shape[1],
        rows.longest * (heads // keys.key.shape[-2]),
        resolved_terms,
        is_narrow=rows.query.dtype == FP8,
        causal=is_causal,
        padded=keys.leftpad is not None,
    )


def resolved(rows: Rows, params: ScoreParams, *, causal: bool) -> tuple[ScoreParams, bool]:
    """Return the window that the kernels run with, and whether they run the causal ones."""
    left = -1 if params.left >= rows.longest_keys - 1 else params.left
    right = 0 if causal else -1 if params.right >= rows.longest - 1 else params.right
    return evolve(params, left=left, right=right), left < 0 and right == 0


def check_call(rows: Rows, keys: Keys, params: ScoreParams) -> None:
    """
    Check what both packages check.

    Raises:
        RuntimeError: They refuse the call.
        MisuseError: They would return wrong numbers.
    """
    query, heads, size, size_v = rows.query, *rows.query.shape[1:], keys.value.shape[-1]
    check(query.dtype in (torch.float16, torch.bfloat16, FP8), "FlashAttention only supports fp16, bf16, and fp8_e4m3")
    check(keys.key.dtype == query.dtype, "query and key must have the same dtype")
    check(keys.value.dtype == query.dtype, "query and value must have the same dtype")
    check(size <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(heads % keys.key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    check(size == size_v or _may_differ(size, size_v), "If V headdim is different from Q/K dim, ...")
    check(size_v <= 256 or query.dtype != FP8, "HeaddimV > 256 requires fp16 and bf16 data type")
    _check_latent(rows, size, size_v)
    multiple = 16 if query.dtype == FP8 else 8
    check(size % multiple == 0 and size_v % multiple == 0, f"head_size should be a multiple of {multiple}")
    check_rows("q", query, tuple(query.shape), query.device)
    check_rows("k", keys.key, (*keys.key.shape[:-1], size), query.device)
    check_rows("v", keys.value, (*keys.key.shape[:-1], size_v), query.device)
    check_index("cu_seqlens_q", rows.starts, (rows.requests + 1,), query.device)
    check(keys.starts is None or keys.table is None, "If cu_seqlens_k is passed in, then page table is not supported")
    if keys.starts is not None:
        check_index("cu_seqlens_k", keys.starts, (rows.requests + 1,), query.device)
    if keys.used is not None:
        check_index("seqused_k", keys.used, (rows.requests,), query.device)
    if keys.table is not None:
        check(len(keys.table) == rows.requests, "batch_size must be equal to batch_size_k")
        check_index("block_table", keys.table, tuple(keys.table.shape), query.device)
    check_leftpad(keys.leftpad, rows.requests, query.device)
    check_longest(keys, rows.longest_keys)
    check_sink(query, params.sink, size == size_v)


def _check_latent(rows: Rows, size: int, size_v: int) -> None:
    query, latent = rows.query, rows.latent
    if latent is None:
        return
    check(size <= 64, "q_v is only supported for head_size <= 64")
    check(size_v >= 256, "q_v is only supported for hdim_v >= 256.")
    check(query.dtype != FP8, "q_v is only supported for fp16 and bf16 data type")
    check(latent.dtype == query.dtype, "q_v must have the same dtype as query")
    check_rows("q_v", latent, (*query.shape[:2], size_v), query.device)


def check_sink(query: Tensor, sink: Tensor | None, same_sizes: bool) -> None:
    """
    Check the sinks.

    Raises:
        RuntimeError: The kernels do not take them.
    """
    if sink is not None:
        check(query.shape[1] <= 64, "We only support query heads <= 64 with S aux")
        check(same_sizes, "We don't support S aux with hdim != hdim_v")
        check(sink.dtype == torch.bfloat16, "We only support bf16 dtype for S aux.")
        check(tuple(sink.shape) == (query.shape[1],) and sink.is_contiguous(), "s_aux must have shape (num_heads)")


def _may_differ(size: int, size_v: int) -> bool:
    return (128 < size <= 192 and 96 < size_v <= 128) or (size <= 64 and size_v <= 512)


def _scales(rows: Rows, descale: Tensor | None, kv_heads: int) -> Tensor:
    """Descales apply to FP8; with other dtypes the kernels ignore them."""
    if descale is None or rows.query.dtype != FP8:
        return torch.ones(rows.requests, kv_heads, dtype=torch.float64)
    check(tuple(descale.shape) == (rows.requests, kv_heads), "descale must have shape (batch_size, num_heads_k)")
    check(descale.dtype == torch.float32, "descale must have dtype float32")
    return descale.double()
