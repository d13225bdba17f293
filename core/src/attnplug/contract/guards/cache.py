"""Whether tensors are a KV cache of an agreement: roles, shapes, dtypes, device, strides. Checked once, when bound."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from attrs import field, frozen

from attnplug.contract.guards._format import describe
from attnplug.contract.guards.memory import share_memory
from attnplug.contract.inputs.cache_form import IN_ONE_BLOCK, TENSOR_EACH, forms_of, misfits, normal_strides
from attnplug.contract.inputs.kv_cache import CacheSpec, CacheTensor, KVCache
from attnplug.errors import CacheError, LayerError, NotNegotiatedError, PluginContractError
from attnplug.request.domains import LATENT, MOST

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.layer import Layer
    from attnplug.negotiation.agreement import Agreement

_ORDERS: Final = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3)}


def checked_specs(specs: object, agreement: Agreement, owner: str) -> CacheSpec | None:
    """
    Return what `Backend.cache_tensors` of a plugin returned for 2 blocks; None without a paged KV cache.

    Args:
        specs: The mapping that `cache_tensors(2)` returned.
        agreement: What was negotiated.
        owner: The plugin's class, for the message.

    Raises:
        PluginContractError: It describes no KV cache of the agreement.
    """
    if not agreement.requirements.paged:
        if specs != {}:
            _refuse_specs(specs, owner, "an agreement without a paged KV cache has no tensors")
        return None
    if not isinstance(specs, Mapping) or not all(isinstance(spec, CacheTensor) for spec in specs.values()):
        _refuse_specs(specs, owner, "it returns CacheTensor by role")
    if not {"k", "v"} <= specs.keys():
        _refuse_specs(specs, owner, "a paged KV cache has the roles 'k' and 'v'")
    blocks = (2, agreement.block_size, agreement.requirements.num_kv_heads)
    order = _ORDERS[agreement.kv_layout or "NHD"]
    for role in ("k", "v"):
        spec = specs[role]
        plain = (spec.block_axis, spec.stride_order, spec.block_padding) == (0, order, 0)
        if not plain or len(spec.shape) != 4 or spec.shape[:3] != blocks:
            wanted = f"(num_blocks, {blocks[1]}, {blocks[2]}, size), block_axis=0, stride_order={order}, no padding"
            _refuse_specs(specs, owner, f"{role!r} is {wanted}: the agreed form lays blocks out")
    form = agreement.kv_cache_form or "joint"
    if form in IN_ONE_BLOCK and specs["k"].dtype != specs["v"].dtype:
        _refuse_specs(specs, owner, f"K and V of {'an' if form[0] == 'i' else 'a'} {form} KV cache have one dtype")
    if form == LATENT and specs["v"].shape[3] > specs["k"].shape[3]:
        _refuse_specs(specs, owner, "a value is the first part of its key in a latent KV cache")
    return CacheSpec(form, agreement.kv_layout or "NHD", dict(specs))


def _refuse_specs(specs: object, owner: str, expected: str) -> NoReturn:
    raise PluginContractError(
        f"{owner}.cache_tensors returned {reprlib.repr(specs)}",
        expected,
        f"return {{'k': CacheTensor(shape, dtype, 0, order), 'v': ...}} from {owner}.cache_tensors, or let the variant "
        "declare other values of kv_cache_form",
    )


@frozen(eq=False)
class CacheGuard:
    """
    Checks the tensors that a host binds as the KV cache of one agreement.

    Attributes:
        agreement: What was negotiated.
        spec: The tensors of its KV caches.
        declared: The forms that the variant declares, for messages.
    """

    agreement: Agreement
    spec: CacheSpec
    declared: tuple[str, ...] = field(default=())

    def bind(self, tensors: object) -> KVCache:
        """
        Return the KV cache over the tensors.

        Raises:
            CacheError: They do not fit the agreement.
        """
        if not isinstance(tensors, Mapping) or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
            given = describe(tensors) if isinstance(tensors, torch.Tensor) else reprlib.repr(tensors)
            raise CacheError(
                f"a KV cache of {given} was given to {self.agreement.id}",
                f"it is a mapping of roles to tensors: {self._roles()}",
                "pass {'k': keys, 'v': values}; attnplug.contract.split_kv makes both from a pool of one tensor",
            )
        if tensors.keys() != self.spec.tensors.keys():
            raise CacheError(
                f"a KV cache with the tensors {', '.join(map(repr, tensors)) or 'none'} was given",
                f"{self.agreement.id} has {self._roles()}",
                "pass a tensor for each role of Backend.cache_tensors",
            )
        ordered = {role: tensors[role] for role in self.spec.tensors}
        blocks = self._count({role: self._check_shape(role, tensor) for role, tensor in ordered.items()})
        for role, tensor in ordered.items():
            if tensor.device != ordered["k"].device:
                self._refuse(role, tensor, f"on {ordered['k'].device}, as the keys are")
            if role not in ("k", "v") and not self.spec.tensors[role].is_ordered(tensor):
                order = self.spec.tensors[role].stride_order
                self._refuse(role, tensor, f"of memory order {order}, not of strides {tensor.stride()}")
        self._check_form(ordered["k"], ordered["v"])
        for role, tensor in ordered.items():
            self._check_places(role, tensor)
        self._check_apart(ordered)
        for role in ("k", "v"):
            ordered[role] = normal_strides(ordered[role], self.spec.tensors[role], self.spec)
        return KVCache(ordered, blocks, self.spec)

    def _check_shape(self, role: str, tensor: Tensor) -> int | None:
        """Return the number of blocks, None for a tensor that has none."""
        spec = self.spec.tensors[role]
        shape, blocks = list(tensor.shape), None
        if spec.block_axis is not None and len(shape) == len(spec.shape):
            blocks, shape[spec.block_axis] = shape[spec.block_axis], spec.shape[spec.block_axis]
        if shape != list(spec.shape) or tensor.dtype != spec.dtype:
            text = ["num_blocks" if axis == spec.block_axis else str(size) for axis, size in enumerate(spec.shape)]
            self._refuse(role, tensor, f"({', '.join(text)}) {spec.dtype}")
        return blocks

    def _count(self, found: dict[str, int | None]) -> int:
        counts = {blocks for blocks in found.values() if blocks is not None}
        if len(counts) != 1 or not 2 <= min(counts) <= MOST:
            raise CacheError(
                f"a KV cache with the block counts {found} was given",
                f"all tensors have as many blocks, from 2, since no request gets block 0, to {MOST}",
                "pass tensors of one pool",
            )
        return counts.pop()

    def _check_form(self, keys: Tensor, values: Tensor) -> None:
        """Refuse strides and places that are not those of the agreed form, and name the forms whose they are."""
        expected = list(misfits(self.spec, keys, values))
        if not expected:
            return
        mine = (self.spec.form, self.spec.kv_layout)
        others = [pair for pair in forms_of(self.spec, keys, values) if pair != mine and LATENT not in mine]
        served = [pair for pair in others if not self.declared or pair[0] in self.declared]
        if any(form != "independent" for form, _ in served):  # what has equal strides is of a narrower form
            served = [pair for pair in served if pair[0] != "independent"]
        raise CacheError(
            f"a KV cache was given whose keys have the strides {keys.stride()} and whose values have {values.stride()}",
            f"{self.agreement.id} agreed on kv_cache_form={mine[0]!r}, kv_layout={mine[1]!r}: {'; '.join(expected)}",
            f"select again with {' or '.join(f'kv_cache_form={f!r}, kv_layout={n!r}' for f, n in served)}"
            if served
            else "let LoadedBackend.make_cache allocate it, or view a pool of the agreed form with split_kv",
        )

    def _check_places(self, role: str, tensor: Tensor) -> None:
        """Refuse blocks that are not where the kernels look for them."""
        spec = self.spec.tensors[role]
        if not spec.is_aligned(tensor):
            self._refuse(
                role,
                tensor,
                f"at an address ({tensor.data_ptr()}) and with strides {tensor.stride()} that are multiples of "
                f"{spec.alignment} bytes",
            )
        if spec.contiguous_blocks and not tensor.permute(spec.stride_order).is_contiguous():
            self._refuse(role, tensor, f"of blocks one after another, not of strides {tensor.stride()}")

    def _check_apart(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that share memory. Keys and values of forms with one memory were compared already."""
        for one, other in combinations(tensors, 2):
            if self.spec.form not in TENSOR_EACH and {one, other} == {"k", "v"}:
                continue
            if not tensors[one].is_meta and share_memory(tensors[one], tensors[other]):
                raise CacheError(
                    f"a KV cache was given whose tensors {one!r} and {other!r} share memory",
                    "each block of each role is memory for itself",
                    "pass views of different parts of the pool",
                )

    def _roles(self) -> str:
        return f"the cache tensors {', '.join(map(repr, self.spec.tensors))}"

    def _refuse(self, role: str, tensor: Tensor, expected: str) -> NoReturn:
        raise CacheError(
            f"a cache tensor {role!r} of {describe(tensor)} was given",
            f"for {self.agreement.id} it is {expected}",
            "pass tensors as Backend.cache_tensors describes them, for the agreed block size and dtypes",
        )


