"""What a kernel library has to do: the one door between the backend and its kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import GraphBuffers, Limits, MetadataBuilder, Phase
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.pages import Pages
    from attnplug_int8_ixformer.terms import Terms


class Provider(ABC):
    """
    Quantizes, writes and attends. Queries, keys and values arrive in the layer's dtype.

    Attributes:
        fuses_in_mixed: Whether decodes write their rows in a batch with prefills too, and not in one of decodes alone.
        supports_max_num_splits: Whether `Limits.max_num_splits` is kept.
        prompt_lens: Rows of prompts for a warm-up, one for each of the kernels of prompts.
        backend: The backend.
    """

    fuses_in_mixed: ClassVar[bool]
    supports_max_num_splits: ClassVar[bool] = False
    prompt_lens: tuple[int, ...] = (1,)

    def __init__(self, backend: Int8Backend) -> None:
        self.backend = backend

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of `State.workspace` that batches within these limits need."""
        del limits
        return 0

    @abstractmethod
    def plan_decodes(self, decodes: Phase, builder: MetadataBuilder, graph: GraphBuffers | None, *, mixed: bool) -> Any:
        """
        Return what `decode` needs to know of a step.

        Args:
            decodes: The requests.
            builder: Its `persist` copies tensors to where a graph reads them.
            graph: The graph buffers that are built into; None runs eagerly.
            mixed: Whether the batch has prefills too.
        """

    @abstractmethod
    def plan_prefills(self, prefills: Phase, builder: MetadataBuilder) -> Any:
        """Return what `prefill` needs to know of a step."""

    @abstractmethod
    def write(self, key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
        """
        Quantize rows and write them with their scales.

        Args:
            key: ``(tokens, num_kv_heads, head_size)``.
            value: The same.
            pages: The cache.
            slots: ``(tokens,)`` int64; -1 is not written.
        """

    @abstractmethod
    def decode(
        self, query: Tensor, new: tuple[Tensor, Tensor] | None, pages: Pages, out: Tensor, plan: Any, terms: Terms
    ) -> None:
        """
        Attend, and write the new rows where they are given.

        Args:
            query: ``(tokens, num_q_heads, head_size)`` of all decodes.
            new: Keys and values ``(tokens, num_kv_heads, head_size)``; None where they are in the cache.
            pages: The cache.
            out: As `query`, heads side by side.
            plan: What `plan_decodes` returned.
            terms: Of the layer.
        """

    @abstractmethod
    def prefill(self, query: Tensor, pages: Pages, out: Tensor, plan: Any, terms: Terms) -> None:
        """Attend keys that are all in the cache. Arguments as for `decode`."""


def provider_of(backend: Int8Backend) -> Provider:
    """Return the provider of the variant that was chosen. No other is imported."""
    if backend.variant == "ixformer":
        from attnplug_int8_ixformer.ixformer_provider import (  # noqa: PLC0415 - loads the vendor's library
            IxformerProvider,
        )

        return IxformerProvider(backend)
    from attnplug_int8_ixformer.triton_provider import TritonProvider  # noqa: PLC0415 - loads Triton

    return TritonProvider(backend)
