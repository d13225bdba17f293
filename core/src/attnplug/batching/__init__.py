"""
Batch utilities that hosts and builders share: decodes and prefills, slots, positions and pages.

Sizes come from CPU tensors or from the caller, so that no function waits for a device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnplug.batching.assembler import BatchAssembler
from attnplug.batching.dcp import (
    check_local_shard,
    local_lens,
    max_local_tokens_per_dcp_rank,
    num_local_tokens_per_dcp_rank,
)
from attnplug.batching.padding import NULL_BLOCK, pad_batch, pad_block_table, pad_rows, padded_size
from attnplug.batching.pages import Pages, pad_pages, pages_of
from attnplug.batching.prefix import shared_prefix_blocks, shared_prefix_len
from attnplug.batching.slot_table import SlotTable
from attnplug.batching.slots import num_unpadded_tokens, positions_of, positions_of_new_tokens, slots_of_new_tokens
from attnplug.batching.vllm_compat import (
    Hyperparameters,
    LocalChunks,
    Reordering,
    Split,
    infer_global_hyperparameters,
    local_chunk_batch,
    make_local_attention_virtual_batches,
    max_local_chunks,
    per_layer_parameters,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from attnplug.batching.window import first_attended_key, num_freeable_blocks

if TYPE_CHECKING:
    from attnplug.selection.scope import kv_cache_layout as kv_cache_layout

__all__ = [
    "NULL_BLOCK",
    "BatchAssembler",
    "Hyperparameters",
    "LocalChunks",
    "Pages",
    "Reordering",
    "SlotTable",
    "Split",
    "check_local_shard",
    "first_attended_key",
    "infer_global_hyperparameters",
    "kv_cache_layout",
    "local_chunk_batch",
    "local_lens",
    "make_local_attention_virtual_batches",
    "max_local_chunks",
    "max_local_tokens_per_dcp_rank",
    "num_freeable_blocks",
    "num_local_tokens_per_dcp_rank",
    "num_unpadded_tokens",
    "pad_batch",
    "pad_block_table",
    "pad_pages",
    "pad_rows",
    "padded_size",
    "pages_of",
    "per_layer_parameters",
    "positions_of",
    "positions_of_new_tokens",
    "reorder_batch_to_split_decodes_and_prefills",
    "shared_prefix_blocks",
    "shared_prefix_len",
    "slots_of_new_tokens",
    "split_decodes_and_prefills",
]


def __getattr__(name: str) -> Any:
    """Import `kv_cache_layout` on first use: it reads settings, which no other function here does."""
    if name != "kv_cache_layout":
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return import_module("attnplug.selection.scope").kv_cache_layout
