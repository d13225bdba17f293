"""The requirements that the manifest supports and refuses, with the messages that a user reads. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnplug
from attnplug import Device, Requirements
from attnplug.discovery.plugin import read_known
from attnplug.errors import NoBackendError
from attnplug_kit.check.examine import examine
from plugins.int8_ixformer.tests.requests import fields_of

PROJECT = Path(__file__).parents[1]
HOPPER, AMPERE, TURING = (Device.cuda(capability) for capability in ("9.0", "8.0", "7.5"))
ILUVATAR = Device("cuda", vendor="iluvatar", name="Iluvatar BI-V150")
LEVELS = {level: Requirements(**fields_of(level)) for level in (1, 2)}
PLAIN = LEVELS[1].evolve(kv_cache_dtype="auto")
OWN = ("int8_ixformer/triton", "int8_ixformer/ixformer", "int8_ixformer/calibration")


pytestmark = pytest.mark.usefixtures("registered")


def statuses(requirements: Requirements, device: Device = HOPPER) -> dict[str, str]:
    explained = attnplug.explain(requirements, device, assume_installed=True)
    return {one.id: one.status for one in explained.verdicts if one.id in OWN}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"head_size": 32},
        {"head_size": 80},
        {"head_size": 256},
        {"dtype": "float16"},
        {"block_size": 16},
        {"block_size": 32, "kv_layout": "HND"},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"alibi": "linear"},
        {"alibi": "sqrt"},
        {"kv_sharing": True},
        {"decode_query_len": 4, "cudagraph": "uniform_batch"},
        {"cudagraph": "single_token_decode"},
    ],
    ids=str,
)
def test_it_supports(level, changed) -> None:
    found = statuses(LEVELS[level].evolve(**changed))

    assert found == {
        "int8_ixformer/triton": "chosen",
        "int8_ixformer/ixformer": "refused",
        "int8_ixformer/calibration": "refused",
    }
    on_iluvatar = statuses(LEVELS[level].evolve(**changed), ILUVATAR)
    assert on_iluvatar["int8_ixformer/ixformer"] == "chosen"
    assert on_iluvatar["int8_ixformer/triton"] == "refused"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"sinks": True}, "sinks"),
        ({"cascade": True}, "cascade"),
        ({"dcp_size": 2}, "dcp_size"),
        ({"return_lse": True}, "return_lse"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"per_head_scales": True}, "per_head_scales"),
        ({"output_quant": "fp8_e4m3"}, "output_quant"),
        ({"attn_type": "encoder_decoder", "causal": False}, "attn_type"),
        ({"attn_type": "encoder_only", "paged": False, "causal": False, "kv_cache_dtype": "auto"}, "attn_type"),
        ({"paged": False, "kv_cache_dtype": "auto"}, "keys and values are quantized when they are cached"),
        ({"head_size": 24}, "head_size"),
        ({"head_size_v": 32}, "head_size_v"),
        ({"dtype": "float32"}, "dtype"),
        ({"block_size": 8}, "block_size"),
        ({"block_size": 16, "kv_layout": "NHD"}, "kv_layout"),
        ({"causal": False}, "causal"),
        ({"attention_chunk": 512}, "attention_chunk"),
        ({"custom_mask": True}, "custom_mask"),
        ({"block_sparse": {"block_size": 64}}, "block_sparse"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"unquantized_queries": True}, "queries are quantized to int8"),
        ({"cudagraph": "always"}, "cudagraph"),
    ],
    ids=str,
)
def test_it_refuses_by_name(level, changed, problem) -> None:
    requested = LEVELS[level].evolve(**changed)

    for device in (HOPPER, ILUVATAR):
        assert set(statuses(requested, device).values()) == {"refused"}
    with pytest.raises(NoBackendError) as refused:
        attnplug.select(requested, HOPPER, backend="int8_ixformer")
    assert problem in " ".join(str(refused.value).split())


def test_it_is_chosen_only_on_request() -> None:
    for requested in (PLAIN, PLAIN.evolve(paged=False), PLAIN.evolve(kv_cache_dtype="fp8_e4m3")):
        for device in (HOPPER, AMPERE, Device.cpu()):
            assert set(statuses(requested, device).values()) == {"refused"}


def test_a_calibration_needs_the_kv_of_each_call() -> None:
    requested = PLAIN.evolve(features=("int8_ixformer.calibrate",), kv_in_cache=True)

    assert statuses(requested, HOPPER)["int8_ixformer/calibration"] == "refused"


def test_calibration_is_requested_by_a_feature() -> None:
    requested = PLAIN.evolve(features=("int8_ixformer.calibrate",))

    for device in (HOPPER, Device.cpu()):
        assert statuses(requested, device)["int8_ixformer/calibration"] == "chosen"
    assert set(statuses(requested.evolve(kv_cache_dtype="int8")).values()) == {"refused"}


@pytest.mark.parametrize("capability", ["7.0", "8.0", "9.0", "10.0", "12.0"])
def test_ixformer_is_refused_on_nvidia_devices(capability) -> None:
    """Also where the library is installed, and no other variant supports the device."""
    device = Device.cuda(capability)
    explained = attnplug.explain(LEVELS[1], device, backend="int8_ixformer", assume_installed=True)
    verdicts = {one.id: one for one in explained.verdicts if one.id in OWN}

    assert verdicts["int8_ixformer/triton"].status == ("refused" if capability == "7.0" else "chosen")
    refused = verdicts["int8_ixformer/ixformer"]
    assert refused.status == "refused"
    because = "ixformer is compiled for Iluvatar devices, and cannot launch a kernel on others"
    assert list(map(str, refused.reasons)) == [
        "requires vendor iluvatar; the device is from nvidia",
        f"does not support vendor=nvidia: {because}",
    ]
    assert str(refused.fix) == "run on cuda (iluvatar)"


def test_other_vendors_are_refused() -> None:
    assert set(statuses(LEVELS[1], Device("cuda", vendor="amd")).values()) == {"refused"}


def test_an_iluvatar_device_may_have_any_compute_capability() -> None:
    for capability in (None, "7.0", "7.1"):
        device = Device("cuda", vendor="iluvatar", compute_capability=capability)
        assert statuses(LEVELS[2], device)["int8_ixformer/ixformer"] == "chosen"


def test_older_devices() -> None:
    assert statuses(LEVELS[1], AMPERE)["int8_ixformer/triton"] == "chosen"
    assert statuses(LEVELS[1], TURING)["int8_ixformer/triton"] == "refused"
    assert set(statuses(LEVELS[1], Device.cpu()).values()) == {"refused"}


def test_core_knows_the_plugin() -> None:
    known = next(one for one in read_known().plugins if one.name == "int8_ixformer")

    assert known.install == "attnplug-int8-ixformer"


def test_attnplug_check_finds_nothing() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("int8_ixformer",)
    assert report.findings == ()


def test_ixformer_comes_from_its_vendor() -> None:
    explained = attnplug.explain(LEVELS[1], ILUVATAR)
    (verdict,) = (one for one in explained.verdicts if one.id == "int8_ixformer/ixformer")

    assert verdict.status == "missing_dependency"
    assert verdict.fix is not None
    assert verdict.fix.install == ()
    assert str(verdict.fix).startswith("install ixformer: part of CoreX, the software stack of Iluvatar devices")
    assert "pip install ixformer" not in str(explained)
