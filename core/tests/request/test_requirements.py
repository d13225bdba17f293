"""What can be requested, and what is refused before any candidate is evaluated."""

from __future__ import annotations

import json
import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import AttnplugError, RequirementsError
from attnplug.request.domains import Flag, Integer, Name, Names, Number, Table
from attnplug.request.fields import FIELDS, fields_of
from attnplug.request.requirements import Requirements

BASE = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}


def requirements_of(**values):
    return Requirements(**{**BASE, **values})


def values_of(domain):
    if isinstance(domain, Names):
        each = st.sampled_from([*domain.each.values, *(() if domain.each.values else ("acme.x", "b.y"))])
        return st.lists(each, min_size=0 if domain.empty else 1, max_size=2)
    if isinstance(domain, Name):
        return st.sampled_from([*domain.values, *domain.aliases, *(["acme.int3"] if domain.open else [])])
    kinds = {
        Flag: st.booleans(),
        Integer: st.integers(1, 9999),
        Number: st.floats(0.5, 100),
        Table: st.just({"block_size": 64, "local_blocks": 16, "homo_head": False}),
    }
    return kinds[type(domain)]


VALUES = {
    item.name: values_of(item.domain) | st.none() if item.is_optional() else values_of(item.domain)
    for item in fields_of("model", "engine")
}
some = st.lists(st.sampled_from(sorted(VALUES)), max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)


def valid(values):
    try:
        return requirements_of(**values)
    except AttnplugError:
        return None


requests = some.map(valid).filter(lambda r: r is not None)


@given(requests)
def test_json_round_trip(requirements):
    again = Requirements.from_dict(json.loads(json.dumps(requirements.to_dict())))

    assert again == requirements
    assert hash(again) == hash(requirements)


@given(requests)
def test_copies_are_equal_and_hash_alike(requirements):
    for copy in (pickle.loads(pickle.dumps(requirements)), attrs.evolve(requirements), requirements.evolve()):
        assert copy == requirements
        assert hash(copy) == hash(requirements)


@given(requests)
def test_requested_names_the_fields_that_are_not_neutral(requirements):
    names = {name for name, _ in requirements.requested()}

    assert {"head_size", "num_q_heads", "num_kv_heads", "dtype"} <= names
    assert ("sinks" in names) == requirements.sinks
    assert ("sliding_window" in names) == (requirements.sliding_window is not None)
    assert ("kv_cache_dtype" in names) == (requirements.kv_cache_dtype != requirements.dtype)
    assert ("paged" in names) == requirements.paged
    assert not names & {"block_size", "kv_layout", "kv_cache_form"}


def test_the_vocabulary_is_the_class():
    fields = {attribute.name for attribute in attrs.fields(Requirements) if not attribute.name.startswith("_")}

    assert fields == {item.name for item in fields_of("model", "engine", "selection")}
    assert all(item.help for item in FIELDS.values())


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ({"dtype": "fp16"}, {"dtype": "float16", "kv_cache_dtype": "float16"}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bfloat16"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"phases": ["decode", "prefill"]}, {"phases": ("prefill", "decode")}),
        ({}, {"head_size_v": 64, "causal": True, "paged": True}),
        ({"attn_type": "encoder_only"}, {"causal": False, "paged": False}),
        ({"logits_soft_cap": 50}, {"logits_soft_cap": 50.0}),
    ],
)
def test_values_are_canonical(given, canonical):
    requirements = requirements_of(**given)

    assert {name: getattr(requirements, name) for name in canonical} == canonical


def test_fields_that_follow_follow_again():
    changed = requirements_of().evolve(head_size=128, dtype="float16")

    assert (changed.head_size_v, changed.kv_cache_dtype) == (128, "float16")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_sise": 64}, ["'head_sise'", "did you mean 'head_size'?"]),
        ({"head_size": 0}, ["head_size=0", "a whole number from 1 to 2147483647"]),
        ({"head_size": True}, ["head_size=True"]),
        ({"dtype": "int4"}, ["dtype='int4'", "'bfloat16'"]),
        ({"num_kv_heads": 3}, ["num_q_heads=8", "multiple of num_kv_heads"]),
        ({"logits_soft_cap": float("nan")}, ["logits_soft_cap=nan", "positive finite"]),
        ({"sinks": 1}, ["sinks=1", "true or false"]),
        ({"alibi": "cubic"}, ["alibi='cubic'", "'sqrt'"]),
        ({"kv_cache_dtype": "fp88"}, ["kv_cache_dtype='fp88'", "dotted vendor name"]),
        ({"features": ("rope",)}, ["features=('rope',)", "acme.rope_fused"]),
        ({"features": "acme.x"}, ["features='acme.x'", "a list"]),
        ({"phases": ()}, ["phases=()"]),
        ({"block_sparse": {}}, ["block_sparse={}"]),
        ({"attn_type": "encoder", "causal": True}, ["causal=True", "attn_type='encoder'", "every key"]),
        ({"attn_type": "encoder_only", "paged": True}, ["no KV cache"]),
        ({"paged": False, "block_size": 16}, ["block_size=16", "describe a paged KV cache"]),
        ({"paged": False, "kv_cache_dtype": "fp8"}, ["another dtype than the layer"]),
        ({"paged": False, "cascade": True}, ["need a paged KV cache"]),
        ({"phases": ("prefill",), "decode_query_len": 4}, ["decode_query_len=4"]),
        ({"dropout": 0.1}, ["'dropout'", "training feature"]),
        ({"use_mla": True}, ["'use_mla'", "latent attention"]),
        ({"backward": True}, ["'backward'", "training feature"]),
    ],
)
def test_refusals_have_problem_and_expected(given, message):
    with pytest.raises(RequirementsError) as caught:
        requirements_of(**given)

    assert all(text in str(caught.value) for text in message), str(caught.value)
    assert caught.value.fix


def test_a_missing_field_is_named():
    with pytest.raises(RequirementsError, match="no 'dtype' was given"):
        Requirements(head_size=64, num_q_heads=8, num_kv_heads=2)


def test_values_go_by_name():
    with pytest.raises(RequirementsError, match="1 unnamed values"):
        Requirements(64)  # type: ignore[misc]


def test_an_error_survives_pickling():
    with pytest.raises(RequirementsError) as caught:
        requirements_of(head_size=0)

    again = pickle.loads(pickle.dumps(caught.value))

    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)


@pytest.mark.parametrize(
    ("field", "value", "written"),
    [
        ("dtype", "int32", "pass another dtype"),
        ("dtype", "float8_e4m3fn", "pass another dtype"),
        ("kv_cache_dtype", "float8_e4m3fnuz", "pass another kv_cache_dtype, or leave it out"),
        ("kv_layout", "float16", "pass another kv_layout, or leave it out"),
    ],
)
def test_a_dtype_of_torch_that_no_field_has_is_refused(field, value, written):
    value = getattr(pytest.importorskip("torch", reason="torch is not installed"), value)
    with pytest.raises(RequirementsError) as caught:
        Requirements(**{"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "float32", field: value})

    assert caught.value.fix == written


@pytest.mark.parametrize(
    ("field", "value", "written"),
    [
        ("dtype", "BFloat16", "write dtype='bfloat16'"),
        ("kv_layout", "hnd", "write kv_layout='HND', or leave it out"),
        ("kv_cache_form", "Split", "write kv_cache_form='split', or leave it out"),
        ("dtype", 16, "pass another dtype"),
    ],
)
def test_another_spelling_is_refused_with_the_right_one(field, value, written):
    with pytest.raises(RequirementsError) as caught:
        Requirements(**{"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "float32", field: value})

    assert caught.value.fix == written
