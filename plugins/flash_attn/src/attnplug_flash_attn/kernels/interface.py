"""The interface of a kernel library. Everything above it is written once for all libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug import Agreement


@frozen(eq=False, kw_only=True)
class LayerParams:
    """
    The parameters of a layer, made once.

    Attributes:
        softmax_scale: The factor of the logits.
        window: The keys to the left and to the right of a row that it attends to; -1 means all.
        softcap: The soft cap of the logits; 0 means none.
        alibi_slopes: ``(q_heads,)`` float32.
        sinks: ``(q_heads,)`` in the dtype of the model. None in a pass that is merged with one that has them.
        q_descale: ``(1,)`` or ``(kv_heads,)`` float32, the factor of quantized queries.
        k_descale: The same for keys.
        v_descale: The same for values.
    """

    softmax_scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


@frozen(eq=False, kw_only=True)
class VarlenCall:
    """
    The rows and keys of a call. It is made once per step, for all layers of a plan key.

    Index tensors are int32, contiguous, on the device of the queries. With a block table keys are in pages, otherwise
    they are packed one request after another.

    Attributes:
        cu_seqlens_q: ``(requests + 1,)``, the first row of each request, from 0.
        max_seqlen_q: The most rows of a request, or an upper bound.
        max_seqlen_k: The most keys of a request, or an upper bound.
        seqused_k: ``(requests,)``, keys per request. Set with a block table.
        cu_seqlens_k: ``(requests + 1,)``, the first key of each request, from 0. Set without a block table, and with
            one if `Kernels.cumulative_keys`.
        block_table: ``(requests, blocks)``, the pages of each request; the last dimension is contiguous.
        leftpad_k: ``(requests,)`` zeros, the slots before the first key of each request. Set with a block table if
            `Kernels.wants_leftpad`.
        causal: Whether a causal mask applies, aligned to the last row and the last key of a request.
        num_splits: The split-KV limit: 0 leaves the number to the library, 1 is batch-invariant. Some libraries only
            distinguish 1 from other numbers.
        scheduler_metadata: The schedule of this call, from `Kernels.schedule`.
    """

    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    leftpad_k: Tensor | None = None
    causal: bool = True
    num_splits: int = 0
    scheduler_metadata: Tensor | None = None


class Kernels(ABC):
    """
    An imported kernel library.

    Attributes:
        paged: Whether it reads pages of the agreed size. Otherwise the builder packs the pages in use, and calls have
            no block table.
        cumulative_keys: Whether calls with a block table need ``cu_seqlens_k``.
        needs_keys: Whether requests with rows and pages need a key: in a graph, calls have no rows of padding then.
        wants_leftpad: Whether calls with a block table have `VarlenCall.leftpad_k`.
        schedules: Whether `schedule` may return a schedule.
        fills_output: Whether it writes into `out`; otherwise its new tensors are copied. An instance sets it if it
            depends on the installed release.

    Args:
        agreement: The agreement.
    """

    paged: ClassVar[bool] = True
    cumulative_keys: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = False
    wants_leftpad: bool = False
    schedules: ClassVar[bool] = False
    fills_output: bool = False

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        """
        Fill `out`, and `lse` unless it is None, without synchronization.

        Args:
            query: ``(tokens, q_heads, head_size)``.
            key: ``(blocks, block_size, kv_heads, head_size)`` of any strides with a block table, otherwise packed
                ``(keys, kv_heads, head_size)``. Of latents it is their rotary part alone, and `value` the rest.
            value: In the form of `key`, with head_size_v.
            out: ``(tokens, q_heads, head_size_v)`` in the dtype of the model.
            call: The rows and keys of the call.
            params: The parameters of the layer.
            lse: ``(tokens, q_heads)`` float32, natural logarithm. Rows without keys get -inf, and zeros in `out`.
        """

    def schedule(self, call: VarlenCall, params: LayerParams, *, num_heads_q: int) -> Tensor | None:
        """
        Return the library's division of a call among multiprocessors, for `VarlenCall.scheduler_metadata`.

        Args:
            call: The call; a schedule in it is ignored.
            params: The parameters of any layer of the plan key.
            num_heads_q: The query heads of the call: more than the layer's if ranks gather them.

        Returns:
            A new int32 tensor; None if the library has no schedule for the call.
        """
        del call, params, num_heads_q
        return None


_UNSCALED: Final = MappingProxyType({"q_descale": None, "k_descale": None, "v_descale": None})


def write_lse(lse: Tensor | None, lse_by_head: Tensor) -> None:
    """
    Write a library's LSE, if it is requested.

    Args:
        lse: ``(tokens, q_heads)``; None if it is not requested.
        lse_by_head: ``(q_heads, tokens)``, the layout of all libraries. Rows without keys have infinity of either sign.
    """
    if lse is not None:
        torch.nan_to_num(lse_by_head.T, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=lse)


def descales_of(call: VarlenCall, params: LayerParams, kv_heads: int) -> Mapping[str, Tensor | None]:
    """Return the keywords ``q_descale``, ``k_descale`` and ``v_descale``, ``(requests, kv_heads)`` each."""
    if params.q_descale is params.k_descale is params.v_descale is None:
        return _UNSCALED
    requests = call.cu_seqlens_q.shape[0] - 1
    return {
        f"{letter}_descale": None if scale is None else scale.expand(requests, kv_heads)
        for letter, scale in zip("qkv", (params.q_descale, params.k_descale, params.v_descale), strict=True)
    }
