"""Whose rows, and which keys: index tensors, pages and packed rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from flash_attn_fake.refusal import check, require

if TYPE_CHECKING:
    from collections.abc import Iterator


@frozen(eq=False, kw_only=True)
class Keys:
    """
    The keys and values of a call.

    Attributes:
        key: Pages ``(pages, page_size, kv_heads, head_size)``, or packed rows ``(keys, kv_heads, head_size)``.
        value: Likewise.
        starts: ``(requests + 1,)``: where the keys of each request start, or None.
        used: ``(requests,)``: how many keys each request has, or None.
        table: ``(requests, pages)``, or None for packed rows.
        leftpad: ``(requests,)``: slots before the first key of each, 0 everywhere; None where the call has none.
    """

    key: Tensor
    value: Tensor
    starts: Tensor | None = None
    used: Tensor | None = None
    table: Tensor | None = None
    leftpad: Tensor | None = None

    def lengths(self) -> list[int]:
        """How many keys each request has."""
        if self.used is not None:
            return self.used.tolist()
        assert self.starts is not None
        return self.starts.diff().tolist()

    def of_requests(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each request."""
        for request, length in enumerate(self.lengths()):
            require(length >= 0, f"request {request} has {length} keys")
            at = self._rows(request, length) if self.table is None else self._slots(request, length)
            yield (
                (self.key[at], self.value[at])
                if self.table is None
                else tuple(pages.flatten(0, 1)[at] for pages in (self.key, self.value))
            )  # type: ignore[misc]

    def behind(self, request: int, tile: int) -> Tensor:
        """Return the values behind the last key of a request, to the end of its tile, which is in the same page."""
        assert self.table is not None
        size, length = self.key.shape[1], self.lengths()[request]
        if not length % tile:
            return self.value[0, :0]
        first = length % size
        return self.value[int(self.table[request, length // size]), first : first + tile - length % tile]

    def _rows(self, request: int, length: int) -> Tensor:
        assert self.starts is not None
        start = int(self.starts[request])
        require(length <= int(self.starts[request + 1]) - start, f"request {request} uses keys of the next one")
        require(
            start + length <= self.key.shape[0], f"request {request} reads past the {self.key.shape[0]} packed keys"
        )
        return torch.arange(start, start + length)

    def _slots(self, request: int, length: int) -> Tensor:
        assert self.table is not None
        size, count = self.key.shape[1], -(-length // self.key.shape[1])
        require(count <= self.table.shape[1], f"request {request} has {length} keys, and its row of the table ends")
        pages = self.table[request, :count].long()
        require(((pages >= 0) & (pages < self.key.shape[0])).all(), f"request {request} has pages {pages.tolist()}")
        return (pages[:, None] * size + torch.arange(size)).flatten()[:length]


def spans(starts: Tensor, total: int, longest: int) -> list[slice]:
    """Return the rows of each request, of calls that say the longest."""
    places = starts.tolist()
    require(places[0] == 0, f"cu_seqlens_q starts at {places[0]}")
    require(places == sorted(places) and places[-1] <= total, f"cu_seqlens_q {places} of {total} rows")
    found = [slice(*pair) for pair in pairwise(places)]
    most = max(each.stop - each.start for each in found)
    require(most <= longest, f"max_seqlen_q={longest}, and a request has {most} rows: they are not computed")
    return found


def check_leftpad(leftpad: Tensor | None, requests: int, device: torch.device) -> None:
    """
    Check the padding to the left of keys.

    Raises:
        RuntimeError: It is no index tensor of the requests.
        MisuseError: A padding is not 0, which the fake does not support.
    """
    if leftpad is not None:
        check_index("leftpad_k", leftpad, (requests,), device)
        require(not leftpad.any(), "the fake supports no padding but 0")


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """
    Check an index tensor.

    Raises:
        RuntimeError: It is not int32, has another shape or device, or is not contiguous.
    """
    check(tensor.dtype == torch.int32, f"{name} must have dtype int32")
    check(tensor.device == device, f"{name} must be on {device}")
    check(tensor.stride(-1) == 1, f"{name} must have contiguous last dimension")
    check(name == "block_table" or tensor.is_contiguous(), f"{name} must be contiguous")
    check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, and has {tuple(tensor.shape)}")


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """
    Check a tensor that kernels read through its strides, in steps of 16 bytes.

    Raises:
        RuntimeError: It has another shape or device, or heads that are not contiguous.
        MisuseError: Its rows do not start at multiples of 16 bytes.
    """
    check(tensor.device == device, f"{name} must be on {device}")
    check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, and has {tuple(tensor.shape)}")
    steps = [step * tensor.itemsize for step in tensor.stride()[:-1]]
    require(all(step % 16 == 0 for step in steps), f"{name} has strides of {steps} bytes, which 16 does not divide")


def check_longest(keys: Keys, longest: int) -> None:
    """
    Check the bound of keys.

    Raises:
        MisuseError: A request has more.
    """
    most = max(keys.lengths(), default=0)
    require(most <= longest, f"max_seqlen_k={longest}, and a request has {most} keys: they are not all read")
