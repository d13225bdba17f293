"""FlashAttention 4: kernels in Python, compiled when they are first called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from flash_attn.cute import flash_attn_varlen_func

from attnplug_flash_attn.kernels.interface import Kernels
from attnplug_flash_attn.kernels.results import keep_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import Call, Terms


class Fa4(Kernels):
    """``flash_attn.cute``: pages, but those of a tile of keys, and sinks; no ALiBi."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._splits = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11)

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: Call, terms: Terms, lse: Tensor | None
    ) -> None:
        left, right = terms.window
        found, by_heads = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            seqused_k=call.seqused_k,
            page_table=call.block_table,
            softmax_scale=terms.softmax_scale,
            causal=call.causal,
            window_size=(None if left < 0 else left, None if right < 0 else right),
            learnable_sink=terms.sinks,
            softcap=terms.softcap,
            num_splits=call.num_splits if self._splits else 1,  # where it does not split it refuses to choose
            return_lse=lse is not None,
        )
        out.copy_(found)
        if lse is not None:
            keep_lse(lse, by_heads)
