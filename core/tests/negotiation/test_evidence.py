"""What of an agreement evidence does not cover."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.evidence.coverage import Evidence, find_unverified
from attnplug.manifest.reader import parse_manifest
from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.reason import Unverified
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements

MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "s" }
[supports]
device_type = ["cpu", "cuda"]
compute_capability = { min = "8.0" }
dtype = ["float32", "bfloat16"]
head_size = { min = 1, max = 512 }
block_size = [16, { min = 1 }]
kv_layout = ["NHD", "HND"]
kv_cache_form = ["joint", "packed"]
kv_cache_dtype = ["auto", "fp8_e4m3"]
cudagraph = { max = "always" }
phases = ["prefill", "decode"]
dcp_size = { max = 8 }
features = ["paged", "sliding_window", "attention_chunk", "logits_soft_cap", "sinks", "block_sparse", "acme.rope"]
"""
HOPPER = Device.cuda("9.0", name="NVIDIA H200")
OWN = "attnplug-acme 1.0"
PLAIN = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}
BASICS = {
    ("head_size", 64),
    ("dtype", "bfloat16"),
    ("paged", True),
    ("block_size", 16),
    ("kv_layout", "NHD"),
    ("kv_cache_form", "joint"),
    ("phases", ("prefill",)),
    ("phases", ("decode",)),
}


def candidate():
    manifest = parse_manifest(MANIFEST)
    return make_candidate(manifest, manifest.variants[0], lambda _: None, distribution=OWN)


def agreed(**wanted):
    requirements = Requirements(**{**PLAIN, **wanted})
    terms = (requirements.block_size or 16, requirements.kv_layout or "NHD", requirements.kv_cache_form or "joint")
    if not requirements.paged:
        terms = (None, None, None)
    return Agreement("acme", "default", requirements, *terms, requirements.kv_cache_dtype, requirements.cudagraph)


def evidence(*served, device=HOPPER, distribution=OWN, passed=True, unreached=None, features=(), ranges=None):
    return Evidence(
        "acme/default",
        distribution,
        device,
        passed,
        frozenset(served),
        unreached or {},
        features=frozenset(features),
        ranges=ranges,
    )


def unverified(*known, device=HOPPER, **wanted):
    return find_unverified(candidate(), agreed(**wanted), device, known)


def test_nothing_is_unverified_where_every_value_was_exercised() -> None:
    assert unverified(evidence(*BASICS)) == ()


def test_several_runs_cover_together_what_none_covers_alone() -> None:
    first, *rest = sorted(BASICS, key=str)

    assert unverified(evidence(first), evidence(*rest)) == ()
    assert len(unverified(evidence(*rest))) == 1


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"head_size": 96}, [("head_size", 96, "verified is 64")]),
        ({"block_size": 32}, [("block_size", 32, "verified is 16")]),
        ({"sinks": True}, [("sinks", True, "no test has requested it")]),
        ({"paged": False}, [("paged", False, "verified is True")]),
        ({"kv_cache_dtype": "fp8"}, [("kv_cache_dtype", "fp8_e4m3", "the oracle does not round to it")]),
        ({"cudagraph": "always"}, [("cudagraph", "always", "no test has requested it")]),
        ({"dcp_size": 4}, [("dcp_size", 4, "it takes several ranks")]),
        ({"block_sparse": {"b": 1}}, [("block_sparse", {"b": 1}, "no test has requested it")]),
        ({"features": ("acme.rope",)}, [("features", "acme.rope", "it means what its backend says")]),
        ({"num_q_heads": 14}, []),
        ({"kv_cache_dtype": "bfloat16"}, []),
        ({"phases": ("decode",)}, []),
    ],
)
def test_each_value_counts_by_itself_and_the_rest_is_listed(wanted, found) -> None:
    unreached = {
        ("kv_cache_dtype", "fp8_e4m3"): "the oracle does not round to it",
        ("dcp_size", 2): "it takes several ranks",
        ("features", "acme.rope"): "it means what its backend says",
    }

    reported = unverified(evidence(*BASICS, unreached=unreached), **wanted)

    assert [(item.field, item.value, item.because) for item in reported] == found


def test_between_two_verified_sizes_nothing_is_inferred() -> None:
    (reported,) = unverified(evidence(*BASICS, ("head_size", 128), ("head_size", 9)), head_size=96)

    assert str(reported) == "head_size=96 (verified are 9, 64, 128)"


