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
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def version_of(name: str) -> str:
    """Return the installed version of a distribution, or an empty text."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
