"""Each pair of features, in random batches, compared with the oracle."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

import attnplug
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, check, materialize, random_case

FEATURES: dict[str, dict[str, object]] = {
    "window": {"sliding_window": 7},
    "chunk": {"attention_chunk": 12},
    "soft cap": {"logits_soft_cap": 5.0},
    "linear ALiBi": {"alibi": "linear"},
    "square-root ALiBi": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "another value head": {"head_size_v": 24},
    "bidirectional": {"causal": False},
    "mask": {"custom_mask": True},
    "spans": {"mm_prefix": True},
    "shared cache": {"kv_sharing": True},
    "long decodes": {"decode_query_len": 5},
    "encoder": {"attn_type": "encoder", "causal": False},
    "encoder only": {"attn_type": "encoder_only", "causal": False},
    "cross attention": {"attn_type": "encoder_decoder", "causal": False},
}
NOT_SPANS = {"bidirectional", "encoder", "encoder only", "cross attention", "chunk"}
"""Features whose tokens attend to later ones anyway, and one that is computed apart."""
PAIRS = [
    (one, other)
    for one, other in combinations(FEATURES, 2)
    if not FEATURES[one].keys() & FEATURES[other].keys() - {"causal"}
    and not ("shared cache" in (one, other) and {one, other} & {"encoder", "encoder only"})
    and not ("spans" in (one, other) and {one, other} & NOT_SPANS)
]
REFUSED = [(one, "cross attention") for one in ("window", "chunk", "linear ALiBi", "square-root ALiBi")]


def cases(*names: str, count: int = 3) -> list[Case]:
    generator = random.Random(str(names))
    fixed = {field: value for name in names for field, value in FEATURES[name].items()}
    return [random_case(generator, **fixed) for _ in range(count)]


def check_all(case: Case, **engine: object) -> None:
    if case.may_be_paged and not (case.is_cross and case.custom_mask):
        requested = case.requirements(block_size=case.block_size, return_lse=True, **engine)
        check(attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), materialize(case))
    if not case.kv_sharing:
        requested = case.requirements(paged=False, return_lse=True)
        check(attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), materialize(case))


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [pair for pair in PAIRS if pair not in REFUSED])
def test_pairs_of_features(one: str, other: str) -> None:
    for case in cases(one, other):
        check_all(case)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_heads_first(feature: str) -> None:
    for case in cases(feature):
        check_all(case, **({"kv_layout": "HND"} if case.may_be_paged else {}))


@pytest.mark.parametrize(
    "feature", [name for name in FEATURES if name not in ("encoder", "encoder only", "long decodes")]
)
def test_features_of_decodes_alone(feature: str) -> None:
    fixed = {"query_lens": (5, 1, 3), "context_lens": (9, 40, 0), "decode_query_len": 5}
    fixed |= {"encoder_lens": (30, 7, 12)} if feature == "cross attention" else {}

    for case in (random_case(random.Random(seed), **fixed, **FEATURES[feature]) for seed in range(2)):
        requested = case.requirements(block_size=case.block_size, phases=("decode",))
        check(attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), materialize(case))


@pytest.mark.parametrize(("one", "other"), REFUSED)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "dense"])
def test_positions_relative_to_an_encoder_are_refused(one: str, other: str, paged: bool) -> None:
    case = Case(query_lens=(1,), context_lens=(1,), encoder_lens=(3,), **FEATURES[one], **FEATURES[other])

    with pytest.raises(attnplug.NoBackendError, match=r"an\s+encoder's\s+and\s+a\s+decoder's"):
        attnplug.select(case.requirements(paged=paged), Device.cpu(), backend="torch/sdpa")


def test_a_mask_over_the_pages_of_an_encoder_is_refused() -> None:
    case = Case(query_lens=(1,), context_lens=(1,), encoder_lens=(3,), custom_mask=True, **FEATURES["cross attention"])

    with pytest.raises(attnplug.NoBackendError, match=r"as\s+wide\s+as\s+seq_lens"):
        attnplug.select(case.requirements(), Device.cpu(), backend="torch/sdpa")
