"""
transformers' continuous batching (5.23, 5.24) on attnplug, as a host would write it: `generate_batch` on its KV cache.

The manager owns the KV cache: one tensor, in which a block has the pages of all layers, and each page its keys, then
its values. Seen from one layer that is the form ``interleaved``, with the other layers between its blocks, so the pages
are bound where they are. Requests keep the manager's order, and `forward` writes the new K/V.

What the host cannot say, since the library has no public name for it, and what is done instead:

* That a step begins. The call of the first layer is taken for it.
* Block tables: the manager fills them for decodes on CUDA only. They are computed from the indices of KV-cache rows
  that each call has, on the device. So are the slots, since these rows count the other layers too.
* Lengths on the CPU: calls have cumulative sums on the device. ``seq_lens_cpu_kind`` and ``query_lens_cpu_kind`` say
  so, and each build reads them.
* That it reads no mask. Only implementations with "flash" in their name get none, and these are imported by that name.
  The function is registered in place of the manager's own paged one, and does not read the masks that come with it.
* That the backend writes the KV cache. Since 5.24 the model's layer does, and its keys are copies. Meanwhile
  `PagedAttentionCache.update` writes nothing, and leaves the cache in the arguments of the attention function.
* Scopes: the manager runs the model in a thread, which `attnplug.using` around `generate_batch` does not reach. The
  context in which the function was registered is copied, and decisions are made in the copy.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnplug

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from transformers.generation.continuous_batching.cache_allocators import CacheAllocator

    from attnplug.contract import Metadata

NAME = "paged|eager"

_hosts: WeakKeyDictionary[PagedAttentionCache, Host] = WeakKeyDictionary()
_contexts: list[Context] = []  # of `registered`, innermost last


@contextmanager
def registered() -> Iterator[str]:
    """
    Register the attention function, and return its name; the library's own is registered again at the end.

    Backends are chosen in the scope of the caller, whichever thread runs the model.
    """
    own, update = ALL_ATTENTION_FUNCTIONS[NAME], PagedAttentionCache.update
    _contexts.append(copy_context())
    AttentionInterface.register(NAME, attend)
    PagedAttentionCache.update = _keep
    try:
        yield NAME
    finally:
        AttentionInterface.register(NAME, own)
        PagedAttentionCache.update = update
        _contexts.pop()


def _keep(
    cache: PagedAttentionCache, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Leave writing and reading to `attend`, which 5.23 passes the cache itself."""
    del layer_idx  # modules have it
    kwargs["cache"] = cache
    return key_states, value_states


class Host:
    """
    What one KV cache of the manager has: the layers' implementations, their KV caches, and the metadata of a step.

    All layers share a decision, as in models that have one kind of attention.
    """

    def __init__(
        self, cache: PagedAttentionCache, allocator: CacheAllocator, request: attnplug.Requirements, scale: float | None
    ) -> None:
        self.allocator, self.shared = allocator, (request, scale)
        device = cache.cache_tensor.device
        target = attnplug.Device.cpu() if device.type == "cpu" else str(device)
        backend = attnplug.load(request, device=target)
        self._caches, self._impls = {}, {}
        step = allocator.block_physical_stride // allocator.tokens_per_page  # pages of a block, of keys and of values
        for layer in allocator.layer_indices:
            keys, values = (pages[::step] for pages in allocator.get_cache_for_block_table(layer))
            self._impls[layer] = backend.make_impl(attnplug.Layer(name=f"layers.{layer}", scale=scale))
            self._caches[layer] = backend.bind_cache({"k": keys, "v": values})
        blocks = len(keys)
        limits = attnplug.Limits(
            max_num_reqs=cache.max_batch_tokens,
            max_num_tokens=cache.max_batch_tokens,
            max_seq_len=blocks * allocator.tokens_per_page,
            num_blocks=blocks,
        )
        self._builder = backend.make_builder(list(self._impls.values()), backend.make_state(limits))
        self._metadata: Metadata | None = None

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: dict[str, Any]) -> Tensor:
        """Attend to ``(tokens, heads, size)``, and write K/V; return ``(tokens, heads * size)``."""
        if layer == self.allocator.layer_indices[0]:
            self._metadata = self._builder.build(self._batch(call))
        output = query.new_empty(query.shape[0], query.shape[1] * value.shape[2])
        self._impls[layer].forward(query, key, value, self._caches[layer], self._metadata, output)
        return output

    def _batch(self, call: dict[str, Any]) -> attnplug.Batch:
        allocator, kind = self.allocator, self.allocator.layer_type
        size, stride = allocator.tokens_per_page, allocator.block_physical_stride
        written, read = (call[name][allocator.index] for name in ("write_index", "read_index"))
        rows = read if read.numel() else written  # nothing is read in a step of first prefills: all keys are written
        key_starts = call["cu_seq_lens_k"][kind]
        # A row of the KV cache is block * stride + offset. The first row of each page has the block.
        firsts = key_starts[:-1, None] + torch.arange(0, call["max_length_k"][kind], size, device=rows.device)
        blocks = rows[firsts.clamp(max=len(rows) - 1)] // stride  # beyond a request's last page they are not read
        return attnplug.Batch(
            query_start_loc=call["cu_seq_lens_q"],
            query_start_loc_cpu=None,
            seq_lens=key_starts.diff(),
            num_reqs=len(key_starts) - 1,
            num_actual_tokens=len(written),
            max_query_len=call["max_length_q"],
            max_seq_len=call["max_length_k"][kind],
            block_table=blocks.to(torch.int32),
            slot_mapping=written // stride * size + written % stride,
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cache: PagedAttentionCache,
    **call: Any,
) -> tuple[Tensor, None]:
    """Attend: ``(1, heads, tokens, size)``, all requests one after another; return ``(1, tokens, heads, size)``."""
    del attention_mask  # what it says is causal
    allocator = cache.layer_to_allocator[module.layer_idx]
    if not allocator.supports_block_table or call.get("softcap") is not None or call.get("s_aux") is not None:
        raise NotImplementedError("windows, soft caps and sinks are not part of this adapter")
    rows = [one[0].transpose(0, 1) for one in (query, key, value)]
    request = attnplug.Requirements(
        head_size=query.shape[3],
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        dtype=str(query.dtype),
        block_size=allocator.tokens_per_page,
        kv_layout="NHD",
        kv_cache_form="interleaved",
        seq_lens_cpu_kind="absent",
        query_lens_cpu_kind="absent",
    )
    host = _hosts.get(cache)
    if host is None:
        # A copy again: one context cannot be entered by two threads at once.
        host = _hosts[cache] = _contexts[-1].copy().run(Host, cache, allocator, request, scaling)
    if host.shared != (request, scaling):
        raise NotImplementedError("layers of several shapes or scales are not part of this adapter")
    return host.forward(module.layer_idx, *rows, call).unflatten(1, (query.shape[1], -1))[None], None
