"""Packs padded tensors into concatenated sequences, after comparing the mask with the negotiated pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import Batch
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.request import Requirements
    from attnplug_transformers.mask import DenseMask, LazyMask

Mask: TypeAlias = "LazyMask | DenseMask"

_FIX = "use one sequence per row with padding at its ends, or attn_implementation='eager' for this call"


@frozen
class Pattern:
    """
    Which keys a query attends to, by position alone: what a layer negotiated.

    Attributes:
        causal: No later ones.
        left: At most so many earlier ones; None for all.
        right: At most so many later ones; None for all.
        chunk: Only those of the query's own chunk, of so many tokens; None without chunks.
    """

    causal: bool
    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, requirements: Requirements) -> Pattern:
        """Return the pattern of requirements: a window has ``w - 1`` earlier keys, in encoders as many later ones."""
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
        Return whether queries attend to keys, bool.

        Args:
            queries: Positions of the queries, broadcast against `keys`.
            keys: Positions of the keys.
        """
        attends = torch.ones((), dtype=torch.bool, device=keys.device)
        if self.causal:
            attends = attends & (keys <= queries)
        if self.left is not None:
            attends = attends & (queries - keys <= self.left)
        if self.right is not None:
            attends = attends & (keys - queries <= self.right)
        if self.chunk is not None:
            # Floor division gives the positions before the first key, which are negative, another chunk.
            attends = attends & (
                queries.div(self.chunk, rounding_mode="floor") == keys.div(self.chunk, rounding_mode="floor")
            )
        return attends

    def __str__(self) -> str:
        words = ["causal" if self.causal else "bidirectional", "attention"]
        if self.left is not None:
            words.append(f"with a window of {self.left + 1}" + ("" if self.causal else " to each side"))
        if self.chunk is not None:
            words.append(f"in chunks of {self.chunk}")
        return " ".join(words)


@frozen(eq=False)
class Packing:
    """
    Which rows of the padded tensors belong to which sequence, decodes first.

    Attributes:
        batch: The sequences, without their padding; None where every query is padding.
        queries: Sequence and column of each packed query; None where there is nothing to leave out or reorder.
        keys: The same for keys.
        padding: ``(batch, queries)`` bool, the padded queries that attend to keys; None where none do.
    """

    batch: Batch | None
    queries: tuple[Tensor, Tensor] | None
    keys: tuple[Tensor, Tensor] | None
    padding: Tensor | None = None

    def pack_queries(self, padded: Tensor) -> Tensor:
        """Return ``(tokens, heads, size)`` of ``(batch, heads, queries, size)``."""
        return _pack(padded, self.queries)

    def pack_keys(self, padded: Tensor) -> Tensor:
        """Return ``(tokens, heads, size)`` of ``(batch, heads, keys, size)``."""
        return _pack(padded, self.keys)

    def unpack(self, packed: Tensor, padded: Tensor) -> Tensor:
        """Return ``(batch, queries, heads, size)`` of ``(tokens, heads, size)``; `padded` has the padded queries."""
        if self.queries is None:
            return packed.view(padded.shape)
        padded[self.queries] = packed
        return padded


def _pack(padded: Tensor, rows: tuple[Tensor, Tensor] | None) -> Tensor:
    tokens = padded.transpose(1, 2)
    return tokens.flatten(0, 1) if rows is None else tokens[rows]


def pack(mask: Mask, pattern: Pattern, layer: str, device: torch.device, starts: tuple[int, ...] = ()) -> Packing:
    """
    Compare the mask with the pattern, and return the sequences that it consists of.

    Padding at either end is left out; so are cached keys that no query attends to. The queries of the remaining
    sequences are their last tokens, as in the contract, and the mask has to be their pattern, key by key.

    Args:
        mask: The mask of the call.
        pattern: What the layer negotiated.
        layer: The layer's name, for the message.
        device: The layer's device; the mask may be on another one where a model is spread over several.
        starts: Where the samples begin that are packed into the only row of the call, the first at 0; empty for none.

    Raises:
        NotNegotiatedError: The mask differs from the pattern, or samples are packed behind cached keys.
    """
    key = pattern, device, starts
    if key not in mask.packings:
        packed = _pack_samples(mask, pattern, layer, device, starts) if starts else None
        mask.packings[key] = packed or _pack_mask(mask, pattern, layer, device)
    packing: Packing = mask.packings[key]
    return packing


