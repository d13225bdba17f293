"""
The kernels that compute a tile: torch's fused ones, and an unfused one of float32 matmuls and a softmax.

Query heads are folded into rows of their KV head, so that keys are read once per KV head; every row attends to a key.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from attnplug.torch_backend.masks import AlibiMask, apply_alibi

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.request.requirements import Requirements
    from attnplug.torch_backend.masks import Visibility


@frozen(eq=False)
class ScoreParams:
    """
    What a layer does to scores.

    Attributes:
        scale: Factor of the scores.
        soft_cap: Scores become ``cap * tanh(score / cap)``; None for no cap.
        alibi: Form of the ALiBi distances; None without ALiBi.
        slopes: ``(num_q_heads,)`` float32, with ALiBi.
    """

    scale: float
    soft_cap: float | None
    alibi: str | None = None
    slopes: Tensor | None = None


class Attend(Protocol):
    """Computes one tile."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, params: ScoreParams, *, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """
        Return the output ``(members, heads, rows, head_size_v)`` and float32 LSE ``(members, heads, rows)``, or None.

        Args:
            query: ``(members, heads, rows, head_size)``.
            key: ``(members, num_kv_heads, keys, head_size)``.
            value: ``(members, num_kv_heads, keys, head_size_v)``.
            mask: ``(members or 1, 1, rows, keys)`` additive, or None; an `AlibiMask` with ALiBi; what
                `TileKernel.make_mask` returns, if the kernel has one.
            params: Scale, soft cap and slopes.
            causal: Whether row i attends to the keys up to i. The tile is square then, has no mask, and its heads are
                not folded.
        """


class MakeMask(Protocol):
    """Makes the mask of a whole group."""

    def __call__(self, visibility: Visibility, lens: Tensor, rows: int, keys: int, ratio: int) -> Any:
        """
        Return the mask.

        Args:
            visibility: Which positions attend to which.
            lens: ``(2, members)`` int64 rows and keys of each member; its last row is at the position of its last key.
            rows: The most rows.
            keys: The most keys.
            ratio: Query heads per KV head: each row is repeated so often.
        """


@frozen
class TileKernel:
    """
    A kernel, and the tiles that it takes.

    Attributes:
        attend: Computes one tile.
        fused: Whether it keeps no scores in memory, takes the layer's dtype and has a causal form. Otherwise tiles are
            small, and keys and values are float32.
        make_mask: Makes the kernel's own mask for a whole group, which is one tile then; None takes additive masks.
        least_keys: Keys that a group is padded to.
        order: The outer axis of gathered keys: "tokens", "heads", or "any" for what suits the KV cache. Matmuls copy
            anything but "heads".
    """

    attend: Attend
    fused: bool
    make_mask: MakeMask | None = None
    least_keys: int = 1
    order: Literal["tokens", "heads", "any"] = "any"


def choose_kernel(requested: Requirements, device_type: str) -> TileKernel:
    """Return the fastest kernel that supports the requirements on a type of device."""
    if (
        requested.logits_soft_cap is not None
        or requested.alibi is not None
        or requested.head_size != requested.head_size_v
    ):
        return UNFUSED
    op = fused_cpu_op() if device_type == "cpu" else None
    if op is not None:
        return TileKernel(partial(_fused_on_cpu, op), fused=True)
    # The public function returns no LSE, which a caller's LSE and sinks require.
    return UNFUSED if requested.return_lse or requested.sinks else FUSED


def flex_kernel() -> TileKernel:
    """Return FlexAttention. Its module, and the compiler behind it, load here."""
    from attnplug.torch_backend import flex  # noqa: PLC0415 - takes a second that the other variant does not need

    # A single key would be a size of one, and the compiler makes separate graphs for those.
    return TileKernel(flex.attend, fused=True, make_mask=flex.make_mask, least_keys=2, order="tokens")


@cache
def fused_cpu_op() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """
    Return the CPU kernel beneath `scaled_dot_product_attention`, which also returns the LSE; None where torch has none.

    It is not public, so its schema is checked. The LSE of a row that attends to no key is 0 there, not -inf: plans keep
    such rows away from it.
    """
    op = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if op is None:
        return None
    schema = op.default._schema  # noqa: SLF001 - schemas have no public name
    names = {argument.name for argument in schema.arguments}
    expected = {"query", "key", "value", "is_causal", "attn_mask", "scale"}
    if not names >= expected or len(schema.returns) != 2:
        return None
    return cast("Callable[..., tuple[Tensor, Tensor]]", getattr(torch, op.__name__, op.default))  # faster by 2 us


def _fused_on_cpu(
    op: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    params: ScoreParams,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute a tile with torch's fused CPU kernel."""
    members, heads, rows, _ = query.shape
    ratio = heads // key.shape[1]
    if ratio == 1:
        return op(query, key, value, is_causal=causal, attn_mask=mask, scale=params.scale)
    # In torch 2.6 this kernel takes as many key heads as query heads, unchecked: so KV heads become members.
    query = query.reshape(-1, ratio, rows, query.shape[3])
    key, value = (x.reshape(-1, 1, *x.shape[2:]).expand(-1, ratio, -1, -1) for x in (key, value))
    out, lse = op(query, key, value, is_causal=causal, attn_mask=mask, scale=params.scale)
    return out.reshape(members, heads, rows, -1), lse.reshape(members, heads, rows)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: ScoreParams, *, causal: bool
) -> tuple[Tensor, None]:
    """Compute a tile with the fused kernel that torch chooses, without LSE."""
    shared = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=params.scale, enable_gqa=shared
    )
    return out, None


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | AlibiMask | None, params: ScoreParams, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute a tile in plain float32: whatever no fused kernel supports, on any device."""
    del causal
    scores = (query.float() * params.scale) @ key.transpose(-1, -2)
    if params.soft_cap is not None:
        scores = scores.div_(params.soft_cap).tanh_().mul_(params.soft_cap)
    if isinstance(mask, AlibiMask):
        scores, mask = apply_alibi(scores, cast("Tensor", params.slopes), mask.distance), mask.mask
    if mask is not None:
        scores = scores.add_(mask)
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights @ value).div_(total), total.log_().add_(highest).squeeze(-1)


FUSED: Final = TileKernel(_fused, fused=True)
UNFUSED: Final = TileKernel(_unfused, fused=False, order="heads")
