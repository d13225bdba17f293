"""One request of the kit: fields that differ from the default, and a batch that exercises them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.errors import RequestError
from attnplug.request import FIELDS, Requirements
from attnplug_kit.fields import ROWS
from attnplug_kit.oracle import Case
from attnplug_kit.oracle.case import OF_LAYER, STRIDES
from attnplug_kit.oracle.rounding import ROW_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FP8_DTYPES: Final = ("fp8_e4m3", "fp8_e5m2")
"""The FP8 cache dtypes whose rounding the oracle has."""

_CASE_FIELDS: Final = {*OF_LAYER} - {"num_q_heads"}
_FP8_SCALES: Final = {
    "fp8_e4m3": ((0.3, 0.004), (0.004, 0.7)),
    "fp8_e5m2": ((0.3, 3e-5), (3e-5, 0.7)),
}
"""Scales of keys and values. At the smallest ones values beyond 1.8 exceed the largest number, and are clipped."""

_SHIFTED_SIZE: Final = 16
"""The smallest head whose last number may shift the scores: the others decide between keys."""

_LARGEST_BLOCK: Final = 512
"""Requests have more than one block up to this size: steps have sequences of 1,024 tokens at most."""

_OF_PAGES: Final = tuple(item.name for item in FIELDS.values() if item.free)


@frozen
class RequestSpec:
    """
    The fields of a request.

    Attributes:
        pairs: Fields of the requirements with their values, sorted. `gqa_ratio` replaces `num_q_heads`.
        fixed: The fields that the request is about. Tests draw others, see `attnplug_kit.conformance.drawing`.
    """

    pairs: tuple[tuple[str, Any], ...]
    fixed: frozenset[str] = field(default=frozenset(), eq=False, repr=False)

    @classmethod
    def of(cls, fields: Mapping[str, Any], fixed: Iterable[str] = ()) -> RequestSpec:
        """Return a request for these fields. None leaves a field out, and ``paged=False`` those of pages."""
        without = () if fields.get("paged", True) else _OF_PAGES
        pairs = tuple(sorted((n, v) for n, v in fields.items() if v is not None and n not in without))
        return cls(pairs, frozenset(fixed))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields, by name."""
        return dict(self.pairs)

    def evolve(self, **fields: Any) -> RequestSpec:
        """Return a request with these fields changed; None removes one."""
        return RequestSpec.of({**self.fields, **fields}, self.fixed | set(fields))

    def drawn(self, **fields: Any) -> RequestSpec:
        """Return a request with these fields changed, which remain free."""
        return RequestSpec.of({**self.fields, **fields}, self.fixed)

    def requirements(self) -> Requirements | None:
        """Return the requirements; None where the fields contradict each other, or the kit has no batch for them."""
        fields = self.fields
        if _has_no_batch(fields):
            return None
        fields["num_q_heads"] = fields["num_kv_heads"] * fields.pop("gqa_ratio", 1)
        fields["attn_type"] = fields.get("attn_type", "decoder")
        try:
            return Requirements(**fields)
        except RequestError:
            return None

    @property
    def engine(self) -> dict[str, Any]:
        """The fields that a case does not have, for `Case.requirements`."""
        names = set(FIELDS) - _CASE_FIELDS - {"gqa_ratio", "cascade", "num_q_heads"}
        return {name: value for name, value in self.pairs if name in names}

    def case(self, seed: int, *, any_order: bool = False, **fixed: Any) -> Case:
        """
        Return a batch that exercises the request: decodes and prefills, with and without context.

        What neither the request nor `fixed` has is drawn by the seed and the request: the order of requests, the scale,
        strides, shared blocks, a shift of all scores, and the scales of an FP8 cache, in some of which values saturate.

        Args:
            seed: Of lengths and tensors.
            any_order: Whether the order of requests is drawn where `fixed` has their lengths.
            fixed: Fields of the case that have these values.
        """
        fields = self.fields
        case = {name: value for name, value in fields.items() if name in _CASE_FIELDS}
        case["num_q_heads"] = fields["num_kv_heads"] * fields.get("gqa_ratio", 1)
        case["block_size"] = fields.get("block_size", 16)
        case["causal"] = fields.get("causal", fields.get("attn_type", "decoder") == "decoder")
        drawn = _drawn(self, random.Random(f"{seed} {self}"), fixed)
        made = Case(**{**case, **_lengths(fields, random.Random(seed)), "seed": seed, **drawn, **fixed})
        if any_order or not {"query_lens", "context_lens"} & set(fixed):
            made = made.reordered(random.Random(f"{self} {seed}").randrange(len(made.query_lens)))
        return made.with_shared_prefix(max(1, 32 // made.block_size)) if fields.get("cascade") else made

    def over_pages(self, context_lens: tuple[int, ...]) -> tuple[int, ...]:
        """Return lengths of context of which the longest exceeds a block, by a block more where none does."""
        return _over_pages(context_lens, self.fields)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.pairs)


def _drawn(spec: RequestSpec, source: random.Random, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of the case that no request has, and what hosts do in requests whose fields were drawn."""
    fields, size = spec.fields, spec.fields["head_size"]
    # Not head_size ** -0.5, which a backend may compute by itself. Large scores show rounded queries: none larger.
    found: dict[str, Any] = {"scale": size**-0.5 * source.choice((0.6, 0.8, *((1.5,) * (fixed.get("gain", 1) <= 1))))}
    found["strides"] = source.choice(STRIDES)
    found["shared_blocks"] = source.choice((0, 1)) if fields.get("paged", True) else 0
    shift = source.choice((0.0, 0.0, 100.0, -100.0))
    own = any(ROWS[name].absolute for name in fields) or fields.get("kv_cache_dtype") in ROW_DTYPES
    found["score_shift"] = 0.0 if own or size < _SHIFTED_SIZE else shift
    if fields.get("kv_cache_dtype", "auto") in FP8_DTYPES:
        found |= dict(zip(("k_scale", "v_scale"), source.choice(_FP8_SCALES[fields["kv_cache_dtype"]]), strict=True))
        found["score_shift"] = 0.0
    if fields.get("kv_in_cache") and "kv_in_cache" not in spec.fixed:
        found["kv_written"] = True
    if fields.get("topk"):
        found["index_lens"] = source.choice((False, True))
    if "seq_lens_cpu_kind" not in spec.fixed:
        found["lens_on_cpu"] = fields.get("seq_lens_cpu_kind", "exact")
    return found


def _has_no_batch(fields: Mapping[str, Any]) -> bool:
    fp8 = fields.get("kv_cache_dtype", "auto") in FP8_DTYPES
    cross = fields.get("attn_type") == "encoder_decoder"
    dense = not fields.get("paged", True)
    inexact = fields.get("seq_lens_cpu_kind", "exact") != "exact"
    return (
        (bool(fields.get("per_head_scales")) and not fp8)
        or (dense and fields.get("phases") == ("decode",))
        or (cross and bool(fields.get("cascade")))
        or (cross and not dense and bool(fields.get("custom_mask")))
        or (inexact and (cross or bool(fields.get("custom_mask"))))
    )


def _lengths(fields: Mapping[str, Any], source: random.Random) -> dict[str, Any]:
    """Return two decodes, then two prefills, one without context; or those of the one phase that is requested."""
    longest, phases = fields.get("decode_query_len", 1), fields.get("phases", ("prefill", "decode"))
    decodes = [source.randint(1, longest), longest] if "decode" in phases else []
    prefills = [source.randint(longest + 1, longest + 9), longest + 17] if "prefill" in phases else []
    query_lens = (*decodes, *prefills)
    context_lens = [source.choice((3, 18, 41)) for _ in query_lens]
    context_lens[-1] = 0 if prefills else context_lens[-1]
    lens: dict[str, Any] = {"query_lens": query_lens, "num_padding_tokens": 2}
    lens["context_lens"] = _over_pages(tuple(context_lens), fields)
    if fields.get("attn_type") in ("encoder", "encoder_only"):
        lens["context_lens"] = (0,) * len(query_lens)
    if fields.get("attn_type") == "encoder_decoder":
        lens["encoder_lens"] = _over_pages(tuple(source.randint(1, 40) for _ in query_lens), fields)
    return lens


def _over_pages(lens: tuple[int, ...], fields: Mapping[str, Any]) -> tuple[int, ...]:
    size, longest = fields.get("block_size", 0), max(lens, default=0)
    first = lens.index(longest) if _LARGEST_BLOCK >= size > longest > 0 else -1
    return tuple(length + size * (n == first) for n, length in enumerate(lens))
