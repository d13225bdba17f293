"""A dtype and a device of torch count as what they are, and nothing imports torch for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import attnplug
from attnplug.errors import DeviceError
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements

BASE = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2}


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16"])
def test_a_dtype_of_torch_is_its_name(torch, name):
    by_torch = Requirements(**BASE, dtype=getattr(torch, name))

    assert by_torch == Requirements(**BASE, dtype=name)
    assert type(by_torch.dtype) is str
    assert Requirements(**BASE, dtype="float32").evolve(dtype=getattr(torch, name)).dtype == name


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2"), ("int8", "int8"), ("bfloat16", "bfloat16")],
)
def test_the_other_fields_with_dtypes_take_them_too(torch, dtype, name):
    found = Requirements(**BASE, dtype="float16", kv_cache_dtype=getattr(torch, dtype))

    assert found.kv_cache_dtype == name
    if name != "bfloat16":  # an output is quantized, or has the dtype of the layer
        assert Requirements(**BASE, dtype="float16", output_quant=getattr(torch, dtype)).output_quant == name


@pytest.mark.parametrize("make", [Device, Device.parse])
@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu"])
def test_a_device_of_torch_is_its_type(torch, make, kind):
    assert make(torch.device(kind)) == Device(kind)


@pytest.fixture
def two_gpus(torch, monkeypatch):
    """Let torch report an A100 and an H200, of which the process uses the second first."""
    properties = [
        SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108),
        SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("make", [Device, Device.parse])
@pytest.mark.parametrize(
    ("text", "name", "capability", "count"),
    [("cuda:0", "A100", "8.0", 108), ("cuda:1", "H200", "9.0", 132), ("cuda", "H200", "9.0", 132)],
)
def test_a_cuda_device_of_torch_is_the_one_of_this_process(torch, make, text, name, capability, count):
    expected = Device("cuda", name=name, compute_capability=capability, num_multiprocessors=count)

    assert make(torch.device(text)) == expected


@pytest.mark.usefixtures("two_gpus")
def test_what_is_given_beside_a_device_of_torch_stays(torch):
    assert Device(torch.device("cuda:0"), name="mine", num_multiprocessors=4).to_dict() == {
        "type": "cuda",
        "vendor": "nvidia",
        "name": "mine",
        "compute_capability": "8.0",
        "num_multiprocessors": 4,
    }


@pytest.mark.usefixtures("two_gpus")
def test_a_cuda_device_that_torch_does_not_see_is_refused(torch):
    with pytest.raises(DeviceError, match="torch sees 2 CUDA devices in this process"):
        Device.parse(torch.device("cuda:2"))


def test_without_cuda_a_cuda_device_is_refused_with_what_to_write(torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for text in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="torch sees no CUDA devices in this process") as caught:
            Device.parse(torch.device(text))
        assert "'cuda:9.0'" in caught.value.fix


def test_the_meta_device_is_refused(torch):
    with pytest.raises(DeviceError, match="tensors without data"):
        Device.parse(torch.device("meta"))


def test_every_call_takes_a_device_of_torch(torch):
    device, request = torch.device("cpu"), Requirements(**BASE, dtype=torch.bfloat16)
    chosen = attnplug.select(request, "cpu")

    assert attnplug.select(request, device) == attnplug.select(request, device) == chosen
    assert attnplug.explain(request, device).device == Device.cpu()
    assert attnplug.plan({"layer": request}, device)["layer"].device == Device.cpu()
    assert attnplug.load(request, device).selection.id == chosen.id
    with attnplug.using(device=device):
        assert attnplug.select(request).device == Device.cpu()


def test_the_cuda_device_of_a_second_call_may_be_another_one(torch, two_gpus, monkeypatch):
    """torch.device("cuda") is the current device: no call repeats the decision for the one before."""
    request = Requirements(**BASE, dtype="bfloat16")
    names = []
    for index in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        names.append(attnplug.explain(request, torch.device("cuda")).device.name)

    assert names == ["A100", "H200", "A100"]


def test_nothing_imports_torch_for_a_dtype_in_text():
    code = (
        "import attnplug, sys\n"
        "r = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype='torch.bfloat16')\n"
        "attnplug.Device.parse('cpu'); assert r.dtype == 'bfloat16'; assert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
