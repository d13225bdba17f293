"""One attention layer of a model, as the host describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from attrs import field, frozen

from attnplug.contract.inputs.limits import Parallel
from attnplug.errors import LayerError, shown
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug.request.tables import FrozenTable


def _to_table(value: Any) -> FrozenTable | None:
    table = FIELDS["block_sparse"].domain
    try:
        return None if value is None else cast("FrozenTable", table.canonical(value))
    except ValueError:
        raise LayerError(
            f"block_sparse={shown(value)} was given",
            f"a pattern is {table.text}",
            "pass a mapping, as in the requirements",
        ) from None


@frozen(eq=False, kw_only=True)
class Layer:
    """
    One layer's values and learned tensors.

    A value left None means "as agreed": `make_impl` fills it in from the agreement, and refuses a value that
    differs from it. A tensor that was requested in the requirements has to be there, and one that was not is refused.

    Attributes:
        name: The layer's name in the model, unique there.
        scale: Factor of the scores before soft cap and softmax; None is ``head_size ** -0.5``. Latent layers name it:
            it is ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, times the square of YaRN's ``mscale``.
        num_q_heads: Query heads of this rank.
        num_kv_heads: Key and value heads of this rank.
        head_size: Size of a query and key head.
        head_size_v: Size of a value head.
        alibi_slopes: ``(num_q_heads,)`` float32, finite.
        sliding_window: Tokens that a token attends to, itself included.
        attention_chunk: Tokens of a chunk of chunked-local attention.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``.
        topk: Cached tokens that a token attends to at most, where their slots come with the call.
        attn_type: decoder, encoder, encoder_only or encoder_decoder.
        sinks: ``(num_q_heads,)`` in float32 or the layer's dtype, finite: one logit per head in the softmax
            denominator. A head without a sink has a large negative one such as -1e4; infinities are refused, since
            kernels differ in what they make of them.
        sinks_with_call: Whether `forward` is given the sinks with each call, in place of `sinks`, as some models pass
            them. The implementation has zeros until the first call.
        kv_sharing_target: Name of the layer whose cache this layer reads; it then writes no cache.
        block_sparse: The block-sparse pattern's parameters.
        q_scale: Quantization scale of queries, on the host: ``x ~ scale * quantized``.
        k_scale: The same for keys.
        v_scale: The same for values. Of latents it is that of their keys, and follows from it.
        q_scale_tensor: The same on the device, float32 with one element, or ``(num_kv_heads,)`` where per-head scales
            were requested: one per group of query heads. Those have no default, and no host float.
        k_scale_tensor: The same for keys, ``(num_kv_heads,)`` per head.
        v_scale_tensor: The same for values, ``(num_kv_heads,)`` per head.
        output_scale: Scale of a quantized output, float32, one element.
        output_block_scale: Where the output's block scales are written, for formats that have them.
        cache_write: Who writes K/V into the cache, ``"forward"`` or ``"host"`` (through `write_kv`), in the phases for
            which the implementation leaves the choice; None is its own way.
        parallel: The ranks that share the model. A backend that reads values of all heads of the model, such as a
            calibration, takes those of this rank: ranks have consecutive KV heads, or several have the same one.
        extra: Values of open features, by the feature's name: tables of a fused rotary embedding, say. Only
            features that were requested.
    """

    name: str
    scale: float | None = None
    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    head_size_v: int | None = None
    alibi_slopes: Tensor | None = None
    sliding_window: int | None = None
    attention_chunk: int | None = None
    logits_soft_cap: float | None = None
    topk: int | None = None
    attn_type: str | None = None
    sinks: Tensor | None = None
    sinks_with_call: bool = False
    kv_sharing_target: str | None = None
    block_sparse: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = field(default=None, converter=_to_table)
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    q_scale_tensor: Tensor | None = None
    k_scale_tensor: Tensor | None = None
    v_scale_tensor: Tensor | None = None
    output_scale: Tensor | None = None
    output_block_scale: Tensor | None = None
    cache_write: str | None = None
    parallel: Parallel = field(factory=Parallel)
    extra: Mapping[str, Any] = field(factory=dict)

    @property
    def window(self) -> tuple[int, int]:
        """Tokens attended left and right of a token, itself not counted; ``(-1, -1)`` without a window."""
        if self.sliding_window is None:
            return -1, -1
        left = self.sliding_window - 1
        return left, left if self.attn_type == "encoder_only" else 0
