"""Turns a batch into metadata: the only place that plans, once per cache group and step."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, final

from attnplug.contract.guards.batch import BatchGuard, Facts
from attnplug.errors import NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from attnplug.contract.backend import Backend
    from attnplug.contract.batch import Batch
    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.state import State

_NO_PLANS: Mapping[Hashable, Any] = MappingProxyType({})


class MetadataBuilder:
    """
    Builds metadata for the layers that share a block table and an agreement. `Backend.make_builder` constructs it.

    A plugin overrides `_build` where its kernels plan, and returns ``self.describe(batch, plans=..., more=...)``; the
    default has no plans. `build` runs while the previous step may still be executing: persistent buffers change in
    stream order only, and nothing in it waits for the device. One builder serves one thread, and one microbatch.

    Attributes:
        takes_slots: Whether `_build` can write into a graph slot's tensors. False refuses a slot.
        backend: The backend.
        agreement: What was negotiated.
        impls: The implementations that this builder serves.
        state: Workspace, limits and ranks.
        plan_groups: The implementations by `plan_key`: one plan each.
    """

    takes_slots: ClassVar[bool] = False

    def __init__(self, backend: Backend, impls: Sequence[AttentionImpl], state: State) -> None:
        self.backend = backend
        self.agreement = backend.agreement
        self.impls = tuple(impls)
        self.state = state
        self.limits = state.limits
        self.parallel = state.parallel
        groups: dict[Hashable, tuple[AttentionImpl, ...]] = {}
        for impl in self.impls:
            groups[impl.plan_key] = (*groups.get(impl.plan_key, ()), impl)
        self.plan_groups: Mapping[Hashable, tuple[AttentionImpl, ...]] = MappingProxyType(groups)
        self._guard = BatchGuard(self.agreement, self.limits, backend.device)

    @final
    def build(self, batch: Batch, *, fast: bool = False, slot: Any = None) -> Metadata:
        """
        Check the batch against the agreement and the limits, then plan.

        Args:
            batch: This step's requests.
            fast: A hint: favour the speed of this build over the speed of the forwards.
            slot: The graph slot of `State` whose tensors are written; None runs eagerly.

        Raises:
            BatchError: Numbers of the batch contradict each other, the agreement or the limits.
            NotNegotiatedError: The batch, or the slot, uses what was not asked for at selection.
            TensorError: A tensor of the batch has the wrong shape, dtype or device.
            CacheError: A slot or a block is outside the cache, given twice, or the null block.
        """
        if slot is not None and (not self.takes_slots or self.agreement.cudagraph == "never"):
            raise NotNegotiatedError(
                "a graph slot was given to build",
                f"{self.agreement.id} builds eagerly here: its builder takes no slots in this agreement",
                "build with slot=None, or select again with the cudagraph level that the batch needs",
            )
        batch.derived[self] = self._guard.check(batch)
        return self._build(batch, fast=fast, slot=slot)

    def _build(self, batch: Batch, *, fast: bool, slot: Any) -> Metadata:
        """Return the metadata of a checked batch. `slot` is None unless `takes_slots`."""
        del fast, slot
        return self.describe(batch)

    def describe(self, batch: Batch, *, plans: Mapping[Hashable, Any] | None = None, **more: Any) -> Metadata:
        """
        Return the backend's metadata for the batch that `build` was given.

        Args:
            batch: The batch, as `_build` got it.
            plans: A plan per plan key.
            more: Fields of the plugin's own Metadata class.

        Raises:
            PluginContractError: The batch is another one.
        """
        facts: Facts | None = batch.derived.get(self)
        if facts is None:
            raise PluginContractError(
                f"{type(self).__name__}.describe was given a batch that was not built",
                "metadata describes the batch that build has checked",
                "pass the batch of _build; keep what is derived from it in fields of a Metadata subclass",
            )
        return self.backend.metadata_class(
            agreement=self.agreement,
            batch=batch,
            num_decodes=facts.num_decodes,
            num_prefills=facts.num_prefills,
            num_decode_tokens=facts.num_decode_tokens,
            num_prefill_tokens=facts.num_prefill_tokens,
            num_key_rows=facts.num_key_rows,
            highest_block=facts.highest_block,
            plans=_NO_PLANS if plans is None else plans,
            **more,
        )
