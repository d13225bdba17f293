"""One backend, as a host has it: where it gets its cache, layers, builders and state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnplug.contract.attention import Attention
from attnplug.contract.calls.block_copy import check_blocks, check_movable, to_pairs
from attnplug.contract.calls.check import check_made
from attnplug.contract.captures import Captures
from attnplug.contract.guards.cache import CacheGuard, checked_specs
from attnplug.contract.guards.layer import complete_layer
from attnplug.contract.guards.memory import check_cache_writable
from attnplug.contract.guards.scales import SCALELESS
from attnplug.contract.inputs.cache_form import allocate_kv
from attnplug.contract.inputs.limits import Parallel, check_limits
from attnplug.contract.step_builder import StepBuilder, check_supports_graphs
from attnplug.contract.vendor import AttentionImpl, Backend, MetadataBuilder, State
from attnplug.errors import CacheError, LayerError, LimitsError, NotNegotiatedError, PluginContractError, shown
from attnplug.request.domains import MOST

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.kv_cache import CacheSpec, CacheTensor, KVCache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.reason import Unverified
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.device import Device


class LoadedBackend:
    """
    A vendor's backend and what core checks around it. `attnplug.load` returns it.

    Args:
        backend: The vendor's backend.
        selection: The decision that it carries out; None where it was constructed by hand.
        kv_cache_forms: The forms of a KV cache that the variant declares, in order of preference.
        record: The file to which the steps of its builders are written; None for none.

    Attributes:
        wrapped: The vendor's backend.
        agreement: What was negotiated.
        device_properties: The device that was selected for: vendor, compute capability, number of multiprocessors.
        selection: The decision.
        kv_cache_forms: The declared forms.
        impl_class: The vendor's class of layers.
    """

    def __init__(
        self,
        backend: Backend,
        selection: Decision | None = None,
        kv_cache_forms: tuple[str, ...] = (),
        record: str | None = None,
    ) -> None:
        check_made(backend, Backend)
        self.wrapped = backend
        self.agreement: Agreement = backend.agreement
        self.device_properties: Device = backend.device_properties
        self.selection: Any = selection
        self.kv_cache_forms = kv_cache_forms
        self.impl_class: type[AttentionImpl] = backend.impl_class
        self._record = record
        self._cache_spec: CacheSpec | None = None
        self._kept_forms: dict[Hashable, dict[int, Any]] = {}

    def __repr__(self) -> str:
        return repr(self.wrapped)

    # --- what a host calls ---

    @property
    def name(self) -> str:
        """The backend's name, such as ``"flash_attn"``."""
        return self.agreement.backend

    @property
    def variant(self) -> str:
        """The variant's name, such as ``"fa3"``."""
        return self.agreement.variant

    @property
    def id(self) -> str:
        """``"backend/variant"``, the same in every process."""
        return self.agreement.id

    @property
    def device(self) -> torch.device:
        """The device type that was selected for."""
        return self.wrapped.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block adds to one layer's cache; 0 without a cache."""
        spec = self._spec()
        stored = () if spec is None else spec.stored.values()
        return sum(one.nbytes // 2 for one in stored if one.block_axis is not None)

    @property
    def supports_max_num_splits(self) -> bool:
        """Whether `Limits.max_num_splits` is kept. Where it is not, limits that name one are refused."""
        return self.wrapped.supports_max_num_splits

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """Describe one layer's KV cache of so many blocks, the null block 0 included; see `Backend.cache_tensors`."""
        return self.wrapped.cache_tensors(num_blocks)

    def workspace_bytes(self, limits: Limits) -> int:
        """
        Return the size of the workspace that batches within these limits need.

        Raises:
            PluginContractError: The plugin's method returns no size.
        """
        found: object = self.wrapped.workspace_bytes(limits)
        if type(found) is int and 0 <= found < 2**63:
            return found
        raise PluginContractError(
            f"{type(self.wrapped).__name__}.workspace_bytes returned {shown(found)}",
            "the size of the workspace in bytes",
            "return an int from 0 on; without the method it is 0",
        )

    def warmup(self, shapes: Sequence[GraphShape]) -> None:
        """Compile and load what the first use of these batch shapes would."""
        self.wrapped.warmup(self, shapes)

    def dummy_batch(self, key: GraphShape) -> Batch:
        """Return a valid batch of this shape that touches nothing but the null block; see `Backend.dummy_batch`."""
        return self.wrapped.dummy_batch(key)

    def swap_blocks(self, src: KVCache, dst: KVCache, src_to_dst: Tensor | Sequence[tuple[int, int]]) -> None:
        """
        Copy whole blocks of one layer from one cache to another, between devices and between forms too.

        Every role that has a block axis moves. All sources are read before any block is written, so that overlapping
        pairs mean what they say.

        Args:
            src: The cache that is read.
            dst: The cache that is written; may be `src`.
            src_to_dst: ``(n, 2)`` pairs of source and destination block.

        Raises:
            CacheError: A block is outside its cache, or is the destination of two sources.
        """
        pairs = to_pairs(src_to_dst)
        self._check_move(src, dst, pairs, first=0)
        self.wrapped.move_blocks(src, dst, pairs)

    def copy_blocks(
        self, caches: Iterable[KVCache], src_to_dsts: Mapping[int, Sequence[int]] | Tensor | Sequence[tuple[int, int]]
    ) -> None:
        """
        Copy whole blocks inside each layer's cache.

        Args:
            caches: One cache per layer.
            src_to_dsts: Destinations of each source, or ``(n, 2)`` pairs; one source may have several destinations.

        Raises:
            CacheError: As for `swap_blocks`; the null block may be neither source nor destination.
        """
        pairs = to_pairs(src_to_dsts)
        layers = list(caches)
        for cache in layers:
            self._check_move(cache, cache, pairs, first=1)
        for cache in layers:
            self.wrapped.move_blocks(cache, cache, pairs)

    def make_cache(
        self, num_blocks: int, device: torch.device | str | None = None, *, impl: Attention | None = None
    ) -> KVCache:
        """
        Return a fresh cache of one layer, in the agreed form.

        Args:
            num_blocks: Blocks, the null block 0 included.
            device: Where it lives; None is the backend's device.
            impl: The layer whose cache it is, which then writes what is its own into it (`AttentionImpl.init_cache`).
                None leaves those tensors at their fill: for a cache that only holds swapped blocks.

        Raises:
            CacheError: The agreement has no cache, or there are too few blocks.
        """
        is_count = type(num_blocks) is int and 2 <= num_blocks <= MOST
        spec = self._spec() if is_count else None
        if spec is None:
            raise CacheError(
                f"a KV cache of {shown(num_blocks)} blocks was requested of {self.id}",
                f"a cache has at least 2 blocks, since no request gets block 0, and at most {MOST}"
                if self.agreement.requirements.paged
                else "paged=False was negotiated",
                "pass free_bytes // (layers * backend.bytes_per_block)"
                if self.agreement.requirements.paged
                else "pass kv_cache=None to forward",
            )
        target = self.device if device is None else torch.device(device)
        further = {role: one for role, one in self.wrapped.cache_tensors(num_blocks).items() if role not in ("k", "v")}
        tensors = {role: one.allocate(target) for role, one in further.items()}
        return self.bind_cache({**allocate_kv(spec, num_blocks, target), **tensors}, impl=impl)

    def bind_cache(
        self, tensors: Mapping[str, Tensor], *, impl: Attention | None = None, null_block: bool = True
    ) -> KVCache:
        """
        Return a cache of one layer over memory that the engine owns. Nothing is copied, and the values stay, but for
        the null block of a layer with a window or chunk whose kernels need it finite: it becomes 0.

        This is where strides are checked, once: `Attention.forward` then only recognizes what was bound.

        Args:
            tensors: A view for each role of `cache_tensors`, of its shape but for the number of blocks. The strides of
                ``"k"`` and ``"v"`` are those of the agreed form and layout; blocks may be further apart, so that
                padding or other layers fit between them: as far for both, unless the form is ``"independent"``.
                `attnplug.contract.split_kv` makes both from one tensor.
            impl: The layer whose cache it is, as for `make_cache`.
            null_block: Whether block 0 is the null block. Where it has keys as any other block, it is not written; no
                table may name a freed block then.

        Raises:
            CacheError: A role is missing or unknown, a shape, dtype or device differs, block counts differ, tensors
                share memory, or strides are not those of the agreed form; the error names the forms whose they are.
        """
        spec = self._spec()
        if spec is None:
            raise CacheError(
                f"a KV cache was given to {self.id}", "paged=False was negotiated", "pass kv_cache=None to forward"
            )
        if impl is not None:
            _check_is_layer(impl, "bind_cache")
        cache = CacheGuard(self.agreement, spec, self.kv_cache_forms).bind(tensors)
        if null_block and self.frees_into_finite_blocks:
            for pages in (cache.k, cache.v):
                pages[0].zero_()
        if impl is not None:
            impl.wrapped.init_cache(cache)
        return cache

    @property
    def frees_into_finite_blocks(self) -> bool:
        """Whether the null block may stand for freed blocks, before a window or chunk, and has to be finite then."""
        requested = self.agreement.requirements
        is_local = requested.sliding_window is not None or requested.attention_chunk is not None
        return is_local and self.impl_class.needs_finite_null_block

    def make_impl(self, layer: Layer) -> Attention:
        """
        Return one layer, which is first completed from the agreement.

        Values of its tensors are read and checked: call it after the weights are loaded.

        Raises:
            NotNegotiatedError: The layer has what was not requested, or lacks what was.
            LayerError: A value of the layer is wrong in itself.
            TensorError: A tensor has the wrong shape, dtype or device.
            PluginContractError: The plugin's implementation is not whole.
        """
        completed = complete_layer(layer, self.agreement, self.device, self.impl_class.static_scales)
        self._check_sink_lse()
        self._check_run_sparse()
        self._check_queries()
        if completed.sinks_with_call:
            self._check_late_parameters(layer)
        # The layer is complete before the plugin sees it, so that no plugin has to resolve defaults.
        impl = self.impl_class(completed, self.wrapped)
        check_made(impl, AttentionImpl)
        if impl.layer is not completed:
            raise PluginContractError(
                f"{type(impl).__name__} was constructed, and does not hold the completed layer",
                "an implementation keeps the layer that it was given",
                "call super().__init__(layer, backend) first, and leave self.layer alone",
            )
        return Attention(impl, self, self._spec())

    def make_state(self, limits: Limits, parallel: Parallel | None = None) -> Captures:
        """
        Return the state that the builders of this backend share.

        Raises:
            LimitsError: The limits contradict the agreement, or name a split-KV limit without support.
        """
        ranks = Parallel() if parallel is None else parallel
        check_limits(limits, ranks, self.agreement, supports_splits=self.supports_max_num_splits)
        state = self.wrapped.state_class(self.wrapped, limits, self.device, ranks)
        check_made(state, State)
        return Captures(state, self, limits, ranks)

    def make_builder(self, impls: Sequence[Attention], state: Captures) -> StepBuilder:
        """
        Return the builder for layers that share a block table.

        Args:
            impls: The layers.
            state: What this backend's `make_state` returned, or that of another agreement of this backend, variant and
                device: builders of several agreements share workspace, graph buffers and limits, and one
                `Captures.begin_forward` builds for all of them.

        Raises:
            LayerError: There are none, or one was not made by this backend's agreement.
            LimitsError: The state is of another backend, its limits contradict this agreement, or graphs hold its
                workspace and this agreement needs a larger one.
            PluginContractError: The plugin's builder is not whole, or supports no graphs though they were negotiated.
        """
        if not impls:
            raise LayerError(
                "a builder for no layers was requested",
                "a builder serves at least one layer",
                "pass the results of make_impl",
            )
        for impl in impls:
            _check_is_layer(impl, "make_builder")
            if not isinstance(impl.wrapped, self.impl_class) or impl.agreement != self.agreement:
                raise LayerError(
                    f"a builder of {self.id} was requested layer {impl.layer.name!r}, made by {impl.agreement.id}",
                    "the layers of a builder share one agreement",
                    "make one builder per backend object: attnplug.plan groups the layers",
                )
        names = [impl.layer.name for impl in impls]
        if len(set(names)) < len(names):
            raise LayerError(
                f"a builder for layers {names} was requested",
                "layer names are unique in a model",
                "name each layer once",
            )
        self._check_state(state)
        state.reserve_workspace(self)
        made = self.wrapped.builder_class(self.wrapped, [impl.wrapped for impl in impls], state.wrapped)
        check_made(made, MetadataBuilder)
        check_supports_graphs(made)
        builder = self._hold(made, impls, state)
        state.join(self.agreement)
        for impl in impls:
            impl.served_by(builder)
        return builder

    # --- machinery ---

    def kept_forms(self, takes: Hashable) -> dict[int, Any]:
        """Return where layers that take and write the same keep the forms of tensors that they have checked."""
        return self._kept_forms.setdefault(takes, {})

    def _hold(self, made: MetadataBuilder, impls: Sequence[Attention], state: Captures) -> StepBuilder:
        if self._record is None:
            return StepBuilder(made, self, impls, state)
        from attnplug.contract.recording import RecordedBuilder, recorder  # noqa: PLC0415 - few processes record

        return RecordedBuilder(made, self, impls, state, recorder(self._record))

    def _spec(self) -> CacheSpec | None:
        """Return what this agreement's KV caches are, the same object each time; None without one."""
        if self._cache_spec is None:
            self._cache_spec = checked_specs(self.cache_tensors(2), self.agreement, type(self.wrapped).__name__)
        return self._cache_spec

    def _check_move(self, src: KVCache, dst: KVCache, pairs: Tensor, first: int) -> None:
        for name, cache, blocks in (("source", src, pairs[:, 0]), ("destination", dst, pairs[:, 1])):
            check_movable(name, cache, self.agreement, self._spec())
            check_blocks(name, blocks, first, cache.num_blocks)
        check_cache_writable(f"of {self.id}", dst)

    def _check_sink_lse(self) -> None:
        requested = self.agreement.requirements
        if requested.sinks and requested.return_lse and self.impl_class.lse_includes_sink is None:
            raise PluginContractError(
                f"{self.impl_class.__name__} serves sinks and LSE, and does not say whether its LSE counts the sink",
                "lse_includes_sink is True or False where both are served: merging counts a sink once",
                f"declare lse_includes_sink on {self.impl_class.__name__}",
            )

    def _check_run_sparse(self) -> None:
        """Refuse a class that serves no selection before its first call does."""
        if self.agreement.requirements.topk is not None and self.impl_class.run_sparse is AttentionImpl.run_sparse:
            raise PluginContractError(
                f"{self.impl_class.__name__} serves topk, and does not override run_sparse",
                "calls of a layer with topk have the slots of selected tokens, which run is not given",
                f"write run_sparse in {self.impl_class.__name__}, or leave topk out of the manifest",
            )

    def _check_queries(self) -> None:
        """Refuse a class that quantizes queries where its manifest says that they are not."""
        kind = self.impl_class
        if not self.agreement.requirements.unquantized_queries or self.agreement.kv_cache_dtype in SCALELESS:
            return
        if "q" in kind.static_scales or kind.query_quantization == "host":
            raise PluginContractError(
                f"{kind.__name__} quantizes queries, and unquantized_queries was agreed",
                f"with kv_cache_dtype={self.agreement.kv_cache_dtype!r} such a variant refuses unquantized_queries",
                "refuse it in the manifest, by a rule",
            )

    def _check_late_parameters(self, layer: Layer) -> None:
        if self.impl_class.parameters_changed is AttentionImpl.parameters_changed:
            raise NotNegotiatedError(
                f"layer {layer.name!r} has sinks_with_call=True",
                f"{self.impl_class.__name__} takes sinks in make_impl only: it does not override parameters_changed",
                "pass Layer(sinks=...), or choose a backend that takes them with the call",
            )

    def _check_state(self, state: Captures) -> None:
        own = isinstance(state, Captures) and isinstance(state.wrapped, self.wrapped.state_class)
        if not own or state.backend.id != self.id or state.device != self.device:
            of = f"a state of {state.backend.id} on {state.device}" if isinstance(state, Captures) else shown(state)
            raise LimitsError(
                f"a builder of {self.id} on {self.device} was given {of}",
                "a state belongs to one backend, variant and device",
                "pass the state that this backend's make_state returned",
            )
        check_limits(state.limits, state.parallel, self.agreement, supports_splits=self.supports_max_num_splits)


def _check_is_layer(impl: object, where: str) -> None:
    if not isinstance(impl, Attention):
        raise LayerError(
            f"{shown(impl)} was given to {where}",
            "a layer is what LoadedBackend.make_impl returned, and no implementation of the plugin",
            "pass the Attention, not its `wrapped`",
        )


class Decision(Protocol):
    """What a loaded backend knows of its selection: the data of an `attnplug.Selection`."""

    @property
    def agreement(self) -> Agreement:
        """What was negotiated."""

    @property
    def device(self) -> Device:
        """The device that was selected for."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdict of every candidate, the chosen one first."""

    @property
    def decided_by(self) -> str:
        """The criterion that ranked the chosen one before the next."""

    @property
    def provenance(self) -> Mapping[str, str]:
        """Where each setting came from."""

    @property
    def distribution(self) -> str:
        """The distribution of the plugin, with its version."""

    @property
    def unverified(self) -> tuple[Unverified, ...]:
        """What was requested and no evidence covers on this device."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, for another process that loads the same decision."""
