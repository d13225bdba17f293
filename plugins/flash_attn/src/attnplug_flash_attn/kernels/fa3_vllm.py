"""FlashAttention 3, as vLLM's wheel has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import torch_dtype
from attnplug_flash_attn.kernels import op_library
from attnplug_flash_attn.kernels.interface import Kernels
from attnplug_flash_attn.kernels.results import descales_of, keep_lse
from attnplug_flash_attn.kernels.whole_tiles import may_be_whole_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import Call, Terms


class Fa3Vllm(Kernels):
    """``_vllm_fa3_C``: pages of any size, fp8, sinks, schedules made ahead; no ALiBi."""

    schedules = True
    fills_output = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.wants_leftpad = may_be_whole_tiles(agreement)
        ops = op_library.load("_vllm_fa3_C")
        self._fwd, self._get_scheduler_metadata = ops.fwd.default, ops.get_scheduler_metadata.default

    def attend(  # noqa: D102
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, call: Call, terms: Terms, lse: Tensor | None
    ) -> None:
        descales = descales_of(call, terms, key.shape[-2])
        _, by_heads, *_ = self._fwd(
            query,
            key,
            value,
            None,  # k_new
            None,  # v_new
            None,  # q_v
            out,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            call.seqused_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            call.block_table,
            None,  # kv_batch_idx
            call.leftpad_k,
            None,  # rotary_cos
            None,  # rotary_sin
            None,  # seqlens_rotary
            descales["q_descale"],
            descales["k_descale"],
            descales["v_descale"],
            terms.softmax_scale,
            call.causal,
            *terms.window,
            terms.softcap,
            True,  # noqa: FBT003 - is_rotary_interleaved
            call.scheduler_metadata,
            call.num_splits,
            None,  # pack_gqa
            0,  # sm_margin
            terms.sinks,
            1,  # cp_world_size
            0,  # cp_rank
            None,  # cp_tot_seqused_k
        )
        keep_lse(lse, by_heads)

    def schedule(self, call: Call, terms: Terms, *, num_heads_q: int) -> Tensor | None:  # noqa: D102
        if call.seqused_k is None:
            return None
        agreement, asked = self.agreement, self.agreement.requirements
        is_paged = call.block_table is not None
        scheduled: Tensor = self._get_scheduler_metadata(
            call.seqused_k.shape[0],
            call.max_seqlen_q,
            call.max_seqlen_k,
            num_heads_q,
            asked.num_kv_heads,
            asked.head_size,
            asked.head_size_v,
            torch_dtype(agreement.kv_cache_dtype if is_paged else asked.dtype),
            call.seqused_k,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            call.leftpad_k,
            agreement.block_size if is_paged else None,
            0,  # max_seqlen_k_new
            call.causal,
            *terms.window,
            terms.softcap > 0,
            call.num_splits,
            None,  # pack_gqa
            0,  # sm_margin
        )
        return scheduled
