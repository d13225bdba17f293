"""Describes batches of every shape that an engine makes, as plain data, and draws random ones."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from attrs import evolve, frozen

from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_T = TypeVar("_T")

FEATURES: Final = ("sliding_window", "attention_chunk", "logits_soft_cap", "alibi", "sinks", "head_size_v", "causal")
"""The fields that `random_case` leaves alone unless it is told that they may vary."""


@frozen(kw_only=True)
class Case:
    """
    A batch, decodes first, and what its layer asks for. `realise` makes its tensors.

    Attributes:
        query_lens: New tokens per request.
        context_lens: Tokens per request that came before; negative (dense calls only) for fewer keys than queries.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a query and key head.
        head_size_v: Size of a value head; None for `head_size`.
        dtype: Name of the dtype.
        block_size: Slots per block.
        num_spare_blocks: Blocks of the cache that no request uses, beside the null block.
        num_padding_tokens: Rows after the batch's last token; they hold NaN, and nothing may read or write them.
        causal: Whether a token attends no later token.
        sliding_window: As in the requirements.
        attention_chunk: As in the requirements.
        logits_soft_cap: As in the requirements.
        alibi: As in the requirements.
        sinks: As in the requirements.
        gain: Factor of the queries. Around 1 the scores are of size 1; a larger one makes some key dominate.
        seed: Seed of the tensors and of the block table.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int | None = None
    dtype: str = "float32"
    block_size: int = 16
    num_spare_blocks: int = 2
    num_padding_tokens: int = 0
    causal: bool = True
    sliding_window: int | None = None
    attention_chunk: int | None = None
    logits_soft_cap: float | None = None
    alibi: str | None = None
    sinks: bool = False
    gain: float = 1.0
    seed: int = 0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys per request, this step's included."""
        return tuple(query + context for query, context in zip(self.query_lens, self.context_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def window(self) -> tuple[int, int]:
        """Positions attended to the left and to the right; -1 for all."""
        return (-1, -1) if self.sliding_window is None else (self.sliding_window - 1, 0)

    def requirements(self, **engine: Any) -> Requirements:
        """Return what this case asks of a backend, with the engine fields that the caller adds."""
        return Requirements(
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            dtype=self.dtype,
            causal=self.causal,
            sliding_window=self.sliding_window,
            attention_chunk=self.attention_chunk,
            logits_soft_cap=self.logits_soft_cap,
            alibi=self.alibi,
            sinks=self.sinks,
            **engine,
        )


class Draw(Protocol):
    """Where choices come from: a seeded generator here, hypothesis in `attnplug.testing.strategies`."""

    def integer(self, low: int, high: int) -> int:
        """Return an integer in ``[low, high]``."""

    def among(self, values: Sequence[_T]) -> _T:
        """Return one of the values; the first is the plainest."""


@frozen
class _Seeded:
    generator: random.Random

    def integer(self, low: int, high: int) -> int:
        return self.generator.randint(low, high)

    def among(self, values: Sequence[_T]) -> _T:
        return self.generator.choice(values)


def random_case(generator: random.Random, *, features: Collection[str] = (), **fixed: Any) -> Case:
    """
    Return a random case; the same generator state gives the same case.

    Args:
        generator: The only source of randomness.
        features: The names out of FEATURES that may be asked for.
        fixed: Fields of the case, by name, that are as given.
    """
    return draw_case(_Seeded(generator), features=features, **fixed)


def draw_case(draw: Draw, *, features: Collection[str] = (), **fixed: Any) -> Case:
    """Return a case drawn from any source. Arguments as for `random_case`."""
    heads = draw.among((1, 2, 3))
    query_lens, context_lens = _lengths(draw)
    case = Case(
        query_lens=query_lens,
        context_lens=context_lens,
        num_kv_heads=heads,
        num_q_heads=heads * draw.among((1, 2, 4, 7)),
        head_size=draw.among((16, 8, 32, 64)),
        dtype=draw.among(("float32", "bfloat16", "float16")),
        block_size=draw.among((16, 1, 4, 12, 32)),
        num_spare_blocks=draw.integer(0, 3),
        num_padding_tokens=draw.among((0, 1, 5)),
        gain=draw.among((1.0, 4.0)),
        seed=draw.integer(0, 2**16),
        **_features(draw, features),
    )
    return evolve(case, **fixed)


def _lengths(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Decodes, then prefills: first ones, chunked ones, and ones whose chunk is much shorter than their context."""
    num_decodes = draw.integer(0, 4)
    num_prefills = draw.integer(0 if num_decodes else 1, 3)
    query_lens = (1,) * num_decodes + tuple(draw.integer(2, 40) for _ in range(num_prefills))
    context_lens = tuple(draw.among((0, draw.integer(1, 20), draw.integer(21, 90))) for _ in query_lens)
    return query_lens, context_lens


def _features(draw: Draw, features: Collection[str]) -> dict[str, Any]:
    choices: dict[str, tuple[Any, ...]] = {
        "sliding_window": (None, 1, 3, 17, 64),
        "attention_chunk": (None, 16, 32),
        "logits_soft_cap": (None, 2.0, 30.0),
        "alibi": (None, "linear", "sqrt"),
        "sinks": (False, True),
        "head_size_v": (None, 8, 24),
        "causal": (True, False),
    }
    return {name: draw.among(choices[name]) for name in FEATURES if name in features}
