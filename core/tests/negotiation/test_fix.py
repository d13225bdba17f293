"""fixes, one by one, and in words. That they work, and that none is smaller, `test_brute_force` shows."""

from __future__ import annotations

import json

import pytest

from attnplug.negotiation import fix
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.matching import Request, negotiate
from attnplug.negotiation.reason import Fix, Reason
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from core.tests.negotiation.test_brute_force import candidate

PLAIN = {"head_size": {"min": 1}, "dtype": "bfloat16", "device_type": "cpu", "block_size": [16, 32]}
WANTED = Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16")
HOPPER = Device.cuda("9.0")


def of(rules=(), features=("paged",), **supports):
    """Return a variant that serves paged caches on the CPU, and what else is said."""
    return candidate({"supports": {**PLAIN, **supports, "features": list(features)}, "rules": list(rules)})


def needs(because="a reason", when=None, **need):
    return {"when": when or {"head_size": {"min": 1}}, "need": need, "because": because}


def refuses(because="a reason", **when):
    return {"when": when, "because": because}


def fix_of(offered, wanted=WANTED, device=Device.cpu()):  # noqa: B008 - frozen
    """Return the fix, having tried it."""
    request = Request(wanted, device)
    assert negotiate(offered, request).objections
    found = find_fix(offered, request)
    assert found.possible == (not negotiate(offered, Request(*found.apply(wanted, device))).objections)
    assert Fix.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    return found


class TestFields:
    """Which fields change, and to what."""

    def test_a_feature_that_is_required_is_requested(self):
        offered = of([needs(features=True)], ["paged", "acme.a", "acme.b"])

        assert str(fix_of(offered)) == "request features=('acme.a',)"
        assert str(fix_of(offered, WANTED.evolve(features=("other.c",)))) == "request features=('acme.a',)"

    def test_requested_features_that_are_supported_stay(self):
        offered = of([refuses(features=True, cascade=False)], ["paged", "cascade", "acme.a", "acme.b"])
        wanted = WANTED.evolve(features=("acme.b", "other.c"))

        assert dict(fix_of(offered, wanted).engine) == {"features": ()}
        assert dict(fix_of(of(features=["paged", "acme.a", "acme.b"]), wanted).engine) == {"features": ("acme.b",)}

    @pytest.mark.parametrize(
        ("name", "value", "nothing"),
        [("output_quant", "fp8_e4m3", None), ("dcp_size", 2, 1), ("kv_in_cache", True, False)],
    )
    def test_what_is_not_served_is_left_out(self, name, value, nothing):
        assert dict(fix_of(of(), WANTED.evolve(**{name: value})).engine) == {name: nothing}

    def test_a_phase_that_everyone_serves_is_left(self):
        assert dict(fix_of(of([needs(phases=["decode"])])).engine) == {"phases": ("decode",)}

    def test_without_decodes_there_is_no_length_of_a_decode(self):
        offered = of(phases="prefill", decode_query_len={"max": 4})

        assert dict(fix_of(offered, WANTED.evolve(decode_query_len=4)).engine) == {
            "phases": ("prefill",),
            "decode_query_len": 1,
        }

    def test_a_cache_that_is_needed_is_paged(self):
        offered = of([needs(kv_cache_dtype="int8")], kv_cache_dtype="int8")

        assert dict(fix_of(offered, WANTED.evolve(paged=False)).engine) == {"paged": True, "kv_cache_dtype": "int8"}


