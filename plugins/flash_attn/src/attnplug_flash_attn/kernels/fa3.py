"""FlashAttention 3: from its own distribution, and from the op libraries of two wheels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from attnplug.contract import torch_dtype
from attnplug_flash_attn.kernels import op_library
from attnplug_flash_attn.kernels.interface import Kernels, descales_of, write_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall


_MIN_TILE: Final = 64


def may_load_whole_tiles(agreement: Agreement) -> bool:
    """
    Return whether kernels may load pages of the agreed size by whole tiles, unless a call has `VarlenCall.leftpad_k`.

    TMA copies all slots of a tile, also those after the last key of a request. Stale values there have weight 0, and
    0 * NaN is NaN. The kernels use TMA if pages are multiples of a tile and a call has enough rows, but never with left
    padding, even of 0 slots: then they load each key separately, and none after the last. Tiles have 64 to 224 keys, by
    head size, mask, dtype and release, so that smaller pages are not affected.

    Sources: ``get_pagedkv_tma`` in hopper/flash_api.cpp and hopper/tile_size.h, of Dao-AILab/flash-attention and of
    vllm-project/flash-attention.
    """
    return (agreement.block_size or 0) >= _MIN_TILE


class Fa3(Kernels):
    """``flash_attn_interface``: pages of any size, and FP8; no ALiBi, no sinks."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        import flash_attn_interface  # noqa: PLC0415 - the other adapter here does not need it

        self._varlen = flash_attn_interface.flash_attn_varlen_func
        self._with_kvcache = flash_attn_interface.flash_attn_with_kvcache
        self.wants_leftpad = may_load_whole_tiles(agreement)

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
        shared: dict[str, Any] = {
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
            output, lse_by_head, *_ = self._varlen(
                query,
                key,
                value,
                cu_seqlens_k=call.cu_seqlens_k,
                max_seqlen_k=call.max_seqlen_k,
                seqused_k=call.seqused_k,
                return_attn_probs=True,  # returns the LSE
                **shared,
            )
        else:
            output, lse_by_head, *_ = self._with_kvcache(
                query,
                key,
                value,
                cache_seqlens=call.seqused_k,
                cache_leftpad=call.leftpad_k,
                page_table=call.block_table,
                return_softmax_lse=True,
                **shared,
            )
        out.copy_(output)
        write_lse(lse, lse_by_head)


class Fa3Vllm(Kernels):
    """``_vllm_fa3_C``: pages of any size, latents, FP8, sinks, and schedules; no ALiBi."""

    schedules = True
    fills_output = True
    library: ClassVar[str] = "_vllm_fa3_C"
    local: ClassVar[tuple[int, ...]] = ()
    """Arguments between the window and the soft cap."""
    after_sinks: ClassVar[tuple[object, ...]] = (1, 0, None)  # cp_world_size, cp_rank, cp_tot_seqused_k

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.wants_leftpad = may_load_whole_tiles(agreement)
        required = agreement.requirements
        self._latent_size = (required.head_size_v or 0) if required.latent else 0
        ops = op_library.load(self.library)
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
        latent = None
        if self._latent_size:  # views: the kernels require a contiguous last axis, and rows at multiples of 16 bytes
            latent, query = query[..., : self._latent_size], query[..., self._latent_size :]
        _, lse_by_head, *_ = self._fwd(
            query,
            key,
            value,
            None,  # k_new
            None,  # v_new
            latent,  # q_v: its products with the values are added to those of queries and keys
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
            *self.local,
            params.softcap,
            True,  # noqa: FBT003 - is_rotary_interleaved
            call.scheduler_metadata,
            call.num_splits,
            None,  # pack_gqa
            0,  # sm_margin
            params.sinks,
            *self.after_sinks,
        )
        write_lse(lse, lse_by_head)

    def schedule(self, call: VarlenCall, params: LayerParams, *, num_heads_q: int) -> Tensor | None:  # noqa: D102
        if call.seqused_k is None:
            return None
        agreement, required = self.agreement, self.agreement.requirements
        is_paged = call.block_table is not None
        scheduled: Tensor = self._get_scheduler_metadata(
            call.seqused_k.shape[0],
            call.max_seqlen_q,
            self.longest_scheduled(call),
            num_heads_q,
            required.num_kv_heads,
            required.head_size - self._latent_size,
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
            *self.local,
            params.softcap > 0,
            call.num_splits,
            None,  # pack_gqa
            0,  # sm_margin
        )
        return scheduled

    def longest_scheduled(self, call: VarlenCall) -> int | None:
        """Return the maximum number of keys that the kernel itself assumes in a call."""
        return call.max_seqlen_k


class Fa3Tokenspeed(Fa3Vllm):
    """``flash_attn_3`` of ``tokenspeed-fa3``: as ``_vllm_fa3_C``, without soft-capping."""

    library = "flash_attn_3"
    local = (0,)  # attention_chunk
    after_sinks = ()

    def longest_scheduled(self, call: VarlenCall) -> int | None:  # noqa: D102
        # With pages the kernel counts those of the table: whether a window hides a key decides the schedule's size.
        size = self.agreement.block_size
        return call.max_seqlen_k if call.block_table is None or size is None else call.block_table.shape[1] * size
