"""Compiled FlexAttention: soft caps, ALiBi, windows, sinks and LSE in one kernel that keeps no scores in memory."""

from __future__ import annotations

from functools import cache
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnplug.torch_backend.masks import Visibility
from attnplug.torch_backend.sdpa import ScoreParams

if TYPE_CHECKING:
    from collections.abc import Callable


BLOCK: Final = 128
"""Rows and keys of a block of the mask: the kernel skips empty blocks, and applies the mask in partial ones only."""

_FAR: Final = 2**30
_INPUTS: Final = 5
_SLOPES: Final = 2**12 + 1  # query heads per KV head that no model has, so that no other size equals theirs


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, params: ScoreParams, *, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute a group with the compiled kernel. One memory order, since another would compile again."""
    del causal
    query, key, value = query.contiguous(), _tokens_first(key), _tokens_first(value)
    kernel = compiled(_kind(query, value, params), params.soft_cap is not None, params.alibi)
    return kernel(query, key, value, score_mod_of(params, mask.inputs), mask.blocks, params.scale)


@frozen(eq=False)
class FlexMask:
    """
    The mask of a group.

    Attributes:
        blocks: The mask, block by block.
        inputs: ``(members, 5)`` int32, what mask and score functions read: rows, keys, positions attended to on the
            left and right, query heads per KV head.
    """

    blocks: BlockMask
    inputs: Tensor


def _tokens_first(rows: Tensor) -> Tensor:
    """Return ``(members, keys, heads, size)``, contiguous, as whole slots are gathered."""
    return rows.transpose(1, 2).contiguous()


@frozen
class Kind:
    """
    What the compiler makes separate graphs for, however dynamic the lengths are.

    Attributes:
        heads: Key and value heads.
        size: Size of a query and key head.
        size_v: Size of a value head.
        dtype: Their dtype.
        device: Their device.
        alone: Whether the group has one member.
        short: 0 for a single row, 1 for so few rows that the kernel splits keys instead of rows, 2 for more.
        scale: Factor of the scores.
    """

    heads: int
    size: int
    size_v: int
    dtype: torch.dtype
    device: torch.device
    alone: bool
    short: int
    scale: float

    @property
    def is_wide(self) -> bool:
        """
        Whether values are wider than the compiler assumes.

        It chooses tiles by the size of keys alone: three stages of 128 by 64 leave no room for values of 256.
        """
        return self.device.type == "cuda" and self.size_v > max(self.size, 128)


def _kind(query: Tensor, value: Tensor, params: ScoreParams) -> Kind:
    members, heads, rows, size = query.shape
    short = 0 if rows == 1 else 1 if rows < BLOCK else 2
    return Kind(heads, size, value.shape[3], query.dtype, query.device, members == 1, short, params.scale)


@cache
def compiled(
    kind: Kind,
    soft_capped: bool,  # noqa: FBT001 - part of a cache key
    alibi: str | None = None,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """
    Return the kernel for a kind of group, compiled.

    Each kind has its own function, since the compiler gives up on one that it had to compile often. It takes sizes that
    are equal at first to be equal always: so the first sizes are unequal, which makes a general graph.
    """
    function = _flex_in_one_stage if kind.is_wide else _flex
    code = function.__code__.replace(co_name=f"flex_{abs(hash((kind, soft_capped, alibi)))}")
    own = FunctionType(code, function.__globals__, closure=function.__closure__)
    kernel = torch.compile(own, dynamic=True, fullgraph=True)
    query, key, value, mask = unequal_sizes(kind)
    slopes = torch.zeros(kind.heads * _SLOPES, device=kind.device) if alibi else None
    params = ScoreParams(kind.scale, 1.0 if soft_capped else None, alibi, slopes)
    kernel(query, key, value, score_mod_of(params, mask.inputs), mask.blocks, kind.scale)
    return kernel


def unequal_sizes(kind: Kind) -> tuple[Tensor, Tensor, Tensor, FlexMask]:
    """Return arguments of a kind in which no two sizes are equal, except those that the kind makes equal."""
    taken = {1, 2, _INPUTS, kind.heads, kind.size, kind.size_v}

    def unused(start: int) -> int:
        taken.add(size := next(n for n in count(start) if n not in taken))
        return size

    members = 1 if kind.alone else unused(3)
    row_blocks = unused(3)
    rows = (1, unused(33), unused(row_blocks * BLOCK - 50))[kind.short]
    keys = unused(unused(row_blocks + 1) * BLOCK - 50)
    lens = torch.tensor([[rows] * members, [keys] * members], device=kind.device)
    shapes = ((kind.heads, rows, kind.size), (keys, kind.heads, kind.size), (keys, kind.heads, kind.size_v))
    query, key, value = (torch.zeros(members, *shape, dtype=kind.dtype, device=kind.device) for shape in shapes)
    return query, key, value, make_mask(Visibility(-1, 0), lens, rows, keys, 1)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor | None]:
    return _flex_with(query, key, value, score_mod, mask, scale, None)


def _flex_in_one_stage(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor | None]:
    return _flex_with(query, key, value, score_mod, mask, scale, {"num_stages": 1})


def _flex_with(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: BlockMask, scale: float, options: Any
) -> tuple[Tensor, Tensor | None]:
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    given = {"score_mod": score_mod, "block_mask": mask, "scale": scale, "kernel_options": options}
    out, aux = flex_attention(query, key, value, **given, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def score_mod_of(params: ScoreParams, inputs: Tensor) -> Callable[..., Tensor] | None:
    """Return the function that caps scores and then applies ALiBi; None where there is neither."""
    cap = None if params.soft_cap is None else soft_cap_mod(params.soft_cap, inputs.device)
    return cap if params.slopes is None else alibi_mod(cap, params.slopes, inputs, params.alibi)


@cache
def soft_cap_mod(cap: float, device: torch.device) -> Callable[..., Tensor]:
    """Return the function that caps scores. The cap is a tensor, so that another cap does not compile again."""
    limit = torch.tensor(cap, device=device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del batch, head, row, key
        return torch.tanh(score / limit) * limit

    return capped


def alibi_mod(
    cap: Callable[..., Tensor] | None, slopes: Tensor, inputs: Tensor, form: str | None
) -> Callable[..., Tensor]:
    """
    Return the function that subtracts ``slope * distance`` from scores, after capping.

    Args:
        cap: The function that caps them, or None.
        slopes: ``(num_q_heads,)`` float32. Rows of the query heads that share a KV head are consecutive.
        inputs: As in `FlexMask`.
        form: "linear" or "sqrt".
    """

    def with_alibi(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        score = score if cap is None else cap(score, batch, head, row, key)
        ratio = inputs[batch, 4]
        distance = (key - _position(inputs, batch, row)).abs().to(score.dtype)
        slope = slopes[head * ratio + row % ratio]
        return score - slope * (distance.sqrt() if form == "sqrt" else distance)

    return with_alibi


def _position(inputs: Tensor, batch: Tensor, row: Tensor) -> Tensor:
    """Return the position of a row. Rows beyond a member's own repeat its last one, at its last key."""
    return torch.minimum(row // inputs[batch, 4], inputs[batch, 0] - 1) + inputs[batch, 1] - inputs[batch, 0]


def make_mask(visibility: Visibility, lens: Tensor, rows: int, keys: int, ratio: int) -> FlexMask:
    """Return the mask of a group, computed from lengths on the device; see `MakeMask`."""
    num_rows, num_keys = lens.int()
    left = _FAR if visibility.left < 0 else visibility.left
    right = _FAR if visibility.right < 0 else visibility.right
    # One tensor holds all that the mask function reads: other values do not compile again.
    inputs = torch.stack([num_rows, num_keys, *(torch.full_like(num_rows, n) for n in (left, right, ratio))], dim=1)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del head
        position = _position(inputs, batch, row)
        near = (key >= position - inputs[batch, 2]) & (key <= position + inputs[batch, 3])
        return (key < inputs[batch, 1]) & near

    partial, full = _blocks(num_rows, num_keys, (left, right), rows, keys, ratio)
    blocks = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(rows * ratio, keys),
        compute_q_blocks=False,
    )
    return FlexMask(blocks, inputs)


