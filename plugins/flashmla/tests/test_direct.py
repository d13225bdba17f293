"""Direct FlashMLA calls compute the same as the plugin, and are the baseline of its benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug_kit.bench import Baseline, Step, Target, forwarding
from benchmarks.direct_flashmla import DirectFlashMLA
from tests.backends.bench import FakeTimer, use_baseline


@pytest.mark.parametrize(("query_len", "dtype"), [(1, "auto"), (2, "auto"), (2, "fp8_e4m3")])
def test_replays_are_compared_with_them(
    journal: Any, monkeypatch: pytest.MonkeyPatch, query_len: int, dtype: str
) -> None:
    use_baseline(monkeypatch, DirectFlashMLA, "flashmla_fake")
    monkeypatch.setattr(forwarding, "work_clock", lambda _: FakeTimer())
    sizes = {"num_q_heads": 4, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "latent": True}
    step = Step("latents", (query_len,) * 3, (20, 3, 90), **sizes)

    found = forwarding.measure_replay(step, Target("flashmla_fake/sgl", "cpu"), 1, kv_cache_dtype=dtype)

    assert isinstance(DirectFlashMLA(), Baseline)
    assert not found.failures
    assert len(found.measurements) == 3
    assert (3, query_len) in {(call.requests, call.query_len) for call in journal.calls}  # others fill the KV cache


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [4, 64])
def test_replays_with_selected_tokens_are_compared(
    journal: Any, monkeypatch: pytest.MonkeyPatch, heads: int, dtype: str
) -> None:
    use_baseline(monkeypatch, DirectFlashMLA, "flashmla_fake")
    monkeypatch.setattr(forwarding, "work_clock", lambda _: FakeTimer())
    sizes = {"num_q_heads": heads, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "latent": True}
    step = Step("latents", (1,) * 2, (20, 3), topk=128, **sizes)

    found = forwarding.measure_replay(step, Target("flashmla_fake/sgl", "cpu"), 1, kv_cache_dtype=dtype)

    assert not found.failures
    assert len(found.measurements) == 3
    assert (2, 64, 128) in journal.sparse
