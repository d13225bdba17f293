"""How the device was found, and whether one may have been overlooked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from attnplug.cli import device_report
from attnplug.cli.device_report import DeviceReport, report_device
from attnplug.request.device import Device

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without a device, a driver, NVML's bindings or torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Device, "current", Device.cpu)
    monkeypatch.setattr(device_report, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(device_report, "_AMD_DRIVER", tmp_path / "kfd")
    monkeypatch.setattr(device_report.shutil, "which", lambda _: None)
    monkeypatch.setattr(device_report, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return monkeypatch


def test_without_bindings_nothing_was_looked_for(bare) -> None:
    report = report_device()

    assert report.device == Device.cpu()
    assert report.how.startswith("no NVIDIA device was looked for")
    assert report.overlooked == ""


def test_a_driver_that_nothing_can_read_is_reported(bare, tmp_path: Path) -> None:
    (tmp_path / "version").touch()

    report = report_device()

    assert "an NVIDIA driver is installed" in report.overlooked
    assert "pip install 'attnplug[nvml]'" in report.fix


@pytest.mark.parametrize("has_nvml", [False, True])
def test_a_driver_of_amd_is_reported(bare, tmp_path: Path, has_nvml: bool) -> None:
    (tmp_path / "kfd").touch()
    if has_nvml:
        bare.setattr(device_report, "find_spec", lambda _: SimpleNamespace())

    report = report_device()

    assert "an AMD driver is installed" in report.overlooked
    assert "--device rocm:gfx942" in report.fix
    assert Device.parse("rocm:gfx942").vendor == Device.parse("mi300x").vendor == "amd"


def test_its_command_shows_the_driver_too(bare) -> None:
    bare.setattr(device_report.shutil, "which", lambda _: "/usr/bin/nvidia-smi")

    assert report_device().overlooked


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_devices_are_no_oversight(bare, tmp_path: Path, hidden: str) -> None:
    (tmp_path / "version").touch()
    bare.setenv("CUDA_VISIBLE_DEVICES", hidden)

    assert report_device() == DeviceReport(Device.cpu(), "CUDA_VISIBLE_DEVICES hides every NVIDIA device")


def test_bindings_that_find_nothing_are_believed(bare, tmp_path: Path) -> None:
    (tmp_path / "version").touch()
    bare.setattr(device_report, "find_spec", lambda _: SimpleNamespace())

    assert report_device().how == "NVML finds no NVIDIA device"


def test_torch_is_believed_too(bare) -> None:
    bare.setitem(sys.modules, "torch", SimpleNamespace())

    assert report_device().how == "torch finds no accelerator"


@pytest.mark.parametrize(("imported", "how"), [(False, "NVML"), (True, "torch")])
def test_a_device_is_reported_with_how_it_was_found(bare, imported: bool, how: str) -> None:
    bare.setattr(Device, "current", lambda: Device.cuda("9.0"))
    if imported:
        bare.setitem(sys.modules, "torch", SimpleNamespace())

    assert report_device() == DeviceReport(Device.cuda("9.0"), how)
