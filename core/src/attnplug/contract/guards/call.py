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
    extent,
    has_apart_rows,
    overlaps,
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


_Form = tuple[tuple[Any, ...], int, "int | None", int, int, int, int, int]
"""
Shapes, strides, dtypes and devices that were checked; rows of the query, and of K/V; the bytes from the first element
to the last of query, key, value, output and LSE.
"""


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
        kept: The forms of tensors that were checked last, by their number: those of all layers that take and
            write the same.
    """

    query_dtype: torch.dtype
    output_dtype: torch.dtype
    output_width: int
    host_writes: bool
    forward_writes: bool
    cache: CacheSpec | None
    metadata_class: type[Any]
    kept: dict[int, _Form]


class ForwardGuard:
    """Checks the calls of one implementation."""

    def __init__(self, layer: Layer, form: CallForm, agreement: Agreement, device: torch.device) -> None:
        requested = agreement.requirements
        head_size, kv_heads = requested.head_size, requested.num_kv_heads
        self._name = layer.name
        self._agreement = agreement
        self._metadata_class = form.metadata_class
        self._device_type = device.type
        self._dtype: torch.dtype = TORCH_DTYPES[requested.dtype]
        self._query_dtype = form.query_dtype
        self._output_dtype = form.output_dtype
        self._output_width = form.output_width
        self._num_q_heads = requested.num_q_heads
        self._query_heads = (requested.num_q_heads, head_size)
        self._key_heads = (kv_heads, head_size)
        self._value_heads = (kv_heads, head_size if requested.head_size_v is None else requested.head_size_v)
        self._paged = bool(requested.paged)
        self._latent = requested.latent
        self._shares = layer.kv_sharing_target is not None
        # Such a call writes nothing, whatever slots its batch has.
        self._may_leave_slots = self._shares or requested.kv_in_cache
        self._may_lack_keys = self._may_leave_slots or (self._paged and requested.attn_type == "encoder_decoder")
        self._return_lse = requested.return_lse
        self._lse_strides = (requested.num_q_heads, 1)
        self._cache_spec = form.cache
        self._host_writes = form.host_writes
        self._writes = form.forward_writes
        self._forms = form.kept
        self._written: tuple[Any, ...] | None = None  # the forms of the last write
        self._write_apart: tuple[Any, ...] | None = None

    def check_call(  # noqa: C901, PLR0912 - the hot path: a call of another function costs as much as two comparisons
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
        # What follows from shapes, strides, dtypes and devices is kept with these values, for all layers of the
        # backend: in nearly every call they are those of the call before.
        device = query.device
        seen: tuple[Any, ...]
        if key is None or value is None:
            if not self._may_lack_keys if key is value else value is not None or not self._latent:
                self._refuse_absent(key, value)
            seen = (
                (query.shape, query.stride(), query.dtype, device),
                (output.shape, output.stride(), output.dtype, output.device),
            )
            if key is not None:  # latents
                seen += ((key.shape, key.stride(), key.dtype, key.device),)
        elif self._latent:
            self._refuse_absent(key, value)
        else:
            seen = (
                (query.shape, query.stride(), query.dtype, device),
                (key.shape, key.stride(), key.dtype, key.device),
                (value.shape, value.stride(), value.dtype, value.device),
                (output.shape, output.stride(), output.dtype, output.device),
            )
        if lse is not None:
            seen += ((lse.shape, lse.stride(), lse.dtype, lse.device),)
        form = self._forms.get(len(seen))
        if form is None or seen != form[0]:
            form = self._check_form(seen, query, key, value, output, lse)
        _, tokens, keys, query_bytes, key_bytes, value_bytes, output_bytes, lse_bytes = form
        # Inference mode records no gradient, and inference tensors are written in it alone.
        if not is_inference_mode_enabled():
            if is_grad_enabled() and (
                query.requires_grad
                or output.requires_grad
                or (key is not None and key.requires_grad)
                or (value is not None and value.requires_grad)
            ):
                self._refuse_gradients()
            if output.is_inference():
                check_writable(self._name, "output", output)
            if lse is not None:
                check_writable(self._name, "lse", lse)
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
        # Addresses change from call to call: whether tensors are apart is computed, as fast as they are compared.
        first, query_first = output.data_ptr(), query.data_ptr()
        key_first = 0 if key is None else key.data_ptr()
        value_first = 0 if value is None else value.data_ptr()
        last, query_last = first + output_bytes, query_first + query_bytes
        key_last, value_last = key_first + key_bytes, value_first + value_bytes
        is_apart = (
            (query_last <= first or last <= query_first)
            and (key_last <= first or last <= key_first)
            and (value_last <= first or last <= value_first)
        )
        for start, end in () if kv_cache is None else kv_cache.spans:
            if (first < end and start < last) or (
                self._writes
                and (
                    (query_first < end and start < query_last)
                    or (key_first < end and start < key_last)
                    or (value_first < end and start < value_last)
                )
            ):
                is_apart = False
        if lse is not None and is_apart:
            start = lse.data_ptr()
            spans = ((query_first, query_last), (key_first, key_last), (value_first, value_last), (first, last))
            others = spans if kv_cache is None else (*spans, *kv_cache.spans)
            is_apart = not overlaps((start, start + lse_bytes), others)
        if not is_apart:
            self._check_memory(query, key, value, kv_cache, output, lse)
        if kv_cache is not None and (kv_cache.is_inference or kv_cache.requires_grad):
            check_cache_writable(self._name, kv_cache)
        return False

    def _check_form(
        self,
        seen: tuple[Any, ...],
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> _Form:
        """Check what `seen` has of the tensors, and return what is kept with it."""
        tokens = self._check_rows("query", query, self._query_heads, self._query_dtype)
        self._check_device("query", query)
        device, strides = query.device, output.stride()
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
        sizes = [0 if tensor is None else extent(tensor) for tensor in (query, key, value, output, lse)]
        form: _Form = (seen, tokens, keys, *sizes)  # type: ignore[assignment] # five of them
        self._forms[len(seen)] = form
        return form

    def check_write(  # noqa: C901 - as above
        self, key: Tensor, value: Tensor | None, kv_cache: KVCache | None, slot_mapping: Tensor
    ) -> bool:
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
        if key is None or (value is None) is not self._latent:
            raise TensorError(
                f"write_kv was called for layer {self._name!r} without K/V"
                if key is None or value is None
                else f"write_kv was called for layer {self._name!r} with a value",
                "it writes the given K/V; of latents the key alone, which the value is a part of",
                "pass key and value=None" if self._latent else "pass key and value",
            )
        device = key.device
        seen = (
            (key.shape, key.stride(), key.dtype, device),
            None if value is None else (value.shape, value.stride(), value.dtype, value.device),
            (slot_mapping.shape, slot_mapping.dtype, slot_mapping.device),
        )
        if seen != self._written:
            self._check_written(key, value, slot_mapping)
            self._written = seen
        if kv_cache is None:
            return False
        if type(kv_cache) is not KVCache or kv_cache.spec is not self._cache_spec or kv_cache.device != device:
            self._check_bound(kv_cache, device)
        inputs = (("key", key),) if value is None else (("key", key), ("value", value))
        for name, tensor in inputs:
            if tensor.requires_grad and is_grad_enabled():
                check_writable(self._name, name, tensor)
        if kv_cache.is_inference or kv_cache.requires_grad:
            check_cache_writable(self._name, kv_cache)
        places = (*(one.untyped_storage().data_ptr() for _, one in inputs), kv_cache.places)
        if places != self._write_apart:
            caches = kv_cache.tensors.values()
            pairs = [("the KV cache", cache, *other) for cache in caches for other in inputs]
            self._write_apart = places if are_apart(self._name, pairs) else None
        if slot_mapping.is_cpu and slot_mapping.shape[0]:
            self._check_slots(slot_mapping, kv_cache.num_blocks)
        return True

    def _check_written(self, key: Tensor, value: Tensor | None, slot_mapping: Tensor) -> None:
        """Check the forms of what `write_kv` was given."""
        self._check_device("key", key)
        rows, device = self._check_pair(key, value, key.device) or 0, key.device
        if (
            slot_mapping.ndim != 1
            or slot_mapping.shape[0] > rows
            or slot_mapping.dtype != torch.int64
            or slot_mapping.device != device
        ):
            self._refuse("slot_mapping", slot_mapping, ("up to", rows), torch.int64, device)

    def _check_memory(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Check that what is written shares no element with what is in use meanwhile, where their addresses overlap."""
        caches = () if kv_cache is None else tuple(kv_cache.tensors.values())
        inputs = [(n, t) for n, t in (("query", query), ("key", key), ("value", value)) if t is not None]
        others = [*inputs, *(("the KV cache", cache) for cache in caches)]
        pairs = [("output", output, *other) for other in others]
        if lse is not None:
            pairs += [("lse", lse, *other) for other in (("output", output), *others)]
        if self._writes:
            pairs += [("the KV cache", cache, *other) for cache in caches for other in inputs]
        are_apart(self._name, pairs)

    def _check_rows(self, name: str, tensor: Tensor, heads: tuple[int, int], dtype: torch.dtype) -> int:
        try:
            rows, count, size = tensor.shape
        except ValueError:
            self._refuse(name, tensor, ("tokens", *heads), dtype, None)
        if count != heads[0] or size != heads[1] or tensor.dtype is not dtype or tensor.stride()[2] != 1:
            self._refuse(name, tensor, ("tokens", *heads), dtype, None)
        return rows

    def _check_pair(self, key: Tensor | None, value: Tensor | None, device: torch.device) -> int | None:
        """Return the number of K/V rows, None where the keys are cached already."""
        if key is None:
            if value is None and self._may_lack_keys:
                return None
            self._refuse_absent(key, value)
        if (value is None) is not self._latent:
            self._refuse_absent(key, value)
        rows = self._check_rows("key", key, self._key_heads, self._dtype)
        if key.device != device:
            self._refuse("key", key, (rows, *self._key_heads), self._dtype, device)
        if value is None:
            return rows
        if self._check_rows("value", value, self._value_heads, self._dtype) != rows:
            self._refuse("value", value, (rows, *self._value_heads), self._dtype, device)
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
        self._cache_spec = kv_cache.spec  # an equal one, which the next call finds to be the same
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
        if self._latent and value is not None:
            raise TensorError(
                f"layer {self._name!r} was given a value of {describe(value)}",
                f"latent=True was negotiated: a value is the first {self._value_heads[1]} elements of its key",
                "pass value=None",
            )
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

    def _refuse_gradients(self) -> NoReturn:
        raise TensorError(
            f"layer {self._name!r} was given tensors that require a gradient",
            "contract 1.0 is for inference: attention has no backward pass here",
            "call it under torch.inference_mode() or torch.no_grad()",
        )
