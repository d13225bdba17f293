"""`attnplug explain --engine sglang` and `attnplug doctor`: SGLang's own choice beside attnplug's."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import attnplug
from attnplug.errors import DeviceError, RequestError
from attnplug_sglang import chooser, report

NEEDS_SGLANG = pytest.mark.skipif(
    find_spec("sglang") is None, reason="SGLang is not installed here; `make test-hosts` runs these"
)
LAYER = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
HOPPER = attnplug.Device.cuda("9.0")


@pytest.fixture
def installed(monkeypatch):
    """Have SGLang, and answers of its program; return its requests."""
    requests = []

    def run(module, request, **_):
        requests.append(request)
        return {"version": "0.5.23", "chosen": "fa3"}

    monkeypatch.setattr(report, "run_program", run)
    monkeypatch.setattr(report, "find_spec", lambda name: name == "sglang" or None)
    monkeypatch.setattr(report, "version", lambda name: "0.5.23")
    return requests


def test_one_backend_is_chosen_for_all_layers(installed) -> None:
    windowed = LAYER.evolve(sliding_window=128, sinks=True)
    found = report.choose([LAYER, windowed], HOPPER, assume_installed=False)

    wanted = {"capability": [9, 0], "sinks": True, "asymmetric": False, "latent": False, "flashinfer": False}
    assert installed == [wanted]
    assert found.warnings == ()
    assert found.engine == "SGLang 0.5.23"
    assert [each.chosen for each in found.choices] == ["fa3", "fa3"]
    assert found.choices[0].backend.same_as == ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa3_tokenspeed")
    assert [each.ignored for each in found.choices] == [(), ("sliding_window",)]


def test_latents_are_a_kind_of_model(installed) -> None:
    latent = LAYER.evolve(latent=True, head_size=576, head_size_v=512, num_kv_heads=1)

    found = report.choose([latent], HOPPER, assume_installed=False)

    assert installed[0]["latent"]
    assert (found.choices[0].ignored, found.warnings) == ((), ())


def test_flashinfer_is_supposed_where_libraries_are(installed) -> None:
    found = report.choose([LAYER], HOPPER, assume_installed=True)

    assert installed[0]["flashinfer"]
    assert "FlashInfer is installed" in found.assumed


@pytest.mark.parametrize("device", ["cpu", "mi300x"])
def test_other_devices_are_refused(installed, device) -> None:
    with pytest.raises(DeviceError, match="NVIDIA GPUs"):
        report.choose([LAYER], attnplug.Device.parse(device), assume_installed=False)
    assert not installed


def test_without_sglang_it_says_so(monkeypatch) -> None:
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(report, "find_spec", lambda name: None)
    monkeypatch.setattr(report, "version", missing)

    with pytest.raises(RequestError, match="SGLang is not installed"):
        report.choose([LAYER], HOPPER, assume_installed=False)
    assert "belongs in the environment of SGLang" in report.diagnose(load=False).lines[0]


def test_the_doctor_lists_the_names(installed, monkeypatch) -> None:
    own = [SimpleNamespace(group="sglang.srt.plugins")]
    monkeypatch.setattr(report, "distribution", lambda name: SimpleNamespace(entry_points=own))

    found = report.diagnose(load=True)

    assert not found.problems
    assert "attnplug:torch/sdpa" in found.lines[-1]


def test_the_doctor_names_what_hides_them(installed, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    monkeypatch.setattr(report, "distribution", lambda name: SimpleNamespace(entry_points=[]))

    problems = report.diagnose(load=False).problems

    assert ["SGLANG_PLUGINS='other'" in what for what, _ in problems] == [True, False]
    assert "reinstall" in problems[1][1]


@NEEDS_SGLANG
@pytest.mark.parametrize(
    ("capability", "more", "expected"),
    [
        ((9, 0), {}, "fa3"),
        ((9, 0), {"sinks": True}, "fa3"),
        ((9, 0), {"latent": True}, "fa3"),
        ((8, 9), {"latent": True}, "triton"),
        ((10, 0), {"latent": True}, "flashinfer"),
        ((10, 0), {}, "trtllm_mha"),
        ((8, 9), {}, "flashinfer"),
        ((8, 9), {"sinks": True}, "triton"),
        ((8, 0), {"flashinfer": False}, "triton"),
    ],
)
def test_sglangs_own_function_is_asked(capability, more, expected) -> None:
    from hosts.sglang.tests import stand_ins  # noqa: PLC0415 - imports torch

    stand_ins.install()
    request = {"capability": list(capability), "sinks": False, "asymmetric": False, "flashinfer": True}
    request |= {"latent": False, **more}

    found = json.loads(json.dumps(chooser.answer(request)))

    assert found["chosen"] == expected
    assert found["version"].startswith("0.5.")
