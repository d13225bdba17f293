"""What the plugin asks of a kernel library. Everything behind it is written once, everything before it once each."""

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
    What a layer brings to each of its calls: made once per layer.

    Attributes:
        softmax_scale: What the logits are multiplied with.
        window: How many keys a row sees to its left and to its right; -1 for all of them.
        softcap: Bound of the logits; 0 for none.
        alibi_slopes: float32 of shape (q_heads,).
        sinks: Of shape (q_heads,), in the dtype of the model. None in a pass that is merged with one that has them.
        q_descale: float32 of shape (1,) or (kv_heads,): what quantized queries are multiplied with.
        k_descale: Likewise for keys.
        v_descale: Likewise for values.
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
    Whose rows attend which keys: made once per step, the same for all layers of a plan key.

    Index tensors are int32, contiguous, on the device of the queries. Keys are in pages where there is a block table,
    and else packed one request behind the other.

    Attributes:
        cu_seqlens_q: (requests + 1,), from 0: where the rows of each request start.
        max_seqlen_q: At least the longest of them.
        max_seqlen_k: At least the most keys of a request.
        seqused_k: (requests,): keys per request. Always there with a block table.
        cu_seqlens_k: (requests + 1,), from 0: where the keys of each request start. Always there without a block table;
            with one, where `Kernels.cumulative_keys` says so, and else not.
        block_table: (requests, blocks): pages of each request, the last dimension contiguous.
        leftpad_k: (requests,), zeros: slots before the first key of each request. With a block table where
            `Kernels.wants_leftpad` says so, and else not.
        causal: Whether the last row of a request sees all of its keys, and each row before it one less.
        num_splits: At most so many parts of the keys of a request; 0 leaves it to the library, 1 is batch-invariant.
            Libraries that choose by themselves tell 1 from other numbers and no more.
        scheduler_metadata: What `Kernels.schedule` has returned for this call.
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
    A kernel library, loaded.

    Attributes:
        paged: Whether it reads pages of the agreed size. Where it does not, the builder packs the pages in use and
            calls have no block table.
        cumulative_keys: Whether calls with a block table say the numbers of keys as ``cu_seqlens_k``.
        wants_leftpad: Whether calls with a block table have `Call.leftpad_k`.
        schedules: Whether `schedule` may return anything but None.
        fills_output: Whether it writes its results where they belong; where it does not, they are copied there. Where
            that depends on what is installed, instances tell.

    Args:
        agreement: What was agreed on for all layers.
    """

    paged: ClassVar[bool] = True
    cumulative_keys: ClassVar[bool] = False
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
        Fill `out`, and `lse` where it is given. No synchronization with the device, nothing allocated that is kept.

        Args:
            query: (tokens, q_heads, head_size).
            key: (blocks, block_size, kv_heads, head_size) with a block table, whatever the strides; else packed rows
                (keys, kv_heads, head_size).
            value: Likewise, of head_size_v.
            out: (tokens, q_heads, head_size_v): the rows of `query`, in the dtype of the model.
            call: Whose rows, which keys.
            params: The layer's.
            lse: float32 of shape (tokens, q_heads), natural logarithm. A row without keys has -inf, and zeros in `out`.
        """

    def schedule(self, call: VarlenCall, params: LayerParams, *, num_heads_q: int) -> Tensor | None:
        """
        Return how the library divides a call among the multiprocessors, for `Call.scheduler_metadata`.

        Args:
            call: The call, its own schedule ignored.
            params: Of any layer of the plan key.
            num_heads_q: Query heads of the call: more than the layer's where ranks gather them.

        Returns:
            A new int32 tensor, or None where the library has no such thing.
        """
        del call, params, num_heads_q
        return None


_UNSCALED: Final = MappingProxyType({"q_descale": None, "k_descale": None, "v_descale": None})


def keep_lse(lse: Tensor | None, found: Tensor) -> None:
    """
    Write a library's LSE where it was asked for.

    Args:
        lse: (tokens, q_heads), or None where nobody asked.
        found: (q_heads, tokens): all libraries lay it out by heads. Rows without keys have infinity of either sign.
    """
    if lse is not None:
        torch.nan_to_num(found.T, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=lse)


def descales_of(call: VarlenCall, params: LayerParams, kv_heads: int) -> Mapping[str, Tensor | None]:
    """Return the keywords ``q_descale``, ``k_descale`` and ``v_descale``, each of shape (requests, kv_heads)."""
    if params.q_descale is params.k_descale is params.v_descale is None:
        return _UNSCALED
    requests = call.cu_seqlens_q.shape[0] - 1
    return {
        f"{letter}_descale": None if scale is None else scale.expand(requests, kv_heads)
        for letter, scale in zip("qkv", (params.q_descale, params.k_descale, params.v_descale), strict=True)
    }
