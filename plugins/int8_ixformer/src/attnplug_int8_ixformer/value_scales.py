"""Value scales per layer, KV head and channel: observed by a calibration, saved to a file, loaded by level 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnplug.contract import Parallel
from attnplug.errors import LayerError
from attnplug_int8_ixformer.observer import ObserverImpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attnplug.contract import Attention

_FORMAT: Final = "attnplug int8 value scales, 1"
_STEPS: Final = 127
_ABSMAX_OF_ZEROS: Final = 1.0
_SMALLEST: Final = torch.finfo(torch.float32).tiny
"""The absmax of a channel that was always 0: any positive number quantizes it."""


@frozen(eq=False)
class ValueScales:
    """
    Value scales of a model.

    Attributes:
        layers: ``(num_kv_heads, head_size)`` float32 by layer name, positive and finite.
        parallel: The ranks that share the KV heads. A file has those of all ranks.
    """

    layers: Mapping[str, Tensor]
    parallel: Parallel = field(factory=Parallel)

    def __attrs_post_init__(self) -> None:
        for name, scales in self.layers.items():
            check_scales(name, scales, tuple(scales.shape), "ValueScales")

    @classmethod
    def observed(cls, impls: Iterable[Attention]) -> ValueScales:
        """
        Return the scales that layers of level 0 observed: the absmax of each channel over 127.

        Args:
            impls: The layers. Those that share another layer's cache are skipped.

        Raises:
            LayerError: A layer is not of level 0, or observed no value, or one that is NaN or infinite.
        """
        found, parallel = {}, Parallel()
        for impl in impls:
            if impl.layer.kv_sharing_target is not None:
                continue
            parallel = impl.layer.parallel
            name, absmax = impl.layer.name, _observed(impl)
            if not absmax.any():
                raise LayerError(
                    f"layer {name!r} observed no value",
                    "scales are computed from the values of one step or more",
                    "run prompts through the model first",
                )
            _check_finite(name, absmax)
            scales = absmax / _STEPS
            found[name] = torch.where(scales >= _SMALLEST, scales, _ABSMAX_OF_ZEROS / _STEPS)
        return cls(found, parallel)

    @classmethod
    def of_ranks(cls, shares: Iterable[ValueScales]) -> ValueScales:
        """
        Return the scales of a model that was calibrated under tensor parallelism: each layer with the KV heads of all
        ranks. Where several ranks have the same KV head, it has a row for each of them.

        Args:
            shares: What each rank observed. Ranks of a pipeline have different layers.

        Raises:
            LayerError: A layer lacks a rank, or has one twice.
        """
        found: dict[str, list[tuple[Parallel, Tensor]]] = {}
        for share in shares:
            for name, scales in share.layers.items():
                found.setdefault(name, []).append((share.parallel, scales))
        for name, parts in found.items():
            parts.sort(key=lambda part: part[0].tp_rank)
            _check_ranks(name, [parallel for parallel, _ in parts])
        return cls({name: torch.cat([scales for _, scales in parts]) for name, parts in found.items()})

    def save(self, path: Path | str) -> None:
        """
        Write a safetensors file, atomically.

        Raises:
            LayerError: There are no scales, or those of one rank of several, or the folder does not exist.
        """
        if self.parallel.tp_size > 1:
            raise LayerError(
                f"value scales of rank {self.parallel.tp_rank} of {self.parallel.tp_size} cannot be saved alone",
                "a file has the KV heads of all ranks of tensor parallelism, and each rank loads its own",
                "collect what ValueScales.observed returns on each rank, and save ValueScales.of_ranks of it",
            )
        target = Path(path)
        if not self.layers or not target.parent.is_dir():
            raise LayerError(
                f"value scales of {len(self.layers)} layers cannot be saved to {str(path)!r}",
                "a file has the scales of one layer or more, in a folder that exists",
                "pass the layers of level 0 to ValueScales.observed, and create the folder first",
            )
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        scales = {name: tensor.contiguous().cpu() for name, tensor in self.layers.items()}
        try:
            save_file(scales, part, metadata={"format": _FORMAT})
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path | str) -> ValueScales:
        """
        Return the scales of a file.

        Raises:
            LayerError: The file is missing or has another format, or a scale is not positive and finite.
        """
        return cls({name: _read(path, name) for name in _names(path)})


def load_layer(path: Path | str, name: str, num_kv_heads: int, head_size: int, parallel: Parallel) -> Tensor:
    """
    Return one rank's scales of one layer, ``(num_kv_heads, head_size)`` float32 on the CPU; read no other layer's.

    Args:
        path: The file, with all KV heads of the model.
        name: The layer.
        num_kv_heads: Those of this rank.
        head_size: Of a value head.
        parallel: The ranks.

    Raises:
        LayerError: The file is missing or has another format, lacks the layer, or has scales of another shape or
            dtype, or one that is not positive and finite.
    """
    names = _names(path)
    if name not in names:
        raise LayerError(
            f"{str(path)!r} has no value scales of layer {name!r}",
            f"one of its {len(names)} layers: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
            "calibrate with this model in this host: layers are found by the host's names",
        )
    scales = _read(path, name)
    total, copies = num_kv_heads * parallel.tp_size, 1
    saved = len(scales) if scales.ndim else 0
    if num_kv_heads == 1 and 0 < saved < total and total % saved == 0:  # several ranks have the same KV head
        total, copies = saved, parallel.tp_size // saved
    check_scales(name, scales, (total, head_size), f"{str(path)!r}", parallel)
    first = parallel.tp_rank // copies * num_kv_heads
    return scales[first : first + num_kv_heads]


def check_scales(
    name: str, scales: Tensor, shape: tuple[int, ...], where: str, parallel: Parallel | None = None
) -> None:
    """
    Check the value scales of one layer.

    Args:
        name: The layer.
        scales: The scales.
        shape: ``(num_kv_heads, head_size)``.
        where: Their source, for the message.
        parallel: The ranks that share them, for the message.

    Raises:
        LayerError: They have another shape or dtype, or one is not positive and finite.
    """
    if tuple(scales.shape) != shape or scales.ndim != 2 or scales.dtype != torch.float32:
        raise LayerError(
            f"in {where}, layer {name!r} has value scales of shape {tuple(scales.shape)} and {scales.dtype}",
            f"they are (num_kv_heads, head_size) = {shape} float32" + _shared(parallel),
            "calibrate with the same model; a file has the KV heads of all ranks, as ValueScales.of_ranks returns them",
        )
    invalid = ~(scales.isfinite() & (scales >= _SMALLEST))
    if invalid.any():
        head, channel = invalid.nonzero()[0].tolist()
        raise LayerError(
            f"in {where}, layer {name!r} has the value scale {float(scales[head, channel])} for channel {channel} of "
            f"KV head {head}",
            "a scale is positive and finite, and normal in float32: 1.2e-38 or more",
            "calibrate again, and save what attnplug_int8_ixformer.value_scales.ValueScales.observed returns",
        )


def _check_ranks(name: str, ranks: list[Parallel]) -> None:
    """Check that a layer was observed on each rank, once; they are in order."""
    size = ranks[0].tp_size
    if [rank.tp_rank for rank in ranks] != list(range(size)) or any(rank.tp_size != size for rank in ranks):
        raise LayerError(
            f"layer {name!r} has value scales of the ranks {', '.join(f'{r.tp_rank} of {r.tp_size}' for r in ranks)}",
            f"each of the {size} ranks of tensor parallelism has some of its KV heads",
            "pass what ValueScales.observed returned on each rank, once",
        )


def _shared(parallel: Parallel | None) -> str:
    return f", of {parallel.tp_size} ranks together" if parallel is not None and parallel.tp_size > 1 else ""


def _observed(impl: Attention) -> Tensor:
    """Return the absmax of a layer of level 0, ``(num_kv_heads, head_size)`` float32 on the CPU."""
    if not isinstance(impl.wrapped, ObserverImpl):
        raise LayerError(
            f"layer {impl.layer.name!r} of {impl.agreement.id} observes no values",
            "a layer of int8_ixformer/calibration",
            "select with features=('int8_ixformer.calibrate',), and run prompts through the model",
        )
    return impl.wrapped.absmax.cpu()


def _check_finite(name: str, absmax: Tensor) -> None:
    invalid = (~absmax.isfinite()).nonzero()
    if len(invalid):
        head, channel = invalid[0].tolist()
        raise LayerError(
            f"layer {name!r} observed the value {float(absmax[head, channel])} in channel {channel} of KV head {head}",
            "scales are computed from finite values",
            "find what overflows in the model, and calibrate again",
        )


def _names(path: Path | str) -> list[str]:
    if not Path(path).is_file():
        raise LayerError(
            f"there is no file {str(path)!r} of value scales",
            "",
            "calibrate first (level 0), and pass its file: options={'int8_ixformer': {'value_scales': PATH}}",
        )
    try:
        with safe_open(path, framework="pt") as file:
            kind, names = (file.metadata() or {}).get("format"), list(file.keys())
    except (SafetensorError, OSError) as error:
        _refuse_kind(path, str(error))
    if kind != _FORMAT:
        _refuse_kind(path, f"its format is {kind!r}")
    return names


def _read(path: Path | str, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(name)
    return found


def _refuse_kind(path: Path | str, why: str) -> NoReturn:
    raise LayerError(
        f"{str(path)!r} is not a file of value scales: {why}",
        "",
        "pass a file that ValueScales.save has written",
    ) from None
