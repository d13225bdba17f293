"""The built-in backend: its variants differ in the kernel that attends a tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.backend import Backend
from attnplug.contract.graphs.dummy import dummy_batch
from attnplug.contract.inputs.kv_cache import torch_dtype
from attnplug.contract.inputs.layer import Layer
from attnplug.contract.inputs.limits import Limits
from attnplug.torch_backend.builder import FlexBuilder, TorchBuilder, bytes_per_key, keys_per_gather
from attnplug.torch_backend.impl import TorchImpl
from attnplug.torch_backend.sources import padded_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.request.requirements import Requirements


class TorchBackend(Backend):
    """Attention on torch's own kernels, over pages that are gathered first. The variant `sdpa`."""

    impl_class = TorchImpl
    builder_class = TorchBuilder
    supports_max_num_splits = True  # any bound: no request's keys are cut

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the buffers that pages are gathered into: K/V of one group, shared by all layers."""
        if not self.agreement.requirements.paged:
            return 0
        size = self.agreement.block_size or 1
        longest = -(-padded_keys(limits.max_seq_len) // size) * size  # whole blocks are gathered
        per_gather = min(keys_per_gather(self.agreement, self.device.type), limits.max_num_reqs * longest)
        return max(longest, per_gather) * bytes_per_key(self.agreement)


class FlexBackend(TorchBackend):
    """The same on compiled FlexAttention. The variant `flex`."""

    builder_class = FlexBuilder
    supports_max_num_splits = False

    def warmup(self, shapes: Sequence[GraphShape]) -> None:
        """Compile what batches of these shapes run. Lengths are dynamic: one short and one long query is enough."""
        for shape in shapes:
            run_zeros(self, shape)


def run_zeros(backend: Backend, shape: GraphShape) -> None:
    """Build and run one step of this shape, on a cache of its own that is dropped again."""
    asked = backend.agreement.requirements
    batch = dummy_batch(backend.agreement, shape, backend.device)
    impl = backend.make_impl(_layer(asked, backend.device))
    tokens = batch.num_actual_tokens
    limits = Limits(max_num_reqs=batch.num_reqs, max_num_tokens=tokens, max_seq_len=batch.max_seq_len)
    builder = backend.make_builder([impl], backend.make_state(limits))
    pages = backend.make_cache(2) if asked.paged else None
    query, key, value = (
        torch.zeros(tokens, heads, size, dtype=torch_dtype(asked.dtype), device=backend.device)
        for heads, size in (
            (asked.num_q_heads, asked.head_size),
            (asked.num_kv_heads, asked.head_size),
            (asked.num_kv_heads, impl.head_size_v),
        )
    )
    output = query.new_empty(tokens, impl.output_width)
    impl.forward(query, key, value, pages, builder.build(batch), output)


def _layer(asked: Requirements, device: torch.device) -> Layer:
    """Return a layer with every tensor that was asked for."""
    scales = torch.ones(asked.num_kv_heads, device=device) if asked.per_head_scales else None
    return Layer(
        name="warmup",
        sinks=torch.zeros(asked.num_q_heads, device=device) if asked.sinks else None,
        alibi_slopes=torch.zeros(asked.num_q_heads, device=device) if asked.alibi else None,
        k_scale_tensor=scales,
        v_scale_tensor=scales,
    )
