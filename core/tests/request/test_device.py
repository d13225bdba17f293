"""Devices as data, and the look at this machine through doubles that take what NVML and torch take."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from attnplug.errors import DeviceError
from attnplug.request import device as module
from attnplug.request.device import Device, is_unseen, multiprocessors
from tools import forked


class Nvml(SimpleNamespace):
    """Two GPUs, by index and by UUID."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver=True, cores=16896):
        super().__init__(driver=driver, cores=cores, open=0)

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        if index not in (0, 1):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-b":
            raise self.NVMLError("Not Found")
        return 1

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return [9, 0] if handle == 0 else [8, 0]

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200" if handle == 0 else b"NVIDIA A100"

    def nvmlDeviceGetNumGpuCores(self, handle):
        if self.cores is None:
            raise self.NVMLError("Not Supported")
        return self.cores if handle == 0 else 6912


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def nvml(monkeypatch, no_torch):
    double = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", double)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return double


def test_reads_the_first_device(nvml):
    device = Device.current()

    assert device == Device.cuda("9.0", name="NVIDIA H200").__class__(
        "cuda", name="NVIDIA H200", compute_capability="9.0", num_multiprocessors=132
    )
    assert nvml.open == 0


@pytest.mark.parametrize(("visible", "expected"), [("1,0", "8.0"), ("GPU-b", "8.0"), ("0", "9.0")])
def test_honours_visible_devices(nvml, monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert str(Device.current().compute_capability) == expected


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_no_visible_device_is_the_cpu(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert Device.current() == Device.cpu()


def test_a_visible_device_that_is_not_there_is_an_error(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    with pytest.raises(
        DeviceError, match=r"CUDA_VISIBLE_DEVICES='7'(.|\n)*NVML finds no such device(.|\n)*nvidia-smi -L"
    ):
        Device.current()
    assert nvml.open == 0


def test_no_driver_is_the_cpu(nvml):
    nvml.driver = False

    assert Device.current() == Device.cpu()


def test_a_driver_that_does_not_count_cores_leaves_the_count_open(nvml):
    nvml.cores = None

    assert Device.current().num_multiprocessors is None


def test_without_bindings_and_torch_it_is_the_cpu(monkeypatch, no_torch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail

    assert Device.current() == Device.cpu()
    assert "torch" not in sys.modules


def torch_double(*, cuda=False, initialized=False, hip=None, accelerator=None, name="GPU"):
    properties = SimpleNamespace(name=name, major=10, minor=0, multi_processor_count=148)
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: cuda,
            is_initialized=lambda: initialized,
            current_device=lambda: 0,
            get_device_properties=lambda index: {0: properties}[index],
        ),
        version=SimpleNamespace(hip=hip),
        accelerator=SimpleNamespace(
            is_available=lambda: accelerator is not None, current_accelerator=lambda: accelerator
        ),
    )


def test_an_initialized_torch_knows_best(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch_double(cuda=True, initialized=True))

    assert Device.current() == Device("cuda", name="GPU", compute_capability="10.0", num_multiprocessors=148)


def test_an_idle_torch_is_used_only_without_nvml(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch_double(cuda=True))

    assert str(Device.current().compute_capability) == "9.0"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert str(Device.current().compute_capability) == "10.0"


def test_rocm_has_another_vendor_and_no_capability(monkeypatch, no_torch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", torch_double(cuda=True, initialized=True, hip="6.3"))

    assert (Device.current().vendor, Device.current().compute_capability) == ("amd", None)


def test_iluvatar_devices_are_not_taken_for_nvidia(monkeypatch, no_torch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", torch_double(cuda=True, initialized=True, name="Iluvatar BI-V150"))

    assert (Device.current().vendor, Device.current().compute_capability) == ("iluvatar", None)


def test_other_accelerators_are_named(monkeypatch, no_torch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "torch", torch_double(accelerator=SimpleNamespace(type="xpu")))

    assert Device.current() == Device("xpu")


@pytest.mark.parametrize(
    ("driver", "torch", "bindings", "visible", "unseen"),
    [
        (True, False, False, None, True),
        (False, False, False, None, False),
        (True, True, False, None, False),
        (True, False, True, None, False),
        (True, False, False, "", False),
    ],
)
def test_a_gpu_that_nothing_can_see(monkeypatch, no_torch, driver, torch, bindings, visible, unseen):
    monkeypatch.setattr(module.os.path, "exists", lambda path: driver and path.startswith("/dev/"))
    monkeypatch.setattr(module, "find_spec", lambda _: bindings or None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if torch:
        monkeypatch.setitem(sys.modules, "torch", torch_double())

    assert is_unseen() is unseen


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device.cpu()),
        ("cuda:9.0", Device.cuda("9.0")),
        ("cuda:9.0a", Device.cuda("9.0a")),
        ("xpu", Device("xpu")),
    ],
)
def test_reads_as_text(text, device):
    assert Device.parse(text) == device
    assert Device.from_dict(device.to_dict()) == device
    assert str(device) == text


@pytest.mark.parametrize("text", ["", "cuda", "cuda:nine", "CUDA:9.0", "cuda:9"])
def test_texts_that_are_no_device(text):
    with pytest.raises(DeviceError) as caught:
        Device.parse(text)
    assert caught.value.fix


def test_unknown_fields_are_refused():
    with pytest.raises(DeviceError, match="'sms'"):
        Device.from_dict({"type": "cpu", "sms": 3})
    with pytest.raises(DeviceError, match="a device has a type"):
        Device.from_dict({})


@pytest.mark.parametrize(
    ("cores", "capability", "count"),
    [(16896, (9, 0), 132), (6912, (8, 0), 108), (5120, (7, 0), 80), (10752, (8, 6), 84)],
)
def test_multiprocessors_follow_from_lanes(cores, capability, count):
    """H200, A100, V100 and RTX A6000, by their data sheets."""
    assert multiprocessors(cores, capability) == count


@pytest.mark.parametrize("make", [Device, Device.parse])
def test_a_device_of_another_library_is_refused_with_its_text(make):
    for kind, written in (
        ("cpu", "or write 'cpu'"),
        ("cuda", "or write 'cuda:9.0', with its own compute capability"),
    ):
        with pytest.raises(DeviceError) as caught:
            make(SimpleNamespace(type=kind))
        assert caught.value.fix == f"leave it out for this process's own, {written}"


def test_a_device_index_is_no_compute_capability():
    with pytest.raises(DeviceError, match=r"such as '9\.0', not as a device index"):
        Device.parse("cuda:0")


def test_a_device_that_torch_does_not_know_has_the_name_of_its_package() -> None:
    code = """
import torch, attnplug
torch.utils.rename_privateuse1_backend("acmecore")
print(repr(attnplug.Device(torch.device("acmecore", 1))), repr(attnplug.Device.parse(torch.device("acmecore"))))
"""
    done = forked.run("-c", code)

    assert done.stdout == "Device('acmecore') Device('acmecore')\n", done.stderr
