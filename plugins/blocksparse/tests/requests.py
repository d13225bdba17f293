"""Requests with a block-sparse pattern, in rows and in pages, and their results by the oracle."""

from __future__ import annotations

from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug_kit.oracle import attend
from tests.backends import requests
from tests.backends.requests import CANARY, DTYPES, lens, starts
from tests.backends.triton_on_cpu import DEVICE

__all__ = ["CANARY", "DTYPES", "Requests", "check", "lens", "starts"]


@frozen(eq=False)
class Requests(requests.Requests):
    """
    Requests of a block-sparse model.

    Attributes:
        pattern: The parameters of the pattern.
    """

    pattern: dict[str, Any] = field(kw_only=True)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return ``(tokens, heads, size)`` and the LSE ``(tokens, heads)``, in float64."""
        parts = [
            attend(*(part.cpu() for part in rows), scale=self.scale, block_sparse=self.pattern)
            for rows in zip(self.queries, self.keys, self.values, strict=True)
        ]
        return torch.cat([part.output for part in parts]), torch.cat([part.lse for part in parts])

    def pages(self, page: int) -> tuple[Tensor, Tensor]:
        """Return the cache ``(2, blocks, page, kv_heads, size)``, NaN without tokens, and the block table."""
        table, blocks = self.block_table(page)
        shape = (2, blocks, page, self.kv_heads, self.size)
        cache = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        for request, length in enumerate(self.seq_lens):
            places = torch.arange(length)
            at = table[request, places // page].long().to(DEVICE), (places % page).to(DEVICE)
            cache[0][at], cache[1][at] = self.keys[request], self.values[request]
        return cache, table.to(DEVICE)


def check(out: Tensor, lse: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    """
    Check an output and its LSE.

    Probabilities and outputs are rounded once to 16 bits, an LSE is not; rows without keys are 0 and -inf.
    """
    (output, sums), out, lse = expected, out.cpu(), lse.cpu()
    limit = 2**-6 if out.dtype == torch.bfloat16 else 2**-9
    torch.testing.assert_close(out.double(), output, rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-3, atol=1e-3)
    assert not out[sums == -torch.inf].any()
