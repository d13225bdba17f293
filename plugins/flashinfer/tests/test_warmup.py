"""Warm-up runs every kernel that compiles; a profiling run attends to contiguous K/V."""

from __future__ import annotations

import pytest
import torch

from attnplug.contract import GraphShape, Layer
from tests.backends.harness import Harness

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
RAGGED, SINK = "BatchPrefillWithRaggedKVCacheWrapper", "BatchAttentionWithAttentionSinkWrapper"
SHAPE = GraphShape(4, 4, 1)


@pytest.mark.parametrize(
    ("required", "run"),
    [
        ({}, {DECODE, PREFILL}),
        ({"phases": ("decode",)}, {DECODE, PREFILL}),  # a decode after a padded request runs as a prefill
        ({"phases": ("decode",), "decode_query_len": 3}, {DECODE, PREFILL}),
        ({"decode_query_len": 3}, {DECODE, PREFILL}),
        ({"sinks": True}, {SINK}),
        ({"return_lse": True, "kv_cache_dtype": "fp8_e4m3"}, {DECODE, PREFILL}),
        ({"paged": False, "block_size": None}, {RAGGED}),
        ({"paged": False, "block_size": None, "attn_type": "encoder_only"}, {RAGGED}),
    ],
)
def test_warm_up_runs_every_kind(load_fake, journal, required, run) -> None:
    backend = Harness(
        load_fake, [Layer(name="l", sinks=torch.zeros(4) if required.get("sinks") else None)], **required
    ).backend
    journal.clear()
    backend.warmup([SHAPE])

    assert {call.owner for call in journal.runs} == run


@pytest.mark.parametrize(
    ("required", "backends"),
    [
        ({}, ["fa2", "fa3"]),
        ({"decode_query_len": 3}, ["fa2", "fa2", "fa3"]),
        ({"sinks": True}, ["fa2", "fa3"]),
        ({"sinks": True, "phases": ("decode",)}, ["fa2"]),
    ],
)
def test_warm_up_runs_the_kernels_of_every_kind(load_fake, journal, required, backends) -> None:
    layer = Layer(name="l", sinks=torch.zeros(4) if required.get("sinks") else None)
    Harness(load_fake, [layer], variant="fa3", **required).backend.warmup([SHAPE])

    assert [call.arguments["backend"] for call in journal.of("__init__")] == backends


def test_warm_up_of_a_cascade_merges(load_fake, journal) -> None:
    Harness(load_fake, cascade=True).backend.warmup([SHAPE])

    assert len(journal.of("merge_state_in_place")) == 1


def test_no_shape_needs_no_warm_up(load_fake, journal) -> None:
    Harness(load_fake).backend.warmup([])

    assert not journal.calls


@pytest.mark.parametrize(
    "required", [{}, {"sliding_window": 4}, {"kv_cache_dtype": "fp8_e4m3"}, {"paged": False, "block_size": None}]
)
def test_a_profiling_run_attends_to_its_keys(load_fake, journal, required) -> None:
    harness = Harness(load_fake, **required)
    query, rows = torch.randn(9, 4, 64).bfloat16(), torch.randn(9, 2, 64).bfloat16()
    output = torch.zeros(9, 256, dtype=torch.bfloat16)
    harness.impls[0].forward(query, rows, rows, None, None, output)

    assert [call.owner for call in journal.runs] == [RAGGED]
    assert journal.plans[0].arguments["causal"] is True
    assert output.any()


def test_profiling_accepts_strided_outputs_and_fewer_keys(load_fake, journal) -> None:
    impl = Harness(load_fake).impls[0]
    query, rows = torch.randn(9, 4, 64).bfloat16(), torch.randn(5, 2, 64).bfloat16()
    impl.forward(query, rows, rows, None, None, torch.zeros(9, 512, dtype=torch.bfloat16)[:, :256])

    assert len(journal.runs) == 1


@pytest.mark.parametrize("tokens", [0, 4])
def test_profiling_without_keys_runs_nothing(load_fake, journal, tokens) -> None:
    impl = Harness(load_fake).impls[0]
    rows = torch.zeros(0, 2, 64, dtype=torch.bfloat16)
    output = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    impl.forward(torch.zeros(tokens, 4, 64, dtype=torch.bfloat16), rows, rows, None, None, output)

    assert not journal.runs


def test_profiling_with_sinks_makes_the_wrapper_only(load_fake, journal) -> None:
    impl = Harness(load_fake, [Layer(name="l", sinks=torch.zeros(4))], sinks=True).impls[0]
    journal.clear()
    query, rows = torch.randn(9, 4, 64).bfloat16(), torch.randn(9, 2, 64).bfloat16()
    impl.forward(query, rows, rows, None, None, torch.zeros(9, 256, dtype=torch.bfloat16))

    assert [call.owner for call in journal.calls] == [SINK]
