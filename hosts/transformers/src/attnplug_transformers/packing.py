"""What negotiated attention lets a token attend: the yardstick that the library's masks are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import Batch
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.request import Requirements
    from attnplug_transformers.mask import DenseMask, LazyMask


@frozen
class Pattern:
    """
    Which keys a query attends, by position alone.

    Attributes:
        causal: No later ones.
        left: At most so many earlier ones; None for all.
        right: At most so many later ones; None for all.
        chunk: Only those of the query's own chunk, of so many tokens; None for no chunks.
    """

    causal: bool
    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, requirements: Requirements) -> Pattern:
        """Return what these requirements say. A window is left ``w - 1``; encoders look as far to the right."""
        width = requirements.sliding_window
        left = None if width is None else width - 1
        right = left if requirements.attn_type == "encoder_only" else None
        return cls(bool(requirements.causal), left, right, requirements.attention_chunk)

    @property
    def is_local(self) -> bool:
        """Whether positions matter beyond causality."""
        return self.left is not None or self.chunk is not None

    def attends(self, queries: Tensor, keys: Tensor) -> Tensor:
        """
        Return who attends whom.

        Args:
            queries: Positions of the queries, broadcast against `keys`.
            keys: Positions of the keys.
        """
        seen = torch.ones((), dtype=torch.bool, device=keys.device)
        if self.causal:
            seen = seen & (keys <= queries)
        if self.left is not None:
            seen = seen & (queries - keys <= self.left)
        if self.right is not None:
            seen = seen & (keys - queries <= self.right)
        if self.chunk is not None:
            # Floor division, so that what stands before the first key has a chunk of its own.
            seen = seen & (
                queries.div(self.chunk, rounding_mode="floor") == keys.div(self.chunk, rounding_mode="floor")
            )
        return seen

    def __str__(self) -> str:
        words = ["causal" if self.causal else "bidirectional", "attention"]
        if self.left is not None:
            words.append(f"with a window of {self.left + 1}" + ("" if self.causal else " to each side"))
        if self.chunk is not None:
            words.append(f"in chunks of {self.chunk}")
        return " ".join(words)


Mask: TypeAlias = "LazyMask | DenseMask"

_REMEDY = "use one sequence per row with padding at its ends, or attn_implementation='eager' for this call"


@frozen(eq=False)
class Packing:
    """
    Which rows of the padded tensors belong to which sequence, decodes first.

    Attributes:
        batch: The sequences, without their padding; None where every query is padding.
        queries: Sequence and column of each packed query; None where the padded tensor is packed as it is.
        keys: The same for keys.
    """

    batch: Batch | None
    queries: tuple[Tensor, Tensor] | None
    keys: tuple[Tensor, Tensor] | None

    def pack_queries(self, padded: Tensor) -> Tensor:
        """Return ``(tokens, heads, size)`` of ``(batch, heads, queries, size)``."""
        return _pack(padded, self.queries)

    def pack_keys(self, padded: Tensor) -> Tensor:
        """Return ``(tokens, heads, size)`` of ``(batch, heads, keys, size)``."""
        return _pack(padded, self.keys)

    def unpack(self, packed: Tensor, batch_size: int, q_length: int) -> Tensor:
        """Return ``(batch, queries, heads, size)`` of ``(tokens, heads, size)``; padded queries are zero."""
        if self.queries is None:
            return packed.view(batch_size, q_length, *packed.shape[1:])
        padded = packed.new_zeros(batch_size, q_length, *packed.shape[1:])
        padded[self.queries] = packed
        return padded


def pack(mask: Mask, pattern: Pattern, layer: str, device: torch.device) -> Packing:
    """
    Hold the mask against the pattern, and return the sequences that it consists of.

    Padding at either end falls away; so do cached keys that no query attends. What remains are sequences whose queries
    are their last tokens, as the contract has them, and the mask has to be what the pattern says of them, key by key.

    Args:
        mask: What the library asks for.
        pattern: What the layer negotiated.
        layer: The layer's name, for the message.
        device: Where the layer is; parts of a model may be elsewhere than its masks.

    Raises:
        NotNegotiatedError: The mask is another one.
    """
    if (pattern, device) not in mask.packings:
        mask.packings[pattern, device] = _pack_mask(mask, pattern, layer, device)
    packing: Packing = mask.packings[pattern, device]
    return packing


def _pack(padded: Tensor, rows: tuple[Tensor, Tensor] | None) -> Tensor:
    tokens = padded.transpose(1, 2)
    return tokens.flatten(0, 1) if rows is None else tokens[rows]


def _pack_mask(mask: Mask, pattern: Pattern, layer: str, device: torch.device) -> Packing:
    queries, keys = _visible(mask, pattern)
    _refuse_lost_queries(mask, queries, pattern, layer)
    query_lens, key_lens = queries.sum(1), keys.sum(1)
    key_positions = keys.cumsum(1) - 1
    query_positions = queries.cumsum(1) - 1 + (key_lens - query_lens)[:, None]
    for start, asked in mask.rows():
        rows = slice(start, start + asked.shape[1])
        expected = pattern.attends(query_positions[:, rows, None], key_positions[:, None, :]) & keys[:, None, :]
        differs = (expected != asked) & queries[:, rows, None]
        if bool(differs.any()):
            raise _mismatch(differs, asked, start, pattern, layer)
    return _rows_of(queries.to(device), keys.to(device), torch.stack([query_lens, key_lens]).tolist(), pattern)


def _visible(mask: Mask, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return ``(batch, queries)`` and ``(batch, keys)`` bool: the tokens that take part."""
    queries, keys = [], None
    last = None
    for start, asked in mask.rows():
        piece, last = _taking_part(mask, pattern, asked, start, last)
        seen = (asked & piece[:, :, None]).any(1)
        keys = seen if keys is None else keys | seen
        queries.append(piece)
    if keys is None:
        raise NotNegotiatedError("a call without queries was made", "there is at least one", "skip the call")
    return torch.cat(queries, 1), keys