def _pack_samples(
    mask: Mask, pattern: Pattern, layer: str, device: torch.device, starts: tuple[int, ...]
) -> Packing | None:
    """Return the samples of a row, whether its mask keeps them apart or not; None where the mask is another one."""
    _, _, q_length, kv_length = mask.shape
    if q_length != kv_length:
        raise NotNegotiatedError(
            f"{layer}: position_ids of {q_length} queries restart at {starts[1]}, and there are {kv_length} keys",
            "packed samples are separated where each has all of its keys in the call",
            "pass packed samples without a KV cache (use_cache=False), or one sequence per row",
        )
    columns, first = torch.arange(kv_length, device=mask.device), torch.tensor(starts, device=mask.device)
    sample = torch.searchsorted(first, columns, right=True) - 1
    own = columns - first[sample]
    is_whole = is_apart = True
    for start, attends in mask.rows():
        rows = slice(start, start + attends.shape[1])
        whole = pattern.attends(columns[rows, None], columns)
        apart = pattern.attends(own[rows, None], own) & (sample[rows, None] == sample)
        is_whole = is_whole and torch.equal(attends[0], whole.expand_as(attends[0]))
        is_apart = is_apart and torch.equal(attends[0], apart)
    if not (is_whole or is_apart):
        return None
    ends = [*starts[1:], q_length]
    samples = sorted(zip(starts, ends, strict=True), key=lambda each: each[1] - each[0] > 1)  # decodes come first
    lengths = [end - start for start, end in samples]
    batch = Batch.from_lengths(lengths, lengths, device=device, causal=pattern.causal)
    order = torch.cat([torch.arange(start, end, device=device) for start, end in samples])
    rows_of = None if sorted(samples) == samples else (torch.zeros_like(order), order)
    return Packing(batch, rows_of, rows_of)


def _pack_mask(mask: Mask, pattern: Pattern, layer: str, device: torch.device) -> Packing:
    queries, keys = _real_tokens(mask, pattern)
    padding, counts = mask.is_padding(), [queries.sum(1), keys.sum(1)]
    with_keys, lost, differs = [], [], []
    for (start, attends), different in zip(mask.rows(), _differences(mask, queries, keys, pattern), strict=True):
        rows = slice(start, start + attends.shape[1])
        with_keys.append(attends.any(2) & ~queries[:, rows])
        lost.append(with_keys[-1] if padding is None else with_keys[-1] & ~padding[:, rows])
        differs.append(different.any())
    attending = torch.cat(with_keys, 1)
    flags = [attending.any(), torch.cat(lost, 1).any(), torch.stack(differs).any()]
    # All that the CPU reads of the mask is read at once: each read waits for the device.
    read = torch.cat([*counts, torch.stack(flags).to(counts[0].dtype)]).tolist()
    is_attending, is_lost, is_different = read[-3:]
    if is_lost:
        raise _lost_query(mask, torch.cat(lost, 1), pattern, layer)
    if is_different:
        raise _mismatch(mask, queries, keys, pattern, layer)
    lengths = [read[: len(queries)], read[len(queries) : -3]]
    is_padded = padding is not None and bool(is_attending)
    return _rows_of(queries.to(device), keys.to(device), lengths, pattern, attending if is_padded else None)


def _differences(mask: Mask, queries: Tensor, keys: Tensor, pattern: Pattern) -> Iterator[Tensor]:
    """Yield ``(batch, rows, keys)`` bool per slice of the mask: where real queries do not follow the pattern."""
    key_positions = keys.cumsum(1) - 1
    query_positions = queries.cumsum(1) - 1 + (keys.sum(1) - queries.sum(1))[:, None]
    for start, attends in mask.rows():
        rows = slice(start, start + attends.shape[1])
        expected = pattern.attends(query_positions[:, rows, None], key_positions[:, None, :]) & keys[:, None, :]
        yield (expected != attends) & queries[:, rows, None]


