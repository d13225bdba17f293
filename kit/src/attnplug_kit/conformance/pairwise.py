"""Few requests in which every value meets every value of every other field that it may meet: seeded and greedy."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from attnplug.request import FIELDS
from attnplug_kit.conformance.field_values import Capability, field_values_of, is_served
from attnplug_kit.conformance.request_spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug_kit.conformance.field_values import Menu
    from attnplug_kit.conformance.subject import Subject

_SEED: Final = 20
_APART: Final = ("cudagraph", "seq_lens_cpu_kind")  # these have tests of their own, which replay, or hide the lengths
_BASE: Final = ("dtype", "head_size", "gqa_ratio", "num_kv_heads", "block_size", "paged")  # every ask has these
_Pair = frozenset[tuple[str, Any]]

# What a kernel is compiled for: a value each, or whether there is one. Compiling one takes from seconds to minutes.
_COMPILED: Final = (
    "dtype",
    "head_size",
    "head_size_v",
    "kv_cache_dtype",
    "attn_type",
    "causal",
    "alibi",
    "sinks",
    "custom_mask",
    "block_sparse",
)
_COMPILED_IN: Final = ("sliding_window", "attention_chunk", "logits_soft_cap")
_Kernel = tuple[Any, ...]


def kernel_of(ask: RequestSpec) -> _Kernel:
    """Return what a variant that compiles at its first use has to compile for, as far as the requirements tell."""
    fields = ask.fields
    cached = None if fields.get("kv_cache_dtype") == "auto" else fields.get("kv_cache_dtype")
    values = {**fields, "kv_cache_dtype": cached}
    return (*(values.get(name) for name in _COMPILED), *(values.get(name) is not None for name in _COMPILED_IN))


@cache
def covering_asks(subject: Subject) -> tuple[RequestSpec, ...]:
    """Return asks that together contain every pair of values that the subject serves; the same ones each time."""
    return _Cover(field_values_of(subject)).rows()


@cache
def refused_pairs(subject: Subject) -> tuple[RequestSpec, ...]:
    """Return asks for two values, each of which is served, that are refused together."""
    menu, refused = field_values_of(subject), []
    for one, other in _pairs_of(menu.asks):
        ask = menu.asks[one].and_(**{**menu.asks[other].fields, one.field: one.value, other.field: other.value})
        if ask.requirements() is not None and not is_served(subject, ask):
            refused.append(ask)
    return tuple(dict.fromkeys(refused))


def _pairs_of(asks: Mapping[Capability, RequestSpec]) -> Iterator[tuple[Capability, Capability]]:
    served = [item for item in asks if FIELDS[item.field].kind != "device" and item.field not in _APART]
    yield from (pair for pair in combinations(served, 2) if pair[0].field != pair[1].field)


class _Cover:
    def __init__(self, menu: Menu) -> None:
        self._menu = menu
        self._random = random.Random(_SEED)
        names = {one.field for pair in _pairs_of(menu.asks) for one in pair}
        required = {name for name in names if FIELDS[name].required or name in ("gqa_ratio", "paged", "num_kv_heads")}
        values = menu.values()
        self._values = {name: (*values[name], *(() if name in required else (None,))) for name in sorted(names)}
        variant = menu.subject.candidate.variant
        self._compiles = variant is not None and variant.jit is not None
        self._kernels: dict[_Kernel, None] = dict.fromkeys(map(kernel_of, menu.asks.values()))
        possible = sorted(self._possible(), key=self._is_for_one_kernel) if self._compiles else self._possible()
        self._left = {self._pair(one, other): (one, other) for one, other in possible}

    def rows(self) -> tuple[RequestSpec, ...]:
        """Return the asks."""
        rows = []
        while self._left:
            one, other = next(iter(self._left.values()))
            seed, names = self._seed_of(one, other), {one.field, other.field}
            row = self._with_known_kernel(seed, names) if self._compiles else None
            row = self._row(seed, names) if row is None else row
            for pair in list(self._pairs_in(row)):
                self._left.pop(pair, None)
            self._kernels[kernel_of(row)] = None
            rows.append(row)
        return tuple(rows)

    @staticmethod
    def _is_for_one_kernel(pair: tuple[Capability, Capability]) -> bool:
        """False, which comes first, for pairs that ask for a kernel of their own: others are asked of these then."""
        return not all(one.field in (*_COMPILED, *_COMPILED_IN) for one in pair)

    def _with_known_kernel(self, seed: RequestSpec, pair: set[str]) -> RequestSpec | None:
        """Return a row that runs on a kernel which is needed anyway, or None where no such one serves the pair."""
        for kernel in self._kernels:
            row = self._for_kernel(seed, kernel, pair)
            if kernel_of(row) == kernel and self._serves(row):
                return self._row(row, {*pair, *_COMPILED, *_COMPILED_IN})
        return None

    def _for_kernel(self, row: RequestSpec, kernel: _Kernel, pair: set[str]) -> RequestSpec:
        """Give a row the fields that this kernel is compiled for, those of the pair excepted."""
        wanted = dict(zip((*_COMPILED, *_COMPILED_IN), kernel, strict=True))
        for name in _COMPILED:
            row = row if name in pair or name not in self._values else row.and_(**{name: wanted[name]})
        for name in _COMPILED_IN:
            if name not in pair and name in self._values:
                values = [value for value in self._values[name] if (value is not None) == wanted[name]]
                row = max((row.and_(**{name: value}) for value in values), key=self._gain, default=row)
        return row

    def _serves(self, row: RequestSpec) -> bool:
        return is_served(self._menu.subject, row)

    def _possible(self) -> Iterator[tuple[Capability, Capability]]:
        for one, other in _pairs_of(self._menu.asks):
            seed = self._seed_of(one, other)
            if self._pair(one, other) <= set(seed.pairs) and self._serves(seed):
                yield one, other

    def _seed_of(self, one: Capability, other: Capability) -> RequestSpec:
        asks = self._menu.asks
        merged = {**asks[one].fields, **asks[other].fields, one.field: one.value, other.field: other.value}
        for item in (one, other):  # a plainest ask may have given up pages: both need not
            if not asks[item].fields.get("paged", True):
                merged["paged"] = False
        return RequestSpec.of(merged)

    def _row(self, row: RequestSpec, pair: set[str]) -> RequestSpec:
        """Fill in the other fields, each with the value that leaves fewest pairs over."""
        names = [name for name in self._values if name not in pair and (name in _BASE or name not in row.fields)]
        self._random.shuffle(names)
        for name in names:
            row = max(self._with(row, name), key=self._gain)
        return row

    def _with(self, row: RequestSpec, name: str) -> list[RequestSpec]:
        values = list(self._values[name])
        self._random.shuffle(values)
        found = [ask for value in values if self._serves(ask := row.and_(**{name: value}))]
        return [*found, row]

    def _gain(self, row: RequestSpec) -> int:
        return sum(pair in self._left for pair in self._pairs_in(row))

    @staticmethod
    def _pairs_in(row: RequestSpec) -> Iterator[_Pair]:
        yield from (frozenset(pair) for pair in combinations(row.pairs, 2))

    @staticmethod
    def _pair(one: Capability, other: Capability) -> _Pair:
        return frozenset({(one.field, one.value), (other.field, other.value)})
