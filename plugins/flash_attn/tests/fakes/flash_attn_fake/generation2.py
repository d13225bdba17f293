"""The kernels of FlashAttention 2 with their peculiarities, as three packages ship them."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from flash_attn_fake.exact import ScoreParams, attend
from flash_attn_fake.keys import Keys, check_index, check_longest, check_rows, spans
from flash_attn_fake.refusal import check, require


@frozen
class Build:
    """
    What differs from package to package.

    Attributes:
        page_multiple: A divisor of every page size; None without pages.
        folded_lse: How the LSE of folded rows is laid out where keys are not split: ``"right"``, or in another order
            with ``"pages"``, or where keys are ``"packed"``.
    """

    page_multiple: int | None
    folded_lse: str


@frozen(eq=False, kw_only=True)
class Rows:
    """The query side of a call."""

    query: Tensor
    starts: Tensor
    longest: int
    longest_keys: int
    num_splits: int = 0


def varlen_fwd(build: Build, rows: Rows, keys: Keys, params: ScoreParams, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output ``(rows, heads, head_size)``, NaN where nothing is written, and LSE ``(heads, rows)``."""
    _check(build, rows, keys, params)
    causal = causal and (rows.longest != 1 or params.alibi is not None)
    folded = _is_folded(rows, keys, params)
    if causal:
        params = evolve(params, right=0)
    params = evolve(params, **{side: -1 for side in ("left", "right") if getattr(params, side) >= rows.longest_keys})
    out = torch.full(rows.query.shape, torch.nan, dtype=torch.float64)
    lse = torch.full((rows.query.shape[1], rows.query.shape[0]), torch.nan, dtype=torch.float64)
    where = spans(rows.starts, len(rows.query), rows.longest)
    for at, (key, value) in zip(where, keys.of_requests(), strict=True):
        if at.stop > at.start:
            _require_keys(build, keys, len(key), folded=folded)
            out[at], lse[:, at] = attend(rows.query[at], key, value, params)
            lse[:, at] += _missing_alibi(params, at.stop - at.start, len(key))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return out.to(rows.query.dtype), (_laid_out(build, rows, keys, lse) if folded else lse).float()


def _check(build: Build, rows: Rows, keys: Keys, params: ScoreParams) -> None:
    query, (requests, heads, size) = rows.query, (len(rows.starts) - 1, *rows.query.shape[1:])
    check(query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(keys.key.dtype == query.dtype, "query and key must have the same dtype")
    check(keys.value.dtype == query.dtype, "query and value must have the same dtype")
    check(requests > 0, "batch size must be positive")
    check(size <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(size % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check(heads % keys.key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")
    check_rows("q", query, tuple(query.shape), query.device)
    for name, given in (("k", keys.key), ("v", keys.value)):
        check_rows(name, given, (*keys.key.shape[:-1], size), query.device)
    check_index("cu_seqlens_q", rows.starts, (requests + 1,), query.device)
    if keys.starts is not None:
        check_index("cu_seqlens_k", keys.starts, (requests + 1,), query.device)
    if keys.used is not None:
        check_index("seqused_k", keys.used, (requests,), query.device)
    if keys.table is not None:
        _check_pages(build, keys, rows)
    if params.alibi is not None:
        check(params.alibi.dtype == torch.float32, "ALiBi slopes must have dtype fp32")
        check(tuple(params.alibi.shape) == (heads,), "ALiBi slopes must have shape (heads,)")
    check_longest(keys, rows.longest_keys)


def _check_pages(build: Build, keys: Keys, rows: Rows) -> None:
    assert keys.table is not None
    multiple = build.page_multiple
    require(multiple is not None, "this build has no pages")
    check(keys.key.shape[1] % multiple == 0, f"Paged KV cache block size must be divisible by {multiple}")
    check_index("block_table", keys.table, (len(rows.starts) - 1, keys.table.shape[1]), rows.query.device)


def _is_folded(rows: Rows, keys: Keys, params: ScoreParams) -> bool:
    """Whether the query heads of a key head become rows, which they do where each request seems to have one row."""
    ratio = rows.query.shape[1] // keys.key.shape[-2]
    folded = rows.longest == 1 and ratio > 1 and params.left < 0 and params.right < 0 and params.alibi is None
    requests = len(rows.starts) - 1
    check(not folded or len(rows.query) == requests, f"shape '[{requests}, ...]' is invalid for {len(rows.query)} rows")
    check(folded or keys.table is None or rows.num_splits <= 1, "num_splits > 1 is not supported for varlen paged KV")
    return folded


def _require_keys(build: Build, keys: Keys, count: int, *, folded: bool) -> None:
    """With pages, the LSE of a request with rows and without keys overwrites others, or memory past the end."""
    require(
        count or keys.table is None or folded,
        "a request with rows and no keys, in pages: its LSE is written to a wrong address",
    )


def _missing_alibi(params: ScoreParams, rows: int, keys: int) -> Tensor | float:
    """What a causal mask alone adds to an LSE with ALiBi: slopes are then counted from the first key."""
    if params.alibi is None or params.left >= 0 or params.right != 0:
        return 0.0
    return params.alibi.double()[:, None] * (torch.arange(rows) + keys - rows)


def _laid_out(build: Build, rows: Rows, keys: Keys, lse: Tensor) -> Tensor:
    """The LSE of folded rows, as the package returns it."""
    heads, requests, kv_heads = *lse.shape, keys.key.shape[-2]
    splits = rows.num_splits or (2 if rows.longest_keys > 64 else 1)
    if splits > 1 or build.folded_lse != ("packed" if keys.table is None else "pages"):
        return lse
    by_group = lse.reshape(kv_heads, heads // kv_heads, requests)
    if keys.table is None:
        by_group = lse.reshape(kv_heads, requests, heads // kv_heads)
    return by_group.transpose(1, 2).reshape(heads, requests)
