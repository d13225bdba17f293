"""The kernel of `attnplug.ops.merge_splits`. Imported only where Triton is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from attnplug.ops.triton import Kernel

if TYPE_CHECKING:
    from torch import Tensor

_FEW: Final = 8
_MANY: Final = 64
"""Splits that a program loads: one kernel for up to 8 splits, one for up to 64."""

_COLUMNS: Final = 128
"""Elements of a head that a program merges: 64 splits of 512 elements would not fit its registers."""


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def _merge(
    parts: tl.tensor,
    part_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_starts: tl.tensor,
    out_token: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    num_reqs: tl.int32,
    num_splits: tl.int32,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    has_lse: tl.constexpr,
    max_splits: tl.constexpr,
    query_len: tl.constexpr,
) -> None:
    """One program merges the splits of `block` elements of one head of one row."""
    blocks: tl.constexpr = (size + block - 1) // block
    program = tl.program_id(0) // blocks
    part = program // heads
    if query_len > 0:  # parts are by request: a short one has padding, and longer ones are not here
        request, token = part // query_len, part % query_len
        row = tl.load(query_starts + request)
        count = tl.load(query_starts + request + 1) - row
        row += token
        is_here = (token < count) & (count <= query_len)
    else:
        row = part
        is_here = row < tl.load(query_starts + num_reqs)
    if not is_here:
        return

    head, split = program % heads, tl.arange(0, max_splits)
    columns = tl.program_id(0) % blocks * block + tl.arange(0, block)
    row = row.to(tl.int64)
    at = (part.to(tl.int64) * heads + head) * num_splits + split
    logs = tl.load(part_lse + at, mask=split < num_splits, other=float("-inf"))
    top = tl.max(logs, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)  # without keys -inf - -inf would be NaN
    weights = tl.math.exp2(logs - shift)
    # A split without keys may hold anything, NaN included: it is not loaded.
    mask = (weights > 0)[:, None] & (columns < size)[None, :]
    found = tl.load(parts + at[:, None] * size + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(found * weights[:, None], 0) * tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(out + row * out_token + head * size + columns, result.to(out.dtype.element_ty), mask=columns < size)
    if has_lse and tl.program_id(0) % blocks == 0:
        natural = (shift + tl.math.log2(total)) * 0.6931471805599453
        tl.store(lse + row * lse_token + head * lse_head, tl.where(total > 0, natural, float("-inf")))


_kernel = Kernel(_merge)


def launch(
    parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None, query_starts: Tensor, query_len: int
) -> None:
    """Launch the kernel. Arguments as of `attnplug.ops.merge_splits`."""
    rows, heads, num_splits, size = parts.shape
    tensors = (parts, part_lse, out, part_lse if lse is None else lse, query_starts)
    strides = (out.stride(0), *((0, 0) if lse is None else lse.stride()))
    max_splits = _FEW if num_splits <= _FEW else max(_MANY, triton.next_power_of_2(num_splits))
    block = min(triton.next_power_of_2(size), _COLUMNS)
    constants = (heads, size, block, lse is not None, max_splits, query_len)
    scalars = (query_starts.shape[0] - 1, num_splits)
    _kernel.run(rows * heads * -(-size // block), tensors, strides, scalars, constants, num_warps=4)
