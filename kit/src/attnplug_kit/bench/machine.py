"""What the numbers depend on: processor, interpreter, versions."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from attnplug.commands import environment

_CPUINFO: Final = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Return the facts as plain JSON values; nothing that names the machine or its user."""
    return {
        "processor": _processor(),
        "processors": _count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": environment()["versions"],
        "distributions": sum(1 for _ in metadata.distributions()),
    }


def _processor() -> str:
    """Return the processor's model. Linux tells it in a file, and other systems through `platform`."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or "unknown"


def _count() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
