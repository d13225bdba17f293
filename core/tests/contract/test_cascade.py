"""When a shared prefix is attended once."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract.calls.cascade import cascade_pays
from core.tests.contract.world import make_backend, make_builder

FACTS = {
    "num_q_heads": 32,
    "num_kv_heads": 8,
    "use_alibi": False,
    "use_sliding_window": False,
    "use_local_attention": False,
    "num_sms": 132,
}


@pytest.mark.parametrize(
    ("prefix", "lens", "changes"),
    [
        (255, [1] * 64, {}),
        (4096, [1] * 7, {}),
        (4096, [1] * 7 + [0] * 9, {}),
        (4096, [1] * 64, {"use_alibi": True}),
        (4096, [1] * 64, {"use_sliding_window": True}),
        (4096, [1] * 64, {"use_local_attention": True}),
        (4096, [1] * 64, {"dcp_world_size": 2}),
    ],
)
def test_never(prefix, lens, changes):
    assert not cascade_pays(prefix, lens, **{**FACTS, **changes})


def test_without_flash_decoding_it_pays():
    assert cascade_pays(256, [1] * 8, **{**FACTS, "num_kv_heads": 32})
    assert cascade_pays(256, [1] * 7 + [2], **FACTS)


@given(
    st.integers(256, 20000),
    st.integers(8, 300),
    st.sampled_from([(8, 1), (32, 8), (64, 4), (256, 1)]),
    st.integers(1, 200),
)
def test_waves_are_compared(prefix, reqs, heads, num_sms):
    q, kv = heads
    cascade = ceil(q * ceil(reqs / 128) / num_sms) * ceil(prefix / 128)
    flash = ceil(reqs * kv * ceil(q // kv / 128) * ceil(prefix / 128) / num_sms)
    split = {**FACTS, "num_q_heads": q, "num_kv_heads": kv, "num_sms": num_sms}
    assert cascade_pays(prefix, [1] * reqs, **split) == (cascade < flash)


def test_a_builder_asks_the_rule_where_cascade_was_negotiated():
    assert make_builder(make_backend(cascade=True)).use_cascade_attention(512, [2] * 8)
    assert not make_builder(make_backend(cascade=True, sliding_window=3)).use_cascade_attention(512, [2] * 8)
    assert not make_builder(make_backend()).use_cascade_attention(512, [2] * 8)