def refuse_cache(layer: str, agreement: Agreement, spec: CacheSpec | None, given: Any) -> NoReturn:
    """Raise for what is not a KVCache, or is one of another agreement."""
    if isinstance(given, KVCache) and spec is not None:
        theirs, mine = given.spec, spec
        names = [n for n in ("form", "kv_layout") if getattr(theirs, n) != getattr(mine, n)] or ["tensors"]
        raise CacheError(
            f"layer {layer!r} was given a KV cache with {', '.join(f'{n}={getattr(theirs, n)!r}' for n in names)}",
            f"for {agreement.id} it has {', '.join(f'{n}={getattr(mine, n)!r}' for n in names)}",
            "bind the memory with this layer's backend: backend.bind_cache; attnplug.plan gives all layers one form",
        )
    what = describe(given) if isinstance(given, torch.Tensor) else type(given).__name__
    raise CacheError(
        f"layer {layer!r} was given a KV cache of {what}",
        "it is a KVCache, which was checked once, when it was bound",
        "pass what make_cache returned, or backend.bind_cache({'k': keys, 'v': values}) over your own memory",
    )


CHOICES: Final = ("forward", "host", "either")


def by_phase(cache_write: str | Mapping[str, str]) -> Mapping[str, str]:
    """Return an implementation's `cache_write` spelled out by phase."""
    return cache_write if isinstance(cache_write, Mapping) else {"prefill": cache_write, "decode": cache_write}


