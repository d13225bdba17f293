"""The variant `torch/sdpa`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract.backend import Backend
from attnplug.contract.dtypes import torch_dtype
from attnplug.torch_backend.builder import SdpaBuilder
from attnplug.torch_backend.impl import SdpaImpl
from attnplug.torch_backend.metadata import TorchMetadata
from attnplug.torch_backend.shape import sizes_on

if TYPE_CHECKING:
    from attnplug.contract.limits import Limits


class SdpaBackend(Backend):
    """Attention on `scaled_dot_product_attention` and the kernels beneath it, over pages that are gathered first."""

    impl_class = SdpaImpl
    builder_class = SdpaBuilder
    metadata_class = TorchMetadata

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the buffers that pages are gathered into: K/V of one group, shared by all layers."""
        asked = self.agreement.requirements
        if not asked.paged:
            return 0
        keys = max(limits.max_seq_len, min(sizes_on(self.device.type).keys, limits.max_num_reqs * limits.max_seq_len))
        width = asked.num_kv_heads * (asked.head_size + (asked.head_size_v or asked.head_size))
        return keys * width * torch_dtype(self.agreement.kv_cache_dtype).itemsize
