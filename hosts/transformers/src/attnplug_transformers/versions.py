"""Whether a tensor was written again since it was looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def version_of(tensor: Tensor | None) -> int:
    """Count of in-place changes: weights that are loaded again keep their tensor. Inference tensors do not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it