def cache_writers(
    cache_write: str | Mapping[str, str], layer: Layer, agreement: Agreement
) -> tuple[frozenset[str], frozenset[str]]:
    """
    Return the phases in which forward writes, and those in which the host does.

    Raises:
        NotNegotiatedError: The layer wants a writer that the implementation does not have.
        LayerError: The layer's `cache_write` is no writer.
        PluginContractError: The phases of cross attention have different writers.
    """
    if layer.cache_write not in (None, "forward", "host"):
        raise LayerError(
            f"layer {layer.name!r} has cache_write={layer.cache_write!r}",
            "the cache is written by 'forward' or by the 'host'",
            "pass one of them",
        )
    if not agreement.requirements.paged or layer.kv_sharing_target is not None:
        return frozenset(), frozenset()
    declared = {phase: by_phase(cache_write)[phase] for phase in agreement.requirements.phases}
    if layer.cache_write is not None and not {"either", layer.cache_write} & set(declared.values()):
        raise NotNegotiatedError(
            f"layer {layer.name!r} has cache_write={layer.cache_write!r}",
            f"in {agreement.id} the cache is written by {', '.join(sorted(map(repr, set(declared.values()))))}",
            "leave cache_write out of the layer",
        )
    if agreement.requirements.attn_type == "encoder_decoder" and len(set(declared.values()) - {"either"}) > 1:
        raise PluginContractError(
            f"{agreement.id} declares cache_write={cache_write!r} for cross attention",
            "the rows that are written there are an encoder's, and belong to no phase of the decoder",
            "declare one writer for both phases",
        )
    writers = {phase: layer.cache_write or "forward" if who == "either" else who for phase, who in declared.items()}
    return tuple(frozenset(phase for phase, who in writers.items() if who == writer) for writer in ("forward", "host"))  # type: ignore[return-value]
