"""Negotiation and fixes against an evaluation of the raw manifest that shares no code with them."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from attnplug.errors import AttnplugError
from attnplug.manifest.reader import parse_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.matching import Request, negotiate
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from tests.examples import examples

pytestmark = pytest.mark.unmeasured

LEVELS = ["never", "single_token_decode", "uniform_batch", "always"]
DEVICES = [Device.cpu(), Device.cuda("8.0"), Device.cuda("9.0"), Device.cuda("10.0"), Device.cuda("12.0")]
MODEL = {
    "head_size": [64, 80, 128, 256],
    "dtype": ["bfloat16", "float16", "float32"],
    "sliding_window": [None, 128, 4096],
    "logits_soft_cap": [None, 30.0],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "custom_mask": [False, True],
}
TERMS = ("block_size", "kv_layout", "kv_cache_form")
FORMS = ["joint", "interleaved", "split", "packed", "independent"]
ENGINE = {
    "paged": [True, False],
    "block_size": [None, 16, 48, 64, 256],
    "kv_layout": [None, "NHD", "HND"],
    "kv_cache_form": [None, *FORMS],
    "kv_cache_dtype": ["auto", "fp8_e4m3", "int8"],
    "cudagraph": LEVELS,
    "cascade": [False, True],
    "return_lse": [False, True],
    "decode_query_len": [1, 2, 8],
    "seq_lens_cpu_kind": ["exact", "upper_bound", "absent"],
    "phases": [("prefill", "decode"), ("prefill",), ("decode",)],
    "dcp_size": [1, 2],
    "output_quant": [None, "fp8_e4m3"],
    "features": [(), ("acme.fused",), ("acme.other",), ("acme.fused", "acme.other")],
}
NEUTRAL = {
    "sliding_window": None,
    "logits_soft_cap": None,
    "alibi": None,
    "sinks": False,
    "custom_mask": False,
    "paged": False,
    "cudagraph": "never",
    "cascade": False,
    "return_lse": False,
    "decode_query_len": 1,
    "seq_lens_cpu_kind": "exact",
    "phases": ("prefill", "decode"),
    "dcp_size": 1,
    "features": (),
    "compute_capability": None,
}


# ---------------------------------------------------------------- an independent evaluation of the raw tables


def capability(text):
    return tuple(int(part) for part in text.split("."))


def order(field, value):
    if field == "cudagraph":
        return LEVELS.index(value)
    return capability(value) if field == "compute_capability" else value


def admits(field, declared, value, dtype):
    return any(
        admits_part(field, part, value, dtype) for part in (declared if isinstance(declared, list) else [declared])
    )


def admits_part(field, part, value, dtype):
    if isinstance(part, dict):
        low = part.get("min") is None or order(field, value) >= order(field, part["min"])
        high = part.get("max") is None or order(field, value) <= order(field, part["max"])
        return low and high and ("multiple_of" not in part or value % part["multiple_of"] == 0)
    if field == "kv_cache_dtype" and part == "auto":
        return value == dtype
    if field == "compute_capability":
        return capability(part) == capability(value)
    return {"fp8": "fp8_e4m3"}.get(part, part) == value


def is_requested(field, value, facts):
    return value != (facts["dtype"] if field == "kv_cache_dtype" else NEUTRAL.get(field))


def condition(field, wanted, facts, *, absent):
    value = facts[field]
    if isinstance(wanted, bool) and field not in ("sinks", "custom_mask", "paged", "cascade", "return_lse"):
        return is_requested(field, value, facts) is wanted
    if value is None:
        return absent
    if field in ("phases", "features"):
        return set(value) <= set(wanted if isinstance(wanted, list) else [wanted])
    return admits(field, wanted, value, facts["dtype"])


def serves(raw, requirements, device):
    """Whether the only variant of a raw manifest serves: with the lengths of the request, or with exact ones."""
    return any(serves_as(raw, requirements, device, kind) for kind in {requirements.seq_lens_cpu_kind, "exact"})


def serves_as(raw, requirements, device, lengths):
    """The same for one kind of lengths, by trying every block size and layout."""
    supports, features = raw["supports"], raw["supports"].get("features", [])
    facts = {name: getattr(requirements, name) for name in (*MODEL, *ENGINE)}
    facts |= {
        "seq_lens_cpu_kind": lengths,
        "device_type": device.type,
        "compute_capability": str(device.compute_capability) if device.compute_capability else None,
    }
    supports = {"phases": ["prefill", "decode"], **supports}  # undeclared is both, and each of them
    for field, value in facts.items():
        if field in TERMS or (
            field not in ("head_size", "dtype", "device_type", "phases") and not is_requested(field, value, facts)
        ):
            continue
        if field == "features":
            if not set(value) <= set(features):
                return False
        elif field in features:
            continue
        elif field not in supports:
            return False
        elif field == "phases":
            if not set(value) <= set(supports[field]):
                return False
        elif not admits(field, supports[field], value, facts["dtype"]):
            return False
    return any(allowed(raw, {**facts, **terms}) for terms in all_terms(supports, requirements))


def all_terms(supports, requirements):
    """Every block size, layout and form that may be agreed on, preferred ones first."""
    if not requirements.paged:
        return [dict.fromkeys(TERMS)]
    supports = {"block_size": [], "kv_layout": "NHD", "kv_cache_form": "joint", **supports}
    values = {"block_size": range(1, 1025), "kv_layout": ["NHD", "HND"], "kv_cache_form": FORMS}
    choices = []
    for name in TERMS:
        wanted = getattr(requirements, name)
        parts = supports[name] if isinstance(supports[name], list) else [supports[name]]
        fitting = [[v for v in ([wanted] if wanted else values[name]) if admits(name, part, v, "")] for part in parts]
        # The first of each alternative, as the manifest lists them; then all, rising.
        choices.append(dict.fromkeys([*(fits[0] for fits in fitting if fits), *sorted(sum(fitting, []))]))  # noqa: RUF017
    return [dict(zip(TERMS, terms, strict=True)) for terms in product(*choices)]


def settled(raw, requirements, device):
    """
    The terms that the only variant of a raw manifest agrees to, or None where it cannot serve: of the preferred block
    size, layout and form with which it serves the request, the highest graph level. Lengths are read where nothing
    serves without.
    """
    if not serves(raw, requirements, device):
        return None
    rest = {name: getattr(requirements, name) for name in (*MODEL, *ENGINE)}
    levels = LEVELS[LEVELS.index(requirements.cudagraph) :]
    for lengths in dict.fromkeys((requirements.seq_lens_cpu_kind, "exact")):
        for terms in all_terms(raw["supports"], requirements):
            served = [
                level
                for level in levels
                if serves_as(raw, SimpleNamespace(**{**rest, **terms, "cudagraph": level}), device, lengths)
            ]
            if requirements.cudagraph in served:
                reads = lengths != requirements.seq_lens_cpu_kind
                return {**terms, "cudagraph": served[-1], "reads_lengths": reads}
    raise AssertionError


def allowed(raw, facts):
    for rule in raw.get("rules", []):
        if all(condition(f, w, facts, absent=False) for f, w in rule["when"].items()):
            need = rule.get("need", {})
            if not need or not all(condition(f, w, facts, absent=True) for f, w in need.items()):
                return False
    return True


# ---------------------------------------------------------------- random manifests and requests


def subsets(values):
    return st.lists(st.sampled_from(values), min_size=1, max_size=len(values), unique=True)


DECLARATIONS = {
    "head_size": st.sampled_from([{"multiple_of": 8, "max": 256}, [64, 128], {"max": 128}, 256]),
    "dtype": subsets(["bfloat16", "float16", "float32"]),
    "device_type": st.sampled_from(["cuda", ["cpu", "cuda"], "cpu"]),
    "compute_capability": st.sampled_from(
        [{"min": "8.0"}, ["9.0", {"min": "10.0", "max": "11.0"}], {"max": "9.0"}, "12.0"]
    ),
    "sliding_window": st.sampled_from([{"max": 1024}, {"min": 1}]),
    "alibi": st.just("linear"),
    "block_size": st.sampled_from(
        [{"multiple_of": 16}, [128, {"multiple_of": 64}], {"multiple_of": 256}, [16, 32], {"min": 1}]
    ),
    "kv_layout": st.sampled_from(["NHD", ["HND", "NHD"], "HND"]),
    "kv_cache_form": st.sampled_from(["split", ["interleaved", "joint"], ["packed", "split", "joint"]]),
    "kv_cache_dtype": st.sampled_from([["auto", "fp8"], "int8"]),
    "cudagraph": st.sampled_from([{"max": "uniform_batch"}, "single_token_decode", {"max": "always"}]),
    "decode_query_len": st.sampled_from([{"max": 4}, {"min": 1}]),
    "seq_lens_cpu_kind": st.sampled_from(["upper_bound", ["upper_bound", "absent"]]),
    "phases": st.sampled_from([["prefill"], ["decode"], ["prefill", "decode"]]),
}
FEATURES = [
    "sliding_window",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "custom_mask",
    "cascade",
    "return_lse",
    "cudagraph",
    "seq_lens_cpu_kind",
    "dcp_size",
    "output_quant",
    "acme.fused",
    "acme.other",
]
CONDITIONS = {
    "cascade": st.just(True),
    "return_lse": st.booleans(),
    "sinks": st.booleans(),
    "sliding_window": st.booleans() | st.just({"max": 1000}),
    "logits_soft_cap": st.booleans(),
    "kv_cache_dtype": st.booleans() | st.just("int8"),
    "cudagraph": st.booleans() | st.just({"min": "uniform_batch"}),
    "block_size": st.sampled_from([{"max": 32}, {"min": 64}, {"multiple_of": 32}, 16, {"multiple_of": 128}]),
    "kv_layout": st.sampled_from(["NHD", "HND"]),
    "kv_cache_form": st.sampled_from(["joint", ["split", "packed"]]),
    "head_size": st.sampled_from([256, {"max": 64}]),
    "compute_capability": st.sampled_from(["9.0", {"min": "10.0"}]),
    "decode_query_len": st.just({"min": 2}),
    "paged": st.booleans(),
    "dcp_size": st.booleans(),
    "phases": st.sampled_from(["prefill", "decode"]),
    "features": st.booleans() | st.just(["acme.fused"]),
    "output_quant": st.booleans(),
}


@st.composite
def tables(draw, names, most):
    chosen = draw(st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=most, unique=True))
    return {name: draw(names[name]) for name in chosen}


@st.composite
def manifests(draw):
    optional = [name for name in DECLARATIONS if name not in ("head_size", "dtype", "device_type", *TERMS)]
    declared = [
        "head_size",
        "dtype",
        "device_type",
        *draw(st.lists(st.sampled_from(optional), max_size=5, unique=True)),
    ]
    features = draw(st.lists(st.sampled_from(FEATURES), max_size=5, unique=True))
    if draw(st.booleans()) or "paged" in features:
        features.append("paged")
        declared += ["block_size", *draw(st.lists(st.sampled_from(["kv_cache_form", "kv_layout"]), unique=True))]
    supports = {name: draw(DECLARATIONS[name]) for name in dict.fromkeys(declared) if name not in features}
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        rule = {"when": draw(tables(CONDITIONS, 2)), "because": "a reason"}
        if draw(st.booleans()):
            rule["need"] = draw(tables(CONDITIONS, 2))
        rules.append(rule)
    return {"supports": {**supports, "features": features}, "rules": rules}


requests = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in {**MODEL, **ENGINE}.items()})
plain_requests = st.tuples(requests, st.sets(st.sampled_from(sorted({**MODEL, **ENGINE})), max_size=5)).map(
    lambda pair: (
        {name: pair[0][name] for name in pair[1]} | {"head_size": pair[0]["head_size"], "dtype": pair[0]["dtype"]}
    )
)

engine_requests_only = st.dictionaries(st.sampled_from(sorted(ENGINE)), st.none(), max_size=5).flatmap(
    lambda names: st.fixed_dictionaries(
        {
            "head_size": st.just(64),
            "dtype": st.just("bfloat16"),
            **{name: st.sampled_from(ENGINE[name]) for name in names},
        },
    )
)


def toml(value):
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(key) if '.' in key else key} = {toml(item)}" for key, item in value.items())
            + " }"
        )
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def manifest_of(raw):
    lines = [
        'api = "1.0"',
        'backend = { name = "acme", summary = "a backend" }',
        f"supports = {toml(raw['supports'])}",
        f"rules = {toml(raw['rules'])}",
    ]
    return parse_manifest("\n".join(lines))


def candidate(raw):
    manifest = manifest_of(raw)
    return make_candidate(manifest, manifest.variants[0], lambda _: None)


def ask(values):
    try:
        return Requirements(num_q_heads=8, num_kv_heads=2, **values)
    except AttnplugError:
        return assume(False)  # the values contradict each other


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests(), st.lists(requests | plain_requests, min_size=1, max_size=6), st.sampled_from(DEVICES))
def test_negotiation_agrees_with_brute_force(raw, wanted, device):
    offered = candidate(raw)
    for values in wanted:
        requirements = ask(values)

        outcome = negotiate(offered, Request(requirements, device))

        assert (not outcome.objections) == serves(raw, requirements, device), outcome
        assert (outcome.terms or None) == settled(raw, requirements, device)


def engine_requests(raw, requirements):
    """
    Every assignment of the engine fields that the manifest or the request is about, as plain namespaces.

    Building a checked Requirements for each would take most of the test's time, so the few contradictions are spelled
    out again.
    """
    about = set(raw["supports"]) | set(raw["supports"]["features"]) | {"paged"}
    about |= {f for rule in raw["rules"] for f in (*rule["when"], *rule.get("need", {}))}
    plain = Requirements(head_size=1, num_q_heads=1, num_kv_heads=1, dtype=requirements.dtype)
    about |= {name for name in ENGINE if getattr(requirements, name) != getattr(plain, name)}
    names = [name for name in ENGINE if name in about]
    assume(prod(len(ENGINE[name]) for name in names) <= 6000)
    rest = {name: getattr(requirements, name) for name in (*MODEL, *ENGINE)}
    worlds = (
        SimpleNamespace(**{**rest, **dict(zip(names, values, strict=True))})
        for values in product(*(ENGINE[name] for name in names))
    )
    return [canonical(world) for world in worlds if not contradicts(world)]


def canonical(world):
    world.kv_cache_dtype = world.dtype if world.kv_cache_dtype == "auto" else world.kv_cache_dtype
    return world


def contradicts(world):
    cache = world.block_size or world.kv_layout or world.kv_cache_form or world.cascade
    cache = cache or world.kv_cache_dtype not in ("auto", world.dtype)
    cache = cache or world.dcp_size > 1
    return (not world.paged and cache) or (world.decode_query_len > 1 and "decode" not in world.phases)


def distance(requirements, other):
    return sum(getattr(requirements, name) != getattr(other, name) for name in ENGINE)


WITHOUT_PAGES = {
    "supports": {
        "head_size": 64,
        "dtype": "bfloat16",
        "device_type": "cuda",
        "compute_capability": {"min": "8.0"},
        "features": [],
    },
    "rules": [],
}


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifests(), engine_requests_only | plain_requests, st.sampled_from(DEVICES))
# Lengths are read where they are lacking: the fix leaves them as they are.
@example(WITHOUT_PAGES, {"head_size": 64, "dtype": "bfloat16", "seq_lens_cpu_kind": "upper_bound"}, DEVICES[0])
def test_a_fix_makes_its_candidate_serve_or_none_exists(raw, values, device):
    requirements = ask(values)
    offered = candidate(raw)
    request = Request(requirements, device)
    assume(negotiate(offered, request).objections)

    others = engine_requests(raw, requirements)
    fix = find_fix(offered, request)

    event("none" if not fix.possible else "device" if fix.device else f"{len(fix.engine)} engine fields")
    if fix.possible:
        changed, there = fix.apply(requirements, device)
        assert serves(raw, changed, there)
        assert all(getattr(changed, name) == getattr(requirements, name) for name in MODEL)
    on_this_device = [other for other in others if serves(raw, other, device)]
    if fix.device is not None:
        fewest = [distance(requirements, other) for there in DEVICES for other in others if serves(raw, other, there)]
        assert len(fix.engine) == distance(requirements, changed) <= min(fewest, default=len(ENGINE))
    if on_this_device:
        assert fix.device is None
        assert distance(requirements, fix.apply(requirements, device)[0]) <= min(
            distance(requirements, other) for other in on_this_device
        )
    else:
        assert (
            not fix.possible or fix.device is not None or distance(requirements, fix.apply(requirements, device)[0]) > 0
        )
    if not fix.possible:
        assert not any(serves(raw, other, d) for d in DEVICES for other in others)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_brute_force_itself_knows_a_known_case(device):
    raw = {
        "supports": {
            "device_type": "cuda",
            "compute_capability": {"min": "9.0"},
            "dtype": "bfloat16",
            "head_size": 64,
            "features": ["sinks"],
        },
        "rules": [],
    }
    wanted = Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16", sinks=True, paged=False)

    assert serves(raw, wanted, device) is (device.type == "cuda" and device.compute_capability.major >= 9)
    assert not serves(raw, wanted.evolve(logits_soft_cap=3.0), device)
