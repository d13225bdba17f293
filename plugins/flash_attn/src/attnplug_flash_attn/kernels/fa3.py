"""Pages that FlashAttention 3 would load tile by tile, whatever of a tile is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.contract import torch_dtype
from attnplug_flash_attn.kernels import op_library
from attnplug_flash_attn.kernels.interface import Kernels, descales_of, keep_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall


_LEAST_TILE: Final = 64


def may_be_whole_tiles(agreement: Agreement) -> bool:
    """
    Return whether pages of the agreed size may be loaded by whole tiles, unless a call has `Call.leftpad_k`.

    TMA copies all slots of a tile, those behind the last key of a request too. What an earlier request has left there
    has the weight 0, and 0 * NaN is NaN. Pages are copied so where they are multiples of a tile and a call has rows
    enough, but never with a padding to the left, be it of 0 slots: each key is then loaded by itself, and none behind
    the last. Tiles have 64 to 224 keys, by head size, mask, dtype and release: no smaller page is concerned.

    Sources: ``get_pagedkv_tma`` in hopper/flash_api.cpp and hopper/tile_size.h, of Dao-AILab/flash-attention and of
    vllm-project/flash-attention.
    """
    return (agreement.block_size or 0) >= _LEAST_TILE


class Fa3(Kernels):
    """``flash_attn_interface``: pages of any size, fp8; no ALiBi, no sinks."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        import flash_attn_interface  # noqa: PLC0415 - the other adapter here does without it

        self._varlen = flash_attn_interface.flash_attn_varlen_func
        self._with_kvcache = flash_attn_interface.flash_attn_with_kvcache
        self.wants_leftpad = may_be_whole_tiles(agreement)

    def attend(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        given: dict[str, Any] = {
            "cu_seqlens_q": call.cu_seqlens_q,
            "max_seqlen_q": call.max_seqlen_q,
            "softmax_scale": params.softmax_scale,
            "causal": call.causal,
            "window_size": params.window,
            "softcap": params.softcap,
            "num_splits": call.num_splits,
            **descales_of(call, params, key.shape[-2]),
        }
        if call.block_table is None:
            found, by_heads, *_ = self._varlen(
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
            found, by_heads, *_ = self._with_kvcache(
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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        descales = descales_of(call, params, key.shape[-2])
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
            params.softmax_scale,
            call.causal,
            *params.window,
            params.softcap,
            True,  # noqa: FBT003 - is_rotary_interleaved
            call.scheduler_metadata,
            call.num_splits,
            None,  # pack_gqa
            0,  # sm_margin
            params.sinks,
            1,  # cp_world_size
            0,  # cp_rank
            None,  # cp_tot_seqused_k
        )
        keep_lse(lse, by_heads)

    def schedule(self, call: VarlenCall, params: LayerParams, *, num_heads_q: int) -> Tensor | None:  # noqa: D102
        if call.seqused_k is None:
            return None
        agreement, required = self.agreement, self.agreement.requirements
        is_paged = call.block_table is not None
        scheduled: Tensor = self._get_scheduler_metadata(
            call.seqused_k.shape[0],
            call.max_seqlen_q,
            call.max_seqlen_k,
            num_heads_q,
            required.num_kv_heads,
            required.head_size,
            required.head_size_v,
            torch_dtype(agreement.kv_cache_dtype if is_paged else required.dtype),
            call.seqused_k,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            call.leftpad_k,
            agreement.block_size if is_paged else None,
            0,  # max_seqlen_k_new
            call.causal,
            *params.window,
            params.softcap > 0,
            call.num_splits,
            None,  # pack_gqa
            0,  # sm_margin
        )
        return scheduled
