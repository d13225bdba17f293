"""Makes the slots of selected tokens safe for the kernels, and addresses of them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

_MOST: Final = 2**31 - 1


@frozen
class Places:
    """
    How a slot becomes the number that the kernels read.

    Attributes:
        slots: Slots of the KV cache. Others are no token.
        block_size: Slots of a block.
        of_block: The number's step from one block to the next.
        of_slot: Its step from one slot of a block to the next.
    """

    slots: int
    block_size: int
    of_block: int
    of_slot: int

    @property
    def are_slots(self) -> bool:
        """Whether the number is the slot itself."""
        return self.of_slot == 1 and self.of_block == self.block_size


def places_of(pages: Tensor) -> Places:
    """Return the slots themselves, for kernels that find blocks by their stride."""
    blocks, block_size = pages.shape[:2]
    return Places(blocks * block_size, block_size, block_size, 1)


def rows_of(pages: Tensor) -> tuple[Tensor, Places]:
    """
    Return latents as rows of one stride, which overlap where blocks are apart, and the row of each slot.

    Args:
        pages: ``(num_blocks, block_size, 1, head_size)``, tokens of a block one behind another.

    Returns:
        ``(rows, 1, head_size)``, a view that ends with the last slot.

    Raises:
        CacheError: There are more rows than int32 counts.
    """
    (blocks, block_size, _, size), of_block = pages.shape, pages.stride(0)
    step = gcd(of_block, size)
    places = Places(blocks * block_size, block_size, of_block // step, size // step)
    count = (blocks - 1) * places.of_block + (block_size - 1) * places.of_slot + 1
    if count > _MOST:
        raise CacheError(
            f"a KV cache of {blocks} blocks, {of_block} elements apart, was given",
            f"the kernel counts latents by int32, here in steps of {step} elements",
            f"use fewer blocks, or blocks whose distance is a multiple of {size} elements",
        )
    return pages.as_strided((count, 1, size), (step, size, 1)), places


def mask_indices(indices: Tensor, index_lens: Tensor | None, places: Places, multiple: int) -> Tensor:
    """
    Return the numbers that the kernels read, and -1 for entries that are no slot or beyond the length of their row.

    The kernels load from the address of whatever they are given. One launch on a GPU where Triton is installed.

    Args:
        indices: ``(tokens, topk)`` int32 of any values, of any row stride.
        index_lens: ``(tokens,)`` int32, or None.
        places: What becomes of a slot.
        multiple: Entries that the kernels read together.

    Returns:
        ``(tokens, width)`` int32, contiguous; the width is the next multiple.
    """
    tokens, topk = indices.shape
    width = -(-topk // multiple) * multiple
    kernel = _kernel() if indices.is_cuda else None
    if kernel is not None:
        out = indices.new_empty(tokens, width)
        run_kernel(kernel, indices, index_lens, places, out)
        return out
    unused = (indices < 0) | (indices >= places.slots)
    if index_lens is not None:
        unused |= torch.arange(topk, device=indices.device) >= index_lens.unsqueeze(1)
    block, offset = torch.div(indices, places.block_size, rounding_mode="floor"), indices % places.block_size
    found = (block * places.of_block + offset * places.of_slot).masked_fill(unused, -1)
    return torch.nn.functional.pad(found, (0, width - topk), value=-1)


def run_kernel(kernel: Any, indices: Tensor, index_lens: Tensor | None, places: Places, out: Tensor) -> None:
    """Launch the kernel, which writes `out`."""
    width = out.shape[1]
    tile = min(1024, 1 << (width - 1).bit_length())
    tiles = -(-width // tile)
    kernel.run(
        out.shape[0] * tiles,
        (indices, indices if index_lens is None else index_lens, out),
        (indices.stride(0),),
        (places.slots, places.of_block),
        (indices.shape[1], width, places.block_size, places.of_slot, places.are_slots, index_lens is not None, tile),
        num_warps=max(1, min(4, tile // 256)),
    )


@cache
def _kernel() -> Any:
    """Return the kernel, which is compiled when it first runs; None without Triton."""
    if find_spec("triton") is None:
        return None
    return import_module("attnplug_flashmla.triton_selection").mask_kernel
