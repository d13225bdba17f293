"""Batches of every shape that an engine makes, as plain data, and random ones: seeded, or as hypothesis strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from attrs import evolve, field, fields, frozen

from attnplug.request import FIELDS, Requirements
from attnplug_kit.fields import ROWS

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence

    from hypothesis import strategies as st


_T = TypeVar("_T")

STRIDES: Final = ("packed", "rows", "heads", "values", "keys", "heads first")

FEATURES: Final = tuple(name for name, row in ROWS.items() if row.drawn)
"""The fields that `random_case` varies only if they are named in `features`."""


def _as_pairs(
    pattern: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None,
) -> tuple[tuple[str, Any], ...] | None:
    """Return a mapping as pairs: a case is hashable."""
    return None if pattern is None else tuple(sorted(dict(pattern).items()))


@frozen(kw_only=True)
class Case:
    """
    A batch and the requirements of its layer. `materialize` makes its tensors.

    Attributes:
        query_lens: New tokens per request.
        context_lens: Tokens per request before these; negative (dense calls only) for fewer keys than queries.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a query and key head.
        head_size_v: Size of a value head; None for `head_size`.
        dtype: Name of the dtype.
        block_size: Slots per block.
        num_spare_blocks: Blocks of the cache that no request uses, besides the null block.
        num_padding_tokens: Rows after the batch's last token; they hold NaN, and nothing may read or write them.
        attn_type: As in the requirements. The keys of cross attention are an encoder's, `encoder_lens` of them.
        encoder_lens: Encoder tokens per request, for cross attention. Their K/V come with the first step of a request,
            which is one without context, and are in the cache in the others.
        causal: Whether a token attends to no later token.
        sliding_window: As in the requirements.
        attention_chunk: As in the requirements.
        logits_soft_cap: As in the requirements.
        alibi: As in the requirements.
        sinks: As in the requirements.
        custom_mask: As in the requirements.
        mm_prefix: As in the requirements.
        attn_bias: As in the requirements; its K/V are not cached then.
        block_sparse: As in the requirements, with the parameters of `attnplug_kit.oracle.attention`.
        latent: As in the requirements: a value is the first `head_size_v` elements of its key.
        topk: As in the requirements; each token attends to so many tokens of its request at most, later ones too.
        index_lens: Whether a call says how many entries of each row of indices are read.
        kv_sharing: As in the requirements: all K/V are in the cache, and none come with the call.
        decode_query_len: As in the requirements.
        kv_cache_dtype: As in the requirements.
        k_scale: Scale of the keys in an 8-bit cache; per head it is the mean of scales that differ.
        v_scale: The same of the values.
        per_head_scales: As in the requirements.
        common_prefix_len: Tokens at the start that all requests share, in the same blocks, all of them context.
        gain: Factor of the queries. Around 1 the scores are of size 1; a larger one makes some key dominate.
        scale: Factor of the scores; None for ``head_size ** -0.5``.
        score_shift: About what every score has besides. Softmax is the same with it, and at 100 ``exp(score)``
            overflows in float32, at -100 it is 0.
        strides: How rows are placed: ``"packed"``; ``"rows"``: as parts of wider rows, and a block table as wide as an
            engine's; ``"heads"``: the heads of queries, keys and values as parts of wider heads, too; ``"values"``:
            values as parts of wider rows, and keys not; ``"keys"``: keys as parts of wider heads, and queries far
            apart; ``"heads first"``: the heads of queries before the tokens.
        shared_blocks: The first blocks of all requests with as much context are the same, as with prefix caching.
        kv_written: Whether K/V were written before a paged call, which has none then.
        lens_on_cpu: What the CPU has of the lengths of sequences: ``"exact"``, ``"upper_bound"`` or ``"absent"``.
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
    attn_type: str = "decoder"
    encoder_lens: tuple[int, ...] = ()
    causal: bool = True
    sliding_window: int | None = None
    attention_chunk: int | None = None
    logits_soft_cap: float | None = None
    alibi: str | None = None
    sinks: bool = False
    custom_mask: bool = False
    attn_bias: bool = False
    mm_prefix: bool = False
    block_sparse: tuple[tuple[str, Any], ...] | None = field(default=None, converter=_as_pairs)
    latent: bool = False
    topk: int | None = None
    index_lens: bool = False
    kv_sharing: bool = False
    decode_query_len: int = 1
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    per_head_scales: bool = False
    common_prefix_len: int = 0
    gain: float = 1.0
    scale: float | None = None
    score_shift: float = 0.0
    strides: str = "packed"
    shared_blocks: int = 0
    kv_written: bool = False
    lens_on_cpu: str = "exact"
    seed: int = 0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens per request, this step's included."""
        return tuple(query + context for query, context in zip(self.query_lens, self.context_lens, strict=True))

    @property
    def is_cross(self) -> bool:
        """Whether the keys are an encoder's."""
        return self.attn_type == "encoder_decoder"

    @property
    def may_be_paged(self) -> bool:
        """Whether its K/V may be cached; those of encoders never are, nor those of calls with an additive mask."""
        return self.attn_type in ("decoder", "encoder_decoder") and not self.attn_bias

    @property
    def key_lens(self) -> tuple[int, ...]:
        """Keys per request: its tokens, or the encoder's."""
        return self.encoder_lens if self.is_cross else self.seq_lens

    @property
    def first_new_keys(self) -> tuple[int, ...]:
        """The first key per request whose K/V come with a paged call; those before are in the cache."""
        if not self.is_cross:
            return self.context_lens
        return tuple(keys if context else 0 for keys, context in zip(self.encoder_lens, self.context_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def window(self) -> tuple[int, int]:
        """Positions attended to on the left and on the right; -1 for all."""
        if self.sliding_window is None:
            return -1, -1
        left = self.sliding_window - 1
        return left, left if self.attn_type == "encoder_only" else 0

    def requirements(self, **engine: Any) -> Requirements:
        """
        Return the requirements of this case, with the engine fields that the caller adds.

        If the cache is paged, its block size is the case's, unless the caller gives another one.
        """
        paged = engine.get("paged", self.may_be_paged)
        blocks = {"block_size": self.block_size} if paged else {}
        engine = {"cascade": self.common_prefix_len > 0, **blocks, **engine}
        own = {name: getattr(self, name) for name in OF_LAYER}
        return Requirements(**own, **engine)

    def reordered(self, first: int = 1) -> Case:
        """Return the case with the requests from `first` to the last but one behind the last one."""
        order = (*range(first), len(self.query_lens) - 1, *range(first, len(self.query_lens) - 1))
        names = ("query_lens", "context_lens", *(("encoder_lens",) if self.encoder_lens else ()))
        lens: dict[str, Any] = {name: tuple(getattr(self, name)[one] for one in order) for name in names}
        return evolve(self, **lens)

    @property
    def shared_prefix(self) -> tuple[tuple[int, ...], int]:
        """The requests that have their first blocks in common, and the tokens in these blocks."""
        if self.common_prefix_len:
            return tuple(n for n, count in enumerate(self.query_lens) if count), self.common_prefix_len
        length = self.shared_blocks * self.block_size if self.attn_type == "decoder" else 0
        return tuple(n for n, context in enumerate(self.context_lens) if length and context >= length), length

    def with_shared_prefix(self, blocks: int) -> Case:
        """Return the case with so many more blocks of context, which all requests with queries share."""
        length = blocks * self.block_size
        lens = zip(self.query_lens, self.context_lens, strict=True)
        context_lens = tuple(context + length if query else context for query, context in lens)
        return evolve(self, context_lens=context_lens, common_prefix_len=length)


OF_LAYER: Final = tuple(item.name for item in fields(Case) if item.name in FIELDS and item.name != "block_size")
"""The fields of requests that a case has; its block size is of the KV cache."""


class Draw(Protocol):
    """A source of random choices: a seeded generator, or hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """Return an integer in ``[low, high]``."""

    def among(self, values: Sequence[_T]) -> _T:
        """Return one of the values; the first is the simplest."""


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
        features: The names out of FEATURES that may vary.
        fixed: Fields of the case that have these values.
    """
    return draw_case(_Seeded(generator), features=features, **fixed)


def draw_case(draw: Draw, *, features: Collection[str] = (), **fixed: Any) -> Case:
    """Return a case drawn from any source. Arguments as for `random_case`."""
    heads = draw.among((1, 2, 3))
    drawn = _features(draw, features, fixed)
    both = {**drawn, **fixed}
    if both.get("latent"):
        heads = 1
    query_lens, context_lens = _lengths(draw, both.get("decode_query_len", 1))
    if both.get("attn_type") in ("encoder", "encoder_only"):
        context_lens = (0,) * len(query_lens)
    if both.get("attn_type") == "encoder_decoder":
        drawn["encoder_lens"] = tuple(draw.among((draw.integer(1, 20), draw.integer(21, 90), 0)) for _ in query_lens)
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
        **drawn,
    )
    if not {"query_lens", "context_lens"} & set(fixed):  # last, so that the other choices do not depend on it
        case = case.reordered(draw.among((len(case.query_lens) - 1, 0, len(case.query_lens) // 2)))
    return evolve(case, **fixed)


def _lengths(draw: Draw, decode_query_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return decodes, then prefills: first ones, and chunks with a context that is shorter or much longer."""
    num_decodes = draw.integer(0, 4)
    num_prefills = draw.integer(0 if num_decodes else 1, 3)
    query_lens = tuple(draw.integer(1, decode_query_len) for _ in range(num_decodes))
    query_lens += tuple(draw.integer(decode_query_len + 1, 40) for _ in range(num_prefills))
    context_lens = tuple(draw.among((0, draw.integer(1, 20), draw.integer(21, 90))) for _ in query_lens)
    return query_lens, context_lens


def _features(draw: Draw, features: Collection[str], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return values that are compatible: encoders are not causal, and have no cache."""
    drawn = {name: draw.among(ROWS[name].drawn) for name in FEATURES if name in features and name not in fixed}
    attn_type = {**drawn, **fixed}.get("attn_type", "decoder")
    if attn_type != "decoder":
        drawn["causal"] = False
    if {"latent": False, **drawn, **fixed}["latent"]:
        drawn["head_size_v"] = draw.among((None, 8))  # no head is smaller
    if drawn.get("kv_cache_dtype", "auto") != "auto":
        # Normal K/V are in the range of each dtype at a scale of 1, and beyond the largest e4m3 at the smallest.
        drawn |= {name: draw.among((1.0, 0.3, 0.004)) for name in ("k_scale", "v_scale")}
        drawn["per_head_scales"] = draw.among((False, True)) and not {"latent": False, **drawn, **fixed}["latent"]
    without = _WITHOUT[attn_type]
    both = {**drawn, **fixed}
    if both.get("topk"):
        if not both.get("latent") or any(both.get(name) for name in _BY_POSITION if name in fixed):
            without = (*without, "topk")
        else:
            drawn["index_lens"] = draw.among((False, True))
            without = (*without, *_BY_POSITION)
    if both.get("causal") is False or both.get("attention_chunk"):  # which torch's kernels compute chunk by chunk
        without = (*without, "mm_prefix")
    return {name: value for name, value in drawn.items() if name not in without}


_BY_POSITION: Final = ("sliding_window", "attention_chunk", "alibi", "custom_mask", "mm_prefix")
"""The fields that hide tokens by their position, which selected tokens have none of."""

_QUANTIZED: Final = ("kv_cache_dtype", "k_scale", "v_scale", "per_head_scales")

# Encoder tokens have no position relative to decoder tokens, and the contract has no mask over paged ones.
_WITHOUT: Final[dict[str, tuple[str, ...]]] = {
    "decoder": (),
    "encoder": ("kv_sharing", "latent", "topk", "mm_prefix", *_QUANTIZED),
    "encoder_only": ("kv_sharing", "latent", "topk", "mm_prefix", *_QUANTIZED),
    "encoder_decoder": (*_BY_POSITION, "latent", "topk"),
}


@frozen
class _Drawn:
    draw: st.DrawFn

    def integer(self, low: int, high: int) -> int:
        from hypothesis.strategies import integers  # noqa: PLC0415 - as in `cases`

        return self.draw(integers(low, high))

    def among(self, values: Sequence[_T]) -> _T:
        from hypothesis.strategies import sampled_from  # noqa: PLC0415 - as in `cases`

        return self.draw(sampled_from(values))


def cases(*, features: Collection[str] = (), **fixed: Any) -> st.SearchStrategy[Case]:
    """
    Return a hypothesis strategy of cases. Failing ones shrink to few requests, short lengths and no features.

    Args:
        features: The names out of FEATURES that may vary.
        fixed: Fields of the case that have these values.
    """
    from hypothesis.strategies import composite  # noqa: PLC0415 - only tests that draw wait for its import

    drawn = composite(lambda draw: draw_case(_Drawn(draw), features=tuple(features), **fixed))
    return drawn()
