"""What was agreed on: everything that was requested, and the values that were left open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from attnplug.negotiation.received import (
    are_options,
    check_received,
    is_name,
    is_table,
    is_value_of,
)
from attnplug.request.fields import read_only
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen
class Agreement:
    """
    The settled terms between a host and one candidate.

    Attributes:
        backend: Name of the backend.
        variant: Name of the variant.
        requirements: What was requested; all of it is served.
        block_size: Tokens per KV-cache block; None without a paged cache.
        kv_layout: ``"NHD"`` or ``"HND"``; None without a paged cache.
        kv_cache_dtype: Dtype of the KV cache, canonical.
        cudagraph: The highest graph level that is supported, at least the requested one.
        options: The plugin's own settings, complete.
    """

    backend: str
    variant: str
    requirements: Requirements
    block_size: int | None
    kv_layout: str | None
    kv_cache_dtype: str
    cudagraph: str
    options: Mapping[str, Any] = field(factory=dict, converter=read_only, hash=False)

    @property
    def id(self) -> str:
        """``backend/variant``, the identity of the candidate in every process."""
        return f"{self.backend}/{self.variant}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "backend": self.backend,
            "variant": self.variant,
            "requirements": self.requirements.to_dict(),
            "block_size": self.block_size,
            "kv_layout": self.kv_layout,
            "kv_cache_dtype": self.kv_cache_dtype,
            "cudagraph": self.cudagraph,
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Agreement:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: A value has another type. Loading checks the terms themselves.
            RequirementsError: The requirements are invalid.
        """
        check_received("the agreement", data, _CHECKS)
        return cls(**{**data, "requirements": Requirements.from_dict(data["requirements"])})

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement.from_dict, (self.to_dict(),)  # a read-only view does not pickle


_CHECKS = {
    "backend": is_name,
    "variant": is_name,
    "requirements": is_table,
    "block_size": is_value_of("block_size", optional=True),
    "kv_layout": is_value_of("kv_layout", optional=True),
    "kv_cache_dtype": is_value_of("kv_cache_dtype"),
    "cudagraph": is_value_of("cudagraph"),
    "options": are_options,
}
