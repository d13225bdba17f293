"""The dtypes that requirements and agreements name, as torch has them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
)
"""Every canonical name that is one torch dtype. For others (``int8_k``) the plugin lays out its own cache."""


def torch_dtype(name: str) -> torch.dtype:
    """
    Return the torch dtype of a canonical dtype name.

    Raises:
        PluginContractError: The name stands for more than one tensor format.
    """
    if name not in TORCH_DTYPES:
        raise PluginContractError(
            f"the dtype {name!r} was agreed on, and no torch dtype has that name",
            f"the names that are one torch dtype are {', '.join(TORCH_DTYPES)}",
            "override Backend.cache_tensors (for a cache) or AttentionImpl.output_dtype (for an output)",
        )
    return TORCH_DTYPES[name]
