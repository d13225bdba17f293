"""What a host hands over in Python: lists of lengths, tensors, batches. Looked at by type alone."""

from __future__ import annotations

import reprlib
from operator import index
from typing import TYPE_CHECKING

from torch import Tensor

from attnplug.errors import BatchError, TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable


def whole_numbers(name: str, given: Iterable[int]) -> list[int]:
    """
    Return lengths as Python numbers.

    Raises:
        BatchError: They are no lengths, or not whole.
    """
    try:
        return list(map(index, given))
    except TypeError:
        raise BatchError(
            f"{name}={reprlib.repr(given)} was given",
            f"{name} is a list with a whole number per request",
            "pass Python ints, one per request",
        ) from None


def check_tensor(name: str, given: object) -> None:
    """
    Check that what should be a tensor is one.

    Raises:
        TensorError: It is something else.
    """
    if not isinstance(given, Tensor):
        raise TensorError(
            f"{name}={reprlib.repr(given)} was given",
            f"{name} is a tensor",
            f"pass torch.tensor({name}, dtype={'torch.int64' if name == 'slot_mapping' else 'torch.int32'})",
        )
