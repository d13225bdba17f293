"""The tolerances of results, by dtype, with the reason for each."""

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
        atol: Per unit of the largest value: an output is a weighted mean of values.
        rtol: Relative to the exact result.
        lse: Of the LSE, absolute and relative. The LSE is a float32 sum in every dtype, of scores that are rounded.
    """

    atol: float
    rtol: float
    lse: float


# float32: sums of a few thousand products of eps 6e-8, in any order.
# Half precision: the output is rounded once (half an eps), and kernels round the softmax weights to the dtype before
# the PV matmul (another half eps of each, plus some of its sum). The oracle reads the same rounded queries and keys.
# Some kernels round the query once more after scaling it, which changes a score, and with it the LSE, by half an eps.
_TOLERANCES: Final = {
    torch.float32: Tolerance(atol=2e-5, rtol=2e-5, lse=2e-5),
    torch.bfloat16: Tolerance(atol=2**-7, rtol=2**-7, lse=2e-2),
    torch.float16: Tolerance(atol=2**-10, rtol=2**-10, lse=4e-3),
}

# Keys of an FP8 cache that were multiplied by their scale are rounded to the dtype once more: half an eps in each
# element of a key, which changes a score several times as much as rounding the score would.
_SCALED_KEYS: Final = 4

# Kernels with int8 values may round the softmax weights to int8 too: each weight changes by at most half of 1/127 of
# the largest, and the sum of all weights is at least the largest.
_INT8_WEIGHTS: Final = 2**-6


def tolerance(dtype: torch.dtype, *, scaled_keys: bool = False, byte_weights: bool = False) -> Tolerance:
    """
    Return the tolerance of a dtype.

    Args:
        dtype: float32, bfloat16 or float16.
        scaled_keys: Whether keys may have been multiplied by a scale, and rounded.
        byte_weights: Whether the softmax weights may be rounded to int8.
    """
    limit = _TOLERANCES[dtype]
    if byte_weights:
        return Tolerance(limit.atol + _INT8_WEIGHTS, limit.rtol + _INT8_WEIGHTS, limit.lse)
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
    Assert that a result equals the exact one but for the rounding of its dtype.

    Args:
        actual: The result, on any device.
        exact: The oracle's, of the same shape. Infinities have to be equal.
        dtype: The dtype of the computation.
        scale: The largest absolute value among the values (for outputs).
        what: ``"output"`` or ``"lse"``: which tolerance applies, and the first word of a failure.
        scaled_keys: As for `tolerance`.
        byte_weights: As for `tolerance`.

    Raises:
        AssertionError: With the worst element, both its values, and the tolerance; or with the number of elements that
            still hold CANARY.
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
