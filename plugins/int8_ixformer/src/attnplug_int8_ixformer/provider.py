"""The interface between the backend and a kernel library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import AttentionImpl, GraphBuffers, Limits, MetadataBuilder, Phase
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.pages import Pages


@frozen(eq=False)
class ScoreParams:
    """
    The parameters of a layer's scores.

    Attributes:
        scale: The softmax scale.
        left: Tokens attended to before a token's own; -1 for all.
        soft_cap: Scores become ``cap * tanh(score / cap)``; 0 for no cap.
        slopes: ``(num_q_heads,)`` float32 ALiBi slopes, contiguous, or None.
        is_sqrt: Whether the slopes multiply the square root of the distance.
    """

    scale: float
    left: int = -1
    soft_cap: float = 0.0
    slopes: Tensor | None = None
    is_sqrt: bool = False

    @classmethod
    def of(cls, impl: AttentionImpl) -> ScoreParams:
        """Return the parameters of a layer."""
        slopes = impl.layer.alibi_slopes
        return cls(
            scale=impl.scale,
            left=impl.window[0],
            soft_cap=impl.logits_soft_cap or 0.0,
            slopes=None if slopes is None else slopes.contiguous(),
            is_sqrt=impl.agreement.requirements.alibi == "sqrt",
        )


class Provider(ABC):
    """
    Quantizes rows, writes the KV cache, and computes attention. Rows have the layer's dtype.

    Attributes:
        fuses_mixed_writes: Whether decodes write their rows in batches with prefills too. Otherwise only in batches of
            decodes.
        supports_max_num_splits: Whether `Limits.max_num_splits` is supported.
        contiguous_blocks: Whether the blocks of a KV cache have to follow each other without gaps.
        warmup_lens: Query lengths for the warm-up, one per prefill kernel.
        backend: The backend.
    """

    fuses_mixed_writes: ClassVar[bool]
    supports_max_num_splits: ClassVar[bool] = False
    contiguous_blocks: ClassVar[bool] = False
    warmup_lens: tuple[int, ...] = (1,)

    def __init__(self, backend: Int8Backend) -> None:
        self.backend = backend

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of `State.workspace` for batches within these limits."""
        del limits
        return 0

    @abstractmethod
    def plan_decodes(self, decodes: Phase, builder: MetadataBuilder, graph: GraphBuffers | None, *, mixed: bool) -> Any:
        """
        Return the plan that `decode` takes.

        Args:
            decodes: The requests.
            builder: Its `persist` keeps tensors that a graph reads.
            graph: The graph buffers, or None.
            mixed: Whether the batch has prefills too.
        """

    @abstractmethod
    def plan_prefills(self, prefills: Phase, builder: MetadataBuilder) -> Any:
        """Return the plan that `prefill` takes."""

    @abstractmethod
    def write(self, key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
        """
        Quantize rows, and write them and their scales to the KV cache.

        Args:
            key: ``(tokens, num_kv_heads, head_size)``.
            value: As `key`.
            pages: The KV cache.
            slots: ``(tokens,)`` int64; rows with the slot -1 are not written.
        """

    @abstractmethod
    def decode(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        pages: Pages,
        out: Tensor,
        plan: Any,
        params: ScoreParams,
    ) -> None:
        """
        Compute attention of the decodes, and write their new rows if passed.

        Args:
            query: ``(tokens, num_q_heads, head_size)`` of all decodes.
            new: Keys and values ``(tokens, num_kv_heads, head_size)``; None where they are in the cache.
            pages: The KV cache.
            out: As `query`, heads contiguous.
            plan: The plan of `plan_decodes`.
            params: The layer's parameters.
        """

    @abstractmethod
    def prefill(self, query: Tensor, pages: Pages, out: Tensor, plan: Any, params: ScoreParams) -> None:
        """Compute attention of the prefills, whose keys are all in the cache. Arguments as of `decode`."""


def provider_of(backend: Int8Backend) -> Provider:
    """Return the provider of the chosen variant, and import no other."""
    if backend.variant == "ixformer":
        from attnplug_int8_ixformer.ixformer_provider import (  # noqa: PLC0415 - loads the vendor's library
            IxformerProvider,
        )

        return IxformerProvider(backend)
    from attnplug_int8_ixformer.triton_provider import TritonProvider  # noqa: PLC0415 - loads Triton

    return TritonProvider(backend)
