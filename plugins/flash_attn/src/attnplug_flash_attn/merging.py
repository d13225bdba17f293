"""Merges attention over the shared prefix and over the other keys, in place."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from attnplug.ops import merge_attention_states
from attnplug.triton_launch import triton_works

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def merge_into(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """
    Merge a result over other keys into a result, as `merge_attention_states` does; one launch where Triton works.

    Args:
        out: ``(tokens, heads, head_size_v)``; written.
        lse: ``(tokens, heads)`` float32; written.
        other: As `out`, contiguous. At most one of the two counts the sink.
        other_lse: As `lse`, contiguous.
    """
    merge = _in_one_launch() if out.is_cuda else None
    if merge is not None and merge(out, lse, other, other_lse):
        return
    merged, total = merge_attention_states(out, lse, other, other_lse)
    out.copy_(merged)
    lse.copy_(total)


@cache
def _in_one_launch() -> Callable[..., bool] | None:
    if not triton_works():
        return None
    from attnplug_flash_attn.triton_merge import merge  # noqa: PLC0415 - Triton is imported where it works, and there alone

    return merge
