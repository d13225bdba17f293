"""
Tests of Triton kernels on a CPU: run by Triton's interpreter, or compiled only.

Triton reads ``TRITON_INTERPRET`` when it is imported, so interpreted tests run in a process each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from attrs import frozen

import attnplug
from attnplug.ops import Kernel
from attnplug.selection.process import PROCESS
from tests.backends.fakes import edited_manifest
from tests.backends.plugin import register_unless_installed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels of this process are interpreted."""

DEVICE: Final = "cpu" if INTERPRETED else "cuda"
"""The device that the kernels of this process run on."""

MARKS: Final = (
    # numpy warns of infinities that cancel, and of rows of nothing but NaN.
    [pytest.mark.filterwarnings("ignore:.*encountered in", "ignore:All-NaN slice encountered")]
    if INTERPRETED
    else [pytest.mark.gpu]
)
"""Marks of a module whose tests run kernels."""

RELEASE: Final = tuple(int(part) for part in metadata.version("triton").split(".")[:2]) if find_spec("triton") else None
"""The installed release of Triton."""

NEEDS_TRITON: Final = pytest.mark.skipif(
    RELEASE is None or RELEASE < (3, 3), reason="Triton 3.3 or newer is not installed"
)
"""The mark of a test that compiles a kernel by ``ASTSource``, whose arguments differ before Triton 3.3."""

DIVISION: Final = "div.rn.f32" if RELEASE is None or RELEASE >= (3, 6) else "div.rn.ftz.f32"
"""The PTX instruction of a division that rounds to nearest. Before Triton 3.6 it flushes subnormal numbers."""


def run_interpreted(file: Path, *options: str, measured: bool = True) -> None:
    """
    Run the tests of a file in a process whose kernels are interpreted, and assert that they pass.

    Args:
        file: The file.
        options: Options of pytest.
        measured: Whether coverage measures the process where it measures this one, which doubles the time.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, str(file)]
    kept = {name: value for name, value in os.environ.items() if measured or not name.startswith("COVERAGE_")}

    done = subprocess.run(command, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def interpreted_runs(folder: Path) -> list[Any]:
    """
    Return test parameters, arguments of `run_interpreted`, that together run all GPU tests of a folder.

    Coverage measures the hypothesis tests of the kernels and the tests of the backend, which run nearly every line.
    """
    found = []
    for file in sorted(folder.glob("test_*_on_gpu.py")):
        if file.name == "test_kernels_on_gpu.py":
            examples, others = ((file, "-m", which) for which in ("hypothesis", "not hypothesis"))
            found += [(examples, True, "random kernels"), (others, False, "kernels")]
        else:
            name = file.stem.removeprefix("test_").removesuffix("_on_gpu")
            found.append(((file,), name == "backend", name))
    return [pytest.param(words, measured, id=name) for words, measured, name in found]


def run_interpreted_kit(file: Path, folder: Path) -> None:
    """
    Run the conformance kit of a file interpreted, and assert that every declared value was exercised.

    Args:
        file: The file.
        folder: The folder that the kit's report is written to.
    """
    run_interpreted(file, f"--attn-report={folder}", measured=False)

    (found,) = json.loads((folder / "report.json").read_text("utf-8"))
    assert found["missing"] == []


def speed_up_interpreter() -> None:
    """
    Make Triton's interpreter do less. Tests of the kernels themselves keep all of its work.

    Integers wrap, as on a GPU, without a check: that is a quarter of the time. And a launch replaces the functions of
    `triton.language` once, which is a third of the rest: the interpreter does that again in each call of a device
    function, where nothing is left to replace.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter  # noqa: PLC0415 - not on every platform

    builder = interpreter.interpreter_builder
    if not builder.options.sanitize_overflow:
        return  # called before
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        """Return the changes for a launch, which it takes back; the functions of one module see the same language."""
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        scope = patch(function)
        patched.add(function.__module__)
        restore = scope.restore

        def end() -> None:
            restore()
            patched.clear()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_once


