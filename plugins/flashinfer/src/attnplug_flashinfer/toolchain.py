"""
Finds the tools that compile the library's kernels: nvcc, a C++ compiler and ninja.

They are searched where the library searches, in the order of ``get_cuda_path`` in its ``jit/cpp_ext.py``, releases
0.6.8 to 0.7.2.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.negotiation import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_HOME: Final = "/usr/local/cuda"


def missing_tool(modules: Sequence[str]) -> Reason | None:
    """
    Return why modules cannot be compiled here; None where they can.

    Args:
        modules: Their names, at least one.
    """
    return _forbidden(modules) or _nvcc(modules) or _cxx() or _ninja()


def _forbidden(modules: Sequence[str]) -> Reason | None:
    """Check FLASHINFER_DISABLE_JIT. The library reads every value as true."""
    name = "FLASHINFER_DISABLE_JIT"
    if not os.environ.get(name):
        return None
    found = f"{name} is {os.environ[name]!r}, and {', '.join(modules)} would have to be compiled"
    return Reason("probe", name, None, found, f"unset it{_or_compiled(modules)}")


def _nvcc(modules: Sequence[str]) -> Reason | None:
    home, why = _cuda_home()
    nvcc = os.environ.get("FLASHINFER_NVCC")
    if home is None:
        return _no_nvcc(f"FlashInfer compiles its kernels, and there is no nvcc: {why}", modules)
    if nvcc is not None:
        found = f"FLASHINFER_NVCC is {nvcc!r}, which is not a program"
        return None if _is_program(nvcc) else Reason("probe", "nvcc", None, found, "correct it, or unset it")
    expected = f"{home}/bin/nvcc"
    if shutil.which(expected):
        return None
    return _no_nvcc(f"FlashInfer compiles its kernels with {expected}, which does not exist: {why}", modules)


def _cuda_home() -> tuple[str | None, str]:
    """Return the CUDA toolkit that the library uses, and why."""
    name = "CUDA_HOME" if os.environ.get("CUDA_HOME") else "CUDA_PATH"
    home = os.environ.get(name)
    if home is not None:
        return home, f"{name} is {home!r}, and precedes the PATH"
    found = shutil.which("nvcc")
    if found is not None:
        return str(Path(found).parents[1]), f"the nvcc on the PATH is {found}"
    unset = "CUDA_HOME and CUDA_PATH are not set, the PATH has none"
    if Path(DEFAULT_HOME).exists():
        return DEFAULT_HOME, f"{unset}, and {DEFAULT_HOME} is the last place"
    return None, f"{unset}, and {DEFAULT_HOME} does not exist"


def _no_nvcc(found: str, modules: Sequence[str]) -> Reason:
    fix = f"install a CUDA toolkit, and set CUDA_HOME to its folder{_or_compiled(modules)}"
    return Reason("probe", "nvcc", None, found, fix)


def _or_compiled(modules: Sequence[str]) -> str:
    """Return the other fix. Modules with attention sinks have none: they are not distributed compiled."""
    if any("attention_sink" in name for name in modules):
        return ""
    return f"; or install a flashinfer-jit-cache of the library's version that has {', '.join(modules)}"


def _cxx() -> Reason | None:
    compiler = os.environ.get("CXX", "c++")
    if _is_program(compiler):
        return None
    why = f"CXX is {compiler!r}, which is not a program" if "CXX" in os.environ else "there is no c++ on the PATH"
    found = f"FlashInfer compiles its kernels, and {why}"
    return Reason("probe", "c++", None, found, "install g++ or clang++, or set CXX to a C++ compiler")


def _ninja() -> Reason | None:
    if shutil.which("ninja"):
        return None
    found = "FlashInfer compiles its kernels, and there is no ninja on the PATH"
    for folder in dict.fromkeys((sysconfig.get_path("scripts"), str(Path(sys.executable).parent))):
        if shutil.which("ninja", path=folder):
            return Reason("probe", "ninja", None, found, f"add {folder}, which has one, to the PATH")
    return Reason("probe", "ninja", None, found, "pip install ninja")


def _is_program(command: str) -> bool:
    """Return whether a shell command, with or without arguments, begins with a program."""
    words = shlex.split(command)
    return bool(words) and shutil.which(words[0]) is not None
