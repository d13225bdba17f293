"""Values of every kind, for whatever is constructed from what others write."""

from __future__ import annotations

import enum
import math

import pytest
from hypothesis import strategies as st

from attnplug.errors import AttnplugError
from attnplug.request.capability import ComputeCapability

BASE = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}
HUGE = 10**400


class Silent:
    """Neither prints nor hashes nor compares."""

    __hash__ = None

    def __repr__(self):
        raise RuntimeError

    def __eq__(self, other):
        raise RuntimeError


def kind(value):
    return value if isinstance(value, str) else type(value).__name__


class Word(str, enum.Enum):
    DTYPE = "bfloat16"


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ODD = st.sampled_from(
    [
        HUGE,
        -HUGE,
        10**5000,
        2**31,
        math.nan,
        math.inf,
        5e-324,
        nested(5000),
        Silent(),
        object(),
        b"x",
        set(),
        {1: 2},
        Word.DTYPE,
        (9, 10**5000),
        "9" * 5000,
        chr(0xD800),
        {"a": {}},
        {"a": Silent()},
        [["a", []]],
        range(3),
        1j,
        ComputeCapability([], {}),
        ComputeCapability(9, HUGE),
        frozenset({"prefill"}),
        {"b": math.nan},
        [("a", 1)] * 2,
    ]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
TEXTS = st.sampled_from(["auto", "fp8", "NHD", "decoder", "cpu", "cuda", "9.0", "never", "prefill", "acme.x"])
ANY = JSON | ODD | TEXTS


def valid(make):
    """Return what a constructor makes, None where it refuses; any other exception fails the test."""
    try:
        return make()
    except AttnplugError as error:
        return None if str(error) else pytest.fail("an error without a text")
