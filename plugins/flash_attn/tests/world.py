"""The plugin's backend on kernels that any machine runs, agreed on without asking which libraries are here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.negotiation.agreement import Agreement
from attnplug.request.device import Device
from attnplug_flash_attn.backend import FlashAttentionBackend
from plugins.flash_attn.tests.exact_kernels import (
    CumulativeKernels,
    ExactKernels,
    PackedKernels,
    PaddedKernels,
    TiledKernels,
)

if TYPE_CHECKING:
    from attnplug import Requirements

KERNELS: Final = {
    "pages": ExactKernels,
    "cumulative": CumulativeKernels,
    "packed": PackedKernels,
    "padded": PaddedKernels,
    "tiles": TiledKernels,
}


class ExactBackend(FlashAttentionBackend):
    """All of the plugin but a kernel library."""

    kernels: Any = None


def make_backend(requirements: Requirements, reads: str = "pages", cudagraph: str = "never") -> ExactBackend:
    """
    Return a backend.

    Args:
        requirements: With a block size.
        reads: What the kernels take: ``"pages"``, ``"cumulative"`` lengths with pages, keys that are ``"packed"``, or
            pages with zeros for what is ``"padded"`` to the left, or rows by whole ``"tiles"``.
        cudagraph: The agreed graph level.
    """
    agreement = Agreement(
        backend="flash_attn",
        variant="exact",
        requirements=requirements,
        block_size=requirements.block_size,
        kv_layout=requirements.kv_layout or "NHD",
        kv_cache_dtype=requirements.kv_cache_dtype,
        cudagraph=cudagraph,
    )
    backend = ExactBackend(agreement, Device.cpu())
    backend.kernels = KERNELS[reads](agreement)
    return backend
