"""The backend of levels 1 and 2, int8 attention."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from attnplug.contract import Backend, CacheTensor, torch_dtype
from attnplug_int8_ixformer.builder import Int8Builder, Int8Metadata
from attnplug_int8_ixformer.impl import Int8Impl
from attnplug_int8_ixformer.provider import provider_of
from attnplug_int8_ixformer.warmup import run_warmup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug import Agreement, Device
    from attnplug.contract import GraphShape, Limits, LoadedBackend


class Int8Backend(Backend):
    """
    Attention over int8 queries and keys, and at level 1 int8 values.

    Attributes:
        provider: The kernels. Its library is imported here, so that a broken one is reported when the backend loads.
    """

    impl_class = Int8Impl
    builder_class = Int8Builder
    metadata_class = Int8Metadata

    def __init__(self, agreement: Agreement, device: Device) -> None:
        super().__init__(agreement, device)
        self.provider = provider_of(self)

    @property
    def supports_max_num_splits(self) -> bool:
        """Whether the provider supports it."""
        return self.provider.supports_max_num_splits

    @property
    def level(self) -> int:
        """The level: 1 or 2."""
        return 1 if self.agreement.kv_cache_dtype == "int8" else 2

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """
        Return the tensors of one layer's KV cache.

        Keys are int8; values are int8 at level 1, and of the layer's dtype at level 2. ``"k_scale"`` has a block axis;
        ``"v_scale"``, at level 1, has none, and is NaN until it is loaded, so that outputs without calibration are NaN.
        """
        requested, size = self.agreement.requirements, self.agreement.block_size or 1
        heads, gapless = requested.num_kv_heads, self.provider.contiguous_blocks
        shape, order = (num_blocks, size, heads, requested.head_size), (0, 2, 1, 3)
        keys = CacheTensor(shape, torch.int8, 0, order, contiguous_blocks=gapless)
        key_scales = CacheTensor((num_blocks, heads, size), torch.float32, 0, contiguous_blocks=gapless)
        if self.level == 2:
            return {"k": keys, "v": evolve(keys, dtype=torch_dtype(requested.dtype)), "k_scale": key_scales}
        value_scales = CacheTensor((heads, requested.head_size), torch.float32, None, fill=nan)
        return {"k": keys, "v": keys, "k_scale": key_scales, "v_scale": value_scales}

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes that the provider needs."""
        return self.provider.workspace_bytes(limits)

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Compile the kernels by a tiny step of each kind."""
        if shapes:
            run_warmup(self, loaded)
