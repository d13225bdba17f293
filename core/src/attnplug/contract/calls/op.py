"""
Attention, and the cache write apart from it, as opaque custom ops: `torch.compile(fullgraph=True)` sees two calls that
write their outputs.

A graph cannot take metadata as an argument: it is another object at each step. So the step's metadata is put in force
around the model, by layer name, and the ops find it there.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import torch

from attnplug.contract.inputs.kv_cache import KVCache, cache_of
from attnplug.errors import BatchError, CacheError, LayerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from attnplug.contract.attention import Attention
    from attnplug.contract.vendor import Metadata

_in_force: ContextVar[Mapping[str, Metadata | None] | None] = ContextVar("attnplug_metadata", default=None)
_layers: WeakValueDictionary[int, Attention] = WeakValueDictionary()
_handles: Final = count(1)


@contextmanager
def forward_context(metadata: Mapping[str, Metadata | None]) -> Iterator[None]:
    """
    Put a step's metadata in force, for `Attention.forward_op`, in this thread or task alone.

    Args:
        metadata: What each layer's builder returned, by layer name; None is a profiling run.
    """
    token = _in_force.set(metadata)
    try:
        yield
    finally:
        _in_force.reset(token)


def metadata_in_force(layer: str) -> Metadata | None:
    """
    Return the step's metadata of a layer.

    Raises:
        BatchError: None is in force.
    """
    metadata = _in_force.get()
    if metadata is None or layer not in metadata:
        raise BatchError(
            f"layer {layer!r} was run without metadata",
            "no forward_context is in force"
            if metadata is None
            else f"the forward_context in force has metadata for {', '.join(map(repr, metadata)) or 'no layer'}",
            "run the model inside attnplug.contract.forward_context({layer name: metadata})",
        )
    return metadata[layer]


def enlist(impl: Attention) -> int:
    """Return the number by which graphs name an implementation, as long as it lives."""
    handle = next(_handles)
    _layers[handle] = impl
    return handle


def cache_arguments(kv_cache: KVCache | None) -> tuple[list[Tensor], int]:
    """
    Return a KV cache as the ops take it: the memories that are written, and its number; 0 where there is no cache.

    Each memory is one tensor: K and V of one pool, as two, would alias.
    """
    if kv_cache is None:
        return [], 0
    if not isinstance(kv_cache, KVCache):
        raise CacheError(
            f"a KV cache of type {type(kv_cache).__name__} was given",
            "it is a KVCache, which was checked once, when it was bound",
            "pass what LoadedBackend.make_cache or LoadedBackend.bind_cache returned",
        )
    return list(kv_cache.storages), kv_cache.handle


def _forward_op(  # noqa: PLR0913, PLR0917 - the arguments of the op
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    memory: list[Tensor],
    kv_cache: int,
    output: Tensor,
    lse: Tensor | None,
    layer: int,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    index_lens: Tensor | None = None,
) -> None:
    impl = _enlisted(layer)
    metadata = metadata_in_force(impl.layer.name)
    cache = cache_of(kv_cache, memory) if kv_cache else None
    selected = {"indices": indices, "index_lens": index_lens}
    impl.forward(query, key, value, cache, metadata, output, lse=lse, sinks=sinks, **selected)


def _write_kv_op(key: Tensor, value: Tensor | None, memory: list[Tensor], kv_cache: int, layer: int) -> None:
    impl = _enlisted(layer)
    metadata = metadata_in_force(impl.layer.name)
    slots = None if metadata is None else metadata.batch.slot_mapping
    if metadata is None or slots is None:
        return
    rows = _host_rows(impl, metadata, slots.shape[0])
    cache = cache_of(kv_cache, memory) if kv_cache else None
    impl.write_kv(key[rows], None if value is None else value[rows], cache, slots[rows])


def _host_rows(impl: Attention, metadata: Metadata, count: int) -> slice:
    """The rows that the host writes: those of the phases that `host_writes` names, as far as there are slots."""
    if impl.host_writes == {"prefill"} and impl.forward_writes:
        return slice(metadata.num_decode_tokens, count)
    if impl.host_writes == {"decode"} and impl.forward_writes:
        return slice(0, metadata.num_decode_tokens)
    return slice(0, count)


def _enlisted(layer: int) -> Attention:
    impl = _layers.get(layer)
    if impl is None:
        raise LayerError(
            f"layer number {layer} was run by a compiled graph",
            "its implementation has been garbage-collected",
            "keep the implementations as long as the graphs, and compile again for new ones",
        )
    return impl


def _fake(*arguments: Any) -> None:
    """Return nothing, as the op does; the schema names what is written."""
    del arguments


_library: Final[Any] = torch.library.Library("attnplug", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "forward(Tensor query, Tensor? key, Tensor? value, Tensor(a!)[] memory, int kv_cache, Tensor(b!) output, "
    "Tensor(c!)? lse, int layer, Tensor? sinks=None, Tensor? indices=None, Tensor? index_lens=None) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("forward", _forward_op, "CompositeExplicitAutograd")
torch.library.register_fake("attnplug::forward", _fake, lib=_library)
_library.define(
    "write_kv(Tensor key, Tensor? value, Tensor(a!)[] memory, int kv_cache, int layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("write_kv", _write_kv_op, "CompositeExplicitAutograd")
torch.library.register_fake("attnplug::write_kv", _fake, lib=_library)
