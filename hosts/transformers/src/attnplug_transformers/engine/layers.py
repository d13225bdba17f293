"""The attention layers of a model: what each requires, the backends that serve them, and their KV caches."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, TypedDict

import torch
from attrs import frozen
from torch import Tensor

from attnplug import Plan, plan
from attnplug.contract import Layer, LoadedBackend
from attnplug.dense import device_of
from attnplug.errors import LimitsError, NotNegotiatedError
from attnplug_transformers.call import tensor_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from attnplug.contract import Attention, KVCache, Limits, StepBuilder
    from attnplug.request import BackendNames, Options, Requirements
    from attnplug_transformers.call import AttentionCall, CallSignature
    from attnplug_transformers.engine.indexer import IndexKey

CPU_BYTES: Final = 2**30
"""Most bytes of all KV caches on a device that does not report its free memory."""


def is_placeholder(found: object, mask: Tensor | None) -> bool:
    """Return whether a mask that came with a call is the step's, or a view of it."""
    if found is mask or not isinstance(found, Tensor) or mask is None:
        return found is mask
    return found.data_ptr() == mask.data_ptr()


class Window(TypedDict):
    """Which blocks later queries attend to, by the arguments of `num_freeable_blocks`."""

    sliding_window: int | None
    attention_chunk: int | None


@frozen(eq=False)
class LayerSpec:
    """
    One attention layer as `inspect_layers` found it: every later call has to be the same.

    Attributes:
        name: The layer's name.
        module: The attention module.
        requirements: What it requires of a backend.
        signature: The signature of its calls.
        scale: Factor of the scores, as the call has it.
        sinks: Its sinks, and the version of that tensor.
        takes_mask: Whether the model passes the step's mask to it, or None.
        alibi_slopes: ``(num_q_heads,)`` float32; None without ALiBi.
        kv_sharing_target: The name of the layer whose KV cache it reads; None with a KV cache for itself.
        k_scale: Scale of the keys in an FP8 KV cache, ``(1,)`` or per KV head; None for 1.
        v_scale: The same for values.
        index_key: The key of the layer's indexer; None without one.
    """

    name: str
    module: nn.Module
    requirements: Requirements
    signature: CallSignature
    scale: float | None
    sinks: tuple[Tensor | None, int]
    takes_mask: bool
    alibi_slopes: Tensor | None = None
    kv_sharing_target: str | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    index_key: IndexKey | None = None

    @property
    def cache_name(self) -> str:
        """The name of the layer whose KV cache it reads, which is its own name in most layers."""
        return self.kv_sharing_target or self.name

    def check(self, call: AttentionCall, mask: Tensor | None) -> None:
        """
        Compare a call with the one that was inspected.

        Raises:
            NotNegotiatedError: It differs.
        """
        if call.signature != self.signature:
            self._refuse(f"the signature {call.signature}", f"the layer was made for {self.signature}")
        if call.scale != self.scale:
            self._refuse(f"scaling {call.scale}", f"the layer was made for {self.scale}")
        if call.sinks is not self.sinks[0] or tensor_version(call.sinks) != self.sinks[1]:
            self._refuse("other sinks (s_aux)", "a backend keeps the sinks that a layer was made with")
        if not is_placeholder(call.mask, mask if self.takes_mask else None):
            self._refuse("another mask", "a step attends as the layer was negotiated")

    def _refuse(self, found: str, expected: str) -> None:
        raise NotNegotiatedError(
            f"{self.name}: the call has {found}",
            f"{expected}, when the engine was made",
            "make a new engine after changing the model",
        )


@frozen(eq=False)
class PagedLayer:
    """
    One attention layer, ready to run.

    Attributes:
        spec: What its calls are compared with.
        impl: Its implementation.
        group: The number of its group.
    """

    spec: LayerSpec
    impl: Attention
    group: int


