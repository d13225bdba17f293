"""Requests, their tensors in rows and in quantized pages, and what float64 says of them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug_int8_ixformer.pages import Pages
from attnplug_int8_ixformer.terms import Terms
from attnplug_kit.oracle.attention import attend
from tests.backends.triton_on_cpu import DEVICE

CANARY = 7.0
DTYPES = (torch.bfloat16, torch.float16)


def by_row(rows: Tensor) -> tuple[Tensor, Tensor]:
    """
    Rows as whole numbers of -127 to 127, and their scales ``(...,)``, in float64. The definition is in float32: where
    that says that two numbers are as near, another precision might not.
    """
    largest = rows.float().abs().amax(-1)
    scales = torch.where(largest > 0, largest, 1.0) / 127
    return (rows.float() / scales[..., None]).round().clamp(-127, 127).double(), scales.double()


def by_channel(rows: Tensor, scales: Tensor) -> Tensor:
    """``(tokens, kv_heads, size)`` as whole numbers, with scales ``(kv_heads, size)``."""
    return (rows.float() / scales).round().clamp(-127, 127).double()


@frozen(eq=False)
class Requests:
    """
    A few requests of a model.

    Attributes:
        query_lens: New tokens of each request.
        seq_lens: Tokens of each request.
        level: 1 or 2.
        kv_heads: KV heads of the model.
        group: Query heads per KV head.
        size: Size of a head.
        page: Tokens of a page.
        dtype: Of what is not quantized.
        window: Tokens that a token attends, itself included; None for all.
        soft_cap: Of the scores; None for none.
        alibi: linear, sqrt, or None.
    """

    query_lens: list[int]
    seq_lens: list[int]
    level: int = 1
    kv_heads: int = 2
    group: int = 2
    size: int = 64
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    alibi: str | None = None
    queries: list[Tensor] = field(init=False)
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    value_scales: Tensor = field(init=False)
    table: Tensor = field(init=False)
    num_blocks: int = field(init=False)

    def __attrs_post_init__(self):
        put, generator = object.__setattr__, torch.Generator().manual_seed(0)

        def draw(count, heads):
            return torch.randn(count, heads, self.size, generator=generator).to(self.dtype).to(DEVICE)

        put(self, "queries", [draw(count, self.kv_heads * self.group) for count in self.query_lens])
        put(self, "keys", [draw(count, self.kv_heads) for count in self.seq_lens])
        put(self, "values", [draw(count, self.kv_heads) for count in self.seq_lens])
        spread = torch.rand(self.kv_heads, self.size, generator=generator)
        put(self, "value_scales", ((2 + 2 * spread) / 127).to(DEVICE))  # the largest values are clipped
        most = max(-(-length // self.page) for length in self.seq_lens)
        order = torch.randperm(most * len(self.seq_lens), generator=torch.Generator().manual_seed(1)).int()
        put(self, "table", (1 + order.view(len(self.seq_lens), most)).to(DEVICE))
        put(self, "num_blocks", 1 + most * len(self.seq_lens))

    @property
    def terms(self) -> Terms:
        left = -1 if self.window is None else self.window - 1
        slopes = self.slopes if self.alibi else None
        return Terms(self.size**-0.5, left, self.soft_cap or 0.0, slopes, self.alibi == "sqrt")

    @property
    def slopes(self) -> Tensor:
        return torch.logspace(-1, -4, self.kv_heads * self.group, base=2.0).to(DEVICE)

    def seen(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries, keys and values as attention sees them: rounded, in float64, on the CPU."""

        def whole(rows):
            found, scales = by_row(rows.cpu())
            return found * scales[..., None]

        scales = self.value_scales.cpu()
        values = [rows.cpu().double() for rows in self.values]
        if self.level == 1:
            values = [by_channel(rows, scales) * scales.double() for rows in values]
        return [whole(rows) for rows in self.queries], [whole(rows) for rows in self.keys], values

    def expected(self) -> Tensor:
        """``(tokens, heads, size)``, in float64: attention of what is rounded."""
        given = {"window": (-1 if self.window is None else self.window - 1, 0), "logits_soft_cap": self.soft_cap}
        slopes = {"alibi": self.alibi, "alibi_slopes": self.slopes.cpu() if self.alibi else None}
        parts = [attend(*rows, scale=self.size**-0.5, **given, **slopes) for rows in zip(*self.seen(), strict=True)]
        return torch.cat([part.output for part in parts])

    def slots(self, request: int, places: Tensor) -> Tensor:
        """``(places,)`` int64."""
        return self.table[request].cpu().long()[places // self.page] * self.page + places % self.page

    def cache(self, *, written: bool) -> Pages:
        """The cache: what came before this step or, where `written`, all; elsewhere what would spoil a result."""
        shape = (self.num_blocks, self.kv_heads, self.page, self.size)
        keys = torch.full(shape, 99, dtype=torch.int8)
        kind = torch.int8 if self.level == 1 else self.dtype
        values = torch.full(shape, 99 if self.level == 1 else torch.nan).to(kind)
        scales = torch.full(shape[:3], torch.nan)
        for request, (length, count) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            old = torch.arange(length if written else length - count)
            block, slot = self.table[request].cpu().long()[old // self.page], old % self.page
            whole, found = by_row(self.keys[request].cpu())
            keys[block, :, slot], scales[block, :, slot] = whole[old].to(torch.int8), found[old].float()
            rows = self.values[request].cpu()[old]
            values[block, :, slot] = by_channel(rows, self.value_scales.cpu()).to(kind) if self.level == 1 else rows
        return Pages(
            keys.to(DEVICE).transpose(1, 2),
            values.to(DEVICE).transpose(1, 2),
            scales.to(DEVICE),
            self.value_scales if self.level == 1 else None,
        )

    def new(self) -> tuple[Tensor, Tensor]:
        """The rows of this step."""
        ends = list(zip(self.seq_lens, self.query_lens, strict=True))
        keys, values = (
            torch.cat([rows[length - count :] for rows, (length, count) in zip(part, ends, strict=True)])
            for part in (self.keys, self.values)
        )
        return keys, values

    def new_slots(self) -> Tensor:
        """``(tokens,)`` int64."""
        ends = enumerate(zip(self.seq_lens, self.query_lens, strict=True))
        found = [self.slots(request, torch.arange(length - count, length)) for request, (length, count) in ends]
        return torch.cat(found).to(DEVICE)


def outlying(query_lens: list[int], seq_lens: list[int], **fields: Any) -> Requests:
    """
    Requests as language models make them. Two channels of a key are some ten times as far from zero as the others
    vary, in every token, and queries use them little; three channels of a value are eight times as large. Value scales
    are those of a calibration on other tokens.
    """
    case, generator = Requests(query_lens, seq_lens, **fields), torch.Generator().manual_seed(7)
    offset, grown, used = torch.zeros(case.size), torch.ones(case.size), torch.full((case.size,), 1.5)
    offset[3], offset[17], used[3], used[17] = 12.0, -9.0, 0.3, 0.3
    grown[5], grown[11], grown[23] = 8.0, 6.0, 7.0
    scaled = (
        ("queries", used, torch.zeros(case.size)),
        ("keys", torch.ones(case.size), offset),
        ("values", grown, offset * 0),
    )
    for name, factor, shift in scaled:
        rows = [
            (rows.float() * factor.to(rows.device) + shift.to(rows.device)).to(case.dtype)
            for rows in getattr(case, name)
        ]
        object.__setattr__(case, name, rows)
    others = torch.randn(512, case.kv_heads, case.size, generator=generator) * grown
    object.__setattr__(case, "value_scales", (others.abs().amax(0) / 127).to(DEVICE))
    return case


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def lens(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def check(out: Tensor, expected: Tensor) -> None:
    """The output is rounded once, and each weight, to 16 bits; whole weights are exact, but for one in a while."""
    limit = 2**-6 if out.dtype == torch.bfloat16 else 2**-8
    torch.testing.assert_close(out.cpu().double(), expected, rtol=limit, atol=limit)


def with_byte_weights(case: Requests, tile: int) -> Tensor:
    """
    ``(tokens, heads, size)`` of level 1 prompts in float64: in each tile of keys, weights are whole numbers of at most
    127, relative to the largest of their row there. One row, one head at a time.
    """
    found = []
    for q, k, v in zip(*case.seen(), strict=True):
        out = torch.zeros(q.shape, dtype=torch.float64)
        for row in range(q.shape[0]):
            for head in range(q.shape[1]):
                scores, kv_head = (
                    _scores(case, q[row, head], k, k.shape[0] - q.shape[0] + row, head),
                    head // case.group,
                )
                tops = torch.stack([part.max() for part in scores.split(tile)]).repeat_interleave(tile)[: len(scores)]
                tops = tops.clamp(min=-1e30)
                weights = (127 * (scores - tops).exp()).round() * (tops - tops.max()).exp()
                out[row, head] = weights @ v[: len(scores), kv_head] / weights.sum()
        found.append(out)
    return torch.cat(found)


def _scores(case: Requests, query: Tensor, keys: Tensor, position: int, head: int) -> Tensor:
    """``(position + 1,)``: -inf before the window."""
    scores = case.size**-0.5 * (keys[: position + 1, head // case.group] @ query)
    distance = position - torch.arange(position + 1)
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    if case.alibi:
        scores = scores - case.slopes[head].cpu() * (distance if case.alibi == "linear" else distance.sqrt())
    return scores if case.window is None else scores.masked_fill(distance >= case.window, -torch.inf)


def ask(level: int, **changed: Any) -> dict[str, Any]:
    """Fields of requirements of a level."""
    return {
        "head_size": 64,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "dtype": "bfloat16",
        "paged": True,
        "kv_cache_dtype": "int8" if level == 1 else "int8_k",
        **changed,
    }
