"""FlashAttention 3, as its own package has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

from attnplug_flash_attn.kernels.interface import Kernels
from attnplug_flash_attn.kernels.results import descales_of, keep_lse
from attnplug_flash_attn.kernels.whole_tiles import may_be_whole_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import Call, Terms


class Fa3(Kernels):
    """``flash_attn_interface``: pages of any size, fp8; no ALiBi, no sinks."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.wants_leftpad = may_be_whole_tiles(agreement)

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: Call, terms: Terms, lse: Tensor | None
    ) -> None:
        given: dict[str, Any] = {
            "cu_seqlens_q": call.cu_seqlens_q,
            "max_seqlen_q": call.max_seqlen_q,
            "softmax_scale": terms.softmax_scale,
            "causal": call.causal,
            "window_size": terms.window,
            "softcap": terms.softcap,
            "num_splits": call.num_splits,
            **descales_of(call, terms, key.shape[-2]),
        }
        if call.block_table is None:
            found, by_heads, *_ = flash_attn_varlen_func(
                query,
                key,
                value,
                cu_seqlens_k=call.cu_seqlens_k,
                max_seqlen_k=call.max_seqlen_k,
                seqused_k=call.seqused_k,
                return_attn_probs=True,  # the LSE, that is
                **given,
            )
        else:
            found, by_heads, *_ = flash_attn_with_kvcache(
                query,
                key,
                value,
                cache_seqlens=call.seqused_k,
                cache_leftpad=call.leftpad_k,
                page_table=call.block_table,
                return_softmax_lse=True,
                **given,
            )
        out.copy_(found)
        keep_lse(lse, by_heads)
