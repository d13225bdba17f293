"""What one attention call brings, and whether it is what the model's configuration says of the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.errors import NotNegotiatedError
from attnplug.request import Requirements

if TYPE_CHECKING:
    from torch import Tensor, nn

    from attnplug.models import ModelLayer


@frozen
class Call:
    """
    The facts of a call, tensor-free.

    Attributes:
        num_q_heads: Query heads given.
        num_kv_heads: Key and value heads given.
        head_size: Size of a query head.
        head_size_v: Size of a value head.
        dtype: Dtype of the query, in the words of `Requirements`.
        sliding_window: The window handed over; None where none was, though the mask may have one.
        softcap: The soft cap handed over.
        sinks: Whether sinks were handed over.
        is_causal: What the caller said; None where it said nothing.
        is_cross: Whether keys and queries are different sequences, as far as the call tells.
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    sliding_window: int | None
    softcap: float | None
    sinks: bool
    is_causal: bool | None
    is_cross: bool

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sliding_window: int | None,
        softcap: float | None,
        sinks: bool,
        is_causal: bool | None,
    ) -> Call:
        """Return the facts of ``(batch, heads, tokens, size)`` tensors and of what came with them."""
        return cls(
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            dtype=str(query.dtype).removeprefix("torch."),
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            is_causal=is_causal,
            is_cross="Cross" in type(module).__name__ or query.shape[2] > key.shape[2],
        )

    def requirements(self, module: nn.Module) -> Requirements:
        """Return what the call alone asks for, where the configuration says nothing; the mask is held against it."""
        causal = bool(getattr(module, "is_causal", True)) if self.is_causal is None else self.is_causal
        return Requirements(
            head_size=self.head_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_size_v=self.head_size_v,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.softcap,
            sinks=self.sinks,
            attn_type="decoder" if causal else "encoder_decoder" if self.is_cross else "encoder_only",
            paged=False,
        )

    def agree(self, layer: ModelLayer) -> Requirements:
        """
        Return the layer's requirements as this call has them: its dtype, and the heads of this tensor-parallel rank.

        Raises:
            NotNegotiatedError: The call brings something else than the configuration says.
        """
        asked = layer.requirements
        self._compare(layer.name, "head_size", self.head_size, asked.head_size)
        self._compare(layer.name, "head_size of the values", self.head_size_v, asked.head_size_v)
        self._compare(layer.name, "softcap", self.softcap, asked.logits_soft_cap)
        self._compare(layer.name, "sinks (s_aux)", self.sinks, asked.sinks)
        if self.sliding_window is not None:
            self._compare(layer.name, "sliding_window", self.sliding_window, asked.sliding_window)
        if self.is_causal is not None:
            self._compare(layer.name, "is_causal", self.is_causal, asked.causal)
        ranks = max(1, asked.num_q_heads // self.num_q_heads)
        self._compare(layer.name, "query heads", self.num_q_heads * ranks, asked.num_q_heads)
        self._compare(layer.name, "key and value heads", self.num_kv_heads, max(1, asked.num_kv_heads // ranks))
        return asked.evolve(
            dtype=self.dtype, kv_cache_dtype="auto", num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads
        )

    def _compare(self, layer: str, what: str, brought: object, described: object) -> None:
        if brought != described:
            raise NotNegotiatedError(
                f"{layer}: the call brings {what} {brought}",
                f"by the model's configuration it is {described}, and the backend was chosen for that",
                "build the model from the configuration that it runs with, or use attn_implementation='eager'",
            )
