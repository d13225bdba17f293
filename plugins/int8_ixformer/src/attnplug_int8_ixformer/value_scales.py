"""Value scales per layer, KV head and channel: observed by a calibration, saved to a file, loaded by level 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnplug.errors import LayerError
from attnplug_int8_ixformer.observer import ObserverImpl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attnplug.contract import AttentionImpl

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
    """

    layers: Mapping[str, Tensor]

    def __attrs_post_init__(self) -> None:
        for name, scales in self.layers.items():
            check_scales(name, scales, tuple(scales.shape), "ValueScales")

    @classmethod
    def observed(cls, impls: Iterable[AttentionImpl]) -> ValueScales:
        """
        Return the scales that layers of level 0 observed: the absmax of each channel over 127.

        Args:
            impls: The layers. Those that share another layer's cache are skipped.

        Raises:
            LayerError: A layer is not of level 0, or observed no value, or one that is NaN or infinite.
        """
        found = {}
        for impl in impls:
            if impl.layer.kv_sharing_target is not None:
                continue
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
        return cls(found)

    def save(self, path: Path | str) -> None:
        """
        Write a safetensors file, atomically.

        Raises:
            LayerError: There are no scales, or the folder does not exist.
        """
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


def load_layer(path: Path | str, name: str, num_kv_heads: int, head_size: int) -> Tensor:
    """
    Return the scales of one layer, ``(num_kv_heads, head_size)`` float32 on the CPU, and read no other layer's.

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
    check_scales(name, scales, (num_kv_heads, head_size), f"{str(path)!r}")
    return scales


def check_scales(name: str, scales: Tensor, shape: tuple[int, ...], where: str) -> None:
    """
    Check the value scales of one layer.

    Args:
        name: The layer.
        scales: The scales.
        shape: ``(num_kv_heads, head_size)``.
        where: Their source, for the message.

    Raises:
        LayerError: They have another shape or dtype, or one is not positive and finite.
    """
    if tuple(scales.shape) != shape or scales.ndim != 2 or scales.dtype != torch.float32:
        raise LayerError(
            f"in {where}, layer {name!r} has value scales of shape {tuple(scales.shape)} and {scales.dtype}",
            f"they are (num_kv_heads, head_size) = {shape} float32",
            "calibrate with the same model and as many ranks: each rank saves its own KV heads",
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


def _observed(impl: AttentionImpl) -> Tensor:
    """Return the absmax of a layer of level 0, ``(num_kv_heads, head_size)`` float32 on the CPU."""
    if not isinstance(impl, ObserverImpl):
        raise LayerError(
            f"layer {impl.layer.name!r} of {impl.agreement.id} observes no values",
            "a layer of int8_ixformer/calibration",
            "select with features=('int8_ixformer.calibrate',), and run prompts through the model",
        )
    return impl.absmax.cpu()


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
