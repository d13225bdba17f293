"""Requests, their tensors in rows and in pages, and what the oracle says of them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug_kit.oracle.attention import attend
from tests.backends.triton_on_cpu import DEVICE

DTYPES = (torch.bfloat16, torch.float16)
CANARY = 7.0


@frozen(eq=False)
class Requests:
    """
    A few requests of a model whose heads are all here.

    Attributes:
        pattern: The parameters of the pattern.
        query_lens: New tokens of each request.
        seq_lens: Tokens of each request.
        kv_heads: KV heads of the model.
        group: Query heads per KV head.
        size: Size of a head.
        dtype: Of all tensors.
    """

    pattern: dict[str, Any]
    query_lens: list[int]
    seq_lens: list[int]
    kv_heads: int = 2
    group: int = 2
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    queries: list[Tensor] = field(init=False)
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)

    def __attrs_post_init__(self):
        put, generator = object.__setattr__, torch.Generator().manual_seed(0)

        def draw(count, heads):
            return torch.randn(count, heads, self.size, generator=generator).to(self.dtype).to(DEVICE)

        put(self, "queries", [draw(count, self.kv_heads * self.group) for count in self.query_lens])
        put(self, "keys", [draw(count, self.kv_heads) for count in self.seq_lens])
        put(self, "values", [draw(count, self.kv_heads) for count in self.seq_lens])

    @property
    def scale(self) -> float:
        return self.size**-0.5

    def expected(self) -> tuple[Tensor, Tensor]:
        """``(tokens, heads, size)`` and ``(tokens, heads)``, in float64."""
        parts = [
            attend(*(part.cpu() for part in rows), scale=self.scale, block_sparse=self.pattern)
            for rows in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return torch.cat([part.output for part in parts]), torch.cat([part.lse for part in parts])

    def pages(self, size: int) -> tuple[Tensor, Tensor]:
        """The cache ``(2, pages, size, kv_heads, head)``, NaN where nothing is, and the table; page 0 is nobody's."""
        most = max(-(-length // size) for length in self.seq_lens)
        count = most * len(self.seq_lens)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int()
        table = 1 + order.view(len(self.seq_lens), most)
        shape = (2, count + 1, size, self.kv_heads, self.size)
        cache = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        for request, length in enumerate(self.seq_lens):
            places = torch.arange(length)
            at = table[request, places // size].long().to(DEVICE), (places % size).to(DEVICE)
            cache[0][at], cache[1][at] = self.keys[request], self.values[request]
        return cache, table.to(DEVICE)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def lens(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def check(out: Tensor, lse: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """Weights and outputs are rounded once each; an LSE is not; what attends nothing is 0 and -inf."""
    (output, sums), out, lse = expected, out.cpu(), lse.cpu()
    limit = 2**-6 if out.dtype == torch.bfloat16 else 2**-9
    torch.testing.assert_close(out.double(), output, rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=1e-3)
    assert not out[sums == -torch.inf].any()
