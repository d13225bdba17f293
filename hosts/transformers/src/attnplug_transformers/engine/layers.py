"""The attention layers of a running model: what each was negotiated as, and its calls held against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug import Plan, plan
from attnplug.contract import Backend, Layer
from attnplug.errors import LimitsError, NotNegotiatedError
from attnplug_transformers.binding import device_of
from attnplug_transformers.call import tensor_version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from attnplug.contract import AttentionImpl, Cache, Limits, MetadataBuilder
    from attnplug.request import BackendNames, Options, Requirements
    from attnplug_transformers.call import CallSignature
    from attnplug_transformers.engine.model_attention import AttentionCall


@frozen(eq=False)
class LayerSpec:
    """
    One attention module, as a trial run has met it.

    Attributes:
        name: The layer's name.
        module: The module.
        requirements: What it asks of a backend.
        call: The facts of its calls.
        scale: Factor of the scores, as the call has it.
        sinks: Its sinks, and that tensor's version.
        takes_mask: Whether the model hands the step's mask to it, or none.
    """

    name: str
    module: nn.Module
    requirements: Requirements
    call: CallSignature
    scale: float | None
    sinks: tuple[Tensor | None, int]
    takes_mask: bool

    def check(self, asked: AttentionCall, mask: Tensor) -> None:
        """
        Hold a call against what was spec.

        Raises:
            NotNegotiatedError: It brings something else.
        """
        self._compare("the facts", asked.call, self.call)
        self._compare("scaling", asked.scale, self.scale)
        if asked.sinks is not self.sinks[0] or tensor_version(asked.sinks) != self.sinks[1]:
            self._refuse("other sinks (s_aux)", "a backend keeps the sinks that a layer was made with")
        if asked.mask is not (mask if self.takes_mask else None):
            self._refuse("a mask of its own", "a step attends as the layer was negotiated")

    def _compare(self, what: str, brought: object, spec: object) -> None:
        if brought != spec:
            self._refuse(f"{what} {brought}", f"the layer was made for {spec}")

    def _refuse(self, brought: str, expected: str) -> None:
        raise NotNegotiatedError(
            f"{self.name}: the call brings {brought}",
            f"{expected}, when the engine was made",
            "make a new engine after changing the model",
        )


@frozen(eq=False)
class PagedLayer:
    """
    One attention layer, ready to run.

    Attributes:
        spec: What its calls are held against.
        impl: Its implementation.
        group: The number of its group.
    """

    spec: LayerSpec
    impl: AttentionImpl
    group: int


@frozen(eq=False)
class Groups:
    """
    What `attnplug.plan` decided, loaded.

    Attributes:
        plan: The decision.
        backends: The backend of each group.
        layers: The layers in the model's order; each knows the number of its group.
        block_size: Tokens per block, common to all.
    """

    plan: Plan
    backends: tuple[Backend, ...]
    layers: tuple[PagedLayer, ...]
    block_size: int

    @classmethod
    def of(
        cls,
        spec: Sequence[LayerSpec],
        device: torch.device,
        backend: BackendNames | None = None,
        options: Options | None = None,
    ) -> Groups:
        """
        Choose for all layers together, and load each choice once.

        Raises:
            NoBackendError: Nothing can serve a layer.
            PluginError: What was chosen does not load.
        """
        chosen = plan(
            {layer.name: layer.requirements for layer in spec}, device_of(device), backend=backend, options=options
        )
        backends = tuple(group.selection.load() for group in chosen.groups)
        numbers = {name: number for number, group in enumerate(chosen.groups) for name in group.layers}
        layers = tuple(_ready(layer, backends[numbers[layer.name]], numbers[layer.name]) for layer in spec)
        return cls(chosen, backends, layers, chosen.block_size or 1)

    def named(self, model: Any) -> dict[str, PagedLayer]:
        """Return the layers by the names of their modules in the model."""
        names = {module: name for name, module in model.named_modules()}
        return {names[layer.spec.module]: layer for layer in self.layers}

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in the caches of all layers."""
        return sum(self.backends[layer.group].bytes_per_block for layer in self.layers)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of all workspaces."""
        return sum(backend.workspace_bytes(limits) for backend in self._owners(limits).values())

    def make_builders(self, limits: Limits) -> tuple[MetadataBuilder, ...]:
        """Return the builder of each group; those of one backend share a state, and with it a workspace."""
        states = {name: backend.make_state(limits) for name, backend in self._owners(limits).items()}
        return tuple(
            backend.make_builder([layer.impl for layer in self.layers if layer.group == number], states[backend.id])
            for number, backend in enumerate(self.backends)
        )

    def _owners(self, limits: Limits) -> dict[str, Backend]:
        """Return by id the backend that needs the largest workspace: its state serves the others."""
        ordered = sorted(self.backends, key=lambda backend: backend.workspace_bytes(limits))
        return {backend.id: backend for backend in ordered}


def _ready(spec: LayerSpec, backend: Backend, group: int) -> PagedLayer:
    sinks = spec.sinks[0]
    layer = Layer(name=spec.name, scale=spec.scale, sinks=None if sinks is None else sinks.detach())
    return PagedLayer(spec, backend.make_impl(layer), group)


CPU_BYTES: Final = 2**30
"""Most bytes of all caches on a device that does not say how much memory it has free."""


def make_caches(groups: Groups, num_blocks: int, device: torch.device) -> dict[str, Cache]:
    """
    Return the cache of each layer, by name.

    Raises:
        LimitsError: There is not enough memory.
    """
    try:
        return {
            layer.spec.name: groups.backends[layer.group].make_cache(num_blocks, device, impl=layer.impl)
            for layer in groups.layers
        }
    except torch.OutOfMemoryError as error:
        raise LimitsError(
            f"caches of {num_blocks} blocks were asked for, {num_blocks * groups.bytes_per_block / 2**30:.2f} GiB",
            f"{device} has not enough memory: {error}",
            "pass a smaller num_blocks or memory_fraction",
        ) from error


def count_blocks(groups: Groups, limits: Limits, device: torch.device, free_bytes: int | None) -> int:
    """
    Return how many blocks the caches get where the caller names no number.

    As many as all requests of the largest step may need, and the null block; fewer where memory ends before: on CUDA
    what is free, elsewhere `CPU_BYTES`.

    Args:
        groups: The backends.
        limits: The largest step.
        device: Where the caches live.
        free_bytes: Bytes that caches and workspaces may take; None where the device does not say.

    Raises:
        LimitsError: Not even two blocks fit.
    """
    most = limits.max_num_reqs * -(-limits.max_seq_len // groups.block_size) + 1
    room = CPU_BYTES if free_bytes is None else free_bytes - groups.workspace_bytes(limits)
    fitting = room // groups.bytes_per_block
    if fitting < 2:
        raise LimitsError(
            f"{max(0, room) / 2**20:.0f} MiB of {device} are left for the caches",
            f"two blocks, the least, take {2 * groups.bytes_per_block / 2**20:.1f} MiB",
            "pass a larger memory_fraction, or smaller max_num_tokens, max_num_reqs or block_size",
        )
    return min(most, fitting)


def free_bytes(device: torch.device, fraction: float, run: Callable[[], object]) -> int | None:
    """
    Return the bytes that may still be taken, or None on a device that does not say.

    Args:
        device: The device.
        fraction: The share of the whole device that may be in use when all is taken, other processes included.
        run: The largest step that there will be, without caches; what it needs on top of what is in use is kept free.

    Raises:
        LimitsError: The fraction is none.
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
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(fraction * total) - (total - free) - needed
