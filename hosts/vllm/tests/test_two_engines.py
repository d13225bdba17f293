"""Two engines of one process: each has its own layers, and so its own form of KV cache and its own block sizes."""

from __future__ import annotations

import gc
from types import SimpleNamespace as Names
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

from vllm.config import CompilationConfig

from attnplug_vllm import cache, facts, selector
from hosts.vllm.tests.rig import CHOICE, Rig

FORMS = {16: "joint", 32: "packed"}
"""The size of a model's heads -> the only form of KV cache that a backend takes for it."""


@pytest.fixture(autouse=True)
def one_form_each(monkeypatch):
    """Let a backend take another form for each of two models, so that they cannot share one."""
    reasons = facts.reasons

    def only(requirements, choice):
        form, wanted = requirements.kv_cache_form, FORMS[requirements.head_size]
        return reasons(requirements, choice) if form in (wanted, None) else [f"for this size the form is {wanted}"]

    monkeypatch.setattr(facts, "reasons", only)


def form_of(rig):
    return rig.builder.parts[0].backend.agreement.kv_cache_form


def test_each_has_its_own_form_of_kv_cache():
    first = Rig([{}], head_size=16)
    second = Rig([{}], head_size=32)
    assert (form_of(first), form_of(second)) == ("joint", "packed")
    for rig in (first, second):
        rig.add(2)
        assert rig.run([(0, 5), (1, 19)]) < 1e-5
    first.builder = first.make_builder(["layers.0"])  # after the second engine's layers were made
    for rig in (first, second):
        assert rig.run([(0, 1), (1, 1)]) < 1e-5
    assert (form_of(first), form_of(second)) == ("joint", "packed")


def test_the_current_configuration_names_the_engine():
    first, second = Rig([{}], head_size=16), Rig([{}], head_size=32)
    for rig in (first, second):
        with patch.object(facts, "current_config", lambda: rig.config):  # noqa: B023 - called within the iteration
            assert cache.layers_of(CHOICE) == [rig.layers["layers.0"].impl]
    assert cache.layers_of(CHOICE) == [second.layers["layers.0"].impl]  # the one that vLLM is making


def test_an_engine_without_layers_has_none_of_another():
    former = Rig([{}], head_size=16, choice=("torch/sdpa",))
    layers = former.layers.values()
    for impl in (layer.impl for layer in layers):
        impl.selection = Names(agreement=Names(block_sizes=Names(alternatives=())))
    assert selector.block_sizes(CHOICE) == []
    fresh = Names(compilation_config=CompilationConfig())
    with patch.object(facts, "current_config", lambda: fresh):
        assert selector.block_sizes(CHOICE)  # what the candidate declares


def test_an_engine_that_ended_has_no_layers():
    ended = Names(compilation_config=CompilationConfig())
    ended.compilation_config.static_forward_context["layers.0"] = layer = Names(
        impl=Names(choice=CHOICE, requirements=Names(paged=True, latent=False))
    )
    cache.enter_engine(ended)
    assert cache.layers_of(CHOICE) == [layer.impl]
    del ended.compilation_config
    gc.collect()
    assert cache.layers_of(CHOICE) == []


def test_layers_outside_of_an_engine_are_in_no_pool():
    rig = Rig([{}], head_size=16)
    cache.enter_engine(None)
    assert cache.layers_of(CHOICE) == []
    assert cache.layers_of(CHOICE, rig.config) == [rig.layers["layers.0"].impl]