RAN = {
    "num_q_heads": (2, 64),
    "num_kv_heads": (2, 32),
    "gqa_ratio": (1, 8),
    "sliding_window": (1, 64),
    "logits_soft_cap": (2.0, 50.0),
    "seq_len": (1, 2100),
}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"sliding_window": 63}, []),
        ({"sliding_window": 64, "logits_soft_cap": 2.0}, []),
        ({"sliding_window": 4096}, ["sliding_window=4096 (verified up to 64)"]),
        ({"logits_soft_cap": 1.0}, ["logits_soft_cap=1.0 (verified from 2.0)"]),
        ({"num_q_heads": 32, "num_kv_heads": 8}, []),
        ({"num_q_heads": 4, "num_kv_heads": 1}, ["num_kv_heads=1 (verified from 2)"]),
        ({"num_q_heads": 32, "num_kv_heads": 2}, ["gqa_ratio=16 (verified up to 8)"]),
        ({"num_q_heads": 128, "num_kv_heads": 16}, ["num_q_heads=128 (verified up to 64)"]),
        ({"attention_chunk": 8}, ["attention_chunk=8 (no run had longer sequences)"]),
        ({"head_size": 96}, ["head_size=96 (verified are 64, 128)"]),
        ({"block_size": 32}, ["block_size=32 (verified is 16)"]),
    ],
)
def test_between_two_values_of_a_range_all_are_verified(wanted, found) -> None:
    known = evidence(*BASICS, ("head_size", 128), ("sliding_window", 9999), ("attention_chunk", 8), ranges=RAN)

    assert [str(item) for item in unverified(known, **wanted)] == found


def test_between_the_ranges_of_two_runs_nothing_is_inferred() -> None:
    known = [evidence(*BASICS, ranges={**RAN, "sliding_window": ends}) for ends in ((4096, 4096), (1, 64), (60, 128))]

    assert unverified(*known, sliding_window=100) == unverified(*known, sliding_window=4096) == ()
    (between,) = unverified(*known, sliding_window=200)
    assert str(between) == "sliding_window=200 (verified are 1 to 128, 4096)"
    (above,) = unverified(*known, sliding_window=8192)
    assert str(above) == "sliding_window=8192 (verified up to 4096)"


def test_values_of_format_1_are_exact_beside_ranges() -> None:
    first, second = evidence(*BASICS, ("sliding_window", 512)), evidence(*BASICS, ranges=RAN)

    assert unverified(first, num_kv_heads=1, sliding_window=512) == ()
    assert unverified(first, second, sliding_window=512) == ()
    assert [item.field for item in unverified(first, second, num_kv_heads=1)] == ["num_kv_heads"]
    (reported,) = unverified(first, second, sliding_window=256)
    assert str(reported) == "sliding_window=256 (verified are 1 to 64, 512)"


def test_heads_that_are_bound_later_are_not_looked_up() -> None:
    late = agreed(num_q_heads=None, num_kv_heads=None, late=("num_q_heads", "num_kv_heads"))

    assert find_unverified(candidate(), late, HOPPER, [evidence(*BASICS, ranges=RAN)]) == ()


def test_only_the_requested_part_is_checked_name_by_name() -> None:
    known = evidence(*(BASICS - {("phases", ("prefill",))}))

    assert unverified(known, phases=("decode",)) == ()
    (reported,) = unverified(known, phases=("prefill",))
    assert str(reported) == "phases=prefill (verified is decode)"


VALUES = {
    "head_size": (1, 64, 512),
    "dtype": ("float32", "bfloat16"),
    "block_size": (1, 16, 48),
    "kv_layout": ("NHD", "HND"),
    "kv_cache_form": ("joint", "packed"),
    "sliding_window": (None, 7, 4096),
    "sinks": (False, True),
    "cudagraph": ("never", "always"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
}
NEUTRAL = {None, False, "never", "auto"}
requests = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()})
pairs = st.frozensets(
    st.sampled_from([(name, value) for name, values in VALUES.items() for value in values if value not in NEUTRAL])
)
ALWAYS = [("paged", True), ("phases", ("prefill",)), ("phases", ("decode",))]


@given(requests, pairs)
def test_what_is_listed_was_requested_and_not_exercised(wanted, served) -> None:
    reported = unverified(evidence(*served, *ALWAYS), **wanted)

    missing = {(name, value) for name, value in wanted.items() if value not in NEUTRAL} - served
    assert {(item.field, item.value) for item in reported} == missing
    assert len(reported) == len(missing)
    assert all(item.because for item in reported)


@given(requests, pairs, pairs)
def test_more_evidence_leaves_less_unverified(wanted, some, more) -> None:
    def left(*known):
        return {(item.field, item.value) for item in unverified(*known, **wanted)}

    both = left(evidence(*some), evidence(*more))
    assert both == left(evidence(*(some | more))) == left(evidence(*more), evidence(*some))
    assert both <= left(evidence(*some))


# Whose evidence it is


