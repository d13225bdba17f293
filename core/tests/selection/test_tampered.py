"""Decisions that were changed on their way: refused with a documented error, or the same as another valid decision."""

from __future__ import annotations

import copy
import json
import math
import random

import pytest

import attnplug
from attnplug.errors import AttnplugError, DecisionError, PluginLoadError
from attnplug.selection.plan import Plan
from attnplug.selection.selection import Selection

pytestmark = pytest.mark.unmeasured

pytest.importorskip("torch", reason="torch is not installed")  # decisions are made of backends that serve

WANTED = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16", sliding_window=128)
DATA = attnplug.select(WANTED, "cpu").to_dict()
PLAN = attnplug.plan({"a": WANTED, "b": WANTED.evolve(sliding_window=None)}, "cpu").to_dict()
ODD = [
    None,
    True,
    False,
    0,
    1,
    16.0,
    -1,
    10**400,
    math.nan,
    math.inf,
    "",
    "x",
    "NHD",
    "bfloat16",
    [],
    [1],
    {},
    {"a": 1},
]


def places(value, path=()):
    """Yield the path of every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(data, path, make):
    """Return a copy in which the value at a path is another, or is gone where `make` returns the copy's owner."""
    data = copy.deepcopy(data)
    if not path:
        return make(data, None)
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    make(owner, path[-1])
    return data


def replaced(value):
    def make(owner, key):
        if key is None:
            return value
        owner[key] = value
        return owner

    return make


def read(cls, data):
    """Return what was read, None where it was refused; every other exception fails."""
    try:
        made = cls.from_dict(data)
    except AttnplugError:
        return None
    again = cls.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert hash(again) == hash(made)
    assert str(made)
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", True),
        ("block_size", 16.0),
        ("block_size", "16"),
        ("block_size", 2**31),
        ("kv_layout", "nhd"),
        ("kv_layout", ["NHD"]),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", 8),
        ("cudagraph", "sometimes"),
        ("cudagraph", 0),
        ("options", []),
        ("options", {"a": []}),
        ("options", {"a": 10**400}),
        ("backend", 3),
        ("backend", ""),
        ("variant", None),
        ("requirements", None),
    ],
)
def test_an_agreement_with_another_value_is_refused(name, value):
    with pytest.raises(DecisionError, match=f"{name}="):
        Selection.from_dict(changed(DATA, ("agreement", name), replaced(value)))


def test_the_terms_that_are_loaded_are_those_that_were_requested():
    data = attnplug.select(WANTED.evolve(block_size=32, kv_layout="HND", dtype="float32"), "cpu").to_dict()

    for name, value in (("block_size", 16), ("kv_layout", "NHD")):
        tampered = Selection.from_dict(changed(data, ("agreement", name), replaced(value)))
        with pytest.raises(PluginLoadError, match=f"{name} would be .*, not {value!r}"):
            tampered.load()


@pytest.mark.parametrize(("cls", "data"), [(Selection, DATA), (Plan, PLAN)], ids=["selection", "plan"])
def test_each_value_replaced_is_refused_or_valid(cls, data):
    seeded = random.Random(4)
    paths = seeded.sample(list(places(data)), 150)
    refused = sum(
        read(cls, changed(data, path, replaced(value))) is None for path in paths for value in seeded.sample(ODD, 6)
    )

    assert refused > 3 * len(paths)


@pytest.mark.parametrize(("cls", "data"), [(Selection, DATA), (Plan, PLAN)], ids=["selection", "plan"])
def test_a_key_too_few_or_too_many_is_refused(cls, data):
    def drop(owner, key):
        del owner[key]

    for path in places(data):
        if path and isinstance(path[-1], str) and "requirements" not in path[:-1] and not free(path):
            assert read(cls, changed(data, path, drop)) is None, path
            assert read(cls, changed(data, (*path[:-1], "new"), replaced(1))) is None, path


def free(path):
    """Whether a key is one of a table that may have any, or an optional one."""
    return any(name in path[:-1] for name in ("emulated", "provenance", "options", "wanted", "engine", "device"))


@pytest.mark.parametrize("data", [None, 3, [], "{}", {1: 2}, {"groups": [{}]}, {"groups": [[]]}, {"groups": 1}])
def test_what_is_no_decision_is_refused(data):
    for cls in (Selection, Plan):
        with pytest.raises(DecisionError):
            cls.from_dict(data)


def test_groups_share_no_layer():
    with pytest.raises(DecisionError, match="in two groups"):
        Plan.from_dict({**PLAN, "groups": [*PLAN["groups"], *PLAN["groups"]]})
