"""
A fake of FlashInfer for tests without a GPU. It has the library's names, signatures and traps, refuses at least what
the library refuses, and computes the exact result. It contains none of the library's code, and no kernel.

Tests read its calls in `flashinfer.journal`.
"""

from flashinfer.cascade import merge_state_in_place
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from flashinfer.sink import BatchAttentionWithAttentionSinkWrapper

__version__ = "0.6.12"

__all__ = [
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "__version__",
    "merge_state_in_place",
]
