"""The layers of published models: which of them a variant gets, and what their sequences exercise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve

from attnplug.manifest.reader import read_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.request.device import Device
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.models import Models, _layers
from attnplug_kit.conformance.pairwise import covering_specs, kernel_of
from attnplug_kit.conformance.report import Record
from attnplug_kit.conformance.subject import Subject, find_subjects
from attnplug_kit.oracle.exercised import Exercised, observing

SDPA = find_subjects("torch/sdpa", "cpu")[0]
MANIFEST = read_manifest(Path(__file__).parent / "vendor" / "attnplug.toml")


def vendor(jit: str | None) -> Subject:
    variant = evolve(MANIFEST.variants[0], jit=jit)
    return Subject(f"vendor/{jit}", Device.cpu(), make_candidate(MANIFEST, variant, lambda _: None))


def test_every_layer_keeps_what_the_model_has() -> None:
    layers = _layers(SDPA)

    gemma = layers["Gemma-2-9B sliding"].fields
    assert (gemma["head_size"], gemma["sliding_window"], gemma["logits_soft_cap"]) == (256, 4096, 50.0)
    assert (gemma["num_kv_heads"], gemma["gqa_ratio"], gemma["dtype"]) == (8, 2, "bfloat16")
    assert layers["StarCoder"].fields["num_kv_heads"] == 1


def test_a_layer_that_is_refused_is_left_out() -> None:
    assert vendor(None).supports["head_size"].allows(128)
    assert "Phi-3-mini" not in _layers(vendor(None))  # heads of 96 are not declared
    assert "Llama-3-8B" in _layers(vendor(None))


def test_a_layer_needs_no_further_kernel() -> None:
    subject = vendor("nvcc")
    others = {*map(kernel_of, field_values_of(subject).specs.values()), *map(kernel_of, covering_specs(subject))}
    layers = _layers(subject)

    assert layers
    assert {kernel_of(spec) for spec in layers.values()} <= others


@pytest.mark.parametrize(
    ("layer", "field", "value"),
    [("Gemma-2-9B sliding", "sliding_window", 4096), ("Llama-4-Scout", "attention_chunk", 8192)],
)
def test_a_part_of_the_longest_sequence_is_hidden(layer, field, value) -> None:
    found = Exercised()
    record = Record(SimpleNamespace(user_properties=[]))

    with observing(found.add):
        Models().test_layer(SDPA, lambda spec, keep: spec, record, _layers(SDPA)[layer])

    assert found.ranges[field] == (value, value)
    assert found.ranges["seq_len"][1] == value + 1025
