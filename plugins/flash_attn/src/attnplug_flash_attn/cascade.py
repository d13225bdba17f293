"""Cascade attention: all rows attend once to the shared prefix, and its result is merged with that of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve

from attnplug.batching import shared_prefix_blocks
from attnplug.contract import upload
from attnplug_flash_attn.passes import Rows

if TYPE_CHECKING:
    from attnplug.contract import Batch


def prefix_rows(batch: Batch, block_size: int) -> Rows:
    """
    Return all rows of a batch as one request, over the shared prefix.

    All keys of the prefix precede all rows, so that the pass needs no mask.

    Args:
        batch: A checked batch with a shared prefix.
        block_size: Slots per block.
    """
    length, count = batch.common_prefix_len, batch.num_actual_tokens
    on_cpu = torch.tensor([0, count, length], dtype=torch.int32)
    numbers = upload(on_cpu, batch.seq_lens.device)
    return Rows(
        first=0,
        last=count,
        starts=numbers[:2],
        starts_cpu=on_cpu[:2],
        longest_query=count,
        lens=numbers[2:],
        lens_cpu=on_cpu[2:],
        longest=length,
        table=shared_prefix_blocks(batch, block_size),
        causal=False,
    )


def after_prefix(rows: Rows, length: int, block_size: int) -> Rows:
    """
    Return requests with the keys after the shared prefix.

    Args:
        rows: Requests with all their keys. Padded ones may have fewer than the prefix.
        length: The number of shared keys.
        block_size: Slots per block.
    """
    return evolve(
        rows,
        lens=(rows.lens - length).clamp_(min=0),
        lens_cpu=None if rows.lens_cpu is None else (rows.lens_cpu - length).clamp_(min=0),
        longest=rows.longest - length,
        table=rows.table[:, length // block_size :],
    )