def compile_kernel(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    unaligned: Iterable[str] = (),
    capability: int | str = 90,
    **options: int,
) -> Any:
    """
    Compile a kernel, which needs no GPU. A compiler refuses code that the interpreter runs.

    Args:
        kernel: A function of ``triton.jit`` or ``gluon.jit``.
        kinds: The types of its arguments by name; others are ``i64``.
        constants: Its constants by name. Names that it does not have are ignored.
        unaligned: Pointers and strides that are no multiples of 16.
        capability: Ten times the compute capability, or the LLVM target of an AMD GPU.
        options: Options of the launch.
    """
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415
    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415 - Triton has no public name

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i64") for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if (signature[name] == "i64" or signature[name].startswith("*")) and name not in unaligned
    }
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, aligned)
    if isinstance(capability, str):
        if RELEASE is not None and RELEASE < (3, 5):
            pytest.skip("Triton 3.4 has no linker for AMD GPUs; ROCm has it")
        target = GPUTarget("hip", capability, 64 if capability.startswith("gfx9") else 32)
    else:
        target = GPUTarget("cuda", capability, 32)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", folder)
        return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


@frozen
class TritonPlugin:
    """
    A plugin of Triton kernels: on a GPU, or with a manifest that adds the CPU where its kernels are interpreted.

    Attributes:
        name: The name of its backend.
        package: Its package.
        distribution: Its distribution.
        changes: Patterns in its manifest and their replacements, which add the CPU.
    """

    name: str
    package: str
    distribution: str
    changes: tuple[tuple[str, str], ...]

    def configure(self, *more: tuple[str, str]) -> None:
        """Register it for the CPU in a process whose kernels are interpreted, which runs no other tests."""
        if not INTERPRETED:
            return
        # Where it is installed, the registered plugin replaces it.
        os.environ["ATTNPLUG_BLOCK"] = ",".join(filter(None, (os.environ.get("ATTNPLUG_BLOCK"), self.distribution)))
        attnplug.refresh()
        with TemporaryDirectory() as folder:
            manifest = Path(folder, "attnplug.toml")
            manifest.write_text(edited_manifest(self.package, (*self.changes, *more)), encoding="utf-8")
            attnplug.register(f"{self.package}.plugin", manifest=manifest)

    def fixture(self) -> Any:
        """Return a fixture, to be named `registered`, that registers it for one test, unless it is installed."""

        @pytest.fixture
        def registered(monkeypatch: pytest.MonkeyPatch) -> None:
            if not INTERPRETED:
                monkeypatch.setattr(PROCESS, "state", None)
                register_unless_installed(self.name, self.package)

        return registered


@contextmanager
def bounds_checked() -> Iterator[None]:
    """
    Fail each interpreted launch that loads or stores outside its tensors.

    The interpreter itself reads any address that the process has mapped.
    """
    from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415 - not on every platform

    extents: list[Any] = []  # of the current launch: sorted start addresses, and the running maximum of the ends
    with pytest.MonkeyPatch.context() as patch:
        for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
            patch.setattr(InterpreterBuilder, name, _checked(getattr(InterpreterBuilder, name), mask_at, extents))
        patch.setattr(Kernel, "run", _recorded(Kernel.run, extents))
        yield


def _recorded(run: Any, extents: list[Any]) -> Any:
    def recorded(kernel, programs, tensors, *rest, descriptors=(), **options):
        found = sorted(_extent(tensor) for tensor in (*tensors, *(described.base for described in descriptors)))
        extents[:] = np.array([start for start, _ in found]), np.maximum.accumulate([end for _, end in found])
        try:
            return run(kernel, programs, tensors, *rest, descriptors=descriptors, **options)
        finally:
            extents.clear()

    return recorded


def _extent(tensor: Any) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + count * tensor.element_size()


def _checked(access: Any, mask_at: int, extents: list[Any]) -> Any:
    def checked(builder, pointers, *rest, **options):
        if extents:
            mask = np.broadcast_to(rest[mask_at].data, pointers.data.shape).astype(bool)
            addresses = pointers.data[mask].astype(np.int64)
            starts, ends = extents
            at = np.searchsorted(starts, addresses, side="right") - 1
            is_inside = (at >= 0) & (addresses < ends[at])
            assert is_inside.all(), f"{access.__name__} outside all tensors of the launch"
        return access(builder, pointers, *rest, **options)

    return checked
