"""Ways out, one by one. That they work, and that none is smaller, `test_brute_force` shows."""

from __future__ import annotations

import json

import pytest

from attnplug.negotiation.negotiate import Question, negotiate
from attnplug.negotiation.remedy import Remedy, find_remedy
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from core.tests.negotiation.test_brute_force import candidate, unrelated

PLAIN = {"head_size": {"min": 1}, "dtype": "bfloat16", "device_type": "cpu", "block_size": [16, 32]}
ASKED = Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16")
HOPPER = Device.cuda("9.0")


def of(rules=(), features=("paged",), **supports):
    """Return a variant that serves paged caches on the CPU, and what else is said."""
    return candidate({"supports": {**PLAIN, **supports, "features": list(features)}, "rules": list(rules)})


def needs(because="a reason", when=None, **need):
    return {"when": when or {"head_size": {"min": 1}}, "need": need, "because": because}


def refuses(because="a reason", **when):
    return {"when": when, "because": because}


def way_out(offered, asked=ASKED, device=Device.cpu()):  # noqa: B008 - frozen
    """Return the remedy, having tried it."""
    question = Question(asked, device)
    assert negotiate(offered, question).objections
    remedy = find_remedy(offered, question, unrelated)
    assert remedy.possible == (not negotiate(offered, Question(*remedy.apply(asked, device))).objections)
    assert Remedy.from_dict(json.loads(json.dumps(remedy.to_dict()))) == remedy
    return remedy


class TestFields:
    """Which fields change, and to what."""

    def test_a_feature_that_is_needed_is_asked_for(self):
        offered = of([needs(features=True)], ["paged", "acme.a", "acme.b"])

        assert str(way_out(offered)) == "ask for features=('acme.a',)"
        assert str(way_out(offered, ASKED.evolve(features=("other.c",)))) == "ask for features=('acme.a',)"

    def test_of_asked_features_those_that_are_served_stay(self):
        offered = of([refuses(features=True, cascade=False)], ["paged", "cascade", "acme.a", "acme.b"])
        asked = ASKED.evolve(features=("acme.b", "other.c"))

        assert dict(way_out(offered, asked).engine) == {"features": ()}
        assert dict(way_out(of(features=["paged", "acme.a", "acme.b"]), asked).engine) == {"features": ("acme.b",)}

    @pytest.mark.parametrize(
        ("name", "value", "nothing"),
        [("output_quant", "fp8_e4m3", None), ("dcp_size", 2, 1), ("host_lengths", "absent", "exact")],
    )
    def test_what_is_not_served_is_left_out(self, name, value, nothing):
        assert dict(way_out(of(), ASKED.evolve(**{name: value})).engine) == {name: nothing}

    def test_a_phase_that_everyone_serves_is_left(self):
        assert dict(way_out(of([needs(phases=["decode"])])).engine) == {"phases": ("decode",)}

    def test_without_decodes_there_is_no_length_of_a_decode(self):
        offered = of(phases="prefill", decode_query_len={"max": 4})

        assert dict(way_out(offered, ASKED.evolve(decode_query_len=4)).engine) == {
            "phases": ("prefill",),
            "decode_query_len": 1,
        }

    def test_a_cache_that_is_needed_is_paged(self):
        offered = of([needs(kv_cache_dtype="int8")], kv_cache_dtype="int8")

        assert dict(way_out(offered, ASKED.evolve(paged=False)).engine) == {"paged": True, "kv_cache_dtype": "int8"}


class TestSmallest:
    """What a change implies counts too."""

    def test_giving_up_the_paged_cache_is_not_one_change_where_it_gives_up_more(self):
        by_pages = [needs(block_size=16, when={"cascade": True}), needs(kv_layout="HND", when={"cascade": True})]
        offered = of(by_pages, ["paged", "cascade"], kv_cache_dtype=["auto", "int8"], kv_layout=["NHD", "HND"])
        asked = ASKED.evolve(cascade=True, block_size=32, kv_layout="NHD", kv_cache_dtype="int8")
        assert dict(way_out(offered, asked).engine) == {"cascade": False}

        offered = of(
            [*by_pages, needs(cascade=True, when={"paged": True})],
            ["paged", "cascade"],
            kv_cache_dtype=["auto", "int8"],
            kv_layout=["NHD", "HND"],
        )
        assert dict(way_out(offered, asked).engine) == {"block_size": 16, "kv_layout": "HND"}

    def test_the_device_that_asks_for_no_more_comes_before_a_nearer_one(self):
        offered = of(
            [refuses(compute_capability="8.0", cudagraph=True)],
            device_type="cuda",
            compute_capability=["8.0", "12.0"],
            cudagraph={"max": "always"},
        )
        asked = ASKED.evolve(cudagraph="always")

        assert str(way_out(offered, asked, HOPPER)) == "run on cuda:12.0"
        assert str(way_out(offered, ASKED, HOPPER)) == "run on cuda:8.0"

    def test_of_two_devices_that_take_changes_the_one_with_fewer_is_named(self):
        by_device = [
            refuses(compute_capability="8.0", cascade=True),
            refuses(compute_capability="8.0", return_lse=True),
            refuses(compute_capability="12.0", return_lse=True),
        ]
        offered = of(
            by_device, ["paged", "cascade", "return_lse"], device_type="cuda", compute_capability=["8.0", "12.0"]
        )

        remedy = way_out(offered, ASKED.evolve(cascade=True, return_lse=True), HOPPER)

        assert str(remedy) == "ask for return_lse=False; run on cuda:12.0"
