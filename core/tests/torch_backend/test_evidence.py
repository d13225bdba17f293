"""The evidence in the built-in backend is about what its manifest declares today."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

import attnplug
from attnplug import torch_backend
from attnplug.evidence.coverage import hashable
from attnplug.evidence.store import read_folder
from attnplug.request.settings import Settings
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.subject import Subject

OF_DEVICE = ("compute_capability", "vendor")
"""The device of a run has these: selection compares the devices themselves."""
SIZES = ("head_size", "head_size_v", "block_size")
FOLDER = Path(torch_backend.__file__).with_name("evidence")
SHELF = read_folder(FOLDER)
AWAITED = {"h100": {("kv_cache_dtype", "fp8_ds_mla"), ("topk", None), ("mm_prefix", True)}}
"""What the next run on a device has to add; every value of `topk`. Selection names it as unverified until then."""
AGAIN = (
    "make it anew on such a device: pytest --pyargs attnplug_kit --attn-backend={0.id} --attn-report=report, then "
    "move report/evidence-*.json to {0.origin}"
)


@pytest.fixture(params=SHELF.evidence, ids=lambda evidence: Path(evidence.origin).stem)
def evidence(request):
    return request.param


def test_every_file_is_read_and_records_a_run_that_passed() -> None:
    assert SHELF.notes == ()
    assert all(evidence.passed for evidence in SHELF.evidence)
    assert "sdpa-cpu" in {Path(evidence.origin).stem for evidence in SHELF.evidence}


def test_every_declared_value_is_accounted_for(evidence) -> None:
    candidates = attnplug.registry().candidates(Settings(), assume_installed=True)
    candidate = next(c for c in candidates if c.id == evidence.id)
    menu = field_values_of(Subject(evidence.id, evidence.device, candidate))

    served = {(item.field, hashable(item.value)) for item in menu.specs}
    # A device's capability is no JSON value: the kit writes it as text.
    values = ((item.capability.field, str(item.capability.value)) for item in menu.unreached)
    unreached = {pair for pair in values if pair[0] != "vendor"}
    recorded = {(field, str(value)) for field, value in evidence.unreached if field != "vendor"}
    on_device = {pair for pair in served if pair[0] in OF_DEVICE}
    recorded_values = {pair for pair in evidence.served if pair[0] not in OF_DEVICE}
    missing = served - on_device - recorded_values
    awaited = AWAITED.get(Path(evidence.origin).stem.partition("-")[2], set())
    assert {item for item in missing if item[0] != "topk"} == awaited - {("topk", None)}, AGAIN.format(evidence)
    assert any(name == "topk" for name, _ in missing) is (("topk", None) in awaited), AGAIN.format(evidence)
    # Besides, tests run sizes that are no sample of what is declared, and these are recorded since format 2.
    assert {name for name, _ in recorded_values - served} <= ({*SIZES} if evidence.ranges else set()), AGAIN.format(
        evidence
    )
    assert unreached == recorded, AGAIN.format(evidence)


def test_the_cpu_was_verified_in_this_version() -> None:
    """A run on a GPU may be of an older version, which selection names."""
    on_cpu = [evidence for evidence in SHELF.evidence if evidence.device.type == "cpu"]

    assert on_cpu
    for evidence in on_cpu:
        assert evidence.distribution == f"attnplug {version('attnplug')}", AGAIN.format(evidence)


def test_selection_finds_it() -> None:
    requested = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16", sinks=True)

    pick = attnplug.select(requested, "cpu", backend="torch/sdpa")

    assert pick.unverified == ()
    assert [item.field for item in attnplug.select(requested, "cuda:12.1", backend="torch/sdpa").unverified] == [
        "device"
    ]