def _blocks(
    num_rows: Tensor, num_keys: Tensor, window: tuple[int, int], rows: int, keys: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """Return which blocks ``(members, row blocks, key blocks)`` are partially visible, and which fully."""
    left, right = window
    # Two blocks at least: the compiler makes separate graphs for sizes of one.
    start = torch.arange(max(2, -(-rows * ratio // BLOCK)), device=num_rows.device) * BLOCK
    last_row = num_rows.unsqueeze(1) - 1
    first = torch.minimum(torch.div(start, ratio, rounding_mode="floor"), last_row)
    last = torch.minimum(torch.div(start + BLOCK - 1, ratio, rounding_mode="floor"), last_row)
    shift, ends = (num_keys - num_rows).unsqueeze(1), num_keys.unsqueeze(1)
    low, high = first + shift - left, torch.minimum(last + shift + right + 1, ends)
    full_low, full_high = last + shift - left, torch.minimum(first + shift + right + 1, ends)
    key = torch.arange(max(2, -(-keys // BLOCK)), device=num_rows.device) * BLOCK
    some = (key < high.unsqueeze(2)) & (key + BLOCK > low.unsqueeze(2))
    full = (key >= full_low.unsqueeze(2)) & (key + BLOCK <= full_high.unsqueeze(2))
    return some & ~full, full


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(members, 1, row blocks)`` counts of the marked key blocks, and their numbers, marked ones first."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), numbers.int().unsqueeze(1)
