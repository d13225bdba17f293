"""Scales of FP8 KV caches: those of a checkpoint, and a warning where keys or values leave the range."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnplug.errors import RequirementsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from torch import nn

    from attnplug_transformers.engine.layers import PagedLayer

_log = logging.getLogger(__name__)

_KEY: Final = re.compile(r".+\.(k_scale|v_scale|[kv]_proj\.output_scale)")
"""The name of a scale in checkpoints of compressed-tensors, ModelOpt and Quark: of the attention or a projection."""


def scales_of(module: nn.Module, num_kv_heads: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """
    Return the scales of an attention module's keys and values, where its checkpoint has any other than 1.

    Args:
        module: The attention module, with `k_scale` and `v_scale`, or its projections with them or `output_scale`.
        num_kv_heads: Key and value heads.
        device: Where they go.

    Returns:
        Of both, None, or float32 on the device: ``(1,)``, or ``(num_kv_heads,)`` where one of them is per head.

    Raises:
        RequirementsError: One has another number of elements.
    """
    found = [_scale(module, letter, num_kv_heads, device) for letter in "kv"]
    if all(scale is None or bool((scale == 1).all()) for scale in found):
        return None, None
    width = max(scale.numel() for scale in found if scale is not None)
    k_scale, v_scale = (
        torch.ones(width, device=device) if scale is None else scale.expand(width).contiguous() for scale in found
    )
    return k_scale, v_scale


def _scale(module: Any, letter: str, num_kv_heads: int, device: torch.device) -> Tensor | None:
    projection = getattr(module, f"{letter}_proj", None)
    places = ((module, f"{letter}_scale"), (projection, f"{letter}_scale"), (projection, "output_scale"))
    found = next((one for one in (getattr(*place, None) for place in places) if isinstance(one, Tensor)), None)
    if found is not None and found.numel() not in (1, num_kv_heads):
        raise RequirementsError(
            f"{type(module).__name__} has a {letter}_scale of shape {tuple(found.shape)}",
            f"a scale of the KV cache is one number, or one for each of {num_kv_heads} key and value heads",
            "correct the checkpoint, or remove its scales",
        )
    return None if found is None else found.detach().flatten().to(device, torch.float32)


def attach_scales(made: Any, model: str | PathLike[str], how: Mapping[str, Any]) -> None:
    """
    Set the scales of a checkpoint's KV caches on the attention modules of a model: transformers leaves them out.

    Args:
        made: The model.
        model: The folder of its safetensors files, or its id on the Hub.
        how: As for transformers' `from_pretrained`.
    """
    from safetensors import safe_open  # noqa: PLC0415 - only for this
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - likewise

    options: dict[str, Any] = {name: value for name, value in how.items() if name != "trust_remote_code"}
    config = Path(model) / "config.json" if Path(model).is_dir() else cached_file(str(model), "config.json", **options)
    modules = dict(made.named_modules())
    for file in sorted(Path(config).parent.glob("*.safetensors")) if config else ():
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                path, _, name = key.rpartition(".")
                module = modules.get(path) if _KEY.fullmatch(key) else None
                if module is not None and not hasattr(module, name):
                    module.register_buffer(name, opened.get_tensor(key), persistent=False)


class RangeCheck:
    """
    Warns once per layer where keys or values are beyond what its FP8 KV cache holds.

    Args:
        layers: The layers by their modules.
    """

    def __init__(self, layers: Mapping[nn.Module, PagedLayer]) -> None:
        self._largest = {
            layer.spec.name: _LARGEST[dtype]
            for layer in layers.values()
            if (dtype := layer.impl.agreement.kv_cache_dtype) in _LARGEST and layer.spec.kv_sharing_target is None
        }
        self._peaks: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        """Return whether a layer is left that has not been warned about."""
        return bool(self._largest)

    def record(self, layer: PagedLayer, key: Tensor, value: Tensor) -> None:
        """
        Record the largest key and value of a step in the unit of the KV cache.

        Args:
            layer: The layer.
            key: ``(tokens, num_kv_heads, head_size)``.
            value: ``(tokens, num_kv_heads, head_size_v)``.
        """
        name = layer.spec.name
        if name not in self._largest:
            return
        scales = (layer.spec.k_scale, layer.spec.v_scale)
        peaks = [rows.abs().amax((0, 2)).float() for rows in (key, value)]
        scaled = [peak if scale is None else peak / scale for peak, scale in zip(peaks, scales, strict=True)]
        self._peaks[name] = torch.stack([one.amax() for one in scaled])

    def finish(self) -> None:
        """Warn about what the step has recorded."""
        peaks, self._peaks = self._peaks, {}
        if not peaks:
            return
        for name, found in zip(peaks, torch.stack(list(peaks.values())).tolist(), strict=True):
            largest = self._largest[name]
            for what, peak in zip(("keys", "values"), found, strict=True):
                if peak > largest:
                    _log.warning(
                        "%s of %s reach %g in its FP8 KV cache, which holds up to %g: use a checkpoint with scales, or"
                        " kv_cache_dtype='auto'",
                        what,
                        name,
                        peak,
                        largest,
                    )
                    self._largest.pop(name, None)


_LARGEST: Final = {
    "fp8_e4m3": torch.finfo(torch.float8_e4m3fn).max,
    "fp8_e5m2": torch.finfo(torch.float8_e5m2).max,
}
"""Dtype of a KV cache -> the largest value that it holds."""
