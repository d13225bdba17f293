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


def imported_torch(*, cuda: str | None, available: bool) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
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


@pytest.mark.parametrize(
    ("torch", "problem", "fix"),
    [
        (imported_torch(cuda=None, available=False), "torch 2.13.0 is built without CUDA", "install a torch that is"),
        (imported_torch(cuda="13.0", available=False), "torch 2.13.0 sees no CUDA device", "check nvidia-smi"),
        (imported_torch(cuda="13.0", available=True), None, None),
        (imported_torch(cuda=None, available=True), None, None),  # another vendor's devices
    ],
)
def test_an_imported_torch_is_checked_for_a_device(
    monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace, problem: str | None, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = missing_cuda()
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
