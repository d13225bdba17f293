"""`attnplug explain --engine torch` and `attnplug doctor`: torch's own choice beside attnplug's."""

from __future__ import annotations

import io
import json
import runpy
import subprocess
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import attnplug
from attnplug.engines import EngineAnswer, EngineDiagnosis
from attnplug.errors import DeviceError, PluginError, RequestError
from attnplug_torch import chooser, engine

SIZES = {"head_size": 64, "num_q_heads": 4, "num_kv_heads": 4}
ENCODER = {**SIZES, "dtype": "float32", "attn_type": "encoder_only", "paged": False}


def request(**fields):
    return attnplug.Requirements(**{**ENCODER, **fields})


@pytest.fixture
def here(monkeypatch):
    """Let the program run in this process."""
    monkeypatch.setattr(engine, "_run", lambda given: json.loads(json.dumps(chooser.answer(given))))


@pytest.fixture
def entry(monkeypatch):
    """Have the entry point of the distribution, whether or not it is installed."""
    found = [EntryPoint("attnplug", "attnplug_torch.registration:autoload", "torch.backends")]
    monkeypatch.setattr(engine, "distribution", lambda name: SimpleNamespace(entry_points=found))
    return found


def test_torch_chooses_for_each_request(here) -> None:
    requests = [
        request(),
        request(head_size_v=32),
        request(attn_type="decoder", num_kv_heads=2, batch_invariant=True),
        request(custom_mask=True),
        request(attn_bias=True),
    ]
    found = engine.choose(requests, attnplug.Device.cpu(), assume_installed=False)

    assert isinstance(found, EngineAnswer)
    assert found.engine == f"torch {torch.__version__}"
    assert [one.chosen for one in found.choices] == ["FLASH_ATTENTION", "MATH", *["FLASH_ATTENTION"] * 3]
    assert found.choices[0].backend.same_as == ("torch/sdpa",)
    assert found.choices[1].backends[0].reasons == ("values of another head size",)
    assert found.choices[2].ignored == ("batch_invariant",)


def test_what_torchs_function_has_no_argument_for_is_named(here) -> None:
    requests = [
        request(attn_type="decoder", sinks=True, sliding_window=8),
        request(),
        request(attn_type="decoder", paged=True),
    ]
    found = engine.choose(requests, attnplug.Device.cpu(), assume_installed=True).choices

    assert [one.chosen for one in found] == [None, "FLASH_ATTENTION", None]
    assert "no argument for a window and attention sinks" in found[0].reason
    assert "no paged KV cache" in found[2].reason


def test_torch_chooses_on_the_gpu_that_is_there(here, monkeypatch) -> None:
    def reason():
        return engine.choose([request()], attnplug.Device.cuda("9.0"), assume_installed=False).choices[0].reason

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is none here" in reason()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "compute capability 8.0" in reason()
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))  # of a gfx90a
    assert "AMD" in reason()


@pytest.mark.parametrize("device", [attnplug.Device("rocm"), attnplug.Device.parse("mi300x")])
def test_other_devices_are_refused(here, device: attnplug.Device) -> None:
    with pytest.raises(DeviceError, match="--engine torch"):
        engine.choose([request()], device, assume_installed=False)


def test_without_torch_there_is_no_answer(monkeypatch) -> None:
    def missing(name):
        raise PackageNotFoundError

    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    monkeypatch.setattr(engine, "version", missing)

    with pytest.raises(RequestError, match="torch is not installed"):
        engine.choose([request()], attnplug.Device.cpu(), assume_installed=False)
    assert "not installed" in engine.diagnose(load=False).lines[0]


def test_the_program_reads_and_writes_json(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"device": "cpu", "capability": None, "calls": []})))
    monkeypatch.delitem(sys.modules, "attnplug_torch.chooser")

    runpy.run_module("attnplug_torch.chooser", run_name="__main__")

    assert json.loads(capsys.readouterr().out)["version"] == torch.__version__


@pytest.mark.slow
def test_the_program_runs_in_another_process() -> None:
    found = engine.choose([request()], attnplug.Device.cpu(), assume_installed=False)

    assert found.choices[0].chosen == "FLASH_ATTENTION"


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (subprocess.CompletedProcess([], 3, "", "a trace\nOSError: no library\n"), "OSError: no library"),
        (subprocess.CompletedProcess([], 3, "", ""), "exit code 3"),
        (subprocess.TimeoutExpired([], 1), "more than"),
    ],
)
def test_a_torch_that_fails_is_an_error_and_a_problem(outcome, message, entry, monkeypatch) -> None:
    def run(*args, **kwargs):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)

    with pytest.raises(PluginError, match=message):
        engine.choose([request()], attnplug.Device.cpu(), assume_installed=False)
    ((problem, fix),) = engine.diagnose(load=True).problems
    assert message in problem
    assert fix


def test_the_diagnosis_names_what_is_registered(here, entry, registry, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ATTNPLUG_IMPLS", "FA3")

    found = engine.diagnose(load=True)

    assert isinstance(found, EngineDiagnosis)
    assert (found.warnings, found.problems) == ((), ())
    assert "'attnplug'" in found.lines[1]
    assert "FA3" in found.lines[2]
    assert "attnplug" in found.lines[3]
    assert len(engine.diagnose(load=False).lines) == 3


def test_the_diagnosis_names_what_keeps_torch_from_it(entry, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "attnplug_torch.register()" in engine.diagnose(load=False).warnings[0]

    entry.clear()
    assert "reinstall" in engine.diagnose(load=False).problems[0][1]


def test_a_distribution_that_is_not_installed_is_a_problem(monkeypatch) -> None:
    def missing(name):
        raise PackageNotFoundError

    monkeypatch.setattr(engine, "distribution", missing)

    assert "torch.backends" in engine.diagnose(load=False).problems[0][0]
