"""The probe on a fake machine, and a library that does not load."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug import Agreement, Requirements
from attnplug.errors import PluginLoadError
from attnplug_flashmla.plugin import attnplug_probe
from tests.backends.fake_machine import CPU_TORCH, CUDA_TORCH, FakeMachine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LATENT = Requirements(
    latent=True, head_size=576, head_size_v=512, num_q_heads=16, num_kv_heads=1, dtype="bfloat16", block_size=64
)
AGREED = Agreement("flashmla", "sgl", LATENT, 64, "NHD", "latent", "bfloat16", "never", {})
INTERFACE = "def flash_mla_with_kvcache(q, use_legacy=False): ...\ndef get_mla_decoding_metadata(): ...\n"
INTERFACE += "def flash_mla_sparse_fwd(): ...\n"
FOLDER = "site/flash_mla"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """Return a machine with a CUDA build of torch and the library."""
    made = FakeMachine(tmp_path, attnplug_probe, ("flash_mla",))
    made.torch(CUDA_TORCH)
    made.distribution("sgl-flash-mla", "1.0.0")
    made.package("flash_mla")
    made.write(f"{FOLDER}/_C_legacy.abi3.so")
    made.write(f"{FOLDER}/flash_mla_interface.py", INTERFACE)
    return made


def test_a_complete_machine_is_not_refused(machine: FakeMachine) -> None:
    assert machine.probe(AGREED) is None


@pytest.mark.parametrize(
    ("torch", "problem"),
    [
        (CPU_TORCH, "torch | torch 2.11.0+cpu is built without CUDA"),
        (CUDA_TORCH.replace("13.0", "12.8").replace("cu130", "cu128"), "torch | torch 2.11.0+cu128 is built for CUDA"),
    ],
)
def test_other_builds_of_torch_are_refused(machine: FakeMachine, torch: str, problem: str) -> None:
    machine.torch(torch)

    assert machine.reason(AGREED).startswith(problem)
    assert machine.probe(AGREED, "cpu") is None


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (
            "_C_legacy.abi3.so",
            None,
            "flash_mla has no _C_legacy library, which has the kernels for Hopper of sgl-flash",
        ),
        ("__init__.py", None, "sgl-flash-mla 1.0.0 is installed, and the package flash_mla is missing"),
        (
            "flash_mla_interface.py",
            None,
            "has no flash_mla_with_kvcache, flash_mla_sparse_fwd, get_mla_decoding_metadata, use_legacy",
        ),
        ("flash_mla_interface.py", INTERFACE.replace("get_mla", "old_mla"), "py has no get_mla_decoding_metadata: "),
        (
            "flash_mla_interface.py",
            INTERFACE.replace("use_legacy", "old"),
            "flash_mla_interface.py has no use_legacy: ",
        ),
    ],
)
def test_what_a_package_lacks_is_named(machine: FakeMachine, file: str, text: str | None, problem: str) -> None:
    machine.root.joinpath(FOLDER, file).unlink()
    if text is not None:
        machine.write(f"{FOLDER}/{file}", text)

    found = machine.reason(AGREED)

    assert found.startswith("sgl-flash-mla | ")
    assert problem in found
    assert "pip install --no-deps --force-reinstall sgl-flash-mla" in found


def test_an_absent_library_is_left_to_the_manifest(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, attnplug_probe, ("flash_mla",))
    machine.torch(CUDA_TORCH)

    assert machine.probe(AGREED) is None


def test_kernels_that_do_not_load_are_an_error(load_fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(use_legacy: bool) -> None:
        raise RuntimeError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(importlib.import_module("flash_mla.flash_mla_interface"), "get_ops", fail)

    with pytest.raises(PluginLoadError, match=r"(?s)do not load: libcudart\.so\.13.*install a torch for CUDA 13"):
        load_fake(LATENT)
    attnplug.refresh()  # the failure is remembered until then
