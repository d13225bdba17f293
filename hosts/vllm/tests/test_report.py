"""`attnplug explain --engine vllm` and `attnplug doctor`: vLLM's own selection beside attnplug's."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec

import pytest

import attnplug
from attnplug.cli.main import main
from attnplug.engines import EngineBackend, EngineChoice
from attnplug.errors import DeviceError, PluginError, RequestError
from attnplug.request import FIELDS
from attnplug_vllm import report, versions

LLAMA = {"head_size": 128, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16", "paged": True}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "torch_dtype": "bfloat16",
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
}
HOPPER = attnplug.Device.cuda("9.0")
REQUESTS = {
    "plain": {},
    "sinks": {"sinks": True, "block_size": 16, "num_q_heads": 64},
    "soft cap": {"logits_soft_cap": 30.0, "sliding_window": 1024},
    "float32": {"dtype": "float32"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "int8": {"kv_cache_dtype": "int8"},
    "own dtype": {"kv_cache_dtype": "bfloat16"},
    "contiguous": {"paged": False},
    "encoder": {"paged": False, "attn_type": "encoder_only"},
    "dcp": {"dcp_size": 2},
    "latent": {"latent": True, "head_size": 576, "head_size_v": 512, "num_kv_heads": 1},
}


@pytest.fixture
def installed(monkeypatch):
    """Have a vLLM 0.32.0 that is never started."""

    def find_spec(name):
        return ModuleSpec(name, None)

    monkeypatch.setattr(report, "find_spec", find_spec)
    monkeypatch.setattr(versions, "installed_version", lambda: versions.Version("0.32.0"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)


@pytest.fixture
def calls(monkeypatch, installed):
    """Record the requests to the other process, and answer that FLASH_ATTN was chosen."""
    found = []

    def run(program, request, environment):
        found.append((program, json.loads(json.dumps(request)), dict(environment)))
        backend = {"name": "FLASH_ATTN", "reasons": [], "kernels": "FlashAttention 3"}
        choice = {"chosen": "FLASH_ATTN", "backends": [backend], "ignored": []}
        return {"version": "0.32.0", "assumed": ["a"], "choices": [choice for _ in request["layers"]]}

    monkeypatch.setattr(report, "_run", run)
    return found


def _choose(*fields, device=HOPPER):
    requests = [attnplug.Requirements(**{**LLAMA, **each}) for each in fields]
    return report.choose(requests, device, assume_installed=True)


def test_without_vllm_the_fix_names_its_environment(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda _: None)

    with pytest.raises(RequestError, match="vLLM is not installed in this environment") as caught:
        _choose({})

    assert "pip install attnplug-vllm in the environment of vLLM" in caught.value.fix


@pytest.mark.parametrize("device", [attnplug.Device("xpu"), attnplug.Device("cuda", vendor="amd")])
def test_a_device_that_is_neither_a_cpu_nor_of_nvidia(calls, device):
    with pytest.raises(DeviceError, match="--engine vllm was given for the device"):
        _choose({}, device=device)

    assert calls == []


def test_every_layer_is_in_one_process_without_plugins(calls):
    answer = _choose({}, {"sinks": True, "sliding_window": 128, "block_size": 32}, {"alibi": "linear"})

    ((program, request, environment),) = calls
    assert (program, request["device_type"], request["capability"]) == ("stand_in", "cuda", [9, 0])
    assert environment["VLLM_PLUGINS"] == ""
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    sinks = request["layers"][1]["selector"]
    assert (sinks["has_sink"], sinks["has_sliding_window"], sinks["block_size"]) == (True, True, 32)
    assert [each["flash_attention"]["requires_alibi"] for each in request["layers"]] == [False, False, True]
    assert (answer.engine, answer.assumed, answer.warnings) == ("vLLM 0.32.0", ("a",), ())


def test_kernels_of_vllm_have_candidates_that_exist(calls):
    (choice,) = _choose({}).choices

    assert choice.backend.same_as == ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa3_tokenspeed")
    ids = {each.id for each in attnplug.registry().candidates()}
    absent = {each.id for each in attnplug.registry().candidates() if each.availability == "absent"}
    listed = {name for names in (*report.SAME_KERNELS.values(), *report.OF_BACKEND.values()) for name in names}
    assert {name for name in listed if name.partition("/")[0] not in absent} <= ids


def test_every_field_that_is_considered_exists():
    assert {*FIELDS, "late"} >= report.CONSIDERED


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"logits_soft_cap": 30.0}, ("logits_soft_cap",)),
        ({"alibi": "linear", "sliding_window": 7}, ("alibi",)),
        ({"sinks": True, "kv_cache_dtype": "fp8", "batch_invariant": True}, ()),
        ({"cudagraph": "always", "kv_layout": "HND"}, ("kv_layout", "cudagraph")),
    ],
)
def test_what_its_selector_is_not_given_is_ignored(calls, fields, ignored):
    (choice,) = _choose(fields).choices

    assert choice.ignored == ignored


def test_latents_are_for_vllms_own_backends(calls):
    answer = _choose(REQUESTS["latent"], {})

    ((_, request, _),) = calls
    assert [each["selector"]["use_mla"] for each in request["layers"]] == [True, False]
    assert answer.choices[0].ignored == ()
    assert answer.warnings == ()
    assert _choose({}).warnings == ()
    (windowed,) = _choose(REQUESTS["latent"] | {"sliding_window": 64}).choices
    assert windowed.ignored == ("sliding_window",)


def test_contiguous_keys_of_a_decoder_are_no_layer_of_vllm(calls):
    first, second = _choose({"paged": False}, {}).choices

    assert first == EngineChoice(
        None, reason="vLLM keeps the keys and values of layers that decode in a paged KV cache"
    )
    assert second.chosen == "FLASH_ATTN"
    assert len(calls[0][1]["layers"]) == 1


def test_an_untested_version_is_a_warning(calls, monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda: versions.Version("9.1"))

    (warning,) = _choose({}).warnings

    assert "is tested with vLLM" in warning
    assert "this is vLLM 9.1" in warning


def test_a_process_that_fails_is_an_error_with_its_last_line(installed, tmp_path, monkeypatch):
    """A vLLM that does not import."""
    (tmp_path / "vllm.py").write_text("raise OSError('libcuda is gone')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with pytest.raises(PluginError, match="OSError: libcuda is gone") as caught:
        _choose({})

    assert "python -c 'import vllm.config'" in caught.value.fix


def test_a_process_that_takes_too_long_is_an_error(installed, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(report, "_LONGEST", 0.5)

    with pytest.raises(PluginError, match=r"it takes more than 0.5 s"):
        _choose({})


# doctor


def test_doctor_without_vllm_has_no_problem(monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda _: None)

    found = report.diagnose(load=True)

    assert found.problems == ()
    assert found.lines[0].startswith("vLLM is not installed here")


@pytest.fixture
def entry_point(monkeypatch, tmp_path, installed):
    """Install the metadata of this distribution alone."""
    folder = tmp_path / "attnplug_vllm-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: attnplug-vllm\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nattnplug = attnplug_vllm:register\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_doctor_finds_the_plugin_without_starting_vllm(entry_point, monkeypatch):
    monkeypatch.setattr(report, "_run", None)

    found = report.diagnose(load=False)

    assert (found.lines, found.problems, found.warnings) == (("vLLM 0.32.0", "its plugins include attnplug"), (), ())


@pytest.mark.parametrize(
    ("listed", "fix"),
    [
        ("other", "other,attnplug"),
        ("", "attnplug"),
        ("foo, attnplug", "foo,attnplug"),
        ("attnplug ,foo ", "attnplug,foo"),
        ("foo bar", "'foo bar,attnplug'"),
    ],
)
def test_plugins_that_leave_attnplug_out_are_a_problem(entry_point, monkeypatch, listed, fix):
    monkeypatch.setenv("VLLM_PLUGINS", listed)

    ((what, how),) = report.diagnose(load=True).problems

    assert f"VLLM_PLUGINS={listed!r} leaves attnplug out" in what
    assert how == f"set VLLM_PLUGINS={fix}, or unset it"
    assert ("does not strip the space around 'attnplug'" in what) is ("attnplug" in listed)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "ATTNPLUG", "", None])
def test_the_variable_that_vllm_does_not_read_is_named(entry_point, monkeypatch, name):
    if name is not None:
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)

    warnings = report.diagnose(load=False).warnings

    assert len(warnings) == bool(name)
    for text in warnings:
        assert f"VLLM_ATTENTION_BACKEND='{name}' is set" in text
        assert f"pass --attention-backend {name}," in text


def test_plugins_that_include_attnplug_are_no_problem(entry_point, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other,attnplug")

    assert report.diagnose(load=False).problems == ()


def test_an_installation_without_the_entry_point_is_a_problem(installed, monkeypatch):
    monkeypatch.setattr(report, "entry_points", lambda **_: ())

    assert report.diagnose(load=False).problems == (
        ("no entry point of the group vllm.general_plugins names attnplug_vllm", "reinstall attnplug-vllm"),
    )


@pytest.mark.parametrize("names", [[], ["ATTNPLUG", "ATTNPLUG_TORCH_SDPA"]])
def test_names_are_those_that_vllm_has(entry_point, monkeypatch, names):
    monkeypatch.setattr(report, "_run", lambda *_: {"names": names})

    found = report.diagnose(load=True)

    assert any("ATTNPLUG, ATTNPLUG_TORCH_SDPA" in line for line in found.lines) is bool(names)
    assert [what for what, _ in found.problems] == (
        [] if names else ["vLLM has loaded its plugins, and has no name of attnplug"]
    )


# The real vLLM


@pytest.fixture(scope="module")
def hopper():
    """Return what the installed vLLM picks on a GPU of compute capability 9.0, by request."""
    requests = [attnplug.Requirements(**{**LLAMA, **fields}) for fields in REQUESTS.values()]
    answer = report.choose(requests, HOPPER, assume_installed=True)
    return answer, dict(zip(REQUESTS, answer.choices, strict=True))


@pytest.mark.needs_vllm
def test_the_real_selector_answers_in_its_order(hopper):
    answer, choices = hopper

    assert answer.engine == f"vLLM {versions.installed_version()}"
    assert "FlashInfer, which is not installed here" in answer.assumed
    assert choices["plain"].chosen == "FLASH_ATTN"
    assert [each.name for each in choices["plain"].backends] == [
        *("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")
    ]
    assert choices["plain"].backend.kernels == "FlashAttention 3"
    assert choices["plain"].backends[1].reasons == ()
    assert choices["own dtype"] == choices["plain"]


@pytest.mark.needs_vllm
def test_the_real_selector_gives_its_reasons(hopper):
    _, choices = hopper

    refused = {each.name: each.reasons for each in choices["float32"].backends if each.reasons}
    assert choices["float32"].chosen == "TRITON_ATTN"
    assert refused["FLASH_ATTN"] == ("dtype not supported",)
    sinks = {each.name: each.reasons for each in choices["sinks"].backends}
    assert "attention sinks not supported" in sinks["FLEX_ATTENTION"]
    assert "kv_cache_dtype not supported" in {r for each in choices["fp8"].backends for r in each.reasons}


@pytest.mark.needs_vllm
def test_what_the_real_vllm_lacks_is_a_reason(hopper):
    _, choices = hopper

    assert (choices["int8"].chosen, choices["int8"].backends) == (None, ())
    assert choices["int8"].reason == "vLLM has no KV-cache dtype 'int8'"
    assert choices["contiguous"].chosen is None
    assert choices["encoder"].chosen == "FLASH_ATTN"
    assert choices["soft cap"].ignored == ("logits_soft_cap",)


@pytest.mark.needs_vllm
def test_the_real_selector_has_backends_for_latents(hopper):
    latent = hopper[1]["latent"]

    assert (latent.chosen, latent.ignored) == ("FLASH_ATTN_MLA", ())
    assert {"FLASH_ATTN_MLA", "TRITON_MLA"} <= {each.name for each in latent.backends if not each.reasons}


@pytest.mark.needs_vllm("<0.32")
def test_an_older_selector_ignores_decode_context_parallelism(hopper):
    assert hopper[1]["dcp"].ignored == ("dcp_size",)


@pytest.mark.needs_vllm(">=0.32")
def test_a_newer_selector_considers_it(hopper):
    refused = {each.name: each.reasons for each in hopper[1]["dcp"].backends}

    assert hopper[1]["dcp"].ignored == ()
    assert refused["TRITON_ATTN"] == ("DCP not supported",)


@pytest.mark.needs_vllm
def test_a_model_by_the_command_line_without_flashinfer(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    words = ["explain", "--engine", "vllm", "--config", str(tmp_path), "--json", "--backend", "torch"]

    main([*words, "--device", "cuda:10.0"])

    (blackwell,) = json.loads(capsys.readouterr().out)["engines"]
    window, full = blackwell["choices"]
    assert blackwell["engine"] == f"vLLM {versions.installed_version()}"
    assert window["layers"] == ["layers.0.self_attn", "layers.2.self_attn"]
    assert full["layers"] == ["layers.1.self_attn", "layers.3.self_attn"]
    assert {each["chosen"] for each in (window, full)} == {"FLASH_ATTN"}
    assert any("No module named 'flashinfer'" in text or text == "ImportError" for text in _reasons(full, "FLASHINFER"))
    assert (full["attnplug"], full["same_kernels"]) == ("torch/flex", False)
    assert any("does not consider logits_soft_cap=50.0" in line for line in full["why"])
    assert any(line.startswith("vLLM") and "prefers FLASH_ATTN to FLEX_ATTENTION" in line for line in full["why"])


@pytest.mark.needs_vllm("==0.32.*")  # the rest of this platform is the same in all versions
def test_on_the_cpu_vllm_has_one_backend():
    answer = _choose({}, device=attnplug.Device.cpu())

    assert answer.choices == (EngineChoice("CPU_ATTN", (EngineBackend("CPU_ATTN"),)),)
    assert answer.assumed == ()


@pytest.mark.needs_vllm("<0.32")  # `engine/test_how_to.py` runs the command beside later versions
def test_doctor_lists_the_names_that_the_real_vllm_has(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    found = report.diagnose(load=True)

    assert found.problems == ()
    assert found.lines[-1] == "it has these names for --attention-backend: CUSTOM"


def _reasons(choice, name):
    (found,) = [each["reasons"] for each in choice["backends"] if each["name"] == name]
    return found