@frozen(eq=False)
class Groups:
    """
    What `attnplug.plan` decided, loaded: one backend per group of layers, which builds once per step.

    Attributes:
        plan: The decision.
        backends: The backend of each group.
        layers: The layers in the model's order.
        block_size: Tokens per block, common to all.
    """

    plan: Plan
    backends: tuple[LoadedBackend, ...]
    layers: tuple[PagedLayer, ...]
    block_size: int

    @classmethod
    def load(
        cls,
        specs: Sequence[LayerSpec],
        device: torch.device,
        backend: BackendNames | None = None,
        options: Options | None = None,
    ) -> Groups:
        """
        Choose for all layers together, and load each choice once.

        Raises:
            NoBackendError: No backend supports a layer.
            PluginError: The chosen backend does not load.
            NotNegotiatedError: Layers that share a KV cache are served by backends whose KV caches differ.
        """
        requirements = {spec.name: spec.requirements for spec in specs}
        decision = plan(requirements, device_of(device), backend=backend, options=options)
        backends = tuple(group.selection.load() for group in decision.groups)
        numbers = {name: number for number, group in enumerate(decision.groups) for name in group.layers}
        layers = tuple(_make_layer(spec, backends[numbers[spec.name]], numbers[spec.name]) for spec in specs)
        for layer in layers:
            _check_shared_form(layer, backends[layer.group], backends[numbers[layer.spec.cache_name]])
        return cls(decision, backends, layers, decision.block_size or 1)

    def by_module_name(self, model: Any) -> dict[str, PagedLayer]:
        """Return the layers by the names of their modules in the model."""
        names = {module: name for name, module in model.named_modules()}
        return {names[layer.spec.module]: layer for layer in self.layers}

    @property
    def window(self) -> Window:
        """
        The window and the chunk that bound the attention of all layers.

        All layers share the block table: one layer that attends to all tokens keeps all blocks.
        """
        requirements = [layer.spec.requirements for layer in self.layers]
        bounds = {(one.sliding_window, one.attention_chunk) for one in requirements}
        windows = [window for window, chunk in bounds if window is not None and chunk is None]
        if len(windows) == len(bounds):
            return {"sliding_window": max(windows), "attention_chunk": None}
        window, chunk = bounds.pop() if len(bounds) == 1 else (None, None)
        return {"sliding_window": window, "attention_chunk": chunk}

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in the KV caches of all layers that have their own, and in those of indexers."""
        keys = sum(layer.spec.index_key.nbytes for layer in self.layers if layer.spec.index_key is not None)
        return sum(self.backends[layer.group].bytes_per_block for layer in self.owners) + self.block_size * keys

    @property
    def owners(self) -> tuple[PagedLayer, ...]:
        """The layers that have a KV cache for themselves."""
        return tuple(layer for layer in self.layers if layer.spec.kv_sharing_target is None)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of all workspaces."""
        return sum(backend.workspace_bytes(limits) for backend in self._state_owners(limits).values())

    def make_builders(self, limits: Limits) -> tuple[StepBuilder, ...]:
        """Return the builder of each group; those of one backend share a state, and with it a workspace."""
        states = {name: backend.make_state(limits) for name, backend in self._state_owners(limits).items()}
        return tuple(
            backend.make_builder([layer.impl for layer in self.layers if layer.group == number], states[backend.id])
            for number, backend in enumerate(self.backends)
        )

    def _state_owners(self, limits: Limits) -> dict[str, LoadedBackend]:
        """Return by id the backend that needs the largest workspace: its state serves the other groups."""
        ordered = sorted(self.backends, key=lambda backend: backend.workspace_bytes(limits))
        return {backend.id: backend for backend in ordered}


def _make_layer(spec: LayerSpec, backend: LoadedBackend, group: int) -> PagedLayer:
    sinks = spec.sinks[0]
    layer = Layer(
        name=spec.name,
        scale=spec.scale,
        sinks=None if sinks is None else sinks.detach(),
        alibi_slopes=spec.alibi_slopes,
        kv_sharing_target=spec.kv_sharing_target,
        k_scale_tensor=spec.k_scale,
        v_scale_tensor=spec.v_scale,
    )
    return PagedLayer(spec, backend.make_impl(layer), group)


