"""Whether a cache is what `Backend.make_cache` makes: roles, shapes, dtypes, device and order in memory."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract.guards._format import describe
from attnplug.contract.inputs.kv_cache import CacheTensor
from attnplug.errors import CacheError, LayerError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import Cache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.negotiation.agreement import Agreement


def checked_specs(specs: object, agreement: Agreement, owner: str) -> dict[str, CacheTensor]:
    """
    Return what `Backend.cache_tensors` of a plugin returned.

    Args:
        specs: That.
        agreement: What was negotiated.
        owner: The plugin's class, for the message.

    Raises:
        PluginContractError: It describes no cache, though the agreement has one.
    """
    if isinstance(specs, Mapping) and all(isinstance(spec, CacheTensor) for spec in specs.values()):
        counted = any(spec.block_axis is not None for spec in specs.values())
        if counted or not agreement.requirements.paged:
            return dict(specs)
    raise PluginContractError(
        f"{owner}.cache_tensors returned {reprlib.repr(specs)}",
        "it returns CacheTensor by role, and where the cache is paged one of them at least has a block axis",
        f"return {{'kv': CacheTensor(shape, dtype, block_axis)}} from {owner}.cache_tensors",
    )


class CacheGuard:
    """Checks the caches of one layer. The form that was found right last is all that the next call compares."""

    def __init__(self, specs: Mapping[str, CacheTensor], agreement: Agreement) -> None:
        self._specs = dict(specs)
        self._role = next(iter(specs)) if len(specs) == 1 else None
        self._agreement = agreement
        self._known: dict[str, tuple[Any, Any, int | None]] = dict.fromkeys(specs, (None, None, None))

    def check(self, kv_cache: Cache, device: torch.device | None) -> int:
        """
        Return the number of blocks.

        Raises:
            CacheError: The cache is not what `Backend.make_cache` makes.
        """
        if not isinstance(kv_cache, torch.Tensor):
            return self._check_roles(kv_cache, device)
        if self._role is None:
            raise CacheError(
                f"a cache tensor of {describe(kv_cache)} was given",
                f"{self._agreement.id} has {self._roles()}",
                "pass the mapping that Backend.make_cache returned",
            )
        return self._check_tensor(self._role, kv_cache, device) or 0

    def _check_roles(self, kv_cache: Mapping[str, Tensor], device: torch.device | None) -> int:
        if kv_cache.keys() != self._specs.keys():
            raise CacheError(
                f"a cache with the tensors {', '.join(map(repr, kv_cache))} was given",
                f"{self._agreement.id} has {self._roles()}",
                "pass what Backend.make_cache returned",
            )
        found = {role: self._check_tensor(role, tensor, device) for role, tensor in kv_cache.items()}
        counts = {blocks for blocks in found.values() if blocks is not None}
        if len(counts) != 1:
            raise CacheError(
                f"a cache with the block counts {found} was given",
                "all tensors of a cache have as many blocks",
                "pass what Backend.make_cache returned",
            )
        return counts.pop()

    def _check_tensor(self, role: str, tensor: Tensor, device: torch.device | None) -> int | None:
        spec = self._specs[role]
        shape, strides, blocks = self._known[role]
        if tensor.shape != shape or tensor.stride() != strides:
            blocks = self._look(role, tensor)
        if tensor.dtype != spec.dtype or tensor.device != device:
            self._refuse(role, tensor, f"{spec.dtype} on {device}")
        return blocks

    def _look(self, role: str, tensor: Tensor) -> int | None:
        spec = self._specs[role]
        shape = list(tensor.shape)
        blocks = None
        if spec.block_axis is not None and len(shape) == len(spec.shape):
            blocks, shape[spec.block_axis] = shape[spec.block_axis], spec.shape[spec.block_axis]
        if shape != list(spec.shape):
            text = ["num_blocks" if axis == spec.block_axis else str(size) for axis, size in enumerate(spec.shape)]
            self._refuse(role, tensor, f"({', '.join(text)})")
        if not spec.is_ordered(tensor):
            self._refuse(
                role,
                tensor,
                f"of memory order {spec.stride_order} ({self._agreement.kv_layout}), not of strides {tensor.stride()}",
            )
        self._known[role] = (tensor.shape, tensor.stride(), blocks)
        return blocks

    def _roles(self) -> str:
        named = ", ".join(map(repr, self._specs))
        return f"the cache tensors {named}" if self._specs else "no cache in this agreement"

    def _refuse(self, role: str, tensor: Tensor, expected: str) -> None:
        raise CacheError(
            f"a cache tensor {role!r} of {describe(tensor)} was given",
            f"for {self._agreement.id} it is {expected}",
            "pass what Backend.make_cache returned",
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
