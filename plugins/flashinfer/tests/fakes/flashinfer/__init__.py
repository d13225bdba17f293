"""
A fake of FlashInfer for tests without a GPU: its names and signatures, refusals as strict as its own or stricter, its
traps, and the exact result. Nothing of the library's code is in it, and no kernel.

What a test may ask it is in `flashinfer.journal`.
"""

from flashinfer.cascade import merge_state_in_place
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.sink import BatchAttentionWithAttentionSinkWrapper

__version__ = "0.6.12"

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "__version__",
    "merge_state_in_place",
]
