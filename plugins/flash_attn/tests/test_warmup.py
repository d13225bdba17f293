"""A warm-up runs each kind of call, and nothing for no shape."""

from __future__ import annotations

import pytest

from attnplug import Requirements
from attnplug.contract import GraphShape
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.harness import MODEL

SHAPES = [GraphShape(4, 4, 1)]


@pytest.mark.parametrize(
    "required",
    [
        {},
        {"cascade": True, "sinks": True, "return_lse": True},
        {"alibi": "linear", "sliding_window": 5},
        {"kv_cache_dtype": "fp8_e4m3", "per_head_scales": True},
        {"paged": False, "block_size": None},
        {"attn_type": "encoder_decoder"},
        {"phases": ("decode",), "decode_query_len": 3},
    ],
)
@pytest.mark.parametrize("kind", ["pages", "packed"])
def test_each_kind_of_call_runs(kind, required) -> None:
    backend = load(Requirements(**{**MODEL, **required}), kind)
    backend.warmup(SHAPES)
    calls = backend.wrapped.kernels.calls

    rows = {one.call.max_seqlen_q for one in calls}
    if required.get("phases") == ("decode",):
        assert rows == {3}
    elif "paged" in required:
        assert rows == {2}
    else:
        assert {1, 2} <= rows
    assert ("cascade" in required) == any(not one.call.causal for one in calls if "attn_type" not in required)
    assert all((one.lse is not None) == bool(required.get("return_lse")) for one in calls)


def test_first_prefills_and_chunks_are_run() -> None:
    backend = load(Requirements(**MODEL))
    backend.warmup(SHAPES)

    prompts = [one.call for one in backend.wrapped.kernels.calls if one.call.max_seqlen_q > 1]
    assert [call.block_table is None for call in prompts] == [True, False]


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["pages", "cumulative", "packed"])
def test_a_rank_warms_up_alone(kind, dtype) -> None:
    backend = load(Requirements(**MODEL, dcp_size=2, kv_cache_dtype=dtype), kind)
    backend.warmup(SHAPES)

    new, context = backend.wrapped.kernels.calls
    assert (new.call.block_table, new.call.causal, context.call.causal) == (None, True, False)
    assert (new.num_heads, context.num_heads) == (4, 8)


def test_nothing_is_run_for_no_shape() -> None:
    backend = load(Requirements(**MODEL))
    backend.warmup([])
    assert not backend.wrapped.kernels.calls
