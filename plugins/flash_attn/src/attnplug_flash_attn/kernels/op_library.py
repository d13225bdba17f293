"""The op libraries in vLLM's wheel, loaded. vLLM itself is never imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.errors import PluginLoadError
from attnplug_flash_attn.op_files import ARGUMENTS, DISTRIBUTION, FOLDER, find

if TYPE_CHECKING:
    from pathlib import Path


def load(library: str) -> Any:
    """
    Return the namespace of a library's ops. They are registered once per process, whoever did it first.

    Raises:
        PluginLoadError: It is not there, its file does not load, or its ops take other arguments.
    """
    if not _is_registered(library):
        path = find(library)
        if path is None:
            raise PluginLoadError(
                f"The op library {library!r} is not installed.",
                f"It is a file of vLLM's wheel, in {FOLDER}.",
                f"Install {DISTRIBUTION}, or let attnplug choose another variant.",
            )
        _load_file(library, path)
    for op in changed_ops(library):
        raise PluginLoadError(
            f"{library}.{op} of the installed {DISTRIBUTION} takes other arguments than this plugin passes.",
            f"It passes, by position: {ARGUMENTS[library][op].replace(' ', ', ')}.",
            f"Install a release of {DISTRIBUTION} that the plugin's manifest allows.",
        )
    return getattr(torch.ops, library)


def changed_ops(library: str) -> list[str]:
    """Return which ops of a loaded library are gone, or do not take what the adapters pass."""
    return [op for op, names in ARGUMENTS[library].items() if not _takes(library, op, names.split())]


def _takes(library: str, op: str, names: list[str]) -> bool:
    packet = getattr(getattr(torch.ops, library), op, None)
    if packet is None:
        return False
    arguments = packet.default._schema.arguments  # noqa: SLF001 - there is no other way to ask
    more = arguments[len(names) :]
    return [item.name for item in arguments[: len(names)]] == names and all(item.has_default_value() for item in more)


def _is_registered(library: str) -> bool:
    return any(hasattr(getattr(torch.ops, library), op) for op in ARGUMENTS[library])


def _load_file(library: str, path: Path) -> None:
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise PluginLoadError(
            f"The op library {library!r} does not load: {error}.",
            "It is built for one release of torch and of CUDA each.",
            f"Install the release of {DISTRIBUTION} that goes with this torch.",
        ) from error
