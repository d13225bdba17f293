"""Which query attends to which key: masks, ALiBi distances, and the tiles that groups are cut into."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from attnplug.torch_backend.sources import index_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.builder import PlanParams
    from attnplug.torch_backend.plan import Rectangle


@frozen
class Visibility:
    """
    Which positions a position attends to.

    Attributes:
        left: Positions to the left, -1 for all.
        right: Positions to the right, -1 for all; 0 is causal.
    """

    left: int
    right: int

    def of(self, relative: Tensor) -> Tensor:
        """Return whether a key is visible, for positions of keys minus those of queries."""
        visible = torch.ones_like(relative, dtype=torch.bool)
        if self.left >= 0:
            visible &= relative >= -self.left
        if self.right >= 0:
            visible &= relative <= self.right
        return visible

    def in_group(self, relative: Tensor, num_keys: Tensor) -> Tensor:
        """Return the same for `relative_positions` of a group; keys beyond a member's `num_keys` are not visible."""
        return self.of(relative) & (_keys_of(relative) < num_keys.unsqueeze(1)).unsqueeze(1)

    def hides_keys(self, rows: int, keys: int) -> bool:
        """Whether a key is hidden from any of the last `rows` positions out of `keys`."""
        return 0 <= self.right < rows - 1 or 0 <= self.left < keys - 1


def relative_positions(num_rows: Tensor, num_keys: Tensor, rows: int, keys: int) -> Tensor:
    """
    Return the positions of keys minus those of query rows, ``(members, rows, keys)``.

    Padding rows repeat a member's last row, so that each has a visible key.

    Args:
        num_rows: ``(members,)`` int64 rows per member.
        num_keys: ``(members,)`` int64 keys per member; its last row is at the position of its last key.
        rows: The most rows.
        keys: The most keys.
    """
    row = torch.minimum(torch.arange(rows, device=num_rows.device), num_rows.unsqueeze(1) - 1)
    position = row + (num_keys - num_rows).unsqueeze(1)
    return torch.arange(keys, device=num_rows.device) - position.unsqueeze(2)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where `visible`, -inf elsewhere."""
    return visible.to(dtype).log_()  # of 1 and 0, exactly; two operations where `masked_fill` takes three


@frozen(eq=False)
class AlibiMask:
    """
    The mask of a tile with ALiBi. It holds no slopes: plans are shared by layers, and slopes belong to one layer.

    Attributes:
        mask: ``(members or 1, 1 or num_kv_heads, rows * ratio, keys)`` additive; None where every key is visible.
        distance: ``(members or 1, rows, keys)`` float32, see `alibi_distance`.
    """

    mask: Tensor | None
    distance: Tensor


def alibi_distance(relative: Tensor, form: str | None) -> Tensor:
    """Return the factor of slopes, float32: the distance, or its square root if the form is "sqrt"."""
    distance = relative.abs().float()
    return distance.sqrt_() if form == "sqrt" else distance


def apply_alibi(scores: Tensor, slopes: Tensor, distance: Tensor) -> Tensor:
    """
    Subtract ``slope * distance`` from the scores, in place.

    Args:
        scores: ``(members, num_kv_heads, rows * ratio, keys)``.
        slopes: ``(num_q_heads,)``.
        distance: ``(members or 1, rows, keys)``.
    """
    members, heads, _, keys = scores.shape
    ratio = slopes.shape[0] // heads
    per_head = scores.view(members, heads, -1, ratio, keys)
    per_head.addcmul_(slopes.view(1, heads, 1, ratio, 1), distance[:, None, :, None, :], value=-1)
    return scores


@frozen(eq=False)
class Tile:
    """
    One kernel call: rows of a group against keys of the group.

    Attributes:
        rows: Rows of each member, as ``(start, end)``.
        keys: Keys of each member, likewise.
        mask: ``(members or 1, 1 or num_kv_heads, rows * ratio, keys)`` additive, an `AlibiMask`, or the kernel's own
            mask; None where every key is visible.
        causal: Whether the tile is square and row i attends to the keys up to i; it has no mask then.
        fully_masked: ``(members, rows)`` bool, whether a row attends to no key, where that is known on the device only.
            Such a row is computed over all keys, and its result is replaced. None where no row is.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    mask: Any = None
    causal: bool = False
    fully_masked: Tensor | None = None


