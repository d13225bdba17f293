"""Whatever is written into a field: a valid request, or an error of this project."""

from __future__ import annotations

import copy
import json
import math
import pickle
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.errors import DeviceError, RequirementsError, SettingsError
from attnplug.negotiation.reason import Reason, Unverified
from attnplug.request.capability import ComputeCapability
from attnplug.request.device import Device
from attnplug.request.fields import FIELDS, fields_of
from attnplug.request.requirements import Requirements
from core.tests.request.any_values import ANY, BASE, HUGE, TEXTS, Silent, kind, nested, valid
from tests.examples import examples

pytestmark = pytest.mark.unmeasured


@settings(max_examples=examples(400))
@given(st.dictionaries(st.sampled_from([item.name for item in fields_of("model", "engine")]), ANY, max_size=3))
def test_requirements_are_valid_or_refused(values):
    made = valid(lambda: Requirements(**{**BASE, **values}))

    if made is not None:
        again = Requirements.from_dict(json.loads(json.dumps(made.to_dict(), allow_nan=False)))
        assert again == made
        assert hash(again) == hash(made)


def is_refused(name, value):
    try:
        Requirements(**{**BASE, name: value})
    except RequirementsError as error:
        return name in str(error)
    return False


def test_every_field_refuses_what_is_no_value():
    names = [item.name for item in fields_of("model", "engine", "selection")]
    junk = [HUGE, 10**5000, nested(5000), Silent(), {"a": Silent()}, [Silent()], math.nan]

    assert [(name, kind(value)) for name in names for value in junk if not is_refused(name, value)] == []


@given(ANY | st.dictionaries(st.sampled_from([*BASE, "sinks", "x", ""]), ANY))
def test_requirements_are_read_or_refused(data):
    valid(lambda: Requirements.from_dict(data))


@pytest.mark.parametrize("data", [None, 3, [], [("head_size", 64)], {1: 2}, nested(5000), Silent()], ids=kind)
def test_what_holds_no_requirements_is_refused(data):
    with pytest.raises(RequirementsError):
        Requirements.from_dict(data)


@settings(max_examples=examples(300))
@given(
    st.dictionaries(
        st.sampled_from(["type", "vendor", "name", "compute_capability", "num_multiprocessors"]), ANY, max_size=3
    )
)
def test_devices_are_valid_or_refused(values):
    for made in (valid(lambda: Device(**values)), valid(lambda: Device.from_dict(values))):
        if made is not None:
            assert hash(made) == hash(Device.from_dict(json.loads(json.dumps(made.to_dict()))))
            assert str(made)


@given(ANY)
def test_a_device_is_read_or_refused(value):
    for read in (Device.parse, Device.from_dict, Device.cuda):
        valid(lambda read=read: read(value))


@pytest.mark.parametrize(
    "values",
    [
        {"vendor": 3},
        {"vendor": ["nvidia"]},
        {"name": b"H100"},
        {"num_multiprocessors": True},
        {"num_multiprocessors": HUGE},
        {"compute_capability": (9, -1)},
        {"compute_capability": (HUGE, 0)},
        {"compute_capability": ComputeCapability([], 0)},
        {"compute_capability": "٩.0"},
    ],
)
def test_a_device_of_wrong_parts_is_refused(values):
    with pytest.raises(DeviceError):
        Device(**values)


@settings(max_examples=examples(200))
@given(st.dictionaries(st.sampled_from(["torch", "nobody", "torch/sdpa", 3]), st.dictionaries(TEXTS | st.just(3), ANY)))
def test_options_are_used_or_refused(options):
    valid(lambda: attnplug.select(Requirements(**BASE), "cpu", options=options))


@pytest.mark.parametrize("value", [HUGE, [], nested(5000), Silent(), None, b"x", 1j], ids=kind)
def test_an_option_of_another_type_is_refused(value):
    with pytest.raises(SettingsError, match="options="):
        attnplug.select(Requirements(**BASE), "cpu", options={"torch": {"x": value}})


# --- tables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (True, 1.0), (0, False), (0.0, False)])
def test_equal_looking_tables_are_different_requests(one, other):
    first, second = (Requirements(**BASE, block_sparse={"a": value}) for value in (one, other))

    assert first != second
    assert len({first, second}) == 2
    assert first.block_sparse != second.block_sparse
    assert type(dict(second.block_sparse)["a"]) is type(other)


def test_a_table_is_the_same_after_copies():
    made = Requirements(**BASE, block_sparse={"b": 1, "a": True})

    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.evolve()):
        assert copied == made
        assert hash(copied) == hash(made)
    assert made.block_sparse == {"a": True, "b": 1} == made.block_sparse
    assert made.block_sparse != {"a": 1, "b": 1}
    assert made.block_sparse == (("a", True), ("b", 1))


def test_decisions_on_equal_looking_tables_are_apart():
    decisions = [attnplug.explain(Requirements(**BASE, block_sparse={"a": value}), "cpu") for value in (1, True, 1.0)]

    assert [type(dict(each.requirements.block_sparse)["a"]) for each in decisions] == [int, bool, float]


@pytest.mark.parametrize(
    "table",
    [{"a": math.nan}, {"a": math.inf}, {"a": HUGE}, {"a": None}, {"a": []}, {1: 2}, {}, "ab", ["ab"], [("a", 1)] * 2],
)
def test_tables_hold_plain_values(table):
    with pytest.raises(RequirementsError, match="block_sparse="):
        Requirements(**BASE, block_sparse=table)


def test_decisions_and_reasons_with_tables_hash():
    requirements = Requirements(**BASE, block_sparse=MappingProxyType({"b": 1, "a": 2.5}))
    explanation = attnplug.explain(requirements, "cpu")
    reason = next(r for verdict in explanation.verdicts for r in verdict.reasons if r.field == "block_sparse")

    assert len({reason, Reason.from_dict(json.loads(json.dumps(reason.to_dict())))}) == 1
    assert reason.to_dict()["wanted"] == {"a": 2.5, "b": 1}
    assert "block_sparse={'a': 2.5, 'b': 1}" in str(reason)
    assert isinstance(hash(explanation.verdicts), int)
    assert isinstance(hash(Unverified("block_sparse", {"a": [1]}, "")), int)


@pytest.mark.parametrize("value", [1e39, 3.5e38, 1e-39, 1e-46, 5e-324, HUGE, 2.0**126 * 1.01])
def test_soft_caps_are_normal_in_float32(value):
    with pytest.raises(RequirementsError, match=r"logits_soft_cap=(.|\n)*2\*\*-126 to 2\*\*126"):
        Requirements(**BASE, logits_soft_cap=value)
    assert Requirements(**BASE, logits_soft_cap=2.0**-126).logits_soft_cap == 2.0**-126


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk", "block_size", "decode_query_len", "head_size"])
def test_numbers_are_int32(name):
    with pytest.raises(RequirementsError, match=f"{name}=2147483648"):
        Requirements(**{**BASE, name: 2**31})
    assert getattr(Requirements(**{**BASE, name: 2**31 - 1}), name) == 2**31 - 1


def test_every_number_has_a_bound():
    assert all(getattr(item.domain, "max", 0) < 2**31 for item in FIELDS.values())
