"""FlashAttention 2, as torch itself has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from attnplug_flash_attn.kernels.folding import bound_of_rows
from attnplug_flash_attn.kernels.interface import Kernels
from attnplug_flash_attn.kernels.results import keep_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_flash_attn.kernels.interface import Call, Terms

run: Final = getattr(torch.ops.aten, "_flash_attention_forward").default  # noqa: B009 - public as an op


class TorchFlash(Kernels):
    """``aten::_flash_attention_forward``: packed keys alone; no ALiBi, soft cap or sinks."""

    paged = False

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: Call, terms: Terms, lse: Tensor | None
    ) -> None:
        found, by_heads, *_ = run(
            query,
            key,
            value,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            bound_of_rows(call, query.shape[0], unfolded=call.num_splits == 1),
            call.max_seqlen_k,
            0.0,  # dropout_p
            call.causal,
            False,  # noqa: FBT003 - return_debug_mask
            scale=terms.softmax_scale,
            window_size_left=terms.window[0],
            window_size_right=terms.window[1],
            seqused_k=call.seqused_k,
        )
        out.copy_(found)
        keep_lse(lse, by_heads)
