"""FlashAttention 2, as vLLM's wheel has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug_flash_attn.kernels import op_library
from attnplug_flash_attn.kernels.folding import bound_of_rows, window_of
from attnplug_flash_attn.kernels.interface import Kernels
from attnplug_flash_attn.kernels.results import keep_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import Call, Terms


class Fa2Vllm(Kernels):
    """``_vllm_fa2_C``: pages of multiples of 16 tokens, ALiBi; no sinks."""

    fills_output = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._varlen_fwd = op_library.load("_vllm_fa2_C").varlen_fwd.default

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: Call, terms: Terms, lse: Tensor | None
    ) -> None:
        starts = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
        left, right = window_of(call, terms, return_lse=lse is not None)
        _, by_heads = self._varlen_fwd(
            query,
            key,
            value,
            out,
            call.cu_seqlens_q,
            starts,  # with pages nobody reads it, and it must be there
            call.seqused_k,
            None,  # leftpad_k
            call.block_table,
            terms.alibi_slopes,
            bound_of_rows(call, query.shape[0], unfolded=lse is not None and call.block_table is None),
            call.max_seqlen_k,
            0.0,  # p_dropout
            terms.softmax_scale,
            False,  # noqa: FBT003 - zero_tensors
            call.causal,
            left,
            right,
            terms.softcap,
            False,  # noqa: FBT003 - zero_tensors
            min(call.num_splits, 1),  # of more than one it knows what calls of one row per request have, and no bound
            None,  # gen
        )
        keep_lse(lse, by_heads)
