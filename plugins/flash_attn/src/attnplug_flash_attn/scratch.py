"""What a step holds in each layer beside its results and the workspace: a profiling run holds as much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from attnplug.contract import torch_dtype

if TYPE_CHECKING:
    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import Kernels

_FLOAT32: Final = torch.float32.itemsize
_SUMS_OF_RANKS: Final = 3
"""Float32 results of all ranks' heads that are held at once: weighted, in the order of ranks, and exchanged."""


def scratch_bytes(agreement: Agreement, kernels: Kernels, rows: int) -> int:
    """
    Return the most bytes that a step of so many query rows holds at once.

    What a library takes for itself is not in it: partial results where it splits keys, of few rows as a rule.

    Args:
        agreement: What was agreed on.
        kernels: The library.
        rows: Query rows.
    """
    asked = agreement.requirements
    width, cached = torch_dtype(asked.dtype).itemsize, torch_dtype(agreement.kv_cache_dtype).itemsize
    of_query, of_result = (
        asked.num_q_heads * asked.head_size,
        asked.num_q_heads * (asked.head_size_v or asked.head_size),
    )
    ranks = asked.dcp_size
    held = of_query * cached if cached != width else 0
    result = of_result * width + asked.num_q_heads * _FLOAT32
    if not kernels.fills_output:
        held += ranks * result
    if ranks > 1:
        queries = 2 * ranks * of_query * cached  # as they come from all ranks, and by KV head
        sums = ranks * (ranks + 2) * asked.num_q_heads * _FLOAT32
        held += result + queries + ranks * result + sums + _SUMS_OF_RANKS * ranks * of_result * _FLOAT32
    elif asked.cascade:
        held += result + asked.num_q_heads * _FLOAT32
    return rows * held