def _taking_part(
    mask: Mask, pattern: Pattern, asked: Tensor, start: int, last: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """
    Return which queries of a piece are real tokens.

    Causally, a real token is the newest that it sees, so that the newest key moves on from row to row; padding on the
    right repeats its predecessor's. Otherwise a real token of a windowed layer sees itself; elsewhere all rows are
    alike.
    """
    if pattern.causal:
        columns = torch.arange(asked.shape[2], dtype=torch.int32, device=asked.device)
        newest = torch.where(asked, columns, -1).amax(2)
        before = newest.new_full((len(newest), 1), -1) if last is None else last
        highest = torch.cat([before, newest], 1).cummax(1).values
        return newest > highest[:, :-1], highest[:, -1:]
    own = mask.own_keys() if pattern.is_local else None
    if own is None:
        return asked.any(2), None
    own = own[start : start + asked.shape[1]]
    inside = (own >= 0) & (own < asked.shape[2])
    picked = asked.gather(2, own.clamp(0, asked.shape[2] - 1).expand(len(asked), -1)[:, :, None])[:, :, 0]
    return picked & inside, None


def _refuse_lost_queries(mask: Mask, queries: Tensor, pattern: Pattern, layer: str) -> None:
    """A row that sees keys and is no real token has to be padding by the padding mask: its result is not computed."""
    padding = mask.is_padding()
    for start, asked in mask.rows():
        rows = slice(start, start + asked.shape[1])
        lost = asked.any(2) & ~queries[:, rows]
        if padding is not None:
            lost = lost & ~padding[:, rows]
        if bool(lost.any()):
            sequence, query = (int(i) for i in lost.nonzero()[0])
            how = "sees nothing newer than the query before it" if pattern.causal else "attends keys, and not itself"
            raise NotNegotiatedError(
                f"{layer}: by the mask of this call query {start + query} of sequence {sequence} {how}",
                f"{pattern} was negotiated, where only what the padding mask marks as padding may do so",
                _REMEDY,
            )


def _mismatch(differs: Tensor, asked: Tensor, start: int, pattern: Pattern, layer: str) -> NotNegotiatedError:
    sequence, row, key = (int(i) for i in differs.nonzero()[0])
    wanted = "attends" if bool(asked[sequence, row, key]) else "does not attend"
    return NotNegotiatedError(
        f"{layer}: by the mask of this call query {start + row} of sequence {sequence} {wanted} key {key}",
        f"{pattern} was negotiated, where it {'does not' if wanted == 'attends' else 'does'}; packed"
        " sequences, prefixes, holes in the padding of windowed layers and custom masks are other masks",
        _REMEDY,
    )


def _rows_of(queries: Tensor, keys: Tensor, lengths: list[list[int]], pattern: Pattern) -> Packing:
    alive = [row for row, length in enumerate(lengths[0]) if length]
    order = sorted(alive, key=lambda row: lengths[0][row] > 1)
    if not order:
        return Packing(None, None, None)
    batch = Batch.from_lengths(
        [lengths[0][row] for row in order],
        [lengths[1][row] for row in order],
        device=queries.device,
        causal=pattern.causal,
    )
    return Packing(batch, _indices(queries, order), _indices(keys, order))


def _indices(taking_part: Tensor, order: list[int]) -> tuple[Tensor, Tensor] | None:
    if order == list(range(len(taking_part))) and bool(taking_part.all()):
        return None
    rows = torch.tensor(order, device=taking_part.device)
    sequence, column = taking_part[rows].nonzero(as_tuple=True)
    return rows[sequence], column
