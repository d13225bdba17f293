"""Which backend each layer of a model runs on, before it has run and after."""

from __future__ import annotations

import pytest
import torch

from core.tests.models import published
from hosts.transformers.tests.models import model, prompts


def test_decisions_before_the_first_run_are_those_after_it(host):
    made = model("gemma2")
    made.set_attn_implementation("attnplug")
    before = host.selections(made)

    ids, mask = prompts(5)
    with torch.no_grad():
        made(ids, attention_mask=mask)
    after = host.selections(made)

    assert list(before) == [f"model.layers.{i}.self_attn" for i in range(4)]
    assert after == before
    assert [s.requirements.sliding_window for s in after.values()] == [6, None, 6, None]
    assert {s.id for s in after.values()} == {"torch/sdpa"}


def test_names_are_those_of_the_modules(host):
    made = model("gpt2")
    made.set_attn_implementation("attnplug")

    assert list(host.selections(made)) == ["transformer.h.0.attn", "transformer.h.1.attn"]


def test_modules_without_a_number_are_all_found(host, mirror):
    made = model("whisper")
    made.set_attn_implementation("attnplug")

    found = host.selections(made)

    assert list(found) == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.encoder_attn",
    ]


def test_the_models_dtype_is_required(host):
    made = model("llama", dtype=torch.bfloat16)
    made.set_attn_implementation("attnplug")

    found = host.selections(made)

    assert {s.requirements.dtype for s in found.values()} == {"bfloat16"}


def test_a_model_on_another_attention_has_no_decisions(host):
    made = model("llama")
    assert host.selections(made) == {}

    made.set_attn_implementation("attnplug")
    ids, mask = prompts(5)
    with torch.no_grad():
        made(ids, attention_mask=mask)
    assert host.selections(made).keys() == {f"model.layers.{i}.self_attn" for i in range(4)}

    made.set_attn_implementation("eager")
    assert host.selections(made) == {}


def test_published_code_with_its_own_attention_has_no_decisions(host):
    made = published.model()

    made.set_attn_implementation("attnplug")  # the library logs that this has no effect

    assert host.selections(made) == {}


def test_the_hosts_names(host):
    assert host.KEY == "attnplug"
    with pytest.raises(AttributeError, match="no attribute 'unregister'"):
        host.unregister()