@pytest.mark.parametrize(
    ("ran", "here", "counts"),
    [
        (Device.cpu(), Device.cpu(), True),
        (Device("cpu", name="a"), Device("cpu", name="b"), True),
        (Device.cpu(), HOPPER, False),
        (HOPPER, Device.cpu(), False),
        (HOPPER, Device.cuda("9.0"), True),
        (HOPPER, Device.cuda("9.0", name="NVIDIA H100"), True),
        (HOPPER, Device.cuda("9.0a"), True),
        (HOPPER, Device.cuda("9.1"), False),
        (HOPPER, Device.cuda("10.0"), False),
        (Device("cuda", compute_capability="9.0", num_multiprocessors=132), Device.cuda("9.0"), True),
        (Device("cuda", vendor="amd", name="MI300X"), Device("cuda", vendor="amd", name="MI300X"), True),
        (Device("cuda", vendor="amd", name="MI300X"), Device("cuda", vendor="amd", name="MI250"), False),
        (Device("cuda", vendor="amd", name="MI300X"), Device("cuda", vendor="amd"), False),
        (HOPPER, Device("cuda", vendor="amd", name="NVIDIA H200"), False),
        (Device("xpu", vendor="intel"), Device("xpu", vendor="intel"), True),
        (Device("xpu"), Device("xpu", vendor="intel"), False),
    ],
)
def test_evidence_is_for_devices_that_run_the_same_code(ran, here, counts) -> None:
    assert evidence(device=ran).is_for(here) is counts


def test_without_evidence_there_is_one_record_for_the_device() -> None:
    known = evidence(*BASICS)

    (reported,) = unverified(known, device=Device.cuda("8.0", name="NVIDIA A100"), sinks=True)
    (on_cpu,) = unverified(known, device=Device.cpu())

    assert reported == Unverified("device", "cuda:8.0", "no run of the conformance kit on cuda:8.0 is known")
    assert on_cpu.value == "cpu"
    assert unverified(device=HOPPER)[0].value == "cuda:9.0"


def test_another_version_verifies_nothing_and_is_named() -> None:
    others = (
        evidence(*BASICS, distribution="attnplug-acme 0.9"),
        evidence(*BASICS, distribution="attnplug-acme 1.0.dev3"),
    )

    (reported,) = unverified(*others)

    assert str(reported) == "attnplug-acme 1.0 (verified is attnplug-acme 0.9, attnplug-acme 1.0.dev3)"
    assert reported.field == "distribution"


def test_a_run_that_failed_verifies_nothing() -> None:
    failed = evidence(*BASICS, passed=False)

    (reported,) = unverified(failed, evidence(*BASICS, distribution="attnplug-acme 0.9"))

    assert reported == Unverified("device", "cuda:9.0", "the conformance kit has failed on cuda:9.0")
    assert unverified(failed, evidence(*BASICS)) == ()


def test_a_run_of_part_of_the_kit_verifies_nothing() -> None:
    part = evolve(evidence(*BASICS), part="part of the kit (12 of 400 tests)")

    (reported,) = unverified(part)

    because = "only part of the kit (12 of 400 tests) was run on cuda:9.0"
    assert reported == Unverified("device", "cuda:9.0", because)
    assert unverified(part, evidence(*BASICS)) == ()


def test_it_shows_nothing_of_requests_without_these_features() -> None:
    rope, both = evidence(*BASICS, features=["acme.rope"]), evidence(*BASICS, features=["acme.rope", "acme.norm"])

    (reported,) = unverified(rope, both)
    (partly,) = unverified(both, features=("acme.rope",))

    assert reported.field == partly.field == "device"
    more = "every run of the conformance kit on cuda:9.0 requested more: features=acme.norm, acme.rope"
    assert str(reported) == f"{more} or acme.rope"
    assert str(partly) == more


def test_a_run_with_open_features_counts_for_requests_with_them() -> None:
    because = {("features", "acme.rope"): "it means what its backend says"}
    known = evidence(*BASICS, features=["acme.rope"], unreached=because)

    (reported,) = unverified(known, features=("acme.rope",))
    wide = unverified(known, features=("acme.rope",), head_size=96)

    assert str(reported) == "features=acme.rope (it means what its backend says)"
    assert [str(item) for item in wide] == ["head_size=96 (verified is 64)", str(reported)]


def test_runs_with_and_without_open_features_do_not_add_up() -> None:
    (reported,) = unverified(
        evidence(*BASICS), evidence(*BASICS, ("head_size", 96), features=["acme.rope"]), head_size=96
    )

    assert str(reported) == "head_size=96 (verified is 64)"


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just((("a", 1),))))
def test_odd_values_in_a_file_are_listed_like_any_other(values) -> None:
    known = evidence(
        *((name, value) for name, value in BASICS if name != "head_size"), *(("head_size", v) for v in values)
    )

    reported = unverified(known, head_size=96)

    assert [item.field for item in reported] == ["head_size"] * (96 not in values)


@pytest.mark.parametrize("value", [96, True, "always", 2.5])
def test_a_record_is_plain_data(value) -> None:
    record = Unverified("x", value, "why")

    assert Unverified.from_dict(record.to_dict()) == record
