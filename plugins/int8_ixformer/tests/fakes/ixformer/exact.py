"""Attention over quantized pages, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnplug_kit.oracle import attend


def gather(pages: Tensor, scales: Tensor | None, table: Tensor, length: int) -> Tensor:
    """Return ``(length, heads, size)`` float64 from heads-first pages, times scales per token and head."""
    size = pages.shape[2]
    block, slot = table.long()[torch.arange(length) // size], torch.arange(length) % size
    found = pages[block, :, slot].double()
    return found if scales is None else found * scales[block, :, slot].double()[..., None]


def attention(query: Tensor, keys: Tensor, values: Tensor, given: dict[str, Any], slopes: Tensor | None) -> Tensor:
    """Return ``(queries, heads, size)``, by the library's names of the parameters."""
    assert given["causal"] is True
    left, right = given["window"]
    assert right == (-1 if left < 0 else 0)
    alibi = None if slopes is None else "sqrt" if given["sqrt"] else "linear"
    assert slopes is None or slopes.dtype == torch.float32
    return attend(
        query,
        keys,
        values,
        scale=given["scale"],
        window=(left, right),
        logits_soft_cap=given["cap"] or None,
        alibi=alibi,
        alibi_slopes=slopes,
    ).output


def quantize(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows over scales, as int8."""
    return (rows.float() / scales).round().clamp(-127, 127).to(torch.int8)
