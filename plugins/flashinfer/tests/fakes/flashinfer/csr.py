"""The index arrays of a plan: the rows, pages and keys of each request."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from flashinfer.misuse import require


@frozen(eq=False)
class Lengths:
    """
    The lengths that a plan reads from its CPU arrays, for which it makes a kernel's schedule.

    Attributes:
        rows: Query rows per request.
        keys: Keys per request.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]


def check_offsets(name: str, offsets: Tensor, batch_size: int) -> None:
    """
    Check an indptr.

    Raises:
        MisuseError: It is not an int32 CPU tensor of ``batch_size + 1`` offsets that begin with 0 and never decrease.
    """
    _check_host(name, offsets, batch_size + 1)
    require(int(offsets[0]) == 0, f"{name} begins with {int(offsets[0])}, not with 0")
    require(bool((offsets.diff() >= 0).all()), f"{name} decreases: {offsets.tolist()}")


def check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, device: torch.device) -> None:
    """
    Check the page arrays.

    Raises:
        MisuseError: An array has a type that the kernels do not read, or the length of a last page is invalid.
    """
    batch_size = last_page_len.shape[0]
    require(batch_size > 0, "a plan without requests")
    check_offsets("indptr", indptr, batch_size)
    _check_host("last_page_len", last_page_len, batch_size)
    require(indices.dtype == torch.int32, f"indices are {indices.dtype}, and are read as int32")
    require(indices.ndim == 1 and indices.is_contiguous(), "indices are not a flat, contiguous tensor")
    require(indices.device == device, f"indices are on {indices.device}: plan() would synchronize to copy them")
    require(indices.shape[0] >= int(indptr[-1]), f"{indices.shape[0]} indices for {int(indptr[-1])} pages")
    require(page_size >= 1, f"page_size={page_size}")
    for request, (pages, last) in enumerate(zip(indptr.diff().tolist(), last_page_len.tolist(), strict=True)):
        lowest, highest = (1, page_size) if pages else (0, 0)
        require(
            lowest <= last <= highest,
            f"last_page_len[{request}]={last} of a request with {pages} pages of {page_size}",
        )


def check_lengths(indptr: Tensor, indices: Tensor, lens: Tensor, page_size: int, device: torch.device) -> None:
    """
    Check page arrays with the keys of each request.

    Raises:
        MisuseError: An array has a type that the kernels do not read, or a request has other pages than its keys need.
    """
    check_pages(indptr, indices, lens - (indptr.diff() - 1).clamp(min=0) * page_size, page_size, device)
    _check_host("kv_len_arr", lens, lens.shape[0])


def key_lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> tuple[int, ...]:
    """Return the keys per request."""
    pages = (indptr.diff() - 1).clamp(min=0)
    return tuple((pages * page_size + last_page_len).tolist())


def _check_host(name: str, array: Tensor, length: int) -> None:
    require(array.dtype == torch.int32, f"{name} is {array.dtype}, and is read as int32")
    require(array.device.type == "cpu", f"{name} is on {array.device}: plan() would synchronize to copy it to the CPU")
    require(array.ndim == 1 and array.is_contiguous(), f"{name} is not a flat, contiguous tensor")
    require(array.shape[0] == length, f"{name} has {array.shape[0]} numbers, not {length}")
