from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.batching import Hyperparameters, infer_global_hyperparameters, per_layer_parameters
from attnplug.contract import Layer
from attnplug.errors import LayerError

values = st.tuples(st.integers(-1, 2), st.sampled_from([None, 30.0]), st.sampled_from([0.125, 0.25]))


def impls_of(names, scale=None, **asked):
    requirements = attnplug.Requirements(head_size=16, num_q_heads=2, num_kv_heads=2, dtype="float32", **asked)
    backend = attnplug.load(requirements, "cpu", backend="torch/sdpa")
    return [backend.make_impl(Layer(name=name, scale=scale)) for name in names]


def test_reads_window_cap_and_scale_of_each_layer():
    impls = [
        *impls_of(["local"], scale=0.5, sliding_window=8, logits_soft_cap=30.0),
        *impls_of(["full"]),
    ]

    assert per_layer_parameters(impls) == {"local": (7, 30.0, 0.5), "full": (-1, None, 0.25)}


def test_two_layers_of_one_name_are_refused():
    with pytest.raises(LayerError, match="two layers are called 'a'"):
        per_layer_parameters(impls_of(["a", "b", "a"]))


@given(st.lists(values, min_size=1, max_size=5))
def test_the_shared_values_or_the_names_of_the_layers_that_differ(per_layer):
    named = {f"layers.{index}": layer for index, layer in enumerate(per_layer)}

    if len(set(per_layer)) == 1:
        assert infer_global_hyperparameters(named) == Hyperparameters(*per_layer[0])
        return
    with pytest.raises(LayerError) as caught:
        infer_global_hyperparameters(named)
    said = caught.value.problem.partition("; ")[2]
    assert [name for name in named if f"{name!r}" in said] == [n for n, v in named.items() if v != per_layer[0]]


def test_no_layers_share_nothing():
    with pytest.raises(LayerError, match="no layers were given"):
        infer_global_hyperparameters({})
