"""The look at a real NVIDIA GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import attnplug

pytestmark = pytest.mark.gpu

LOOK = """
import ctypes, json, sys
import attnplug
device = attnplug.Device.current()
driver = ctypes.CDLL("libcuda.so.1")
initialized = driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 0
print(json.dumps({"device": device.to_dict(), "torch": "torch" in sys.modules, "initialized": initialized}))
"""


def look(**environment):
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return json.loads(ran.stdout)


def test_the_device_is_found_without_torch_and_without_a_context(record_property):
    """`cuCtxGetCurrent` fails with "not initialized" as long as nothing of this process has started the driver."""
    found = look()

    record_property("device", found["device"])
    assert found["device"]["type"] == "cuda"
    assert not found["torch"]
    assert not found["initialized"]


def test_hidden_devices_are_not_found():
    assert look(CUDA_VISIBLE_DEVICES="")["device"] == {"type": "cpu"}


def test_torch_and_nvml_agree(record_property):
    seen = look()["device"]
    torch.zeros(1, device="cuda")
    exact = attnplug.Device.current()

    assert attnplug.Device.from_dict(seen) == exact
    record_property("multiprocessors", exact.num_multiprocessors)
