"""Compiled FlexAttention: soft caps, ALiBi, windows, sinks and LSE in one kernel that keeps no scores."""

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
from attnplug.torch_backend.sdpa import Call

if TYPE_CHECKING:
    from collections.abc import Callable


BLOCK: Final = 128
"""Rows and keys of a block of the mask: the kernel skips blocks that nobody sees, and masks only those seen in part."""

_FAR: Final = 2**30
_FACTS: Final = 5
_SLOPES: Final = 2**12 + 1  # query heads per key head that nobody has, so that no other size equals theirs


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, call: Call, *, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend a group with the compiled kernel. One memory order, or each would compile again."""
    del causal
    query, key, value = query.contiguous(), _tokens_first(key), _tokens_first(value)
    kernel = compiled(_kind(query, value, call), call.soft_cap is not None, call.alibi)
    return kernel(query, key, value, bend(call, mask.facts), mask.blocks, call.scale)


@frozen(eq=False)
class FlexMask:
    """
    Who sees whom in a group, and where its members stand.

    Attributes:
        blocks: The mask, block by block.
        facts: ``(members, 5)`` int32: rows, keys, positions seen to the left and right, query heads per KV head.
    """

    blocks: BlockMask
    facts: Tensor


def _tokens_first(rows: Tensor) -> Tensor:
    """Return ``(members, keys, heads, size)``, contiguous, as tokens are gathered."""
    return rows.transpose(1, 2).contiguous()


@frozen
class Kind:
    """
    What the compiler makes graphs of their own for, however dynamic the lengths are.

    Attributes:
        heads: Key and value heads.
        size: Size of a query and key head.
        size_v: Size of a value head.
        dtype: Their dtype.
        device: Where they live.
        alone: Whether the group has one member.
        short: Whether it has so few rows that the kernel splits keys instead of rows; a single row is 0.
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
        Whether values are wider than the compiler takes into account.

        It chooses tiles by the size of keys alone: three of 128 by 64 in flight leave no room for values of 256.
        """
        return self.device.type == "cuda" and self.size_v > max(self.size, 128)


def _kind(query: Tensor, value: Tensor, call: Call) -> Kind:
    members, heads, rows, size = query.shape
    short = 0 if rows == 1 else 1 if rows < BLOCK else 2
    return Kind(heads, size, value.shape[3], query.dtype, query.device, members == 1, short, call.scale)


@cache
def compiled(
    kind: Kind,
    bent: bool,  # noqa: FBT001 - part of a cache key
    alibi: str | None = None,
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """
    Return the kernel for a kind of group, compiled.

    Each kind has a function of its own, since the compiler gives up on one that it had to compile often. Sizes that are
    equal the first time are taken to be equal always: so it sees unequal ones first, and makes a general graph.
    """
    function = _flex_by_single_tiles if kind.is_wide else _flex
    code = function.__code__.replace(co_name=f"flex_{abs(hash((kind, bent, alibi)))}")
    own = FunctionType(code, function.__globals__, closure=function.__closure__)
    kernel = torch.compile(own, dynamic=True, fullgraph=True)
    query, key, value, mask = unequal_sizes(kind)
    slopes = torch.zeros(kind.heads * _SLOPES, device=kind.device) if alibi else None
    call = Call(kind.scale, 1.0 if bent else None, alibi, slopes)
    kernel(query, key, value, bend(call, mask.facts), mask.blocks, kind.scale)
    return kernel


def unequal_sizes(kind: Kind) -> tuple[Tensor, Tensor, Tensor, FlexMask]:
    """Return arguments of a kind, no two of whose sizes are equal, except where the kind says so."""
    taken = {1, 2, _FACTS, kind.heads, kind.size, kind.size_v}

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
    return _attended(query, key, value, score_mod, mask, scale, None)


def _flex_by_single_tiles(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor | None]:
    return _attended(query, key, value, score_mod, mask, scale, {"num_stages": 1})


def _attended(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: BlockMask, scale: float, options: Any
) -> tuple[Tensor, Tensor | None]:
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    given = {"score_mod": score_mod, "block_mask": mask, "scale": scale, "kernel_options": options}
    out, aux = flex_attention(query, key, value, **given, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def bend(call: Call, facts: Tensor) -> Callable[..., Tensor] | None:
    """Return what becomes of scores: capped, then lowered by ALiBi. None for nothing."""
    cap = None if call.soft_cap is None else soft_cap(call.soft_cap, facts.device)
    return cap if call.slopes is None else slanted(cap, call.slopes, facts, call.alibi)


def slanted(
    cap: Callable[..., Tensor] | None, slopes: Tensor, facts: Tensor, form: str | None
) -> Callable[..., Tensor]:
    """
    Return what lowers scores by ``slope * distance``, after capping.

    Args:
        cap: What caps them, or None.
        slopes: ``(num_q_heads,)`` float32. Rows of the query heads that share a key head follow each other.
        facts: As in `Picture`.
        form: "linear" or "sqrt".
    """

    def lower(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        score = score if cap is None else cap(score, batch, head, row, key)
        ratio = facts[batch, 4]
        distance = (key - _position(facts, batch, row)).abs().to(score.dtype)
        slope = slopes[head * ratio + row % ratio]
        return score - slope * (distance.sqrt() if form == "sqrt" else distance)

    return lower


def _position(facts: Tensor, batch: Tensor, row: Tensor) -> Tensor:
    """Where a row stands: rows beyond a member's own repeat its last one, which stands at its last key."""
    return torch.minimum(row // facts[batch, 4], facts[batch, 0] - 1) + facts[batch, 1] - facts[batch, 0]


@cache
def soft_cap(cap: float, device: torch.device) -> Callable[..., Tensor]:
    """Return what bends scores. The cap is a tensor, so that another cap does not compile again."""
    limit = torch.tensor(cap, device=device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del batch, head, row, key
        return torch.tanh(score / limit) * limit

    return capped


def make_mask(visibility: Visibility, lens: Tensor, rows: int, keys: int, ratio: int) -> FlexMask:
    """Return the picture of a group, worked out from lengths on the device; see `kernels.MakeMask`."""
    num_rows, num_keys = lens.int()
    left = _FAR if visibility.left < 0 else visibility.left
    right = _FAR if visibility.right < 0 else visibility.right
    # One tensor holds all that the mask function reads: other values do not compile again.
    facts = torch.stack([num_rows, num_keys, *(torch.full_like(num_rows, n) for n in (left, right, ratio))], dim=1)

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del head
        position = _position(facts, batch, row)
        near = (key >= position - facts[batch, 2]) & (key <= position + facts[batch, 3])
        return (key < facts[batch, 1]) & near

    partial, full = _blocks(num_rows, num_keys, (left, right), rows, keys, ratio)
    blocks = BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(rows * ratio, keys),
        compute_q_blocks=False,
    )
    return FlexMask(blocks, facts)


def _blocks(
    num_rows: Tensor, num_keys: Tensor, window: tuple[int, int], rows: int, keys: int, ratio: int
) -> tuple[Tensor, Tensor]:
    """Return which blocks ``(members, row blocks, key blocks)`` are seen in part, and which as a whole."""
    left, right = window
    # Two blocks at least: sizes of one would compile a graph of their own.
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
