"""What a plugin's probe reports of torch, without importing it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from attnplug.negotiation import missing_cuda, torch_build, torch_probe
from tests.backends.fake_machine import CPU_TORCH, CUDA_TORCH

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def version_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ``version.py`` of the only torch that is found; it does not exist yet, and no torch is imported."""
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_probe, "find_spec", {"torch": spec}.get)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return tmp_path / "version.py"


def imported_torch(*, cuda: str | None, available: bool, hip: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


def test_a_build_is_read_from_its_version_file(version_file: Path) -> None:
    version_file.write_text(CUDA_TORCH, encoding="utf-8")
    build = torch_build()
    assert build is not None
    assert (build.version, build.cuda) == ("2.11.0+cu130", (13, 0))
    assert missing_cuda() is None


def test_a_build_for_the_cpu_is_refused_with_a_fix(version_file: Path) -> None:
    version_file.write_text(CPU_TORCH, encoding="utf-8")
    reason = missing_cuda()
    assert reason is not None
    assert (reason.code, reason.field) == ("broken", "torch")
    assert reason.supported == "torch 2.11.0+cpu is built without CUDA"
    assert reason.because.startswith("install a torch that is built for CUDA")


def test_amd_devices_need_a_build_for_rocm(version_file: Path) -> None:
    version_file.write_text(CUDA_TORCH, encoding="utf-8")
    reason = missing_cuda("amd")
    assert reason is not None
    assert reason.supported == "torch 2.11.0+cu130 is built without ROCm"
    assert reason.because.startswith("install a torch that is built for ROCm")

    version_file.write_text(CPU_TORCH.replace("hip: Optional[str] = None", "hip: Optional[str] = '7.0'"), "utf-8")
    build = torch_build()
    assert build is not None
    assert build.has_hip
    assert missing_cuda("amd") is None
    assert missing_cuda() is not None


@pytest.mark.parametrize("text", [None, "", "__version__ = '2.11'", "cuda = '13.0'"])
def test_a_build_that_cannot_be_read_is_not_refused(version_file: Path, text: str | None) -> None:
    if text is not None:
        version_file.write_text(text, encoding="utf-8")
    assert torch_build() is None
    assert missing_cuda() is None


def test_without_torch_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_probe, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_build() is None
    assert missing_cuda() is None


NO_CUDA = imported_torch(cuda=None, available=False)
OF_CUDA = imported_torch(cuda="13.0", available=True)
OF_ROCM = imported_torch(cuda=None, available=True, hip="7.0")
NO_AMD = imported_torch(cuda=None, available=False, hip="7.0")


@pytest.mark.parametrize(
    ("torch", "vendor", "problem", "fix"),
    [
        (NO_CUDA, "nvidia", "torch 2.13.0 is built without CUDA", "install a torch that is"),
        (imported_torch(cuda="13.0", available=False), "nvidia", "torch 2.13.0 sees no CUDA device", "check nvidia"),
        (OF_CUDA, "nvidia", None, None),
        (imported_torch(cuda=None, available=True), "iluvatar", None, None),
        (NO_CUDA, "amd", "torch 2.13.0 is built without ROCm", "install a torch that is"),
        (OF_CUDA, "amd", "torch 2.13.0 is built without ROCm", "install a torch that is"),
        (NO_AMD, "amd", "torch 2.13.0 sees no AMD device", "check rocm-smi"),
        (OF_ROCM, "amd", None, None),
    ],
)
def test_an_imported_torch_is_checked_for_a_device(
    monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace, vendor: str, problem: str | None, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = missing_cuda(vendor)
    if problem is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.supported == problem
        assert reason.because.startswith(fix)


def test_the_installed_torch_is_read() -> None:
    torch = pytest.importorskip("torch")
    build = torch_build()
    assert build is not None
    assert build.version == torch.__version__
    assert build.cuda == (None if torch.version.cuda is None else tuple(map(int, torch.version.cuda.split(".")[:2])))
