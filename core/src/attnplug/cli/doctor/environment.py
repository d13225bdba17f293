"""What an environment is made of: interpreter, platform, versions."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any, Final

PACKAGES: Final = ("attnplug", "torch", "triton", "transformers", "nvidia-ml-py")
"""The distributions whose versions matter to every backend. What a plugin requires is told with the plugin."""


def environment() -> dict[str, Any]:
    """Return the environment as plain JSON values. Nothing is imported to find a version."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
