"""The calls that ``attnplug bench --host transformers`` measures."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import AttnplugError, NoBackendError
from attnplug_transformers import attention, bench


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Run a model of one layer."""
    monkeypatch.setattr(bench, "LAYERS", 1)
    monkeypatch.setattr(bench, "TOKENS", 5)


def test_each_part_computes_the_same_on_both():
    names = []
    for name, calls in bench.parts("cpu", "torch/sdpa"):
        names.append(name)
        assert list(calls) == ["sdpa", "attnplug on torch/sdpa"]
        first, second = (call(prepare()) for call, prepare in calls.values())
        torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
    assert names == [
        "prefill of 4 x 5 tokens, 1 layers",
        "decode behind 4 x 5 tokens, 1 layers",
        "attention of a layer, prefill of 4 x 5 tokens",
    ]


def test_a_decode_begins_with_the_same_cache_each_time():
    calls = dict(bench.parts("cpu", None))["decode behind 4 x 5 tokens, 1 layers"]
    call, prepare = calls["sdpa"]

    assert torch.equal(call(prepare()), call(prepare()))


def test_a_backend_that_does_not_serve_is_an_error():
    with pytest.raises(NoBackendError):
        list(bench.parts("cpu", "torch/flex"))


def test_a_wrong_result_has_no_time(monkeypatch):
    run = attention._run
    monkeypatch.setattr(attention, "_run", lambda *given: 2 * run(*given))

    with pytest.raises(AttnplugError, match="computes another result than sdpa"):
        list(bench.parts("cpu", None))
