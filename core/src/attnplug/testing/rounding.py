"""What rounding to an 8-bit float is, written to be checked by reading: every number of the dtype is compared."""

from __future__ import annotations

import torch
from torch import Tensor


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Return the nearest finite number of a dtype for each value, in float64; NaN stays NaN.

    Of two that are equally near, the one with the even code is taken. What is beyond the largest number becomes it.

    Args:
        values: Of any shape, in float64.
        dtype: float8_e4m3fn or float8_e5m2.
    """
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = codes.view(dtype).double()
    finite = numbers.isfinite()
    # Even codes first: of equal distances the first is taken.
    order = codes.int().remainder(2).argsort(stable=True)
    numbers = numbers[order][finite[order]]
    flat = values.flatten()
    distances = (flat.nan_to_num(nan=0.0).unsqueeze(1) - numbers).abs()
    rounded = numbers[distances.argmin(1)]
    return torch.where(flat.isnan(), torch.nan, rounded).view(values.shape)
