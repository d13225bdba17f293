"""Tensor code that backends share: cache writes, gathered pages, merged states. Plain torch; Triton where it helps."""

from attnplug.ops.gather import gather_blocks, gather_dense, gather_packed, pages_as_tokens
from attnplug.ops.merge import merge_attention_states, merge_into
from attnplug.ops.quantize import dequantize, quantize, quantize_queries
from attnplug.ops.triton import Kernel, Launch
from attnplug.ops.write import key_and_value_pages, write_cache, write_kv

__all__ = [
    "Kernel",
    "Launch",
    "dequantize",
    "gather_blocks",
    "gather_dense",
    "gather_packed",
    "key_and_value_pages",
    "merge_attention_states",
    "merge_into",
    "pages_as_tokens",
    "quantize",
    "quantize_queries",
    "write_cache",
    "write_kv",
]
