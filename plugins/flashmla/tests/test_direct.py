"""Direct FlashMLA calls compute the same as the plugin, and are the baseline of its benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import benchmarks.latent as benchmark
from tests.backends.bench import FakeTimer


@pytest.mark.parametrize(("query_len", "fp8"), [(1, False), (2, False), (2, True)])
def test_forwards_are_compared_with_direct_calls(
    journal: Any, monkeypatch: pytest.MonkeyPatch, query_len: int, fp8: bool
) -> None:
    monkeypatch.setitem(benchmark.DIRECT, "flashmla_fake", benchmark.flashmla)
    monkeypatch.setattr(benchmark, "work_clock", lambda _: FakeTimer())
    device = torch.device("cpu")

    calls = benchmark.contenders(benchmark.Step.make(3, 70, 4, query_len, device, fp8=fp8), "flashmla_fake/sgl")

    assert set(benchmark.measured(calls, device, 1)) == {"direct", "direct and a copy", "forward"}
    assert {(call.requests, call.query_len) for call in journal.calls} == {(3, query_len)}
