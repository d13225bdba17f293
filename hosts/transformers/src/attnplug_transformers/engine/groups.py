"""The backends of a model: one per group of layers that share it, with the builder that plans for them once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug import Plan, plan
from attnplug.contract import Backend, Layer
from attnplug_transformers.binding import device_of
from attnplug_transformers.engine.layers import PagedLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from attnplug.contract import Limits, MetadataBuilder
    from attnplug.request import BackendNames, Options
    from attnplug_transformers.engine.layers import Learned


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
        learned: Sequence[Learned],
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
            {layer.name: layer.requirements for layer in learned}, device_of(device), backend=backend, options=options
        )
        backends = tuple(group.selection.load() for group in chosen.groups)
        numbers = {name: number for number, group in enumerate(chosen.groups) for name in group.layers}
        layers = tuple(_ready(layer, backends[numbers[layer.name]], numbers[layer.name]) for layer in learned)
        return cls(chosen, backends, layers, chosen.block_size or 1)

    def named(self, model: Any) -> dict[str, PagedLayer]:
        """Return the layers by the names of their modules in the model."""
        names = {module: name for name, module in model.named_modules()}
        return {names[layer.learned.module]: layer for layer in self.layers}

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


def _ready(learned: Learned, backend: Backend, group: int) -> PagedLayer:
    sinks = learned.sinks[0]
    layer = Layer(name=learned.name, scale=learned.scale, sinks=None if sinks is None else sinks.detach())
    return PagedLayer(learned, backend.make_impl(layer), group)