def _check_shared_form(layer: PagedLayer, backend: LoadedBackend, owner: LoadedBackend) -> None:
    """Compare the KV cache that a layer reads with the one that its backend expects."""
    if backend is not owner and _form_of(backend) != _form_of(owner):
        raise NotNegotiatedError(
            f"{layer.spec.name} runs on {backend.id}, and reads the KV cache of {layer.spec.cache_name} on {owner.id}",
            "layers that share a KV cache agree on its form",
            f"pass backend={owner.id!r}, or another one that serves all layers",
        )


def _form_of(backend: LoadedBackend) -> tuple[object, ...]:
    """Return all that a KV cache of a backend is."""
    agreement = backend.agreement
    return backend.cache_tensors(2), agreement.kv_cache_form, agreement.kv_layout


def free_bytes(device: torch.device, fraction: float, run: Callable[[], object]) -> int | None:
    """
    Return the bytes that KV caches and workspaces may take, or None on a device that does not report its memory.

    Args:
        device: The device.
        fraction: The share of the device's memory that may be in use in the end, by other processes too.
        run: Runs the largest step without KV caches; the memory that it takes at its peak stays free.

    Raises:
        LimitsError: The fraction is not above 0 and at most 1.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise LimitsError(
            f"memory_fraction={fraction!r} was given",
            "it is a share of the device's memory, above 0 and at most 1",
            "leave it out for 0.9",
        )
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(fraction * total) - (total - free) - peak


def count_blocks(groups: Groups, limits: Limits, device: torch.device, available: int | None) -> int:
    """
    Return the number of blocks where the caller leaves it open: all that the requests of a step can fill, if they fit.

    Args:
        groups: The backends.
        limits: The largest step.
        device: The device of the KV caches.
        available: The result of `free_bytes`; None is `CPU_BYTES`.

    Raises:
        LimitsError: Fewer than two blocks fit.
    """
    most = limits.max_num_reqs * -(-limits.max_seq_len // groups.block_size) + 1
    room = CPU_BYTES if available is None else available - groups.workspace_bytes(limits)
    fitting = room // groups.bytes_per_block
    if fitting < 2:
        raise LimitsError(
            f"{max(0, room) / 2**20:.0f} MiB of {device} are left for the KV caches",
            f"two blocks, the least, take {2 * groups.bytes_per_block / 2**20:.1f} MiB",
            "pass a larger memory_fraction, or smaller max_num_tokens, max_num_reqs or block_size",
        )
    return min(most, fitting)


def check_memory(groups: Groups, num_blocks: int, device: torch.device) -> None:
    """
    Check, before anything is allocated, that the device could hold so many blocks if nothing else were on it.

    Raises:
        LimitsError: It could not.
    """
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:  # Windows: the allocation fails
        return
    if num_blocks * groups.bytes_per_block > total:
        raise LimitsError(
            f"KV caches of {num_blocks} blocks were requested, {num_blocks * groups.bytes_per_block / 2**30:.2f} GiB",
            f"{device} has {total / 2**30:.2f} GiB of memory in all",
            "pass a smaller num_blocks, or leave it out",
        )


def make_caches(groups: Groups, num_blocks: int, device: torch.device) -> tuple[dict[str, KVCache], dict[int, Tensor]]:
    """
    Return the KV cache of each layer that has its own, by name, and the pages of each indexer's keys, by its number.

    Raises:
        LimitsError: There is not enough memory.
    """
    keys = [layer.spec.index_key for layer in groups.layers if layer.spec.index_key is not None]
    try:
        caches = {
            layer.spec.name: groups.backends[layer.group].make_cache(num_blocks, device, impl=layer.impl)
            for layer in groups.owners
        }
        return caches, {key.layer_idx: key.pages(num_blocks, groups.block_size, device) for key in keys}
    except torch.OutOfMemoryError as error:
        raise LimitsError(
            f"KV caches of {num_blocks} blocks were requested, {num_blocks * groups.bytes_per_block / 2**30:.2f} GiB",
            f"{device} has not enough memory: {error}",
            "pass a smaller num_blocks or memory_fraction",
        ) from error
