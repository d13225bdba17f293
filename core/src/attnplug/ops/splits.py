"""
Split-KV attention: a kernel computes each split of a sequence's keys, and one more launch merges the partial outputs.

For backends whose kernels are in Triton: `merge_splits` launches a Triton kernel, and has no other form.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_bytes(splits: int, heads: int, head_size: int) -> int:
    """
    Return the bytes of scratch memory for partial outputs and their LSEs, in float32.

    Args:
        splits: Splits of all query rows together.
        heads: Query heads.
        head_size: Size of an output head.
    """
    return 4 * splits * heads * (head_size + 1)


def split_views(scratch: Tensor, rows: int, heads: int, num_splits: int, head_size: int) -> tuple[Tensor, Tensor]:
    """
    Return the partial outputs and LSEs of a step, as views of scratch memory.

    Args:
        scratch: uint8 of at least `split_bytes`, uninitialized.
        rows: Query rows.
        heads: Query heads.
        num_splits: Splits of each row's keys.
        head_size: Size of an output head.

    Returns:
        ``(rows, heads, num_splits, head_size)`` and ``(rows, heads, num_splits)``, both float32 and contiguous.
    """
    shape = (rows, heads, num_splits)
    count = rows * heads * num_splits
    floats = scratch[: split_bytes(rows * num_splits, heads, head_size)].view(torch.float32)
    return floats[: count * head_size].view(*shape, head_size), floats[count * head_size :].view(shape)


def merge_splits(
    parts: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor | None,
    query_starts: Tensor,
    *,
    query_len: int | None = None,
) -> None:
    """
    Merge partial outputs by their LSEs.

    A split without keys has the LSE -inf, whatever its output holds; a row without keys gets the output 0 and the LSE
    -inf. Rows at and beyond ``query_starts[-1]`` are padding, and not written.

    Args:
        parts: ``(rows, heads, num_splits, head_size)`` float32, contiguous.
        part_lse: ``(rows, heads, num_splits)`` float32, contiguous, as logarithms to base 2.
        out: ``(rows, heads, head_size)``, heads contiguous; written.
        lse: ``(rows, heads)`` float32, natural logarithms; written. None where it is not needed.
        query_starts: ``(num_reqs + 1,)`` int32, contiguous: the rows of each request.
        query_len: Rows of each request in `parts`, which are ``(num_reqs * query_len, ...)`` then: those of shorter
            requests come first, and requests with more rows are not merged. None: `parts` has the rows of `out`.
    """
    from attnplug.ops.triton_splits import launch  # noqa: PLC0415 - Triton is optional

    launch(parts, part_lse, out, lse, query_starts, query_len or 0)
