"""Devices by their names: products, compute capabilities, LLVM targets; and what is close to a text that is none."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import DeviceError
from attnplug.request.capability import HARDWARE
from attnplug.request.device import Device
from attnplug.request.device import _target as target_of
from attnplug.request.device_names import PRODUCTS, TYPES, plain

# From the makers' tables, beside the module's own: what people ask about most.
PUBLISHED = {
    "a100": "8.0",
    "a10": "8.6",
    "l4": "8.9",
    "l40s": "8.9",
    "h100": "9.0",
    "h200": "9.0",
    "b200": "10.0",
    "gb200": "10.0",
    "b300": "10.3",
    "rtx3090": "8.6",
    "rtx4090": "8.9",
    "rtx5090": "12.0",
    "t4": "7.5",
    "v100": "7.0",
    "gb10": "12.1",
}
TARGETS = {"mi300x": "gfx942", "mi325x": "gfx942", "mi355x": "gfx950", "mi250x": "gfx90a", "mi100": "gfx908"}


@pytest.mark.parametrize(("name", "capability"), PUBLISHED.items())
def test_nvidia_products_have_their_compute_capability(name: str, capability: str) -> None:
    found = Device.parse(name)

    assert (found.type, found.vendor, str(found.compute_capability)) == ("cuda", "nvidia", capability)
    assert found.name is not None
    assert plain(found.name) == name


@pytest.mark.parametrize(("name", "target"), TARGETS.items())
def test_amd_products_have_their_llvm_target(name: str, target: str) -> None:
    found = Device.parse(name)

    assert (found.type, found.vendor, found.arch, found.compute_capability) == ("cuda", "amd", target, None)
    assert str(found) == f"rocm:{target} ({found.name})"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("sm90", Device.cuda("9.0")),
        ("sm_90a", Device.cuda("9.0a")),
        ("SM121", Device.cuda("12.1")),
        ("cuda:10.3", Device.cuda("10.3")),
        ("cuda:6.1", Device.cuda("6.1")),
        ("cuda:13.0", Device.cuda("13.0")),
        ("rocm:gfx942", Device("cuda", vendor="amd", arch="gfx942")),
        ("gfx90a", Device("cuda", vendor="amd", arch="gfx90a")),
        ("rocm", Device("cuda", vendor="amd")),
        ("cuda:iluvatar", Device("cuda", vendor="iluvatar")),
        ("npu", Device("npu")),
    ],
)
def test_other_texts_name_what_a_kernel_depends_on(text: str, device: Device) -> None:
    assert Device.parse(text) == device


@pytest.mark.parametrize("text", ["RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "GeForce_RTX_4090", "rtx4090"])
def test_a_product_is_written_in_several_ways(text: str) -> None:
    assert Device.parse(text) == Device.cuda("8.9", name="NVIDIA GeForce RTX 4090")


def test_this_machine_s_device_is_current() -> None:
    assert Device.parse("current") == Device.current()


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("h1000", "h100"),
        ("rx4090", "rtx4090"),
        ("mi300", "mi300x"),
        ("CUDA:9.0", "cuda:9.0"),
        ("cuda:9.5", "cuda:9.0"),
        ("sm900", "sm90"),
        ("rocm:gfx", "rocm:gfx9"),
        ("tpu", "xpu"),
        ("curent", "current"),
    ],
)
def test_anything_else_is_refused_with_near_names(text: str, nearest: str) -> None:
    with pytest.raises(DeviceError) as caught:
        Device.parse(text)

    assert f"the device {text!r} was given; did you mean {nearest}" in caught.value.problem
    assert caught.value.fix.startswith(f"write {nearest}")


@pytest.mark.parametrize("text", ["", "gpu:x", "acme", "gfx", "cuda:900.0", "x" * 10_000, "cpu:0", "h100:9.0"])
def test_what_is_close_to_nothing_is_refused_too(text: str) -> None:
    with pytest.raises(DeviceError) as caught:
        Device.parse(text)

    assert caught.value.fix


@pytest.mark.parametrize("text", ["h100", "mi300x", "sm90", "gfx942"])
def test_a_product_is_no_device_type(text: str) -> None:
    with pytest.raises(DeviceError) as caught:
        Device(text)

    assert caught.value.fix == f"use Device.parse({text!r})"
    assert Device.parse(text).type == "cuda"


def test_a_manifest_s_device_type_is_a_name() -> None:
    assert Device.parse("acme", types=["acme"]) == Device("acme")
    with pytest.raises(DeviceError, match="did you mean acme"):
        Device.parse("acmee", types=["acme"])


def test_every_product_has_a_source_and_existing_hardware() -> None:
    known = {str(capability) for capability in HARDWARE}
    for product in PRODUCTS.values():
        found = Device.parse(product.name)
        assert Device.parse(product.product) == found
        assert Device.parse(product.device) in (
            Device("cuda", vendor="amd", arch=found.arch),
            Device("cuda", compute_capability=found.compute_capability) if found.compute_capability else None,
        )
        assert re.fullmatch(r"https://(developer\.nvidia|rocm\.docs\.amd)\.com/\S+", product.source)
        assert (product.capability in known) != (product.arch is not None)


@given(st.sampled_from([*PRODUCTS, *TYPES, "sm90", "cuda:9.0", "rocm:gfx942"]) | st.text(max_size=12))
def test_a_text_is_a_device_or_the_fix_names_one(text: str) -> None:
    try:
        found = Device.parse(text)
    except DeviceError as error:
        found = Device.parse(error.fix.removeprefix("write ")) if "did you mean" in error.problem else Device.cpu()
    assert Device.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("name", "target"),
    [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx90a", "gfx90a"), ("", None), ("?", None)],
)
def test_torch_s_name_of_a_target_has_modes(name: str, target: str | None) -> None:
    assert target_of(SimpleNamespace(gcnArchName=name)) == target


def test_a_target_is_a_word() -> None:
    with pytest.raises(DeviceError, match="arch='gfx 942'"):
        Device("cuda", vendor="amd", arch="gfx 942")
