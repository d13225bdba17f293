"""The tolerances of results, by dtype, with the reason for each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug_kit.oracle.scene import CANARY

if TYPE_CHECKING:
    from attnplug_kit.oracle.scene import Scene


class DifferenceError(AssertionError):
    """
    Elements of a result differ from the oracle's.

    Attributes:
        rows: ``(tokens,)`` bool, the rows in which some do.
    """

    def __init__(self, message: str, rows: Tensor) -> None:
        super().__init__(message)
        self.rows = rows


@frozen
class Tolerance:
    """
    The largest error that rounding explains.

    Attributes:
        atol: Per unit of the largest value: an output is a weighted mean of values. It is for results whose spread is
            not known; it grows above the result itself where a thousand keys have similar weights.
        rtol: Relative to the exact result.
        lse: Of the LSE, absolute and relative. The LSE is a float32 sum in every dtype, of scores that are rounded.
        spread: Per unit of the spread of each element, see `OracleResult`.
        peak: Per unit of its peak.
    """

    atol: float
    rtol: float
    lse: float
    spread: float
    peak: float = 0.0


# float32: sums of a few thousand products of eps 6e-8, in any order.
# Half precision: the output is rounded once (half an eps), and kernels round the softmax weights to the dtype before
# the PV matmul (another half eps of each, plus some of its sum). The oracle reads the same rounded queries and keys.
# Some kernels round the query once more after scaling it, which changes a score, and with it the LSE, by half an eps.
# Both errors of the weights are independent from key to key. Rounding has a standard deviation of 0.4 half eps. So the
# output has a standard deviation of 0.4 half eps times its spread; with a rounded query, of up to 2 half eps if scores
# have a standard deviation of 4. The tolerance is 16 half eps: 40 and 8 standard deviations.
_TOLERANCES: Final = {
    torch.float32: Tolerance(atol=2e-5, rtol=2e-5, lse=2e-5, spread=2e-5),
    torch.bfloat16: Tolerance(atol=2**-7, rtol=2**-7, lse=2e-2, spread=2**-5),
    torch.float16: Tolerance(atol=2**-10, rtol=2**-10, lse=4e-3, spread=2**-7),
}

# float16 has no weights below 2^-25 of the largest, and float32 sums lose as much, whatever the spread.
_FLOOR: Final = 2**-20

# Scores around 100 have 7 bits fewer behind the point.
_SHIFTED: Final = 8.0

# The mean error of a whole result, as a part of its mean tolerance. Rounding has less: 0.01 to 0.06 in half
# precision. Triton's interpreter truncates to bfloat16 instead, which doubles the mean error: up to 0.13.
_MEAN: Final = 0.125
_MEAN_TRUNCATED: Final = 0.14

# Keys of an FP8 cache that were multiplied by their scale are rounded to the dtype once more: half an eps in each
# element of a key, which changes a score several times as much as rounding the score would.
_SCALED_KEYS: Final = 4

# Kernels with an FP8 cache may round the softmax weights to its dtype: by half an eps of 2^-4 for e4m3, of which the
# standard deviation is 0.4. Four half eps are 10 standard deviations.
_FP8_WEIGHTS: Final = 2**-2

# Kernels with int8 values may round the softmax weights to int8 too: each weight changes by at most half of 1/127 of
# the largest, and the sum of all weights is at least the largest. This is four times as much: 7 standard deviations.
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
        atol, rtol = limit.atol + _INT8_WEIGHTS, limit.rtol + _INT8_WEIGHTS
        return Tolerance(atol, rtol, limit.lse, limit.spread, peak=_INT8_WEIGHTS)
    if not scaled_keys or dtype == torch.float32:
        return limit
    atol, rtol, lse = (_SCALED_KEYS * part for part in (limit.atol, limit.rtol, limit.lse))
    return Tolerance(atol, rtol, lse, _FP8_WEIGHTS)


def assert_close(
    actual: Tensor,
    exact: Tensor,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    what: str = "output",
    scaled_keys: bool = False,
    byte_weights: bool = False,
    spread: tuple[Tensor, Tensor] | None = None,
) -> None:
    """
    Assert that a result equals the exact one but for the rounding of its dtype: each element, and their mean.

    Args:
        actual: The result, on any device.
        exact: The oracle's, of the same shape. Infinities have to be equal.
        dtype: The dtype of the computation.
        scale: The largest absolute value among the values (for outputs).
        what: ``"output"`` or ``"lse"``: which tolerance applies, and the first word of a failure.
        scaled_keys: As for `tolerance`.
        byte_weights: As for `tolerance`.
        spread: Spread and peak of each element, as the oracle has them; None if they are not known. The absolute
            tolerance is relative to `scale` then, and the mean is not compared.

    Raises:
        AssertionError: With the worst element, both its values, and the tolerance; or with the mean error; or with the
            number of elements that still hold CANARY.
    """
    limit = tolerance(dtype, scaled_keys=scaled_keys, byte_weights=byte_weights)
    got = actual.detach().cpu().double()
    if got.shape != exact.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    allowed = _allowed(limit, exact, what, scale, spread)
    error = torch.where(got == exact, 0.0, (got - exact).abs())  # equal infinities differ by NaN
    wrong = ~(error <= allowed)
    if not bool(wrong.any()):
        if what == "lse" or spread is not None:
            _check_mean(error, allowed, what, dtype)
        return
    unwritten = wrong & (got == CANARY)
    if bool(unwritten.any()):
        place = tuple(unwritten.nonzero()[0].tolist())
        raise AssertionError(
            f"{what} was not written: {int(unwritten.sum())} of {wrong.numel()} elements, {place} the first, hold "
            f"{CANARY:.0f} as before the call"
        )
    error = error.masked_fill(~wrong, -1.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = torch.unravel_index(error.argmax(), error.shape)
    place = tuple(int(index) for index in worst)
    poison = "; NaN is in every slot, row and byte that the call may not read" if got[worst].isnan() else ""
    raise DifferenceError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; at {place} {float(got[worst])!r}, "
        f"exact {float(exact[worst])!r} (tolerance {float(allowed[worst]):.1e}, {dtype}){poison}",
        wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong,
    )


def assert_output(actual: Tensor, scene: Scene, *, rows: slice = slice(None), wider: float = 1.0) -> None:
    """
    Assert that an output equals the oracle's of a scene, each element within the tolerance of its spread.

    Args:
        actual: ``(rows, num_q_heads, head_size_v)``, on any device.
        scene: The scene.
        rows: The rows of the batch that `actual` has.
        wider: Factor of the spread, for results that were merged of several.

    Raises:
        AssertionError: As of `assert_close`.
    """
    exact = scene.expected()
    if scene.case.score_shift and actual.dtype == torch.float32:
        wider *= _SHIFTED  # the shift takes bits of the scores
    assert_close(
        actual,
        exact.output[rows],
        dtype=actual.dtype,
        scale=scene.largest_value,
        scaled_keys=scene.rounding is not None,
        byte_weights=scene.has_byte_weights,
        spread=(wider * exact.spread[rows], wider * exact.peak[rows]),
    )


def _allowed(limit: Tolerance, exact: Tensor, what: str, scale: float, spread: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the largest error of each element."""
    size = exact.abs().nan_to_num(posinf=0.0)
    if what == "lse":
        return limit.lse + limit.lse * size
    if spread is None:
        return limit.atol * scale + limit.rtol * size
    return limit.spread * spread[0] + limit.peak * spread[1] + limit.rtol * size + _FLOOR * scale


def _check_mean(error: Tensor, allowed: Tensor, what: str, dtype: torch.dtype) -> None:
    """Require that errors are small on the whole: rounding goes both ways, and rarely reaches its limit."""
    truncates = dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"
    limit = (_MEAN_TRUNCATED if truncates else _MEAN) * float(allowed.mean())
    if error.numel() and float(error.mean()) > limit:
        raise AssertionError(
            f"{what}: all {error.numel()} elements are within the tolerance, and differ by {float(error.mean()):.1e} "
            f"in the mean: more than rounding does (tolerance {limit:.1e}, {dtype})"
        )
