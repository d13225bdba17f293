"""
Few requests in which every value meets every compatible value of every other field.

The cover is greedy and seeded: it is the same each time.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from attnplug.request import FIELDS
from attnplug_kit.conformance.field_values import Capability, field_values_of, is_served
from attnplug_kit.conformance.request_spec import RequestSpec
from attnplug_kit.fields import ROWS, tested

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug_kit.conformance.field_values import FieldValues
    from attnplug_kit.conformance.subject import Subject

_SEED: Final = 20
_BASE: Final = ("dtype", "head_size", "gqa_ratio", "num_kv_heads", "block_size", "paged")  # every request has these
_DRAWN_ONLY: Final = {"kv_in_cache"}  # drawing adds it, and writes K/V before the calls of requests that have it
_Pair = frozenset[tuple[str, Any]]

# What a kernel is compiled for: a value of each field, or whether it has one. A compilation takes seconds to minutes.
_COMPILED_FOR: Final = tuple(name for name, row in ROWS.items() if row.compiled == "value")
_COMPILED_WITH: Final = tuple(name for name, row in ROWS.items() if row.compiled == "presence")
_Kernel = tuple[Any, ...]


def kernel_of(spec: RequestSpec) -> _Kernel:
    """Return what a variant with just-in-time compilation compiles for, as far as the requirements determine it."""
    fields = spec.fields
    cached = None if fields.get("kv_cache_dtype") == "auto" else fields.get("kv_cache_dtype")
    values = {**fields, "kv_cache_dtype": cached}
    return (*(values.get(n) for n in _COMPILED_FOR), *(values.get(n) is not None for n in _COMPILED_WITH))


def needs_no_other_kernel(subject: Subject, spec: RequestSpec) -> bool:
    """Whether requests for the declared values, alone and in pairs, are compiled for the kernel of this request."""
    specs = (*field_values_of(subject).specs.values(), *covering_specs(subject))
    return kernel_of(spec) in set(map(kernel_of, specs))


@cache
def covering_specs(subject: Subject) -> tuple[RequestSpec, ...]:
    """Return requests that together contain every pair of values that the subject serves."""
    return _Cover(field_values_of(subject)).rows()


@cache
def refused_pairs(subject: Subject) -> tuple[RequestSpec, ...]:
    """Return requests for two values, each of which is served, that are refused together."""
    specs, refused = field_values_of(subject).specs, []
    for one, other in _pairs_of(specs):
        spec = specs[one].evolve(**{**specs[other].fields, one.field: one.value, other.field: other.value})
        if spec.requirements() is not None and not is_served(subject, spec):
            refused.append(spec)
    return tuple(dict.fromkeys(refused))


def _pairs_of(specs: Mapping[Capability, RequestSpec]) -> Iterator[tuple[Capability, Capability]]:
    served = [item for item in specs if FIELDS[item.field].kind != "device" and item.field not in tested("elsewhere")]
    yield from (pair for pair in combinations(served, 2) if pair[0].field != pair[1].field)


class _Cover:
    def __init__(self, declared: FieldValues) -> None:
        self._declared = declared
        self._random = random.Random(_SEED)
        names = {one.field for pair in _pairs_of(declared.specs) for one in pair}
        required = {name for name in names if FIELDS[name].required or name in ("gqa_ratio", "paged", "num_kv_heads")}
        values = declared.values()
        self._values = {name: (*values[name], *(() if name in required else (None,))) for name in sorted(names)}
        variant = declared.subject.candidate.variant
        self._compiles = variant is not None and variant.jit is not None
        self._kernels: dict[_Kernel, None] = dict.fromkeys(map(kernel_of, declared.specs.values()))
        possible = sorted(self._possible(), key=self._needs_no_kernel) if self._compiles else self._possible()
        self._left = {self._pair(one, other): (one, other) for one, other in possible}

    def rows(self) -> tuple[RequestSpec, ...]:
        """Return the requests; each fixes the fields by which it contains pairs that those before it do not."""
        rows = []
        while self._left:
            one, other = next(iter(self._left.values()))
            seed, names = self._seed_of(one, other), {one.field, other.field}
            row = self._with_compiled_kernel(seed, names) if self._compiles else None
            row = self._row(seed, names) if row is None else row
            covered = [pair for pair in self._pairs_in(row) if self._left.pop(pair, None)]
            self._kernels[kernel_of(row)] = None
            rows.append(RequestSpec(row.pairs, frozenset(name for pair in covered for name, _ in pair) - _DRAWN_ONLY))
        return tuple(rows)

    @staticmethod
    def _needs_no_kernel(pair: tuple[Capability, Capability]) -> bool:
        """Whether a pair runs on any kernel. False sorts first: the kernels of those pairs then serve the others."""
        return not all(one.field in (*_COMPILED_FOR, *_COMPILED_WITH) for one in pair)

    def _with_compiled_kernel(self, seed: RequestSpec, pair: set[str]) -> RequestSpec | None:
        """Return a row on a kernel that other rows need anyway, or None where none serves the pair."""
        for kernel in self._kernels:
            row = self._for_kernel(seed, kernel, pair)
            if kernel_of(row) == kernel and self._serves(row):
                return self._row(row, {*pair, *_COMPILED_FOR, *_COMPILED_WITH})
        return None

    def _for_kernel(self, row: RequestSpec, kernel: _Kernel, pair: set[str]) -> RequestSpec:
        """Copy this kernel's compile-time fields into a row, except the pair's own."""
        wanted = dict(zip((*_COMPILED_FOR, *_COMPILED_WITH), kernel, strict=True))
        for name in _COMPILED_FOR:
            row = row if name in pair or name not in self._values else row.evolve(**{name: wanted[name]})
        for name in _COMPILED_WITH:
            if name not in pair and name in self._values:
                values = [value for value in self._values[name] if (value is not None) == wanted[name]]
                row = max((row.evolve(**{name: value}) for value in values), key=self._gain, default=row)
        return row

    def _serves(self, row: RequestSpec) -> bool:
        return is_served(self._declared.subject, row)

    def _possible(self) -> Iterator[tuple[Capability, Capability]]:
        for one, other in _pairs_of(self._declared.specs):
            seed = self._seed_of(one, other)
            if self._pair(one, other) <= set(seed.pairs) and self._serves(seed):
                yield one, other

    def _seed_of(self, one: Capability, other: Capability) -> RequestSpec:
        specs = self._declared.specs
        merged = {**specs[one].fields, **specs[other].fields, one.field: one.value, other.field: other.value}
        for item in (one, other):  # if one of them is served without pages only, so is the pair
            if not specs[item].fields.get("paged", True):
                merged["paged"] = False
        return RequestSpec.of(merged)

    def _row(self, row: RequestSpec, pair: set[str]) -> RequestSpec:
        """Fill in the other fields, each with the value that leaves the fewest pairs."""
        names = [name for name in self._values if name not in pair and (name in _BASE or name not in row.fields)]
        self._random.shuffle(names)
        for name in names:
            row = self._with(row, name)
        return row

    def _with(self, row: RequestSpec, name: str) -> RequestSpec:
        values = list(self._values[name])
        self._random.shuffle(values)
        ranked = sorted((*(row.evolve(**{name: value}) for value in values), row), key=self._gain, reverse=True)
        # To negotiate takes longer than to count: the first one that is served, and no others.
        return next(spec for spec in ranked if spec is row or self._serves(spec))

    def _gain(self, row: RequestSpec) -> int:
        return sum(pair in self._left for pair in self._pairs_in(row))

    @staticmethod
    def _pairs_in(row: RequestSpec) -> Iterator[_Pair]:
        yield from (frozenset(pair) for pair in combinations(row.pairs, 2))

    @staticmethod
    def _pair(one: Capability, other: Capability) -> _Pair:
        return frozenset({(one.field, one.value), (other.field, other.value)})
