"""How the device was found, and whether one may have been overlooked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from attnplug.cli import look as looking
from attnplug.cli.look import look
from attnplug.request.device import Device

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without a device, a driver, NVML's bindings or torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Device, "current", Device.cpu)
    monkeypatch.setattr(looking, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(looking.shutil, "which", lambda _: None)
    monkeypatch.setattr(looking, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return monkeypatch


def test_without_bindings_nothing_was_looked_for(bare) -> None:
    seen = look()

    assert seen.device == Device.cpu()
    assert seen.how.startswith("no NVIDIA device was looked for")
    assert seen.overlooked == ""


def test_a_driver_that_nobody_can_ask_is_told(bare, tmp_path: Path) -> None:
    (tmp_path / "version").touch()

    seen = look()

    assert "an NVIDIA driver is installed" in seen.overlooked
    assert "pip install 'attnplug[nvml]'" in seen.fix


def test_its_command_tells_the_driver_too(bare) -> None:
    bare.setattr(looking.shutil, "which", lambda _: "/usr/bin/nvidia-smi")

    assert look().overlooked


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_devices_are_no_oversight(bare, tmp_path: Path, hidden: str) -> None:
    (tmp_path / "version").touch()
    bare.setenv("CUDA_VISIBLE_DEVICES", hidden)

    assert look() == looking.Sight(Device.cpu(), "CUDA_VISIBLE_DEVICES hides every NVIDIA device")


def test_bindings_that_find_nothing_are_believed(bare, tmp_path: Path) -> None:
    (tmp_path / "version").touch()
    bare.setattr(looking, "find_spec", lambda _: SimpleNamespace())

    assert look().how == "NVML finds no NVIDIA device"


def test_torch_is_believed_too(bare) -> None:
    bare.setitem(sys.modules, "torch", SimpleNamespace())

    assert look().how == "torch finds no accelerator"


@pytest.mark.parametrize(("imported", "how"), [(False, "NVML"), (True, "torch")])
def test_a_device_is_told_with_who_found_it(bare, imported: bool, how: str) -> None:
    bare.setattr(Device, "current", lambda: Device.cuda("9.0"))
    if imported:
        bare.setitem(sys.modules, "torch", SimpleNamespace())

    assert look() == looking.Sight(Device.cuda("9.0"), how)
