"""`attnplug explain --engine diffusers` and `attnplug doctor`: diffusers' own choice beside attnplug's."""

from __future__ import annotations

import io
import json
import runpy
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

import attnplug
from attnplug.engines import EngineAnswer, EngineDiagnosis
from attnplug.errors import DeviceError, PluginError, RequestError
from attnplug_diffusers import chooser, engine

JOINT = {
    "head_size": 128,
    "num_q_heads": 24,
    "num_kv_heads": 24,
    "dtype": "bfloat16",
    "attn_type": "encoder_only",
    "paged": False,
}


def request(**fields):
    return attnplug.Requirements(**{**JOINT, **fields})


@pytest.fixture
def here(monkeypatch, dispatch):
    """Let the program run in this process."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_capability)  # the program sets it
    monkeypatch.setattr(engine, "_run", lambda given: json.loads(json.dumps(chooser.answer(given))))


def test_diffusers_takes_its_active_backend(here, dispatch) -> None:
    hopper = attnplug.Device.cuda("9.0")
    answer = engine.choose([request(), request(custom_mask=True)], hopper, assume_installed=False)

    assert isinstance(answer, EngineAnswer)
    assert answer.engine.startswith("diffusers 0.")
    assert [one.chosen for one in answer.choices] == ["native", "native"]
    first, second = ({one.name: one for one in choice.backends} for choice in answer.choices)
    assert first["native"].same_as == ("torch/sdpa",)
    assert "set_attention_backend('flex')" in first["flex"].reasons[0]
    assert "missing package" in " ".join(first["_flash_3"].reasons)
    assert second["native"].reasons == ()
    assert not {"_native_npu", "_native_xla"} & set(first)

    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName("_native_flash"))
    answer = engine.choose(
        [request(), request(custom_mask=True), request(dtype="float32")], hopper, assume_installed=False
    )

    assert [one.chosen for one in answer.choices] == ["_native_flash", "_native_flash", None]
    assert answer.choices[0].backends[0].name == "_native_flash"
    assert any("bfloat16" in reason for reason in answer.choices[2].backends[0].reasons)


def test_each_refused_backend_names_what_keeps_it(here) -> None:
    call = request(dtype="float32", attn_bias=True, num_kv_heads=8)
    (choice,) = engine.choose([call], attnplug.Device.cpu(), assume_installed=False).choices

    found = {one.name: " ".join(one.reasons) for one in choice.backends}
    assert choice.chosen == "native"
    assert "must be on a CUDA device" in found["_native_cudnn"] + found["sage"]
    assert "no argument for grouped heads" in found["sage"]


def test_what_the_dispatch_has_no_argument_for_is_named(here) -> None:
    requests = [
        request(attn_type="decoder", sinks=True, sliding_window=8),
        request(batch_invariant=True),
        request(attn_type="decoder", paged=True),
    ]
    found = engine.choose(requests, attnplug.Device.cpu(), assume_installed=True).choices

    assert [one.chosen for one in found] == [None, "native", None]
    assert "no argument for sliding_window and sinks" in found[0].reason
    assert found[1].ignored == ("batch_invariant",)
    assert "no KV cache" in found[2].reason


def test_another_minor_version_is_a_warning(monkeypatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _: True)
    monkeypatch.setattr(engine, "version", lambda _: "0.43.0")
    monkeypatch.setattr(engine, "_run", lambda given: {"version": "0.43.0", "choices": []})

    assert "tested with diffusers 0.42, and this is 0.43.0" in engine.diagnose(load=False).warnings[0]
    assert engine.choose([], attnplug.Device.cpu(), assume_installed=False).warnings


def test_other_devices_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda _: True)

    with pytest.raises(DeviceError, match="--engine diffusers"):
        engine.choose([request()], attnplug.Device("rocm"), assume_installed=False)


def test_without_diffusers_there_is_no_answer(monkeypatch) -> None:
    def missing(name):
        raise PackageNotFoundError

    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    monkeypatch.setattr(engine, "version", missing)

    with pytest.raises(RequestError, match="diffusers is not installed"):
        engine.choose([request()], attnplug.Device.cpu(), assume_installed=False)
    assert "not installed" in engine.diagnose(load=True).lines[0]


def test_the_program_reads_and_writes_json(dispatch, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"device": "cpu", "capability": None, "calls": []})))
    monkeypatch.delitem(sys.modules, "attnplug_diffusers.chooser")

    runpy.run_module("attnplug_diffusers.chooser", run_name="__main__")

    assert json.loads(capsys.readouterr().out)["choices"] == []


def test_the_diagnosis_names_the_active_backend(here) -> None:
    found = engine.diagnose(load=True)

    assert isinstance(found, EngineDiagnosis)
    assert (found.warnings, found.problems) == ((), ())
    assert "bind(model)" in found.lines[1]
    assert "'native'" in found.lines[2]
    assert len(engine.diagnose(load=False).lines) == 2


def test_a_diffusers_that_fails_is_a_problem(diffusers, monkeypatch) -> None:
    def fails(given):
        raise PluginError("diffusers fails", "", "see why")

    monkeypatch.setattr(engine, "_run", fails)

    assert engine.diagnose(load=True).problems == (("diffusers fails", "see why"),)


@pytest.mark.slow
def test_the_program_runs_in_another_process(diffusers) -> None:
    found = engine.choose([request()], attnplug.Device.cpu(), assume_installed=False)

    assert found.choices[0].chosen == "native"


def test_the_command_has_both_choices(here, monkeypatch, tmp_path, capsys) -> None:
    from attnplug.cli.main import main  # noqa: PLC0415 - beside the fixture that may skip

    folder = tmp_path / "attnplug_diffusers-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: attnplug-diffusers\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text("[attnplug.engines]\ndiffusers = attnplug_diffusers.engine\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    layer = ("--head-size", "128", "--num-q-heads", "24", "--num-kv-heads", "24", "--dtype", "bfloat16")
    words = ("--attn-type", "encoder_only", "--no-paged", "--device", "cpu", "--json")

    code = main(["explain", *layer, *words, "--engine", "diffusers"])

    (found,) = json.loads(capsys.readouterr().out)["engines"]
    assert code == 0
    assert found["engine"].startswith("diffusers 0.")
    (choice,) = found["choices"]
    assert (choice["chosen"], choice["attnplug"], choice["same_kernels"]) == ("native", "torch/sdpa", True)
    assert {one["name"] for one in choice["backends"]} >= {"native", "flash", "flex"}
