"""Requests of int8 attention, in rows and in quantized pages, their results in float64, and runs of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.ops import split_bytes
from attnplug_int8_ixformer.pages import Pages
from attnplug_int8_ixformer.provider import ScoreParams
from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_launch import (
    DecodePlan,
    PrefillPlan,
    aligned,
    attend_decode,
    attend_prefill,
    column_bytes,
)
from attnplug_kit.oracle import attend
from tests.backends import requests
from tests.backends.requests import CANARY, DTYPES, lens, starts
from tests.backends.triton_on_cpu import DEVICE

__all__ = ["CANARY", "DTYPES", "Requests"]


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return rows as integers from -127 to 127, and their scales ``(...,)``, in float64.

    The definition is in float32: in another precision other values would be ties.
    """
    absmax = rows.float().abs().amax(-1)
    scales = torch.where(absmax > 0, absmax, 1.0) / 127
    return (rows.float() / scales[..., None]).round().clamp(-127, 127).double(), scales.double()


def quantize_channels(rows: Tensor, scales: Tensor) -> Tensor:
    """Return ``(tokens, kv_heads, size)`` as integers in float64, with scales ``(kv_heads, size)``."""
    return (rows.float() / scales).round().clamp(-127, 127).double()


@frozen(eq=False)
class Requests(requests.Requests):
    """
    Requests of a model with an int8 KV cache.

    Attributes:
        level: 1 or 2.
        page: Tokens of a page.
        window: Tokens that a token attends to, itself included; None for all.
        soft_cap: The soft cap of the scores; None for none.
        alibi: linear, sqrt, or None.
        value_scales: ``(kv_heads, size)`` float32; the largest values are clipped.
        table: ``(num_reqs, max_blocks)`` int32.
        num_blocks: Blocks of the cache.
    """

    level: int = 1
    page: int = 16
    window: int | None = None
    soft_cap: float | None = None
    alibi: str | None = None
    value_scales: Tensor = field(init=False)
    table: Tensor = field(init=False)
    num_blocks: int = field(init=False)

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        spread = torch.rand(self.kv_heads, self.size, generator=torch.Generator().manual_seed(2))
        self.put("value_scales", ((2 + 2 * spread) / 127).to(DEVICE))
        table, count = self.block_table(self.page)
        self.put("table", table.to(DEVICE))
        self.put("num_blocks", count)

    @property
    def params(self) -> ScoreParams:
        left = -1 if self.window is None else self.window - 1
        slopes = self.slopes if self.alibi else None
        return ScoreParams(self.scale, left, self.soft_cap or 0.0, slopes, self.alibi == "sqrt")

    @property
    def slopes(self) -> Tensor:
        return torch.logspace(-1, -4, self.kv_heads * self.group, base=2.0).to(DEVICE)

    def rounded(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return queries, keys and values after quantization, in float64 on the CPU."""

        def round_rows(rows):
            found, scales = quantize_rows(rows.cpu())
            return found * scales[..., None]

        scales = self.value_scales.cpu()
        values = [rows.cpu().double() for rows in self.values]
        if self.level == 1:
            values = [quantize_channels(rows, scales) * scales.double() for rows in values]
        return [round_rows(rows) for rows in self.queries], [round_rows(rows) for rows in self.keys], values

    def expected(self) -> Tensor:
        """Return attention over the quantized numbers, ``(tokens, heads, size)`` in float64."""
        given = {"window": (-1 if self.window is None else self.window - 1, 0), "logits_soft_cap": self.soft_cap}
        slopes = {"alibi": self.alibi, "alibi_slopes": self.slopes.cpu() if self.alibi else None}
        parts = [attend(*rows, scale=self.scale, **given, **slopes) for rows in zip(*self.rounded(), strict=True)]
        return torch.cat([part.output for part in parts])

    def slots(self, request: int, places: Tensor) -> Tensor:
        """Return the KV-cache slots of a request's positions, int64."""
        return self.table[request].cpu().long()[places // self.page] * self.page + places % self.page

    def cache(self, *, written: bool) -> Pages:
        """Return the KV cache with the context, or all tokens if `written`; other slots spoil results."""
        shape = (self.num_blocks, self.kv_heads, self.page, self.size)
        keys = torch.full(shape, 99, dtype=torch.int8)
        kind = torch.int8 if self.level == 1 else self.dtype
        values = torch.full(shape, 99 if self.level == 1 else torch.nan).to(kind)
        scales = torch.full(shape[:3], torch.nan)
        for request, (length, count) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            old = torch.arange(length if written else length - count)
            block, slot = self.table[request].cpu().long()[old // self.page], old % self.page
            ints, found = quantize_rows(self.keys[request].cpu())
            keys[block, :, slot], scales[block, :, slot] = ints[old].to(torch.int8), found[old].float()
            rows = self.values[request].cpu()[old]
            if self.level == 1:
                rows = quantize_channels(rows, self.value_scales.cpu()).to(kind)
            values[block, :, slot] = rows
        return Pages(
            keys.to(DEVICE).transpose(1, 2),
            values.to(DEVICE).transpose(1, 2),
            scales.to(DEVICE),
            self.value_scales if self.level == 1 else None,
        )

    def new(self) -> tuple[Tensor, Tensor]:
        """Return the new keys and values of this step."""
        ends = list(zip(self.seq_lens, self.query_lens, strict=True))
        keys, values = (
            torch.cat([rows[length - count :] for rows, (length, count) in zip(part, ends, strict=True)])
            for part in (self.keys, self.values)
        )
        return keys, values

    def new_slots(self) -> Tensor:
        """Return the slots of the new tokens, ``(tokens,)`` int64."""
        ends = enumerate(zip(self.seq_lens, self.query_lens, strict=True))
        found = [self.slots(request, torch.arange(length - count, length)) for request, (length, count) in ends]
        return torch.cat(found).to(DEVICE)


def with_outliers(query_lens: list[int], seq_lens: list[int], **fields: Any) -> Requests:
    """
    Return requests with the outlier channels of language models.

    Two channels of the keys have an offset of about ten standard deviations, and small query weights; three channels
    of the values are six to eight times as large. Value scales are from a calibration on other tokens.
    """
    case, generator = Requests(query_lens, seq_lens, **fields), torch.Generator().manual_seed(7)
    offset, value_gain, query_gain = torch.zeros(case.size), torch.ones(case.size), torch.full((case.size,), 1.5)
    offset[3], offset[17], query_gain[3], query_gain[17] = 12.0, -9.0, 0.3, 0.3
    value_gain[5], value_gain[11], value_gain[23] = 8.0, 6.0, 7.0
    scaled = (
        ("queries", query_gain, torch.zeros(case.size)),
        ("keys", torch.ones(case.size), offset),
        ("values", value_gain, offset * 0),
    )
    for name, factor, shift in scaled:
        rows = [
            (rows.float() * factor.to(rows.device) + shift.to(rows.device)).to(case.dtype)
            for rows in getattr(case, name)
        ]
        case.put(name, rows)
    others = torch.randn(512, case.kv_heads, case.size, generator=generator) * value_gain
    case.put("value_scales", (others.abs().amax(0) / 127).to(DEVICE))
    return case


def check(out: Tensor, expected: Tensor) -> None:
    """Check an output: it is rounded once to 16 bits, and so are probabilities, unless they are int8."""
    limit = 2**-6 if out.dtype == torch.bfloat16 else 2**-8
    torch.testing.assert_close(out.cpu().double(), expected, rtol=limit, atol=limit)


def with_int8_probs(case: Requests, tile: int) -> Tensor:
    """
    Return the output of a level 1 prefill, ``(tokens, heads, size)`` in float64.

    In each tile of keys the probabilities are integers of at most 127, relative to the row's maximum in that tile.
    """
    found = []
    for q, k, v in zip(*case.rounded(), strict=True):
        out = torch.zeros(q.shape, dtype=torch.float64)
        for row in range(q.shape[0]):
            for head in range(q.shape[1]):
                scores, kv_head = (
                    _scores(case, q[row, head], k, k.shape[0] - q.shape[0] + row, head),
                    head // case.group,
                )
                tops = torch.stack([part.max() for part in scores.split(tile)]).repeat_interleave(tile)[: len(scores)]
                tops = tops.clamp(min=-1e30)
                probs = (127 * (scores - tops).exp()).round() * (tops - tops.max()).exp()
                out[row, head] = probs @ v[: len(scores), kv_head] / probs.sum()
        found.append(out)
    return torch.cat(found)


def _scores(case: Requests, query: Tensor, keys: Tensor, position: int, head: int) -> Tensor:
    """Return the scores of a row, ``(position + 1,)``, -inf outside the window."""
    scores = case.scale * (keys[: position + 1, head // case.group] @ query)
    distance = position - torch.arange(position + 1)
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    if case.alibi:
        scores = scores - case.slopes[head].cpu() * (distance if case.alibi == "linear" else distance.sqrt())
    return scores if case.window is None else scores.masked_fill(distance >= case.window, -torch.inf)


def fields_of(level: int, **changed: Any) -> dict[str, Any]:
    """Return fields of requirements of a level."""
    return {
        "head_size": 64,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "dtype": "bfloat16",
        "paged": True,
        "kv_cache_dtype": "int8" if level == 1 else "int8_k",
        **changed,
    }


def run_decode(case, *, tiles=None, splits=1, writes=True, cache=None):
    """Run the decode kernel; return output and KV cache."""
    query, pages = torch.cat(case.queries), case.cache(written=not writes) if cache is None else cache
    out = torch.full_like(query, CANARY)
    heads, size = query.shape[1:]
    plan = DecodePlan(
        query_starts=starts(case.query_lens),
        seq_lens=lens(case.seq_lens),
        table=case.table,
        max_query_len=max(case.query_lens),
        num_splits=splits,
        scratch=torch.full((split_bytes(len(query) * splits, heads, size),), 255, dtype=torch.uint8, device=DEVICE),
        tiles=tiles or DecodeTiles(keys=32),
    )
    attend_decode(query, case.new() if writes else None, pages, out, plan, case.params)
    return out, pages


def run_prefill(case, tiles=None, columns=1024, *, cache=None, scratch=None, uses_tma=False):
    """Run a prefill kernel, and return the output."""
    query, pages = torch.cat(case.queries), case.cache(written=True) if cache is None else cache
    out = torch.full_like(query, CANARY)
    columns_of = [aligned(length) for length in case.seq_lens]
    if scratch is None:
        each = column_bytes(case.kv_heads, case.size, with_keys=uses_tma)
        scratch = torch.full((columns * each,), 99, dtype=torch.uint8, device=DEVICE)
    plan = PrefillPlan(
        query_starts=starts(case.query_lens),
        seq_lens=lens(case.seq_lens),
        table=case.table,
        key_starts=starts(columns_of)[:-1],
        first=0,
        count=len(columns_of),
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
        scratch=scratch,
        tiles=tiles or PrefillTiles(rows=32, keys=32, warps=4),
        uses_tma=uses_tma,
    )
    attend_prefill(query, pages, out, plan, case.params)
    return out
