"""
Random requests of every installed manifest, compared with a second reading that shares no code with the project.

``RANDOM_REQUESTS=100000`` in the environment makes the slow test as long as before a release; the report is printed
with ``-s``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from attnplug.errors import AttnplugError
from attnplug.manifest.reader import parse_manifest
from attnplug.negotiation import fix as fix_module
from attnplug.negotiation import matching
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.matching import Request, negotiate
from attnplug.request.device import Device
from attnplug.request.domains import Flag, Number
from attnplug.request.fields import fields_of
from attnplug.request.requirements import Requirements
from core.tests.negotiation.independent import Variant, read

pytestmark = pytest.mark.unmeasured

COUNTS = [60, pytest.param(int(os.environ.get("RANDOM_REQUESTS", "800")), marks=pytest.mark.slow)]
SAMPLE = 500  # of so many requests one is solved by brute force, which takes as long as hundreds of decisions
ROOT = Path(__file__).parents[3]
MANIFESTS = sorted(
    [ROOT / "core/src/attnplug/torch_backend/attnplug.toml", *ROOT.glob("plugins/*/src/*/attnplug.toml")]
)
PATTERN = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 16, "vert_stride": 8}
SPACES = {
    "head_size": [1, 8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 136, 192, 200, 256, 264, 512, 1024, 1025],
    "heads": [(8, 2), (32, 8), (64, 64), (72, 8), (128, 1), (129, 1), (132, 4), (1, 1)],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "head_size_v": [None, 8, 15, 64, 128, 136, 256, 512],
    "sliding_window": [None, 1, 128, 2**31 - 1],
    "attention_chunk": [None, 64, 8192],
    "topk": [None, 64, 2048],
    "causal": [None, False, True],
    "block_sparse": [None, PATTERN],
    "paged": [True, False],
    "phases": [("prefill", "decode"), ("prefill",), ("decode",)],
    "block_size": [None, 1, 16, 32, 48, 64, 128, 256, 512, 1024, 1040],
    "kv_cache_dtype": ["auto", "fp8_e4m3", "fp8_e5m2", "int8", "int8_k", "int4", "acme.q3"],
    "decode_query_len": [1, 2, 8],
    "dcp_size": [1, 2, 8],
    "output_quant": [None, "fp8_e4m3"],
    "features": [(), ("int8_ixformer.calibrate",), ("acme.fused",)],
}


def space_of(item):
    """Return the values of a field that are requested: of flags and of short lists of names all."""
    if item.name in SPACES:
        return SPACES[item.name]
    if isinstance(item.domain, Flag):
        return [False, True]
    optional = [None] if item.is_optional() else []
    return [*optional, *([30.0] if isinstance(item.domain, Number) else item.domain.values)]


HEADS = ("num_q_heads", "num_kv_heads")
MODEL = {
    "heads": SPACES["heads"],
    **{item.name: space_of(item) for item in fields_of("model") if item.name not in HEADS},
}
ENGINE = {item.name: space_of(item) for item in fields_of("engine")}
DEVICES = [
    Device.cpu(),
    *map(Device.cuda, ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")),
    Device("cuda", vendor="amd"),
    Device("cuda", vendor="iluvatar", compute_capability="7.0"),
    Device("xpu", vendor="intel"),
]
TEMPLATES = (
    {},
    {"head_size": 128, "dtype": "bfloat16"},
    {"head_size": 128, "dtype": "bfloat16", "block_sparse": PATTERN},
    {"head_size": 128, "dtype": "float16", "kv_cache_dtype": "int8"},
    {"head_size": 64, "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    {"head_size": 64, "dtype": "bfloat16", "sinks": True},
    {"head_size": 128, "dtype": "bfloat16", "features": ("int8_ixformer.calibrate",)},
    {"head_size": 128, "dtype": "bfloat16", "attn_type": "encoder_only"},
    {"head_size": 128, "dtype": "bfloat16", "attn_type": "encoder_decoder"},
    {"head_size": 576, "head_size_v": 512, "heads": (16, 1), "dtype": "bfloat16", "latent": True},
)


@pytest.fixture(scope="module")
def pairs():
    """Every variant twice: as the project's candidate, and as the second reading."""
    found = []
    for path in MANIFESTS:
        text = path.read_text(encoding="utf-8")
        manifest, document = parse_manifest(text), read(text)
        assert {variant.name for variant in manifest.variants} == set(document["variants"])
        found += [
            (make_candidate(manifest, variant, lambda _: None, assume_installed=True), Variant(document, variant.name))
            for variant in manifest.variants
        ]
    return found