def _real_tokens(mask: Mask, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Return ``(batch, queries)`` and ``(batch, keys)`` bool: the queries and keys that are not padding."""
    queries, keys = [], None
    newest = None
    for start, attends in mask.rows():
        real, newest = _real_queries(mask, pattern, attends, start, newest)
        used = (attends & real[:, :, None]).any(1)
        keys = used if keys is None else keys | used
        queries.append(real)
    if keys is None:
        raise NotNegotiatedError("a call without queries was made", "there is at least one", "skip the call")
    return torch.cat(queries, 1), keys


def _real_queries(
    mask: Mask, pattern: Pattern, attends: Tensor, start: int, newest: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return which queries of a slice of the mask are real tokens, and the newest key up to here."""
    # Causally, a real token is the newest key that it attends to, which rises from row to row; padding on the right
    # repeats that of its predecessor. Otherwise a real token of a windowed layer attends to itself; without a window
    # all rows are equal.
    if pattern.causal:
        columns = torch.arange(attends.shape[2], dtype=torch.int32, device=attends.device)
        last = torch.where(attends, columns, -1).amax(2)
        before = last.new_full((len(last), 1), -1) if newest is None else newest
        highest = torch.cat([before, last], 1).cummax(1).values
        return last > highest[:, :-1], highest[:, -1:]
    own = mask.own_keys() if pattern.is_local else None
    if own is None:
        return attends.any(2), None
    own = own[start : start + attends.shape[1]]
    inside = (own >= 0) & (own < attends.shape[2])
    itself = attends.gather(2, own.clamp(0, attends.shape[2] - 1).expand(len(attends), -1)[:, :, None])[:, :, 0]
    return itself & inside, None


def _lost_query(mask: Mask, lost: Tensor, pattern: Pattern, layer: str) -> NotNegotiatedError:
    """Return the error for the first query of ``(batch, queries)`` that attends to keys and is no real token."""
    sequence, query = (int(i) for i in lost.nonzero()[0])
    attends = next(part[sequence, query - start] for start, part in mask.rows() if query < start + part.shape[1])
    _refuse_later_keys(mask, attends, sequence, query, pattern, layer)
    how = "attends to nothing newer than the query before it" if pattern.causal else "does not attend to itself"
    return NotNegotiatedError(
        f"{layer}: by the mask of this call query {query} of sequence {sequence} {how}",
        f"{pattern} was negotiated, where only what the padding mask marks as padding may do so",
        _FIX,
    )


def _mismatch(mask: Mask, queries: Tensor, keys: Tensor, pattern: Pattern, layer: str) -> NotNegotiatedError:
    """Return the error for the first key to which a real query does not attend as the pattern says."""
    pairs = zip(mask.rows(), _differences(mask, queries, keys, pattern), strict=True)
    start, attends, differs = next((start, part, different) for (start, part), different in pairs if different.any())
    sequence, row, key = (int(i) for i in differs.nonzero()[0])
    _refuse_later_keys(mask, attends[sequence, row], sequence, start + row, pattern, layer)
    found = bool(attends[sequence, row, key])
    return NotNegotiatedError(
        f"{layer}: by the mask of this call query {start + row} of sequence {sequence}"
        f" {'attends' if found else 'does not attend'} to key {key}",
        f"{pattern} was negotiated, where it {'does not' if found else 'does'}; packed sequences, prefixes, images"
        " among text, holes in the padding of windowed layers and custom masks are other masks",
        _FIX,
    )


def _refuse_later_keys(mask: Mask, attends: Tensor, sequence: int, query: int, pattern: Pattern, layer: str) -> None:
    """Name the reason where a causal query attends to later keys: images and prefixes do in multimodal models."""
    own = mask.own_keys() if pattern.causal else None
    last = int(attends.nonzero().max()) if bool(attends.any()) else -1
    if own is None or last <= int(own[query]):
        return
    raise NotNegotiatedError(
        f"{layer}: by the mask of this call query {query} of sequence {sequence} attends to later keys, up to {last}",
        f"{pattern} was negotiated; image tokens (token_type_ids) and prefixes that attend in both directions are"
        " another mask",
        "use attn_implementation='eager' for calls with images or such a prefix; text alone is served",
    )


def _rows_of(
    queries: Tensor, keys: Tensor, lengths: list[list[int]], pattern: Pattern, padding: Tensor | None
) -> Packing:
    alive = [row for row, length in enumerate(lengths[0]) if length]
    order = sorted(alive, key=lambda row: lengths[0][row] > 1)  # decodes behind prefills would count as prefills
    if not order:
        return Packing(None, None, None, padding)
    batch = Batch.from_lengths(
        [lengths[0][row] for row in order],
        [lengths[1][row] for row in order],
        device=queries.device,
        causal=pattern.causal,
    )
    rows_of_queries, rows_of_keys = (
        _indices(real, order, sum(counts)) for real, counts in zip((queries, keys), lengths, strict=True)
    )
    return Packing(batch, rows_of_queries, rows_of_keys, padding)


def _indices(real: Tensor, order: list[int], count: int) -> tuple[Tensor, Tensor] | None:
    if order == list(range(len(real))) and count == real.numel():
        return None
    rows = torch.tensor(order, device=real.device)
    sequence, column = real[rows].nonzero(as_tuple=True)
    return rows[sequence], column
