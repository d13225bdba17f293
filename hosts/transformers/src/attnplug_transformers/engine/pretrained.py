"""Loads a model of transformers with its tokenizer, for `Engine.from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from attnplug.errors import RequirementsError
from attnplug_transformers.engine.scales import attach_scales

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike


def load_pretrained(
    model: str | PathLike[str],
    *,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    tokenizer: Any,
    revision: str | None,
    trust_remote_code: bool,
    local_files_only: bool,
) -> tuple[Any, Any]:
    """
    Return a model in evaluation mode on its device, and its tokenizer.

    Args:
        model: As for `Engine.from_pretrained`.
        dtype: As for `Engine.from_pretrained`, and so are the others.
        device: Likewise.
        tokenizer: Likewise.
        revision: Likewise.
        trust_remote_code: Likewise.
        local_files_only: Likewise.

    Returns:
        The model, and the tokenizer or None.

    Raises:
        RequirementsError: There is no such model, dtype or device, or the tokenizer cannot be loaded.
    """
    where = _device(device)
    how = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    how = {name: value for name, value in how.items() if value is not None}
    kind = _dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(model, **how)
        made: Any = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=kind, **how)
    except (OSError, ValueError) as error:
        raise RequirementsError(
            f"the model {str(model)!r} cannot be loaded: {error}",
            "it is the id of a causal language model on the Hugging Face Hub, or a folder that save_pretrained wrote",
            "correct the id or the folder, or load the model with transformers and pass it to Engine(model)",
        ) from error
    if tokenizer is None and _has_tokenizer(model, how):
        tokenizer = _load_tokenizer(model, how)
    attach_scales(made, model, how)
    return made.to(where).eval(), tokenizer


def _load_tokenizer(model: str | PathLike[str], how: Mapping[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model, **how)
    except Exception as error:  # a broken file raises whatever its reader meets
        raise RequirementsError(
            f"the tokenizer of {str(model)!r} cannot be loaded: {error}",
            "it is beside the model, and what it needs is installed",
            "install what it needs, or pass tokenizer=...",
        ) from error


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise RequirementsError(
            f"dtype={dtype!r} was given",
            "it is 'auto', or a dtype of floats, as its name or a torch.dtype",
            "pass 'bfloat16', 'float16' or 'float32'",
        )
    return found


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise RequirementsError(
            f"device={device!r} was given: {error}", "it is a device that torch has here", "pass 'cpu', or 'cuda:0'"
        ) from error
    return found


def _has_tokenizer(model: str | PathLike[str], how: Mapping[str, Any]) -> bool:
    """Return whether there is a tokenizer beside the model."""
    from transformers.utils.hub import cached_file  # noqa: PLC0415 - only for this

    names = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if Path(model).is_dir():
        return any((Path(model) / name).exists() for name in names)
    options: dict[str, Any] = {name: value for name, value in how.items() if name != "trust_remote_code"}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return any(cached_file(str(model), name, **quiet, **options) is not None for name in names)