def random_request(rng):
    """Return requirements and a device; a few fields differ from what some backend serves."""
    while True:
        values = {
            "head_size": rng.choice(MODEL["head_size"]),
            "dtype": rng.choice(MODEL["dtype"]),
            **rng.choice(TEMPLATES),
        }
        pool = {**MODEL, **ENGINE}
        for name in rng.sample(sorted(pool), min(int(rng.expovariate(0.4)), 12)):
            values[name] = rng.choice(pool[name])
        q_heads, kv_heads = values.pop("heads", (8, 2))
        try:
            return Requirements(num_q_heads=q_heads, num_kv_heads=kv_heads, **values), rng.choice(DEVICES)
        except AttnplugError:
            continue  # the values contradict each other


@pytest.mark.parametrize("count", COUNTS)
def test_random_requests_are_decided_as_a_second_reading(pairs, count, monkeypatch):
    """
    Also with a hundredth of the evaluations that a candidate may take: shipped manifests need no more. The search for a
    fix takes a fiftieth for these few: the most is 1,181 of 100,000, with the 23 rules of fa3_vllm. None of 50,000
    takes a tenth.
    """
    monkeypatch.setattr(matching, "EVALUATIONS", matching.EVALUATIONS // 100)
    monkeypatch.setattr(fix_module, "EVALUATIONS", fix_module.EVALUATIONS // (50 if count < 5000 else 10))
    rng, counts = random.Random(20261122 + count), Counter()
    for number in range(count):
        requirements, device = random_request(rng)
        request = Request(requirements, device)
        for candidate, second in pairs:
            outcome = negotiate(candidate, request)
            serves = second.serves(requirements, device)
            counts["serves" if serves else "refused"] += 1
            assert (not outcome.objections) == serves, (candidate.id, requirements, device, outcome)
            assert (outcome.terms or None) == second.settled(requirements, device), (candidate.id, requirements, device)
            if serves:
                continue
            fix = find_fix(candidate, request)
            counts[kind_of(fix)] += 1
            assert "evaluations" not in str(fix), (candidate.id, requirements, device)
            if fix.engine or fix.device:
                check_fix(fix, second, requirements, device)
            if number in range(0, 20 * SAMPLE, SAMPLE) and rng.random() < 0.3:
                counts[check_smallest(fix, second, requirements, device)] += 1
    print(dict(counts))  # noqa: T201 - the report of a long run

    assert counts["serves"] + counts["refused"] == count * len(pairs)
    assert min(counts[name] for name in ("serves", "no fix", "engine fields", "device", "smallest")) > 0


def kind_of(fix):
    if not fix.possible:
        return "no fix"
    return "device" if fix.device else "engine fields" if fix.engine else "installation"


def check_fix(fix, second, requirements, device):
    changed, there = fix.apply(requirements, device)

    assert second.serves(changed, there), (second.id, requirements, device, fix)
    assert all(getattr(changed, name) == getattr(requirements, name) for name in MODEL if name != "heads")
    assert (changed.num_q_heads, changed.num_kv_heads) == (requirements.num_q_heads, requirements.num_kv_heads)


def check_smallest(fix, second, requirements, device):
    """Try every change of fewer engine fields, up to two: on this device, and on others where the fix needs another."""
    size = len(fix.engine) if fix.possible else 3
    devices = DEVICES if fix.device or not fix.possible else [device]
    most = min(size - 1, 2) if fix.possible and not fix.device else min(size, 2)
    for count in range(most + 1):
        for names in combinations(ENGINE, count):
            for values in product(*(ENGINE[name] for name in names)):
                for where in devices:
                    if fix.device and count == size and where != device:
                        continue  # as large as the fix: only staying on this device would be better
                    assert not works(second, requirements, dict(zip(names, values, strict=True)), where), (
                        second.id,
                        requirements,
                        device,
                        fix,
                        names,
                        values,
                        where,
                    )
    return "smallest"


def works(second, requirements, changes, device):
    if any(getattr(requirements, name) == value for name, value in changes.items()):
        return False  # fewer changes than were counted: tried already
    try:
        return second.serves(requirements.evolve(**changes), device)
    except AttnplugError:
        return False


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ('a = 1\n[b.c]\nd = ["x", # note\n "y#",]\n', {"a": 1, "b": {"c": {"d": ["x", "y#"]}}}),
        (
            "[[r]]\nw = { a = true }\n[[r]]\nw = { b = { min = 2 } }",
            {"r": [{"w": {"a": True}}, {"w": {"b": {"min": 2}}}]},
        ),
        (
            "[[v.x.r]]\na = [1, { max = 3 }]\n[v.x.s]\nb = 'c'",
            {"v": {"x": {"r": [{"a": [1, {"max": 3}]}], "s": {"b": "c"}}}},
        ),
    ],
)
def test_the_second_reader_reads_toml(text, tables):
    assert read(text) == tables
