"""
Sparse attention over latents (DSA): the keys of a model's indexers in pages, and the tokens that they select.

The indexer of a module passes its new keys to ``update_indexer`` of the KV cache, scores each query with all keys that
it returns, and gives the attention function the positions of the best. Here these keys are those of all requests of a
step, one after another, and a mask hides the keys of other requests and of later tokens.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import upload
from attnplug.ops import gather_slots, write_pages
from attnplug_transformers.engine.schedule import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.contract import Batch
    from attnplug_transformers.engine.layers import PagedLayer
    from attnplug_transformers.engine.schedule import ScheduledRequest

SCORE_BYTES: Final = 2**30
"""
Most bytes of the scores of one indexer: float32 for each of its heads, query and key. Modules hold them twice.
A pass of many requests scores each of its queries with the keys of all. Within this bound, 32 decodes of DeepSeek-V3.2
with 4,096 keys each are one pass.
"""


@frozen
class IndexKey:
    """
    A key of an indexer, as its KV cache stores it.

    Attributes:
        layer_idx: The number of the indexer's layer.
        size: Elements.
        dtype: Their dtype.
    """

    layer_idx: int
    size: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.size * self.dtype.itemsize

    def pages(self, num_blocks: int, block_size: int, device: torch.device) -> Tensor:
        """Return ``(num_blocks, block_size, 1, size)``."""
        return torch.zeros(num_blocks, block_size, 1, self.size, dtype=self.dtype, device=device)


@frozen(eq=False)
class IndexStep:
    """
    The keys that the indexers of one forward pass score.

    Attributes:
        mask: ``(1, 1, tokens, keys)`` bool, True where a token may attend to a key.
        slots: ``(keys,)`` int64, where each key is; None for a profile run.
        new_slots: ``(tokens,)`` int64, where those of the new tokens go; None likewise.
        pages: The keys of each indexer, by the number of its layer.
        topk: Tokens that an indexer selects, of each layer.
    """

    mask: Tensor
    slots: Tensor | None
    new_slots: Tensor | None
    pages: Mapping[int, Tensor]
    topk: int

    @classmethod
    def of(cls, batch: Batch, block_size: int, pages: Mapping[int, Tensor], topk: int) -> IndexStep:
        """Return those of a batch, which has lengths on the CPU. Nothing waits for the device."""
        table, starts, lengths = batch.block_table, batch.query_start_loc_cpu, batch.seq_lens_cpu
        assert table is not None and starts is not None and lengths is not None  # noqa: S101, PT018 - the assembler's
        queries, keys = starts.diff().tolist(), lengths.tolist()
        requests, positions = tokens_of(keys, [0] * len(keys), table.device)
        rows, places = tokens_of(queries, [key - query for query, key in zip(queries, keys, strict=True)], table.device)
        mask = (rows[:, None] == requests) & (positions <= places[:, None])
        blocks = table[requests, torch.div(positions, block_size, rounding_mode="floor")]
        slots = blocks.long() * block_size + positions % block_size
        return cls(mask[None, None], slots, batch.slot_mapping, pages, topk)

    @classmethod
    def profile(cls, num_tokens: int, max_pairs: int, topk: int, device: torch.device) -> IndexStep:
        """Return those of the pass that takes the most memory."""
        mask = torch.ones(1, 1, num_tokens, max(num_tokens, max_pairs // num_tokens), dtype=torch.bool, device=device)
        return cls(mask, None, None, {}, topk)

    def update(self, keys: Tensor, layer_idx: int) -> Tensor:
        """
        Store the keys of new tokens, and return those of all requests.

        Args:
            keys: ``(1, tokens, size)``.
            layer_idx: The number of the indexer's layer.

        Returns:
            ``(1, keys, size)``.
        """
        if self.slots is None or self.new_slots is None:
            return keys.new_zeros(1, self.mask.shape[-1], keys.shape[-1])
        pages = self.pages[layer_idx]
        write_pages(keys.transpose(0, 1), pages, self.new_slots, padded=False)
        return gather_slots(pages, self.slots).transpose(0, 1)

    def select(self, chosen: Tensor) -> Tensor | None:
        """
        Return the slots of selected tokens, -1 where a token may attend to fewer; None in a profile run.

        Args:
            chosen: ``(1, tokens, at most topk)``, numbers of keys.

        Returns:
            ``(tokens, topk)`` int32.
        """
        if self.slots is None:
            return None
        columns = chosen[0].long()
        allowed = self.mask[0, 0].gather(1, columns)
        slots = self.slots[columns].masked_fill(~allowed, -1).int()
        return torch.nn.functional.pad(slots, (0, self.topk - slots.shape[1]), value=-1)


def tokens_of(lengths: Sequence[int], firsts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """
    Return the request and the position of each token, ``(tokens,)`` int64 each.

    Args:
        lengths: Tokens of each request.
        firsts: The position of the first of them.
        device: Where they go.
    """
    counts = torch.tensor(lengths)
    offsets = torch.tensor(firsts) - counts.cumsum(0) + counts
    known, total = upload(torch.stack([counts, offsets]), device), sum(lengths)
    requests = torch.arange(len(lengths), device=device).repeat_interleave(known[0], output_size=total)
    return requests, torch.arange(total, device=device) + known[1][requests]


@frozen(eq=False)
class Indexers:
    """
    The indexers of a model.

    Attributes:
        topk: Tokens that they select.
        max_pairs: Most pairs of query and key that one forward pass scores.
    """

    topk: int
    max_pairs: int

    @classmethod
    def of(cls, layers: Sequence[PagedLayer]) -> Indexers | None:
        """Return those of a model's layers; None without any."""
        specs = [layer.spec for layer in layers if layer.spec.requirements.topk is not None]
        if not specs:
            return None
        modules: list[Any] = [spec.module for spec in specs if spec.index_key is not None]
        heads = max(module.indexer.n_heads for module in modules)
        return cls(specs[0].requirements.topk or 0, max(1, SCORE_BYTES // (4 * heads)))

    def passes(self, step: Step) -> Iterator[Step]:
        """
        Yield the forward passes of a step, each of at most `max_pairs` unless a single token has more.

        A pass scores each of its queries with the keys of all of its requests: few long requests, or many short ones. A
        request whose new tokens are too many for one pass is computed in several, as chunks of a prefill are.
        """
        pending: list[ScheduledRequest] = []
        places: list[int] = []
        tokens = keys = 0
        follows = step.follows or range(len(step))
        for one, place in zip(step, follows, strict=True):
            rest = one
            while True:
                if (tokens + rest.num_new_tokens) * (keys + rest.stop) <= self.max_pairs:
                    break
                if pending:
                    yield _pass(step, pending, places)
                    pending, places, tokens, keys = [], [], 0, 0
                    continue
                count = self._first_tokens(rest)
                if count == rest.num_new_tokens:
                    break
                yield _pass(step, [attrs.evolve(rest, num_new_tokens=count, samples=False)], [place])
                rest = attrs.evolve(rest, start=rest.start + count, num_new_tokens=rest.num_new_tokens - count)
            pending.append(rest)
            places.append(place)
            tokens, keys = tokens + rest.num_new_tokens, keys + rest.stop
        if pending:
            yield _pass(step, pending, places)

    def _first_tokens(self, one: ScheduledRequest) -> int:
        """Return how many tokens of a request one pass scores: at least one, however long it is."""
        low, high = 1, one.num_new_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle * (one.start + middle) <= self.max_pairs else (low, middle - 1)
        return low


def _pass(step: Step, scheduled: list[ScheduledRequest], places: list[int]) -> Step:
    return Step(tuple(scheduled), None if step.follows is None else tuple(places))
