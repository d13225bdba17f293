"""How close a result in a given dtype comes to the exact one, and why."""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug_kit.oracle.scene import CANARY


@frozen
class Tolerance:
    """
    The largest error that rounding explains.

    Attributes:
        atol: Per unit of the largest value: an output is a weighted mean of values, and inherits their size.
        rtol: Relative to the exact result.
        lse: Absolute error of the LSE. It is a float32 sum whatever the dtype: only the rounding of scores enters.
    """

    atol: float
    rtol: float
    lse: float


# float32: sums of a few thousand products of eps 6e-8, reordered freely.
# Half types: the output is rounded once (half an eps), and kernels round the softmax weights to the dtype before they
# multiply them with the values (another half eps of each, plus some of its sum). Queries and keys arrive rounded, and
# the oracle reads the same rounded ones. Some kernels also round the query once more after scaling it, which moves a
# score, and with it the LSE, by half an eps of its size.
_TOLERANCES: Final = {
    torch.float32: Tolerance(atol=2e-5, rtol=2e-5, lse=2e-5),
    torch.bfloat16: Tolerance(atol=2**-7, rtol=2**-7, lse=2e-2),
    torch.float16: Tolerance(atol=2**-10, rtol=2**-10, lse=4e-3),
}

# Keys of an 8-bit cache that were multiplied by their scale are rounded to the dtype once more: half an eps in each
# element of a key, which moves a score several times as far as rounding the score would.
_SCALED_KEYS: Final = 4

# Kernels whose values are bytes may multiply them with weights that are bytes too: each is half of 1/127 of the largest
# away at most, on either side, and the sum of all weights is at least the largest.
_BYTES: Final = 2**-6


def tolerance(dtype: torch.dtype, *, scaled_keys: bool = False, byte_weights: bool = False) -> Tolerance:
    """
    Return the tolerance of a dtype.

    Args:
        dtype: float32, bfloat16 or float16.
        scaled_keys: Whether keys may have been multiplied by a scale, and rounded.
        byte_weights: Whether the weights of values may be rounded to bytes.
    """
    limit = _TOLERANCES[dtype]
    if byte_weights:
        return Tolerance(limit.atol + _BYTES, limit.rtol + _BYTES, limit.lse)
    if not scaled_keys or dtype == torch.float32:
        return limit
    return Tolerance(*(_SCALED_KEYS * part for part in (limit.atol, limit.rtol, limit.lse)))


def assert_close(
    actual: Tensor,
    exact: Tensor,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    what: str = "output",
    scaled_keys: bool = False,
    byte_weights: bool = False,
) -> None:
    """
    Assert that a result is the exact one up to the rounding of its dtype.

    Args:
        actual: The result, on any device.
        exact: The oracle's, of the same shape. Infinities have to be met exactly.
        dtype: The dtype that was computed in.
        scale: The largest absolute value among the values (for outputs).
        what: ``"output"`` or ``"lse"``: which tolerance holds, and what a failure is called.
        scaled_keys: Whether keys may have been multiplied by a scale, and rounded.
        byte_weights: Whether the weights of values may be rounded to bytes.

    Raises:
        AssertionError: With the worst element, both its values, and the tolerance; or with the number of elements that
            hold CANARY still.
    """
    limit = tolerance(dtype, scaled_keys=scaled_keys, byte_weights=byte_weights)
    atol, rtol = (limit.lse, limit.lse) if what == "lse" else (limit.atol * scale, limit.rtol)
    got = actual.detach().cpu().double()
    if got.shape != exact.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    close = torch.isclose(got, exact, atol=atol, rtol=rtol)
    if bool(close.all()):
        return
    unwritten = ~close & (got == CANARY)
    if bool(unwritten.any()):
        place = tuple(unwritten.nonzero()[0].tolist())
        raise AssertionError(
            f"{what} was not written: {int(unwritten.sum())} of {close.numel()} elements, {place} the first, hold "
            f"{CANARY:.0f} as before the call"
        )
    error = (got - exact).abs().masked_fill(close, -1.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = torch.unravel_index(error.argmax(), error.shape)
    place = tuple(int(index) for index in worst)
    raise AssertionError(
        f"{what}: {int((~close).sum())} of {close.numel()} elements differ; at {place} {float(got[worst])!r}, "
        f"exact {float(exact[worst])!r} (atol {atol:.1e}, rtol {rtol:.1e}, {dtype})"
    )
