"""FlashAttention 2: from its own distribution, from a vLLM wheel, and in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from attnplug_flash_attn.kernels import op_library
from attnplug_flash_attn.kernels.interface import Kernels, write_lse

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall


def max_seqlen_q_of(call: VarlenCall, rows: int, *, unfolded: bool) -> int:
    """
    Return ``max_seqlen_q`` for a call.

    For 1 the kernels fold the query heads of a KV head into rows, and split keys at the library's choice. In some
    releases the LSE then has another order than its shape. They also assume that each request has a row, which padded
    requests have not. A value of 2 prevents folding, and changes nothing else.

    Args:
        call: The call.
        rows: The number of query rows.
        unfolded: Whether folding is not allowed.
    """
    if call.max_seqlen_q != 1:
        return call.max_seqlen_q
    return 2 if unfolded or rows != call.cu_seqlens_q.shape[0] - 1 else 1


def window_size_of(call: VarlenCall, params: LayerParams, *, return_lse: bool) -> tuple[int, int]:
    """
    Return ``window_size`` for a call.

    With ALiBi and only a causal mask the kernels omit a bias that is constant per row. That does not change outputs,
    but it changes the LSE. A window of all keys counts as none. A window of all but the first key makes the kernels
    compute distances, and no row loses a key: the last row attends to the window and to its own token.
    """
    left, right = params.window
    is_causal_alone = (call.causal or right == 0) and not 0 <= left < call.max_seqlen_k
    if return_lse and params.alibi_slopes is not None and is_causal_alone:
        return max(call.max_seqlen_k - 1, 0), 0
    return left, right


class Fa2(Kernels):
    """``flash_attn``: pages of multiples of 256 tokens, and ALiBi; no sinks."""

    cumulative_keys = True
    needs_keys = True  # of a request without one, the LSE is written to a wrong address

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - the other adapters here do not need it

        self._varlen = flash_attn_varlen_func

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
        output, lse_by_head, _ = self._varlen(
            query,
            key,
            value,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=max_seqlen_q_of(call, query.shape[0], unfolded=lse is not None or call.num_splits == 1),
            max_seqlen_k=call.max_seqlen_k,
            softmax_scale=params.softmax_scale,
            causal=call.causal,
            window_size=window_size_of(call, params, return_lse=lse is not None),
            softcap=params.softcap,
            alibi_slopes=params.alibi_slopes,
            return_attn_probs=True,  # returns the LSE; probabilities require dropout
            block_table=call.block_table,
        )
        out.copy_(output)
        write_lse(lse, lse_by_head)


class Fa2Vllm(Kernels):
    """``_vllm_fa2_C``: pages of multiples of 16 tokens, and ALiBi; no sinks."""

    fills_output = True
    needs_keys = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._varlen_fwd = op_library.load("_vllm_fa2_C").varlen_fwd.default

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
        starts = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
        left, right = window_size_of(call, params, return_lse=lse is not None)
        _, lse_by_head = self._varlen_fwd(
            query,
            key,
            value,
            out,
            call.cu_seqlens_q,
            starts,  # required with pages too, though ignored
            call.seqused_k,
            None,  # leftpad_k
            call.block_table,
            params.alibi_slopes,
            max_seqlen_q_of(call, query.shape[0], unfolded=lse is not None and call.block_table is None),
            call.max_seqlen_k,
            0.0,  # p_dropout
            params.softmax_scale,
            False,  # noqa: FBT003 - zero_tensors
            call.causal,
            left,
            right,
            params.softcap,
            False,  # noqa: FBT003 - zero_tensors
            min(call.num_splits, 1),  # 1 disables split-KV; larger limits are not supported
            None,  # gen
        )
        write_lse(lse, lse_by_head)


_torch_forward: Final = getattr(torch.ops.aten, "_flash_attention_forward").default  # noqa: B009 - public as an op


class TorchFlash(Kernels):
    """``aten::_flash_attention_forward``: contiguous K/V only; no ALiBi, soft-capping or sinks."""

    paged = False

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
        output, lse_by_head, *_ = _torch_forward(
            query,
            key,
            value,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            max_seqlen_q_of(call, query.shape[0], unfolded=call.num_splits == 1),
            call.max_seqlen_k,
            0.0,  # dropout_p
            call.causal,
            False,  # noqa: FBT003 - return_debug_mask
            scale=params.softmax_scale,
            window_size_left=params.window[0],
            window_size_right=params.window[1],
            seqused_k=call.seqused_k,
        )
        out.copy_(output)
        write_lse(lse, lse_by_head)
