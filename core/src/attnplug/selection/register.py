"""Add a backend by hand: for notebooks, tests, and hosts with plugins of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attnplug.discovery.plugin import BY_HAND, Plugin
from attnplug.errors import ManifestError
from attnplug.manifest.parse import read_manifest
from attnplug.selection import state as process

if TYPE_CHECKING:
    from types import ModuleType


def register(module: ModuleType | str, *, manifest: Path | str) -> str:
    """
    Offer a backend to this process, as if its distribution were installed.

    Registering the same thing again changes nothing, so that it may run in every worker. An edited manifest of the
    same module takes the place of the former one. It stays over `refresh`, and ends with the process.

    Args:
        module: The plugin module, or its dotted name; it is imported only when its backend is loaded.
        manifest: The attnplug.toml.

    Returns:
        The backend's name.

    Raises:
        ManifestError: The manifest is malformed, or there is no such file. Nothing is registered then.
        DuplicateBackendError: Another backend of that name is there. Nothing is registered then.
    """
    name = module if isinstance(module, str) else module.__name__
    parsed = read_manifest(_existing(Path(manifest)))
    process.registry().register(
        Plugin(name=parsed.name, module=name, distribution=BY_HAND, version="", manifest=parsed)
    )
    return parsed.name


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ManifestError(
            f"manifest={str(path)!r} was given",
            f"there is no such file, seen from {str(Path.cwd())!r}"
            if not path.is_absolute()
            else "there is no such file",
            "name the attnplug.toml that describes the module; for one beside it: Path(module.__file__).with_name(...)",
        )
    return path
