"""Loads the op libraries in wheels. The Python code of these wheels is never imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.errors import PluginLoadError
from attnplug_flash_attn.op_files import ARGUMENTS, DISTRIBUTIONS, FILES, find

if TYPE_CHECKING:
    from pathlib import Path


def load(library: str) -> Any:
    """
    Return the namespace of a library's ops. They are registered once per process, by this plugin or by an engine.

    Raises:
        PluginLoadError: The library is missing, does not load, or its ops have other arguments.
    """
    name = DISTRIBUTIONS[library]
    if not _is_registered(library):
        path = find(library)
        if path is None:
            raise PluginLoadError(
                f"the op library {library!r} is not installed",
                f"it is the file {FILES[library]} in the wheel of {name}",
                f"install {name}, or let attnplug choose another variant",
            )
        _load_file(library, path)
    for op in changed_ops(library):
        raise PluginLoadError(
            f"{library}.{op} of the installed {name} has an unsupported signature",
            f"this plugin passes, by position: {ARGUMENTS[library][op].replace(' ', ', ')}",
            f"install a release of {name} that the manifest allows",
        )
    return getattr(torch.ops, library)


def changed_ops(library: str) -> list[str]:
    """Return the ops of a loaded library that are missing or have other arguments."""
    return [op for op, names in ARGUMENTS[library].items() if not _accepts(library, op, names.split())]


def _accepts(library: str, op: str, names: list[str]) -> bool:
    packet = getattr(getattr(torch.ops, library), op, None)
    if packet is None:
        return False
    arguments = packet.default._schema.arguments  # noqa: SLF001 - ops have no public schema
    more = arguments[len(names) :]
    return [item.name for item in arguments[: len(names)]] == names and all(item.has_default_value() for item in more)


def _is_registered(library: str) -> bool:
    return any(hasattr(getattr(torch.ops, library), op) for op in ARGUMENTS[library])


def _load_file(library: str, path: Path) -> None:
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise PluginLoadError(
            f"the op library {library!r} does not load: {error}",
            "it is built for one release of torch and CUDA",
            f"install the release of {DISTRIBUTIONS[library]} for this torch",
        ) from error
