"""Tensor code that backends share: cache writes, gathers, merges, ranks, FP8. Plain torch, and Triton on GPUs."""

from attnplug.ops.gather import gather_blocks, gather_dense, gather_packed, gather_slots
from attnplug.ops.merge import merge_attention_states, merge_into
from attnplug.ops.quantize import dequantize, dequantize_latents, quantize, quantize_latents, quantize_queries
from attnplug.ops.ranks import Ranks, combine, gather_heads
from attnplug.ops.splits import merge_splits, split_bytes, split_views
from attnplug.ops.triton import Kernel
from attnplug.ops.write import write_kv, write_latents, write_pages

__all__ = [
    "Kernel",
    "Ranks",
    "combine",
    "dequantize",
    "dequantize_latents",
    "gather_blocks",
    "gather_dense",
    "gather_heads",
    "gather_packed",
    "gather_slots",
    "merge_attention_states",
    "merge_into",
    "merge_splits",
    "quantize",
    "quantize_latents",
    "quantize_queries",
    "split_bytes",
    "split_views",
    "write_kv",
    "write_latents",
    "write_pages",
]
