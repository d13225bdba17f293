"""What an 8-bit cache makes of K/V, written to be checked by reading: the numbers of the dtype are looked up."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Rounding:
    """
    A cache dtype and the scales of a layer.

    Attributes:
        dtype: float8_e4m3fn or float8_e5m2.
        key_scale: float32, ``(1,)`` or ``(num_kv_heads,)``.
        value_scale: The same of values.
    """

    dtype: torch.dtype
    key_scale: Tensor
    value_scale: Tensor

    def cached(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers that the cache holds of rows ``(tokens, num_kv_heads, size)``, in float64."""
        return nearest((rows.float() / scale[:, None]).double(), self.dtype)

    def seen(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Return what attention sees of such rows, in float64."""
        return self.cached(rows, scale) * scale[:, None].double()


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
    numbers, order = (numbers[finite] + 0.0).sort()  # -0 is 0
    is_even = codes[finite][order] % 2 == 0
    flat = values.flatten().nan_to_num(nan=0.0).clamp(numbers[0], numbers[-1])
    above = torch.searchsorted(numbers, flat)
    below = (above - 1).clamp(min=0)
    up, down = (numbers[above] - flat).abs(), (numbers[below] - flat).abs()
    rounded = torch.where((up < down) | ((up == down) & is_even[above]), numbers[above], numbers[below])
    return torch.where(values.isnan(), torch.nan, rounded.view(values.shape))