class TestSmallest:
    """What a change implies counts too."""

    def test_without_a_paged_cache_there_are_more_changes_than_one(self):
        by_pages = [needs(block_size=16, when={"cascade": True}), needs(kv_layout="HND", when={"cascade": True})]
        offered = of(by_pages, ["paged", "cascade"], kv_cache_dtype=["auto", "int8"], kv_layout=["NHD", "HND"])
        wanted = WANTED.evolve(cascade=True, block_size=32, kv_layout="NHD", kv_cache_dtype="int8")
        assert dict(fix_of(offered, wanted).engine) == {"cascade": False}

        offered = of(
            [*by_pages, needs(cascade=True, when={"paged": True})],
            ["paged", "cascade"],
            kv_cache_dtype=["auto", "int8"],
            kv_layout=["NHD", "HND"],
        )
        assert dict(fix_of(offered, wanted).engine) == {"block_size": 16, "kv_layout": "HND"}

    def test_a_device_without_changes_comes_before_a_nearer_one(self):
        offered = of(
            [refuses(compute_capability="8.0", cudagraph=True)],
            device_type="cuda",
            compute_capability=["8.0", "12.0"],
            cudagraph={"max": "always"},
        )
        wanted = WANTED.evolve(cudagraph="always")

        assert str(fix_of(offered, wanted, HOPPER)) == "run on cuda:12.0"
        assert str(fix_of(offered, WANTED, HOPPER)) == "run on cuda:8.0"

    def test_of_two_devices_with_changes_that_with_fewer_is_named(self):
        by_device = [
            refuses(compute_capability="8.0", cascade=True),
            refuses(compute_capability="8.0", return_lse=True),
            refuses(compute_capability="12.0", return_lse=True),
        ]
        offered = of(
            by_device, ["paged", "cascade", "return_lse"], device_type="cuda", compute_capability=["8.0", "12.0"]
        )

        fix = fix_of(offered, WANTED.evolve(cascade=True, return_lse=True), HOPPER)

        assert str(fix) == "request return_lse=False; run on cuda:12.0"


class TestWork:
    """The search ends after a number of evaluations, and looks nowhere that a refusing rule does not."""

    def test_a_search_that_ends_says_so(self, monkeypatch):
        flags = ("cascade", "return_lse", "batch_invariant", "per_head_scales", "kv_in_cache")
        values = {
            "dcp_size": 2,
            "output_quant": "fp8_e4m3",
            "kv_layout": "HND",
            "block_size": 32,
            "decode_query_len": 2,
        }
        offered = of(
            [needs(**dict.fromkeys(flags, True), **values, cudagraph="always", phases=["decode"])],
            ["paged", *flags],
            dcp_size={"max": 64},
            decode_query_len={"max": 64},
            cudagraph={"max": "uniform_batch"},
        )
        made, negotiated = [], fix.negotiate
        monkeypatch.setattr(fix, "negotiate", lambda *how: made.append(1) or negotiated(*how))

        found = find_fix(offered, Request(WANTED, Device.cpu()))

        assert not found.possible
        assert len(made) <= fix.EVALUATIONS / fix._TRIAL + 1
        assert "requires more than 100,000 evaluations of its rules to find a change that serves" in str(found)

    def test_rules_without_an_engine_field_end_it_at_once(self, monkeypatch):
        made, negotiated = [], fix.negotiate
        monkeypatch.setattr(fix, "negotiate", lambda *how: made.append(1) or negotiated(*how))
        others = [refuses(block_size=size, kv_layout="NHD", cudagraph=True, return_lse=True) for size in (16, 32)]

        found = find_fix(of([refuses(head_size=64), *others]), Request(WANTED, Device.cpu()))

        assert str(found) == "none: this variant does not support head_size=64 (a reason)"
        assert len(made) == 1


