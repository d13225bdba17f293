"""The dtype of a model whose configuration names none, as transformers finds it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from attnplug.models.fields import LIBRARY
from attnplug.request.files import read_head

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from attnplug.models.fields import Fields

_NAMES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LARGEST_HEADER: Final = 2**26  # bytes; the header of a shard lists its tensors, about 100 bytes each
_DEFAULT: Final = "float32"
_BESIDE_QUANTIZED: Final = "bfloat16"  # of what a published quantized checkpoint leaves unquantized


def find_dtype(fields: Fields, dtype: str | None) -> tuple[str, str]:
    """
    Return the dtype of query, key and value, and where it is from where the configuration does not name it.

    Without one, transformers takes the dtype of the first floating-point weight, and float32 for a model without
    weights (`PreTrainedModel.from_pretrained` with ``dtype="auto"``, its default).

    Args:
        fields: The configuration; one that was read from a folder has its weights beside it.
        dtype: The dtype that the caller wants; None reads it.

    Returns:
        The dtype, and a sentence, empty where the caller or the configuration names it.
    """
    named = dtype or fields.get("dtype", "torch_dtype")
    if named is not None and named != "auto":
        return str(named), ""
    if fields.file is not None:
        for name, found in _dtypes_of_weights(fields.file.parent):
            return found, f"dtype={found} is read from the weights in {name}, since the configuration has no dtype"
    quantized = fields.get("quantization_config", "compression_config") is not None
    found = _BESIDE_QUANTIZED if quantized else _DEFAULT
    rest = (
        ", some of which are quantized and the others are not here" if quantized else f", and {_DEFAULT} without them"
    )
    library = f"{LIBRARY} reads it from the weights{rest}"
    how = "pass dtype, on the command line --dtype bfloat16"
    return found, f"dtype={found} is assumed, since the configuration has no dtype ({library}); {how}"


def _dtypes_of_weights(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the first file of weights beside a configuration with the dtype of its first floating-point tensor."""
    for pattern in ("model.safetensors", "model-*-of-*.safetensors"):
        for path in sorted(folder.glob(pattern)):
            for found in _floating(path):
                yield path.name, found


def _floating(path: Path) -> Iterator[str]:
    """Yield the floating-point dtypes of a file, in the order of its header, which begins with its length."""
    try:
        size = int.from_bytes(read_head(path, 8), "little")
        header = json.loads(read_head(path, 8 + size)[8:]) if size <= _LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return
    tensors: Mapping[str, object] = header if isinstance(header, dict) else {}
    for name, tensor in tensors.items():
        dtype = tensor.get("dtype") if isinstance(tensor, dict) and name != "__metadata__" else None
        if dtype in _NAMES:
            yield _NAMES[str(dtype)]
