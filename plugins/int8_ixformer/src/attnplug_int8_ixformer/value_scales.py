"""The scales of values, per layer, KV head and channel: what a calibration finds, a file holds, and level 1 loads."""

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
_NEVER_USED: Final = 1.0
"""Largest value of a channel that has been 0 throughout: any positive one serves."""


@frozen(eq=False)
class ValueScales:
    """
    Value scales of a model.

    Attributes:
        of_layers: ``(num_kv_heads, head_size)`` float32 by the layer's name, positive and finite.
    """

    of_layers: Mapping[str, Tensor]

    def __attrs_post_init__(self) -> None:
        for name, scales in self.of_layers.items():
            check_scales(name, scales, tuple(scales.shape), "the scales that were given")

    @classmethod
    def observed(cls, impls: Iterable[AttentionImpl]) -> ValueScales:
        """
        Return what layers of level 0 have seen: the largest absolute value of each channel over 127.

        Args:
            impls: The layers; those that share the cache of another one have no scales of their own.

        Raises:
            LayerError: A layer is none of level 0, or has seen no value yet, or one that is NaN or infinite.
        """
        found = {}
        for impl in impls:
            if impl.layer.kv_sharing_target is not None:
                continue
            name, largest = impl.layer.name, _noted(impl)
            if not largest.any():
                raise LayerError(
                    f"layer {name!r} has seen no value",
                    "scales follow from the values of some steps at least",
                    "run prompts through the model first",
                )
            _check_finite(name, largest)
            found[name] = torch.where(largest > 0, largest, _NEVER_USED) / _STEPS
        return cls(found)

    def save(self, path: Path | str) -> None:
        """
        Write a safetensors file, whole or not at all.

        Raises:
            LayerError: There are no scales, or no folder of that name.
        """
        target = Path(path)
        if not self.of_layers or not target.parent.is_dir():
            raise LayerError(
                f"value scales of {len(self.of_layers)} layers were to be written to {str(path)!r}",
                "a file has those of one layer at least, in a folder that is there",
                "pass the layers of level 0 to ValueScales.observed, and make the folder first",
            )
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        scales = {name: tensor.contiguous().cpu() for name, tensor in self.of_layers.items()}
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
            LayerError: There is none, it is of another kind, or a scale is not positive and finite.
        """
        return cls({name: _read(path, name) for name in _names(path)})


def load_layer(path: Path | str, name: str, num_kv_heads: int, head_size: int) -> Tensor:
    """
    Return the scales of one layer, ``(num_kv_heads, head_size)`` float32 on the CPU. No other is read.

    Raises:
        LayerError: The file is missing or of another kind, lacks the layer, or has scales of another shape or dtype,
            or one that is not positive and finite.
    """
    names = _names(path)
    if name not in names:
        raise LayerError(
            f"value scales of layer {name!r} were looked for in {str(path)!r}",
            f"it has those of {len(names)} layers: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
            "calibrate with this model, whose layers have the names that the host gives them",
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
        where: What holds them, for the message.

    Raises:
        LayerError: They have another shape or dtype, or one is not positive and finite.
    """
    if tuple(scales.shape) != shape or scales.ndim != 2 or scales.dtype != torch.float32:
        raise LayerError(
            f"in {where}, layer {name!r} has value scales of shape {tuple(scales.shape)} and {scales.dtype}",
            f"they are (num_kv_heads, head_size) = {shape} float32",
            "calibrate with the same model on as many ranks: each has the KV heads of its own",
        )
    wrong = ~(scales.isfinite() & (scales > 0))
    if wrong.any():
        head, channel = wrong.nonzero()[0].tolist()
        raise LayerError(
            f"in {where}, layer {name!r} has the value scale {float(scales[head, channel])} for channel {channel} of "
            f"KV head {head}",
            "a scale is positive and finite",
            "calibrate again, and save what attnplug_int8_ixformer.value_scales.ValueScales.observed returns",
        )


def _noted(impl: AttentionImpl) -> Tensor:
    """``(num_kv_heads, head_size)`` float32 on the CPU: what an observer has noted."""
    if not isinstance(impl, ObserverImpl):
        raise LayerError(
            f"scales were asked of layer {impl.layer.name!r} of {impl.agreement.id}",
            "int8_ixformer/calibration alone notes values",
            "select with features=('int8_ixformer.calibrate',), and run prompts through the model",
        )
    return impl.largest.cpu()


def _check_finite(name: str, largest: Tensor) -> None:
    wrong = (~largest.isfinite()).nonzero()
    if len(wrong):
        head, channel = wrong[0].tolist()
        raise LayerError(
            f"layer {name!r} has seen the value {float(largest[head, channel])} in channel {channel} of KV head {head}",
            "a scale follows from finite values",
            "look for what overflows in the model, and calibrate anew",
        )


def _names(path: Path | str) -> list[str]:
    if not Path(path).is_file():
        raise LayerError(
            f"value scales were looked for in {str(path)!r}",
            "no such file is there",
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
        f"value scales were looked for in {str(path)!r}",
        f"it is no file of them: {why}",
        "pass the file that ValueScales.save has written",
    ) from None
