"""Checks the tensors of one call: attributes alone, in a few microseconds, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from attrs import frozen
from torch import is_grad_enabled, is_inference_mode_enabled

from attnplug.contract.guards._format import describe, dtype_name, duplicate_of, refuse_slot_of_two
from attnplug.contract.guards.cache import refuse_cache
from attnplug.contract.guards.memory import (
    are_apart,
    check_cache_writable,
    check_writable,
    has_apart_rows,
    overlaps,
    storage_span,
)
from attnplug.contract.inputs.exact import extremes
from attnplug.contract.inputs.kv_cache import TORCH_DTYPES, KVCache
from attnplug.errors import BatchError, CacheError, NotNegotiatedError, TensorError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.kv_cache import CacheSpec
    from attnplug.contract.inputs.layer import Layer
    from attnplug.negotiation.agreement import Agreement


class StepMetadata(Protocol):
    """What a call reads of `attnplug.contract.Metadata`."""

    @property
    def agreement(self) -> Agreement:
        """What was negotiated."""

    @property
    def batch(self) -> Batch:
        """The batch of the step."""

    @property
    def graph(self) -> Any:
        """The graph buffers that it reads; None runs eagerly."""

    @property
    def num_key_rows(self) -> int:
        """K/V rows that the call has at least."""

    @property
    def highest_block(self) -> int:
        """An upper bound of the block numbers in use."""


@frozen(kw_only=True)
class CallForm:
    """
    What one implementation takes and writes.

    Attributes:
        query_dtype: Dtype of the queries.
        output_dtype: Dtype of the output.
        output_width: Elements of one output row.
        host_writes: Whether the host writes the KV cache in some phase.
        forward_writes: Whether forward does.
        cache: What the layer's KV cache is; None without one.
        metadata_class: The class of the backend's metadata.
    """

    query_dtype: torch.dtype
    output_dtype: torch.dtype
    output_width: int
    host_writes: bool
    forward_writes: bool
    cache: CacheSpec | None
    metadata_class: type[Any]


class ForwardGuard:
    """Checks the calls of one implementation."""

    def __init__(self, layer: Layer, form: CallForm, agreement: Agreement, device: torch.device) -> None:
        requested = agreement.requirements
        head_size, kv_heads = requested.head_size, requested.num_kv_heads
        self._name = layer.name
        self._agreement = agreement
        self._metadata_class = form.metadata_class
        self._device_type = device.type
        self._device: torch.device | None = None
        self._dtype: torch.dtype = TORCH_DTYPES[requested.dtype]
        self._query_dtype = form.query_dtype
        self._output_dtype = form.output_dtype
        self._output_width = form.output_width
        self._num_q_heads = requested.num_q_heads
        self._query_heads = (requested.num_q_heads, head_size)
        self._key_heads = (kv_heads, head_size)
        self._value_heads = (kv_heads, head_size if requested.head_size_v is None else requested.head_size_v)
        self._paged = bool(requested.paged)
        self._shares = layer.kv_sharing_target is not None
        # Such a call writes nothing, whatever slots its batch has.
        self._may_leave_slots = self._shares or requested.kv_in_cache
        self._may_lack_keys = self._may_leave_slots or (self._paged and requested.attn_type == "encoder_decoder")
        self._return_lse = requested.return_lse
        self._lse_strides = (requested.num_q_heads, 1)
        self._cache_spec = form.cache
        self._host_writes = form.host_writes
        self._writes = form.forward_writes
        self._apart: tuple[Any, ...] | None = None
        self._write_apart: tuple[Any, ...] | None = None

    def check_call(  # noqa: C901 - the hot path: a call of another function costs as much as two comparisons
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        metadata: StepMetadata | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> bool:
        """
        Whether the call is a profiling run.

        Raises:
            ContractError: A tensor does not fit; see `Attention.forward`.
        """
        tokens = self._check_rows("query", query, self._query_heads, self._query_dtype)
        device = query.device
        if device != self._device:
            self._check_device("query", query)
            self._device = device
        strides = output.stride()
        if (
            output.shape != (tokens, self._output_width)
            or output.dtype is not self._output_dtype
            or output.device != device
            or strides[1] != 1
            or (strides[0] < self._output_width and tokens > 1)
        ):
            self._refuse("output", output, (tokens, self._output_width), self._output_dtype, device)
        if lse is not None:
            self._check_lse(lse, tokens, device)
        keys = self._check_pair(key, value, device)
        # Inference mode records no gradient, and inference tensors are written in it alone.
        if not is_inference_mode_enabled():
            if is_grad_enabled():
                self._check_gradients(query, key, value, output)
            if output.is_inference():
                check_writable(self._name, "output", output)
        if metadata is None:
            return True
        # What holds for nearly every call is compared here. Only where it does not, it is checked in detail.
        if (
            type(metadata) is not self._metadata_class
            or metadata.agreement is not self._agreement
            or metadata.graph is not None
            or tokens < metadata.batch.num_actual_tokens
            or keys is None
            or keys < metadata.num_key_rows
            or (self._may_leave_slots and metadata.batch.slot_mapping is None)
        ):
            self._check_metadata(metadata, tokens, keys)
        if (
            type(kv_cache) is not KVCache
            or kv_cache.spec is not self._cache_spec
            or kv_cache.num_blocks <= metadata.highest_block
            or kv_cache.device != device
        ):
            self._check_cache(kv_cache, metadata, device)
        places = (
            output.untyped_storage().data_ptr(),
            query.untyped_storage().data_ptr(),
            None if key is None else key.untyped_storage().data_ptr(),
            None if value is None else value.untyped_storage().data_ptr(),
            None if lse is None else lse.untyped_storage().data_ptr(),
            None if kv_cache is None else kv_cache.places,
        )
        if places != self._apart:
            self._check_memory(places, query, key, value, kv_cache, output, lse)
        if kv_cache is not None and (kv_cache.is_inference or kv_cache.requires_grad):
            check_cache_writable(self._name, kv_cache)
        return False

    def check_write(self, key: Tensor, value: Tensor, kv_cache: KVCache | None, slot_mapping: Tensor) -> bool:
        """
        Check a cache write apart from forward, and return whether there is a cache: a profiling run has none.

        Raises:
            ContractError: See `Attention.write_kv`.
        """
        if not self._host_writes:
            raise CacheError(
                f"write_kv was called for layer {self._name!r}",
                f"in {self._agreement.id} forward writes this layer's cache, or nobody does: nothing is written twice",
                "call it where impl.host_writes names a phase; Layer(cache_write='host') requests it",
            )
        if key is None or value is None:
            raise TensorError(
                f"write_kv was called for layer {self._name!r} without K/V",
                "it writes the given K/V",
                "pass key and value",
            )
        self._check_device("key", key)
        rows = self._check_pair(key, value, key.device) or 0
        device = key.device
        if (
            slot_mapping.ndim != 1
            or slot_mapping.shape[0] > rows
            or slot_mapping.dtype != torch.int64
            or slot_mapping.device != device
        ):
            self._refuse("slot_mapping", slot_mapping, ("up to", rows), torch.int64, device)
        if kv_cache is None:
            return False
        self._check_bound(kv_cache, device)
        for name, tensor in (("key", key), ("value", value)):
            if tensor.requires_grad and torch.is_grad_enabled():
                check_writable(self._name, name, tensor)
        check_cache_writable(self._name, kv_cache)
        places = (key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr(), kv_cache.places)
        if places != self._write_apart:
            inputs, caches = (("key", key), ("value", value)), kv_cache.tensors.values()
            pairs = [("the KV cache", cache, *other) for cache in caches for other in inputs]
            self._write_apart = places if are_apart(self._name, pairs) else None
        if slot_mapping.is_cpu and slot_mapping.shape[0]:
            self._check_slots(slot_mapping, kv_cache.num_blocks)
        return True

    def _check_memory(
        self,
        places: tuple[Any, ...],
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Check that what is written shares no memory with what is in use meanwhile."""
        # Where not even the storages do, their places are kept: the next call with tensors of the same ones is as
        # right.
        caches = () if kv_cache is None else tuple(kv_cache.tensors.values())
        if self._are_storages_apart([one for one in (query, key, value) if one is not None], caches, output, lse):
            self._apart = places
            return
        inputs = [(n, t) for n, t in (("query", query), ("key", key), ("value", value)) if t is not None]
        others = [*inputs, *(("the KV cache", cache) for cache in caches)]
        pairs = [("output", output, *other) for other in others]
        if lse is not None:
            pairs += [("lse", lse, *other) for other in (("output", output), *others)]
        if self._writes:
            pairs += [("the KV cache", cache, *other) for cache in caches for other in inputs]
        self._apart = places if are_apart(self._name, pairs) else None

    def _are_storages_apart(
        self, inputs: list[Tensor], caches: tuple[Tensor, ...], output: Tensor, lse: Tensor | None
    ) -> bool:
        """Whether what is written shares no storage: a host that allocates an output for each call comes here."""
        read, written = list(map(storage_span, inputs)), list(map(storage_span, caches))
        if self._writes and any(overlaps(one, read) for one in written):
            return False
        others, of_output = read + written, storage_span(output)
        if lse is not None:
            of_lse = storage_span(lse)
            if overlaps(of_lse, others) or overlaps(of_lse, (of_output,)):
                return False
        return not overlaps(of_output, others)

    def _check_rows(self, name: str, tensor: Tensor, heads: tuple[int, int], dtype: torch.dtype) -> int:
        try:
            rows, count, size = tensor.shape
        except ValueError:
            self._refuse(name, tensor, ("tokens", *heads), dtype, self._device)
        if count != heads[0] or size != heads[1] or tensor.dtype is not dtype or tensor.stride()[2] != 1:
            self._refuse(name, tensor, ("tokens", *heads), dtype, self._device)
        return rows

    def _check_pair(self, key: Tensor | None, value: Tensor | None, device: torch.device) -> int | None:
        """Return the number of K/V rows, None where the keys are cached already."""
        if key is None or value is None:
            if key is value and self._may_lack_keys:
                return None
            self._refuse_absent(key, value)
        rows = self._check_rows("key", key, self._key_heads, self._dtype)
        if self._check_rows("value", value, self._value_heads, self._dtype) != rows:
            self._refuse("value", value, (rows, *self._value_heads), self._dtype, device)
        if key.device != device:
            self._refuse("key", key, (rows, *self._key_heads), self._dtype, device)
        if value.device != device:
            self._refuse("value", value, (rows, *self._value_heads), self._dtype, device)
        return rows

    def _check_lse(self, lse: Tensor, tokens: int, device: torch.device) -> None:
        if not self._return_lse:
            raise NotNegotiatedError(
                f"an lse tensor was given to layer {self._name!r}",
                "return_lse was not requested, so the chosen backend may not fill it",
                "select again with return_lse=True, or pass lse=None",
            )
        if (
            lse.shape != (tokens, self._num_q_heads)
            or lse.dtype != torch.float32
            or lse.device != device
            or (lse.stride() != self._lse_strides and not has_apart_rows(lse))
        ):
            self._refuse("lse", lse, (tokens, self._num_q_heads), torch.float32, device)
        if lse.requires_grad or lse.is_inference():
            check_writable(self._name, "lse", lse)

    def _check_metadata(self, metadata: StepMetadata, tokens: int, keys: int | None) -> None:
        if not isinstance(metadata, self._metadata_class) or (
            metadata.agreement is not self._agreement and metadata.agreement != self._agreement
        ):
            raise BatchError(
                f"layer {self._name!r} was given metadata ({type(metadata).__name__}) of another builder",
                f"its metadata is a {self._metadata_class.__name__} built for the same agreement, {self._agreement.id}",
                "pass what a builder of this layer's backend returned: plan.groups keeps them apart",
            )
        if metadata.graph is not None and metadata.graph.is_outdated(metadata):
            raise BatchError(
                f"layer {self._name!r} was given metadata of {metadata.graph} from an earlier step",
                "a later build has overwritten the tensors of the graph that it reads",
                "pass what the last build returned; to keep metadata over a build, build with graph=None",
            )
        needed = metadata.batch.num_actual_tokens
        if tokens < needed:
            raise TensorError(
                f"layer {self._name!r} was given a query of {tokens} rows",
                f"the batch has {needed} actual tokens",
                "pass the query of the batch that the metadata was built for",
            )
        if keys is None:
            if metadata.num_key_rows and not self._may_leave_slots:
                self._refuse_unwritten(metadata.num_key_rows)
        elif self._writes and metadata.batch.slot_mapping is None and self._paged:
            self._refuse_unslotted()
        elif keys < metadata.num_key_rows:
            raise TensorError(
                f"layer {self._name!r} was given K/V of {keys} rows",
                f"the batch has {metadata.num_key_rows} key rows: a slot, or a place in key_start_loc, for each",
                "pass the K/V of the batch that the metadata was built for",
            )

    def _check_cache(self, kv_cache: KVCache | None, metadata: StepMetadata, device: torch.device) -> None:
        if not self._paged:
            if kv_cache is not None:
                raise CacheError(
                    f"layer {self._name!r} was given a cache",
                    "paged=False was negotiated: each call gets contiguous (non-paged) K/V",
                    "pass kv_cache=None",
                )
            return
        if kv_cache is None:
            raise CacheError(
                f"layer {self._name!r} was given no cache",
                "paged=True was negotiated; only a profiling run has none, and its metadata is None",
                "pass the cache that LoadedBackend.make_cache or LoadedBackend.bind_cache returned",
            )
        self._check_bound(kv_cache, device)
        if metadata.highest_block >= kv_cache.num_blocks:
            raise CacheError(
                f"layer {self._name!r} was given a cache of {kv_cache.num_blocks} blocks",
                f"the batch, or the limits it was built for, uses block {metadata.highest_block}",
                "pass the cache that the block table was allocated from, and its size in Limits(num_blocks=...)",
            )

    def _check_bound(self, kv_cache: KVCache, device: torch.device) -> None:
        """Compare what was checked when it was bound: layers that share a KV cache may differ in their agreements."""
        if type(kv_cache) is not KVCache or (
            kv_cache.spec is not self._cache_spec and kv_cache.spec != self._cache_spec
        ):
            refuse_cache(self._name, self._agreement, self._cache_spec, kv_cache)
        if kv_cache.device != device:
            raise CacheError(
                f"layer {self._name!r} was given a KV cache on {kv_cache.device}",
                f"the other tensors of the call are on {device}",
                "bind memory of that device; swap_blocks moves blocks between devices",
            )

    def _check_slots(self, slots: Tensor, blocks: int) -> None:
        size = self._agreement.block_size or 1
        low, high = extremes(slots)
        if low < -1 or high >= blocks * size or bool(((slots >= 0) & (slots < size)).any()):
            raise CacheError(
                f"slots from {low} to {high} were given",
                f"slots are {size} to {blocks * size - 1}, or -1 for rows not written; block 0 is a null block",
                "compute slots from the block table (attnplug.batching)",
            )
        twice = duplicate_of(slots[slots >= 0])
        if twice is not None:
            refuse_slot_of_two(twice)

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device.type != self._device_type:
            raise TensorError(
                f"layer {self._name!r} was given {name} of {describe(tensor)}",
                f"its backend was selected for {self._device_type}",
                f"move the model to {self._device_type}, or select again for {tensor.device.type}",
            )

    def _refuse(
        self, name: str, tensor: Tensor, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device | None
    ) -> NoReturn:
        where = self._device_type if device is None else device
        strides = f" with strides {tensor.stride()}" if tensor.ndim and not tensor.is_contiguous() else ""
        raise TensorError(
            f"layer {self._name!r} was given {name} of {describe(tensor)}{strides}",
            f"{name} is ({', '.join(map(str, shape))}) {dtype_name(dtype)} on {where}, its last axis contiguous"
            + (", its rows apart in memory" if name in ("output", "lse") else ""),
            "reshape or convert it; if the model really differs, select again with its values in the requirements",
        )

    def _refuse_absent(self, key: Tensor | None, value: Tensor | None) -> NoReturn:
        given = {(True, False): "key without value", (False, True): "value without key"}.get(
            (key is not None, value is not None), "neither key nor value"
        )
        raise TensorError(
            f"layer {self._name!r} was given {given}",
            "both are given, or neither where keys are cached already: KV sharing, paged cross attention, kv_in_cache",
            "pass key and value, select again with kv_in_cache=True, or name a kv_sharing_target",
        )

    def _refuse_unwritten(self, rows: int) -> NoReturn:
        raise TensorError(
            f"layer {self._name!r} was given no K/V",
            f"the batch has slots for {rows} rows of the encoder's, which nothing would write",
            "pass the encoder's K/V in the first step, and no slots in later ones",
        )

    def _refuse_unslotted(self) -> NoReturn:
        raise TensorError(
            f"layer {self._name!r} was given K/V, and its batch has no slot_mapping",
            "a batch without slots writes nothing: the K/V of its rows are in the KV cache already",
            "pass key=None and value=None, or build a batch with a slot for each row",
        )

    def _check_gradients(self, *tensors: Tensor | None) -> None:
        if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
            return
        raise TensorError(
            f"layer {self._name!r} was given tensors that require a gradient",
            "contract 1.0 is for inference: attention has no backward pass here",
            "call it under torch.inference_mode() or torch.no_grad()",
        )
