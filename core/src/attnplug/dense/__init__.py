"""
Attention as one function call, for callers without a KV cache: `attention` and `attention_varlen`.

`attend_like_sdpa` is `attention` with the arguments of torch's function, for hosts whose code calls that one.
`flash_attn_varlen_func` and `flash_attn_with_kvcache` are the same with FlashAttention's arguments, KV cache included.
`shared_backend`, `BatchPlanner`, `device_of`, `use_device` and `renew_parameters` are what they are made of, for hosts
with dense calls;
`prepare_attention` and `prepare_attention_varlen` decide a call that such a host repeats, `rows_of` sees its tensors as
rows, and `DecisionCache` keeps it.
`NativeRows` has the calls for which the host's own attention was measured to be faster.
`latent_prefill` attends to a cached prefix of latents, expanded in chunks of bounded memory.
The names load on first use, since they import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.dense.backends import BatchPlanner as BatchPlanner
    from attnplug.dense.backends import device_of as device_of
    from attnplug.dense.backends import renew_parameters as renew_parameters
    from attnplug.dense.backends import shared_backend as shared_backend
    from attnplug.dense.backends import use_device as use_device
    from attnplug.dense.calls import PreparedAttention as PreparedAttention
    from attnplug.dense.decisions import DecisionCache as DecisionCache
    from attnplug.dense.decisions import clear_decisions as clear_decisions
    from attnplug.dense.flash import flash_attn_varlen_func as flash_attn_varlen_func
    from attnplug.dense.flash import flash_attn_with_kvcache as flash_attn_with_kvcache
    from attnplug.dense.functions import attention as attention
    from attnplug.dense.functions import attention_varlen as attention_varlen
    from attnplug.dense.latent import latent_prefill as latent_prefill
    from attnplug.dense.native_rows import NativeRow as NativeRow
    from attnplug.dense.native_rows import NativeRows as NativeRows
    from attnplug.dense.prepared import prepare_attention as prepare_attention
    from attnplug.dense.prepared import prepare_attention_varlen as prepare_attention_varlen
    from attnplug.dense.prepared import rows_of as rows_of
    from attnplug.dense.sdpa import attend_like_sdpa as attend_like_sdpa
    from attnplug.dense.sdpa import autocast_like_sdpa as autocast_like_sdpa
    from attnplug.dense.sdpa import requirements_like_sdpa as requirements_like_sdpa

_MODULES: Final = {
    "attnplug.dense.backends": "BatchPlanner device_of renew_parameters shared_backend use_device",
    "attnplug.dense.calls": "PreparedAttention",
    "attnplug.dense.decisions": "DecisionCache clear_decisions",
    "attnplug.dense.flash": "flash_attn_varlen_func flash_attn_with_kvcache",
    "attnplug.dense.functions": "attention attention_varlen",
    "attnplug.dense.latent": "latent_prefill",
    "attnplug.dense.native_rows": "NativeRow NativeRows",
    "attnplug.dense.prepared": "prepare_attention prepare_attention_varlen rows_of",
    "attnplug.dense.sdpa": "attend_like_sdpa autocast_like_sdpa requirements_like_sdpa",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