def masked_tiles(
    params: PlanParams, mask: Tensor, distance: Tensor | None = None, fully_masked: Tensor | None = None
) -> tuple[Tile, ...]:
    """
    Return the tiles of a group from a mask of all its rows and keys, as views.

    Args:
        params: The layers' parameters.
        mask: ``(members, 1 or num_kv_heads, rows * ratio, keys)`` additive.
        distance: ``(members, rows, keys)`` ALiBi distances; None without ALiBi.
        fully_masked: ``(members, rows)``, see `Tile`.
    """
    members, _, rows, keys = mask.shape
    ratio, tiles = params.ratio, []
    # A fused kernel keeps no scores, so that there is nothing to cut for.
    cuts = [(0, rows // ratio)] if params.kernel.fused else params.row_cuts(members, rows // ratio, keys)
    for start, end in cuts:
        part: Any = mask[:, :, start * ratio : end * ratio]
        if distance is not None:
            part = AlibiMask(part, distance[:, start:end])
        rest = None if fully_masked is None else fully_masked[:, start:end]
        tiles.append(Tile((start, end), (0, keys), part, fully_masked=rest))
    return tuple(tiles)


class Tiler:
    """
    Cuts the groups of one batch into tiles.

    Visibility and ALiBi follow from relative positions, so that all tiles of uniform groups are slices of one template,
    which is made here. Each ragged group, whose members differ in length, gets a mask.

    Args:
        params: The layers' parameters.
        groups: All groups of the batch.
        custom: The mask of the batch, or None.
        bias: Its additive mask, or None.
        device: The device of the masks.
        spans: The spans of its query rows, or None.
    """

    def __init__(
        self,
        params: PlanParams,
        groups: Sequence[Rectangle],
        custom: RequestCells | None,
        bias: RequestCells | None,
        device: torch.device,
        spans: Spans | None = None,
    ) -> None:
        self._params = params
        self._custom = custom
        self._bias = bias
        self._spans = spans
        self._device = device
        self._low = 0
        self._mask: Tensor | None = None
        self._distance: Tensor | None = None
        if custom is None and bias is None and spans is None and params.kernel.make_mask is None:
            self._make_template([group for group in groups if group.uniform])

    def tiles(self, group: Rectangle) -> tuple[Tile, ...]:
        """Return the kernel calls of a group."""
        make_mask = self._params.kernel.make_mask
        if make_mask is not None:
            mask = make_mask(self._params.visibility, self._lens(group), group.rows, group.keys, self._params.ratio)
            return (Tile((0, group.rows), (0, group.keys), mask),)
        if not group.uniform or (self._custom, self._bias, self._spans) != (None, None, None):
            return self._ragged_tiles(group)
        if self._is_square(group):
            return (Tile((0, group.rows), (0, group.keys), causal=True),)
        return tuple(self._uniform_tile(group, cut) for cut in self._cuts(group))

    def _lens(self, group: Rectangle) -> Tensor:
        """Return the rows and keys of the members, ``(2, members)``."""
        lens = [*(one.rows for one in group.segments), *(one.keys for one in group.segments)]
        return index_on(self._device, lens).view(2, -1)

    def _ragged_tiles(self, group: Rectangle) -> tuple[Tile, ...]:
        params, fully_masked, mask = self._params, None, None
        is_general = (self._custom, self._bias, self._spans, params.alibi) != (None, None, None, None)
        if not group.uniform and group.rows == 1 and not is_general:
            # Decodes: a single row attends to all keys of its segment.
            shown = torch.arange(group.keys, device=self._device) < self._lens(group)[1].unsqueeze(1)
            of_rows = additive_mask(shown, params.mask_dtype)[:, None, None]
            return masked_tiles(params, of_rows.repeat_interleave(params.ratio, 2))
        relative, visible = self._visible(group)
        if self._spans is not None and visible is not None:
            visible = visible | self._spans.of(group, self._lens(group))
        if self._custom is not None:
            own = self._custom.of(group, self._lens)
            visible = own if visible is None else visible & own
            fully_masked = visible.any(-1).logical_not_()
            visible = visible | fully_masked.unsqueeze(2)  # a softmax over nothing would be NaN
        if visible is not None:
            mask = additive_mask(self._repeated(visible, 1), params.mask_dtype).unsqueeze(1)
        if self._bias is not None:
            bias = self._folded(self._bias.of(group, self._lens))
            mask = bias if mask is None else mask + bias
        distance = alibi_distance(relative, params.alibi) if params.alibi and relative is not None else None
        if mask is None:  # spans alone, of a group where nothing is hidden
            mask = torch.zeros(
                1, 1, group.rows * params.ratio, group.keys, dtype=params.mask_dtype, device=self._device
            )
        return masked_tiles(params, mask, distance, fully_masked)

    def _visible(self, group: Rectangle) -> tuple[Tensor | None, Tensor | None]:
        """Return the relative positions and the visible keys; None for those that nothing needs."""
        visibility = self._params.visibility
        if not group.uniform:
            lens = self._lens(group)
            relative = relative_positions(lens[0], lens[1], group.rows, group.keys)
            return relative, visibility.in_group(relative, lens[1])
        hides = visibility.hides_keys(group.rows, group.keys)
        if not hides and not self._params.alibi:
            return None, None
        first = group.rows - group.keys  # the first row is so far before the first key
        rows = torch.arange(-first, group.keys, device=self._device)
        relative = (torch.arange(group.keys, device=self._device) - rows.unsqueeze(1)).unsqueeze(0)
        return relative, visibility.of(relative) if hides else None

    def _repeated(self, rows: Tensor, axis: int) -> Tensor:
        """Return rows once for each query head of a KV head."""
        return rows if self._params.ratio == 1 else rows.repeat_interleave(self._params.ratio, axis)

    def _folded(self, bias: Tensor) -> Tensor:
        """Return ``(members, 1 or num_kv_heads, rows * ratio, keys)`` of ``(1 or heads, members, rows, keys)``."""
        params = self._params
        heads, members, rows, keys = bias.shape
        bias = bias.to(params.mask_dtype).clamp(min=torch.finfo(params.mask_dtype).min)
        if heads == 1:
            return self._repeated(bias.transpose(0, 1), 2)
        grouped = bias.view(params.num_kv_heads, params.ratio, members, rows, keys)
        return grouped.permute(2, 0, 3, 1, 4).reshape(members, params.num_kv_heads, rows * params.ratio, keys)

    def _uniform_tile(self, group: Rectangle, cut: tuple[int, int]) -> Tile:
        keys, mask = self._visible_keys(group, cut), None
        rows, first = cut[1] - cut[0], cut[0] + group.keys - group.rows
        near = slice(keys[0] - first - self._low, keys[1] - first - self._low)
        if self._mask is not None and rows > 1 and self._params.visibility.hides_keys(group.rows, group.keys):
            mask = self._mask[None, None, : rows * self._params.ratio, near]
        if self._distance is None:
            return Tile(cut, keys, mask)
        return Tile(cut, keys, AlibiMask(mask, self._distance[None, :rows, near]))

    def _is_square(self, group: Rectangle) -> bool:
        """Whether the group is causal without a window, for the causal form of a fused kernel."""
        visibility = self._params.visibility
        square = self._params.kernel.fused and 1 < group.rows == group.keys
        return square and visibility.right == 0 and not 0 <= visibility.left < group.keys - 1

    def _cuts(self, group: Rectangle) -> list[tuple[int, int]]:
        if self._params.kernel.fused and not self._params.visibility.hides_keys(group.rows, group.keys):
            return [(0, group.rows)]  # every tile would attend to all keys
        members = self._params.members_per_gather(len(group.segments), group.keys)
        return self._params.row_cuts(members, group.rows, group.keys)

    def _visible_keys(self, group: Rectangle, cut: tuple[int, int]) -> tuple[int, int]:
        """Return the keys ``(first, last + 1)`` that the rows of a uniform tile attend to."""
        visibility, shift = self._params.visibility, group.keys - group.rows
        low = max(0, cut[0] + shift - visibility.left) if visibility.left >= 0 else 0
        high = min(group.keys, cut[1] + shift + visibility.right) if visibility.right >= 0 else group.keys
        return low, high

    def _make_template(self, groups: list[Rectangle]) -> None:
        """Make the mask and the distances that every tile of these uniform groups is a slice of."""
        params, hides_keys = self._params, self._params.visibility.hides_keys
        masked = [group for group in groups if hides_keys(group.rows, group.keys) and not self._is_square(group)]
        shown = groups if params.alibi else masked
        if not shown:
            return
        rows, low, high = self._extent(shown)
        relative = torch.arange(low, high, device=self._device) - torch.arange(rows, device=self._device).unsqueeze(1)
        self._low = low
        if masked and rows > 1:
            visible = params.visibility.of(relative).repeat_interleave(params.ratio, 0)
            self._mask = additive_mask(visible, params.mask_dtype)
        if params.alibi:
            self._distance = alibi_distance(relative, params.alibi)

    def _extent(self, groups: list[Rectangle]) -> tuple[int, int, int]:
        """Return the most rows of a tile, and the least and greatest relative position (plus 1) from its first row."""
        low, high, most_rows = 0, 0, 1
        for group in groups:
            for cut in self._cuts(group):
                first, keys = cut[0] + group.keys - group.rows, self._visible_keys(group, cut)
                low, high = min(low, keys[0] - first), max(high, keys[1] - first)
                most_rows = max(most_rows, cut[1] - cut[0])
        return most_rows, low, high


class Spans:
    """
    The spans that a batch's query rows are in: an image's tokens, which attend to each other in both directions.

    Args:
        ranges: ``(tokens, 2)`` int32, as of `Batch.mm_prefix_range`.
        first_keys: The first position of the spans of a request's rows, by request; requests without spans are absent.
    """

    def __init__(self, ranges: Tensor, first_keys: dict[int, int]) -> None:
        self._ranges = ranges
        self.first_keys = first_keys

    @classmethod
    def of_batch(cls, batch: Batch, query_lens: Sequence[int], seq_lens: Sequence[int]) -> Spans | None:
        """Return the spans of a batch; None where no row is in one."""
        ranges, host = batch.mm_prefix_range, batch.mm_prefix_range_cpu
        if ranges is None or host is None:
            return None
        first_keys, start = {}, 0
        for request, (rows, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
            low, high = host[start : start + rows].unbind(1)
            positions = torch.arange(keys - rows, keys)
            inside = low[(low >= 0) & (low <= positions) & (positions <= high)]
            if inside.numel():
                first_keys[request] = int(inside.amin())
            start += rows
        return cls(ranges, first_keys) if first_keys else None

    def of(self, group: Rectangle, lens: Tensor) -> Tensor:
        """
        Return whether a key is in the span of a row, ``(members, rows, keys)``. Padding repeats a member's last row.

        Args:
            group: The group.
            lens: ``(2, members)`` rows and keys of its members.
        """
        segments = group.segments
        first = index_on(lens.device, [*(one.first_row for one in segments), *(one.first_key for one in segments)])
        first_row, first_key = first.view(2, -1, 1)
        rows = torch.minimum(torch.arange(group.rows, device=lens.device), lens[0].unsqueeze(1) - 1)
        positions = first_key + (lens[1] - lens[0]).unsqueeze(1) + rows
        keys = torch.arange(group.keys, device=lens.device)
        shown = in_spans(self._ranges[first_row + rows], positions, (first_key + keys).unsqueeze(1))
        return shown & (keys < lens[1].unsqueeze(1)).unsqueeze(1)


def in_spans(ranges: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """
    Return whether a key is in the span of a row, ``(members, rows, keys)``.

    Args:
        ranges: ``(members, rows, 2)``, as of `Batch.mm_prefix_range`.
        positions: ``(members, rows)`` positions of the rows.
        keys: ``(members or 1, 1, keys)`` positions of the keys.
    """
    low, high = ranges.unbind(-1)
    is_inside = (low >= 0) & (low <= positions) & (positions <= high)
    return is_inside.unsqueeze(-1) & (keys >= low.unsqueeze(-1)) & (keys <= high.unsqueeze(-1))


class RequestCells:
    """
    A value of each query and key of a batch: its mask, or its additive mask.

    Args:
        flat: ``(..., sum(query_len * seq_len))``, the values of the requests one after another.
        query_lens: Query rows per request.
        seq_lens: Keys per request.
    """

    def __init__(self, flat: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        self._flat = flat
        self._seq_lens = seq_lens
        self._starts = [0, *accumulate(rows * keys for rows, keys in zip(query_lens, seq_lens, strict=True))]
        self._first_rows = [0, *accumulate(query_lens)]

    def of(self, group: Rectangle, lens_of: Callable[[Rectangle], Tensor]) -> Tensor:
        """
        Return a group's part, ``(..., members, rows, keys)``. Padding repeats a member's last row and key.

        It is a view where the members are one size and follow each other, with all of their keys.

        Args:
            group: The group.
            lens_of: Returns ``(2, members)`` rows and keys of its members.
        """
        firsts, widths = [], []
        for segment in group.segments:
            keys = self._seq_lens[segment.request]
            row = segment.first_row - self._first_rows[segment.request]
            firsts.append(self._starts[segment.request] + row * keys + segment.first_key)
            widths.append(keys)
        members, cells = len(firsts), group.rows * group.keys
        end = firsts[0] + members * cells
        if group.uniform and set(widths) == {group.keys} and firsts == list(range(firsts[0], end, cells)):
            part = self._flat[..., firsts[0] : end]
            return part.view(*part.shape[:-1], members, group.rows, group.keys)
        lens = lens_of(group)
        first, width = index_on(lens.device, [*firsts, *widths]).view(2, -1, 1)
        rows = torch.minimum(torch.arange(group.rows, device=lens.device), lens[0].unsqueeze(1) - 1)
        columns = torch.minimum(torch.arange(group.keys, device=lens.device), lens[1].unsqueeze(1) - 1)
        return self._flat[..., (first + rows * width).unsqueeze(2) + columns.unsqueeze(1)]


def _keys_of(relative: Tensor) -> Tensor:
    return torch.arange(relative.shape[-1], device=relative.device)
