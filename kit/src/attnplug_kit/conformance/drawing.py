"""
Draws what a test does not fix: dtype, sizes, pages, and what hosts do.

A test that fixed them would certify its own values only. The choice depends on the test's name alone: it is the same in
each run, and for each backend that declares the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from attnplug_kit.conformance.field_values import field_values_of, is_served
from attnplug_kit.conformance.pairwise import kernel_of, needs_no_other_kernel
from attnplug_kit.conformance.request_spec import FP8_DTYPES
from attnplug_kit.oracle.rounding import ROW_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject

_BLOCK_SIZES: Final = (16, 32, 64, 128, 256)
_MOST_HEADS: Final = 64

OF_HOSTS: Final = ("kv_in_cache", "seq_lens_cpu_kind")
"""The fields that say what a host knows of a step, and gives with it."""

_FEW: Final = ((1, 1), (1, 4), (1, 8), (1, 16), (2, 1), (2, 2), (2, 7), (4, 1), (4, 2), (8, 1), (8, 2))
_MANY: Final = ((1, 16), (2, 16), (4, 8), (8, 4), (8, 8), (32, 1), (32, 2))
_FEWEST: Final = ((1, 1), (1, 4), (2, 1), (2, 2), (4, 1))
"""KV heads, and query heads per KV head: for batches with many tokens, for short ones, and for interpreted kernels."""


class Draw:
    """
    Draws the fields of requests that they do not fix.

    Args:
        subject: What is tested.
        name: The name of the test, by which choices are made.
        note: Called with each request that was drawn.
    """

    def __init__(self, subject: Subject, name: str, note: Callable[[str], None] = lambda _: None) -> None:
        self._subject, self._name, self._note = subject, name, note

    def __call__(self, spec: RequestSpec, *, many_heads: bool = False, keep: Collection[str] = ()) -> RequestSpec:
        """
        Return a request with other values in its free fields, each of them declared, and all served together.

        Equal requests give equal results. A variant that compiles its kernels gets no request that needs another one
        than those of the declared values.

        Args:
            spec: The request.
            many_heads: Whether the batch is short, so that it may have up to 64 query heads.
            keep: Further fields that stay as they are.
        """
        source = random.Random(self._name)
        for fields in self._choices(source, spec, keep, many_heads=many_heads):
            other = spec.drawn(**fields)
            if is_served(self._subject, other) and self._is_compiled(spec, other):
                spec = other
        self._note(str(spec))
        return spec

    def _choices(
        self, source: random.Random, spec: RequestSpec, keep: Collection[str], *, many_heads: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield single fields in a fixed order, so that one that is fixed or refused changes no other."""
        few = _FEWEST if self._subject.is_interpreted else _FEW
        pairs = [pair for pair in (_MANY if many_heads else few) if self._have(pair, spec)]
        kv_heads, ratio = source.choice(pairs or [(None, None)])
        found: dict[str, Any] = {"num_kv_heads": kv_heads, "gqa_ratio": ratio}
        declared = field_values_of(self._subject).values()
        found["dtype"] = source.choice(declared["dtype"])
        found["head_size"] = source.choice([size for size in declared["head_size"] if size <= 128] or [None])
        found["block_size"] = source.choice(_BLOCK_SIZES)
        for name in ("kv_layout", "kv_cache_form"):
            found[name] = source.choice(declared.get(name, (None,)))
        found["kv_in_cache"] = source.choice((True, None)) if "kv_in_cache" in declared else None
        found["seq_lens_cpu_kind"] = source.choice(("upper_bound", "absent", None, None))
        narrow = [name for name in declared.get("kv_cache_dtype", ()) if name in FP8_DTYPES]
        found["kv_cache_dtype"] = source.choice((*narrow, *[None] * (3 * len(narrow) or 1)))
        found["per_head_scales"] = source.choice((True, None)) if "per_head_scales" in declared else None
        found["return_lse"] = source.choice((True, None, None)) if "return_lse" in declared else None
        for name, value in found.items():
            if value is not None and name not in spec.fixed and name not in keep:
                yield {name: value}

    @staticmethod
    def _have(pair: tuple[int, int], spec: RequestSpec) -> bool:
        """Whether the heads of a pair are those that the request fixes; other ratios come with few heads."""
        has_scales = spec.fields.get("per_head_scales") or spec.fields.get("kv_cache_dtype") in ROW_DTYPES
        if has_scales and pair[0] == 1:  # whose scale would be that of all heads
            return False
        if "gqa_ratio" in spec.fixed and "num_kv_heads" not in spec.fixed:
            return bool(pair[0] * spec.fields["gqa_ratio"] <= _MOST_HEADS)
        return "num_kv_heads" not in spec.fixed or bool(pair[1] * spec.fields["num_kv_heads"] <= _MOST_HEADS)

    def _is_compiled(self, spec: RequestSpec, other: RequestSpec) -> bool:
        variant = self._subject.candidate.variant
        if variant is None or variant.jit is None or kernel_of(other) == kernel_of(spec):
            return True
        return needs_no_other_kernel(self._subject, other)
