"""The probe on a fake machine: a fake torch, fake programs, fake metadata."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from attnplug import Agreement, Device
from attnplug_flashinfer import prebuilt, probe, toolchain
from plugins.flashinfer.tests.agreements import agreed
from tests.backends.fake_machine import CPU_TORCH, CUDA_TORCH, FakeMachine

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = ("c++", "ninja")
H200 = Device.cuda("9.0")
LIBRARIES = ("flashinfer", "flashinfer_jit_cache")


class Machine(FakeMachine):
    """A fake machine with FlashInfer and the programs that compile its kernels."""

    @property
    def path(self) -> Path:
        return self.root / "bin"

    @property
    def default_home(self) -> Path:
        return self.root / "usr-local-cuda"

    def program(self, name: str) -> Path:
        file = self.write(name, "#!/bin/sh\n")
        file.chmod(0o755)
        return file

    def tools(self, *names: str) -> None:
        for name in names:
            self.program(f"bin/{name}")

    def library(self, version: str = "0.6.12") -> None:
        self.distribution("flashinfer-python", version)
        self.package("flashinfer")

    def jit_cache(self, *modules: str, version: str = "0.6.12+cu130") -> None:
        self.distribution("flashinfer-jit-cache", version)
        self.package("flashinfer_jit_cache")
        for name in modules:
            self.write(f"site/flashinfer_jit_cache/jit_cache/{name}/{name}.so")

    def probe(self, agreement: Agreement, device: str = "cuda:9.0", *before: Path, **environment: str) -> Any:
        """Probe with only the programs of this machine on the PATH."""
        return super().probe(agreement, device, *before, PATH=str(self.path), **environment)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return a machine with a CUDA build of torch, the library, and no compiler."""
    made = Machine(tmp_path, probe.probe, LIBRARIES)
    monkeypatch.setattr(toolchain, "DEFAULT_HOME", str(made.default_home))
    made.path.mkdir()
    made.torch(CUDA_TORCH)
    made.library()
    return made


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Return a machine without packages, whose PATH and default toolkit this process uses."""
    made = Machine(tmp_path, probe.probe, LIBRARIES)
    made.path.mkdir()
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(made.path))
    monkeypatch.setattr(toolchain, "DEFAULT_HOME", str(made.default_home))
    return made


def test_a_complete_machine_is_not_refused(machine: Machine) -> None:
    machine.tools("nvcc", *TOOLS)

    assert machine.probe(agreed()) is None
    assert machine.probe(agreed("fa3")) is None


def test_a_cpu_build_of_torch_is_refused(machine: Machine) -> None:
    machine.torch(CPU_TORCH)
    machine.tools("nvcc", *TOOLS)

    reason = machine.probe(agreed())

    assert reason is not None
    assert (reason.code, reason.field) == ("broken", "torch")
    assert str(reason).startswith("torch 2.11.0+cpu is built without CUDA: install a torch that is built for CUDA")


def test_an_old_cuda_excludes_the_hopper_kernels_only(machine: Machine) -> None:
    machine.torch(CUDA_TORCH.replace("13.0", "12.1").replace("cu130", "cu121"))
    machine.tools("nvcc", *TOOLS)

    reason = machine.probe(agreed("fa3"))

    assert reason is not None
    assert "torch 2.11.0+cu121 is built for CUDA 12.1, and the Hopper kernels require 12.3" in str(reason)
    assert "use flashinfer/fa2" in reason.because
    assert machine.probe(agreed("fa2")) is None


def test_without_nvcc_the_searched_places_are_named(machine: Machine) -> None:
    machine.tools(*TOOLS)

    reason = machine.probe(agreed())

    assert reason is not None
    assert reason.field == "nvcc"
    assert f"CUDA_HOME and CUDA_PATH are not set, the PATH has none, and {machine.default_home} does not exist" in str(
        reason
    )
    assert "set CUDA_HOME to its folder; or install a flashinfer-jit-cache" in reason.because


def test_a_complete_jit_cache_needs_no_tool(machine: Machine) -> None:
    machine.jit_cache(*prebuilt.needed_modules(agreed(), H200))

    assert machine.probe(agreed()) is None


def test_a_module_missing_in_the_jit_cache_is_named(machine: Machine) -> None:
    decode, prefill = prebuilt.needed_modules(agreed(num_q_heads=8), H200)
    machine.jit_cache(prefill)

    reason = machine.probe(agreed(num_q_heads=8))

    assert reason is not None
    assert reason.field == "nvcc"
    assert decode in reason.because
    assert prefill not in reason.because


def test_the_library_may_contain_the_modules(machine: Machine) -> None:
    for name in prebuilt.needed_modules(agreed(), H200):
        machine.write(f"site/flashinfer/data/aot/{name}/{name}.so")

    assert machine.probe(agreed()) is None


def test_sink_modules_are_always_compiled(machine: Machine) -> None:
    machine.jit_cache(*prebuilt.needed_modules(agreed(), H200))

    reason = machine.probe(agreed(sinks=True))

    assert reason is not None
    assert reason.because == "install a CUDA toolkit, and set CUDA_HOME to its folder"


def test_a_library_with_compilation_disabled(machine: Machine) -> None:
    machine.tools("nvcc", *TOOLS)
    decode, prefill = prebuilt.needed_modules(agreed(num_q_heads=8), H200)
    machine.jit_cache(prefill)
    disabled = {"FLASHINFER_DISABLE_JIT": "0"}  # to the library every value is true

    assert str(machine.probe(agreed(num_q_heads=8), **disabled)) == (
        f"FLASHINFER_DISABLE_JIT is '0', and {decode} would have to be compiled: unset it; or install a "
        f"flashinfer-jit-cache of the library's version that has {decode}"
    )
    assert str(machine.probe(agreed(sinks=True), **disabled)).endswith("would have to be compiled: unset it")
    machine.jit_cache(decode, prefill)
    assert machine.probe(agreed(num_q_heads=8), **disabled) is None
    assert machine.probe(agreed(sinks=True)) is None


@pytest.mark.parametrize("name", ["flashinfer-jit-cache", "flashinfer-cubin"])
def test_compiled_kernels_of_another_version_are_refused(machine: Machine, name: str) -> None:
    machine.tools("nvcc", *TOOLS)
    machine.distribution(name, "0.6.11+cu130")

    reason = machine.probe(agreed())

    assert reason is not None
    assert reason.field == name
    assert f"{name} 0.6.11+cu130 is installed with flashinfer-python 0.6.12" in str(reason)
    assert machine.probe(agreed(), FLASHINFER_DISABLE_VERSION_CHECK="1") is None


def test_other_devices_are_left_to_the_manifest(machine: Machine) -> None:
    assert machine.probe(agreed(), "cpu") is None


def test_cuda_home_precedes_the_path(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.tools("nvcc", *TOOLS)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")

    reason = toolchain.missing_tool(["m"])

    assert reason is not None
    assert "with /nowhere/bin/nvcc, which does not exist: CUDA_HOME is '/nowhere', and precedes the PATH" in str(reason)
    monkeypatch.delenv("CUDA_HOME")
    assert toolchain.missing_tool(["m"]) is None


def test_cuda_path_replaces_an_empty_cuda_home(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.tools(*TOOLS)
    bare.program("toolkit/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("CUDA_PATH", str(bare.root / "toolkit"))

    assert toolchain.missing_tool(["m"]) is None


def test_the_default_folder_comes_last(bare: Machine) -> None:
    bare.tools(*TOOLS)
    bare.default_home.mkdir()

    reason = toolchain.missing_tool(["m"])

    assert reason is not None
    assert f"with {bare.default_home}/bin/nvcc, which does not exist" in str(reason)
    bare.program("usr-local-cuda/bin/nvcc")
    assert toolchain.missing_tool(["m"]) is None


def test_nvcc_has_to_be_executable(bare: Machine) -> None:
    bare.tools(*TOOLS)
    bare.write("bin/nvcc")

    assert toolchain.missing_tool(["m"]) is not None


def test_a_custom_nvcc_still_needs_a_toolkit(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.tools("my-nvcc", *TOOLS)
    monkeypatch.setenv("FLASHINFER_NVCC", "my-nvcc --quiet")

    reason = toolchain.missing_tool(["m"])

    assert reason is not None
    assert "there is no nvcc" in str(reason)
    bare.default_home.mkdir()
    assert toolchain.missing_tool(["m"]) is None
    monkeypatch.setenv("FLASHINFER_NVCC", "no-such-nvcc")
    assert str(toolchain.missing_tool(["m"])) == (
        "FLASHINFER_NVCC is 'no-such-nvcc', which is not a program: correct it, or unset it"
    )


def test_without_a_cpp_compiler(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.tools("nvcc", "ninja", "ccache")

    assert "there is no c++ on the PATH: install g++ or clang++" in str(toolchain.missing_tool(["m"]))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX is 'no-such-compiler', which is not a program" in str(toolchain.missing_tool(["m"]))
    monkeypatch.setenv("CXX", "ccache g++")
    assert toolchain.missing_tool(["m"]) is None


def test_without_ninja(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.tools("nvcc", "c++")
    monkeypatch.setattr(sys, "executable", str(bare.program("venv/bin/python")))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda _: str(bare.root / "scripts"))

    assert str(toolchain.missing_tool(["m"])).endswith("there is no ninja on the PATH: pip install ninja")
    beside = bare.program("venv/bin/ninja").parent
    assert str(toolchain.missing_tool(["m"])).endswith(f"add {beside}, which has one, to the PATH")


def test_a_probe_imports_neither_torch_nor_the_library() -> None:
    program = f"""if True:
        import sys
        from attnplug import Agreement, Device
        from attnplug_flashinfer.probe import probe
        probe("fa3", Agreement.from_dict({agreed("fa3").to_dict()!r}), Device.cuda("9.0"))
        assert not {{name.partition(".")[0] for name in sys.modules}} & {{"torch", *{LIBRARIES!r}}}
    """
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
