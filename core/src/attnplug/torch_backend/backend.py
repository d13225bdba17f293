"""The built-in backend: its variants differ in the kernel that computes a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract.calls.warm_up import warm_up
from attnplug.contract.vendor import Backend
from attnplug.torch_backend.builder import FlexBuilder, TorchBuilder, bytes_per_key, keys_per_gather
from attnplug.torch_backend.impl import TorchImpl
from attnplug.torch_backend.sources import padded_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.limits import Limits
    from attnplug.contract.loaded import LoadedBackend


class TorchBackend(Backend):
    """The variant `sdpa`: attention by torch's own kernels, over pages that are gathered first."""

    impl_class = TorchImpl
    builder_class = TorchBuilder
    supports_max_num_splits = True  # any limit: no request's keys are split

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the buffers that pages are gathered into: K/V of one group, shared by all layers."""
        requested = self.agreement.requirements
        if not requested.paged or requested.topk is not None:
            return 0
        size = self.agreement.block_size or 1
        longest = -(-padded_keys(limits.max_seq_len) // size) * size  # whole blocks are gathered
        at_once = min(keys_per_gather(self.agreement, self.device.type), limits.max_num_reqs * longest)
        return max(longest, at_once) * bytes_per_key(self.agreement)


class FlexBackend(TorchBackend):
    """The variant `flex`: the same by compiled FlexAttention."""

    builder_class = FlexBuilder
    supports_max_num_splits = False

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Compile what batches of these shapes run. Lengths are dynamic: one short and one long query are enough."""
        warm_up(loaded, [self.dummy_batch(shape) for shape in shapes])