class TestNone:
    """Where there is no fix, what the candidate lacks is named once, and not as in a reason."""

    def test_what_the_model_requests_is_lacking(self):
        offered = of([needs("a mask is dense", sliding_window=False, when={"custom_mask": True})], ["paged"])

        fix = fix_of(offered, WANTED.evolve(sinks=True, alibi="linear", cudagraph="always"))

        assert (fix.lacks, fix.needs) == (("alibi=linear", "sinks=True"), ())
        assert str(fix) == "none: this variant does not support alibi=linear, sinks=True"

    def test_a_rule_says_why_and_replaces_the_plain_refusal(self):
        offered = of([refuses("they have no tiles", head_size=64)], head_size=[128])
        assert fix_of(offered).lacks == ("head_size=64 (they have no tiles)",)

    def test_fields_that_exclude_each_other_have_their_values(self):
        together = refuses("wrong values", head_size=64, sinks=True)
        offered = of([together], ["paged", "sinks"])

        fix = fix_of(offered, WANTED.evolve(sinks=True))

        assert str(fix) == "none: this variant does not support head_size=64 with sinks=True (wrong values)"

    def test_what_the_variant_requires_always_is_needed(self):
        wanted = needs("it is for patterns", block_sparse=True)
        offered = of([wanted, needs("no window", causal=True)], ["paged", "block_sparse", "causal"])

        assert str(fix_of(offered)) == "none: this variant requires block_sparse (it is for patterns)"
        both = fix_of(offered, WANTED.evolve(causal=False, sinks=True))
        assert both.needs == ("block_sparse (it is for patterns)",)
        assert str(both) == (
            "none: this variant does not support sinks=True, causal=False (no window), "
            "and requires block_sparse (it is for patterns)"
        )

    def test_what_no_change_avoids_is_named_by_field_too(self):
        offered = of([refuses("not today", head_size={"min": 1})])
        assert str(fix_of(offered)) == "none: this variant does not support head_size=64 (not today)"

        offered = of([needs("it merges", return_lse=True), refuses("nor so", return_lse=True)], ["paged", "return_lse"])
        assert str(fix_of(offered)) == "none: this variant requires return_lse = True (it merges)"


class TestReasons:
    """The texts of the reasons that rules give."""

    @pytest.mark.parametrize(
        ("rule", "wanted", "text"),
        [
            (needs(features=True), {}, "requires features: a reason"),
            (needs(sliding_window=True), {}, "requires sliding_window: a reason"),
            (needs(cudagraph=True), {}, "requires another cudagraph (requested: cudagraph=never): a reason"),
            (
                needs(kv_cache_dtype=True),
                {},
                "requires another kv_cache_dtype (requested: kv_cache_dtype=bfloat16): a reason",
            ),
            (
                needs(cudagraph=False),
                {"cudagraph": "always"},
                "requires no cudagraph (requested: cudagraph=always): ",
            ),
            (needs(return_lse=True), {}, "requires return_lse = True (requested: return_lse=False): a reason"),
            (refuses(return_lse=False), {}, "does not support return_lse=False: a reason"),
            (
                refuses(head_size=64, cudagraph="always"),
                {"cudagraph": "always"},
                "does not support head_size=64 with cudagraph=always: a reason",
            ),
            (
                refuses(features=True),
                {"features": ("acme.a", "acme.b")},
                "does not support features=('acme.a', 'acme.b'): ",
            ),
        ],
    )
    def test_it_names_the_fields_and_what_is_needed(self, rule, wanted, text):
        offered = of([rule], ["paged", "cudagraph", "return_lse", "acme.a", "acme.b"])

        (reason,) = negotiate(offered, Request(WANTED.evolve(**wanted), Device.cpu())).objections

        assert str(reason).startswith(text)
        assert Reason.from_dict(json.loads(json.dumps(reason.to_dict()))) == reason

    def test_values_within_values_travel_too(self):
        offered = of([refuses(features=True, cudagraph="always")], ["paged", "cudagraph", "acme.a"])
        wanted = WANTED.evolve(features=("acme.a",), cudagraph="always")

        (reason,) = negotiate(offered, Request(wanted, Device.cpu())).objections

        assert hash(Reason.from_dict(json.loads(json.dumps(reason.to_dict())))) == hash(reason)

    def test_a_version_is_named_as_such(self):
        reason = Reason("rule", "installed and head_size", ("acme <2", 64), "", "wrong values")

        assert str(reason) == "does not support acme <2 with head_size=64: wrong values"

    def test_a_device_is_not_requested_but_there(self):
        (reason,) = negotiate(of(), Request(WANTED, Device("xpu"))).objections

        assert str(reason) == "requires device type cpu; the device is xpu"
        assert str(fix_of(of(), device=Device("xpu"))) == "run on cpu"
