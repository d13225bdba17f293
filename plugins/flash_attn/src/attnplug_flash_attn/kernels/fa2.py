"""FlashAttention 2, as its own package has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_attn import flash_attn_varlen_func

from attnplug_flash_attn.kernels.folding import bound_of_rows, window_of
from attnplug_flash_attn.kernels.interface import Kernels
from attnplug_flash_attn.kernels.results import keep_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_flash_attn.kernels.interface import Call, Terms


class Fa2(Kernels):
    """``flash_attn``: pages of multiples of 256 tokens, ALiBi; no sinks."""

    cumulative_keys = True

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: Call, terms: Terms, lse: Tensor | None
    ) -> None:
        found, by_heads, _ = flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=bound_of_rows(call, query.shape[0], unfolded=lse is not None or call.num_splits == 1),
            max_seqlen_k=call.max_seqlen_k,
            softmax_scale=terms.softmax_scale,
            causal=call.causal,
            window_size=window_of(call, terms, return_lse=lse is not None),
            softcap=terms.softcap,
            alibi_slopes=terms.alibi_slopes,
            return_attn_probs=True,  # the LSE, that is: probabilities come with dropout alone
            block_table=call.block_table,
        )
        out.copy_(found)
        keep_lse(lse, by_heads)
