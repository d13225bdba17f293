"""Requests of a small model, with random tensors in rows: for tests of kernels without a backend."""

from __future__ import annotations

from itertools import accumulate

import torch
from attrs import field, frozen
from torch import Tensor

from tests.backends.triton_on_cpu import DEVICE

CANARY = 7.0
DTYPES = (torch.bfloat16, torch.float16)


@frozen(eq=False)
class Requests:
    """
    A few requests of a model whose heads are all on this rank.

    Attributes:
        query_lens: New tokens of each request.
        seq_lens: Tokens of each request.
        kv_heads: KV heads of the model.
        group: Query heads per KV head.
        size: The head size.
        dtype: The dtype of all tensors.
        queries: ``(query_len, kv_heads * group, size)`` of each request.
        keys: ``(seq_len, kv_heads, size)`` of each request.
        values: As `keys`.
    """

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
        generator = torch.Generator().manual_seed(0)

        def draw(count, heads):
            return torch.randn(count, heads, self.size, generator=generator).to(self.dtype).to(DEVICE)

        self.put("queries", [draw(count, self.kv_heads * self.group) for count in self.query_lens])
        self.put("keys", [draw(count, self.kv_heads) for count in self.seq_lens])
        self.put("values", [draw(count, self.kv_heads) for count in self.seq_lens])

    def put(self, name: str, value: object) -> None:
        """Replace an attribute of these frozen requests."""
        object.__setattr__(self, name, value)

    @property
    def scale(self) -> float:
        return self.size**-0.5

    def block_table(self, page: int) -> tuple[Tensor, int]:
        """Return ``(num_reqs, max_blocks)`` int32 in random order on the CPU, and the blocks; block 0 is unused."""
        most = max(-(-length // page) for length in self.seq_lens)
        count = most * len(self.seq_lens)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int()
        return 1 + order.view(len(self.seq_lens), most), count + 1


def starts(lengths: list[int]) -> Tensor:
    """Return cumulative lengths from 0, int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def lens(lengths: list[int]) -> Tensor:
    """Return lengths as int32."""
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
