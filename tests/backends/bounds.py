"""Watches what interpreted kernels load and store: a stray address is read in silence where memory happens to be."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from attnplug.ops import Kernel


@contextmanager
def watched():
    """Fail each launch that loads or stores beyond the tensors that it was given."""
    from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415 - where there is an interpreter

    given: list[Any] = []  # sorted: where tensors begin, and the furthest end of those so far
    with pytest.MonkeyPatch.context() as patch:
        for name, of_mask in (("create_masked_load", 0), ("create_masked_store", 1)):
            patch.setattr(InterpreterBuilder, name, _looking_at(getattr(InterpreterBuilder, name), of_mask, given))
        patch.setattr(Kernel, "run", _noting(Kernel.run, given))
        yield


def _noting(run: Any, given: list[Any]) -> Any:
    def noted(kernel, programs, tensors, *rest, descriptors=(), **options):
        described = [described.base for described in descriptors]
        extents = sorted(_extent(tensor) for tensor in (*tensors, *described))
        given[:] = np.array([first for first, _ in extents]), np.maximum.accumulate([end for _, end in extents])
        try:
            return run(kernel, programs, tensors, *rest, descriptors=descriptors, **options)
        finally:
            given.clear()

    return noted


def _extent(tensor: Any) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.element_size()


def _looking_at(access: Any, of_mask: int, given: list[Any]) -> Any:
    def looked_at(builder, places, *rest, **options):
        if given:
            mask = np.broadcast_to(rest[of_mask].data, places.data.shape).astype(bool)
            found = places.data[mask].astype(np.int64)
            firsts, ends = given
            begun = np.searchsorted(firsts, found, side="right") - 1
            is_inside = (begun >= 0) & (found < ends[begun])
            assert is_inside.all(), f"{access.__name__} beyond all tensors of the launch"
        return access(builder, places, *rest, **options)

    return looked_at
