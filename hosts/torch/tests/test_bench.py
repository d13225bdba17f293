"""The calls that ``attnplug bench --host torch`` measures."""

from __future__ import annotations

import pytest
import torch

import attnplug_torch
from attnplug.errors import AttnplugError, NoBackendError
from attnplug_torch import bench

TINY = ((1, 2, 4, 8),)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Measure a call of next to no work."""
    monkeypatch.setitem(bench.SHAPES, "cpu", TINY)


@pytest.mark.parametrize("backend", [None, "torch/sdpa"])
def test_the_calls_run_on_torch_and_on_attnplug(backend):
    found = list(bench.parts("cpu", backend))

    assert [name for name, _ in found] == ["scaled_dot_product_attention, causal, 1 x 4 tokens, 2 heads of 8"]
    (calls,) = [calls for _, calls in found]
    assert list(calls) == ["torch", "attnplug on torch/sdpa"]
    results, routes = [], []
    for call, prepare in calls.values():
        prepare()
        attnplug_torch.reset()
        results.append(call(None))
        routes.append({route.backend for route in attnplug_torch.report()})
    assert routes == [set(), {"torch/sdpa"}]
    torch.testing.assert_close(*results)
    calls["torch"][1]()  # torch's own again


def test_torch_is_left_as_it_was():
    for _, calls in bench.parts("cpu", None):
        list(calls.values())[1][1]()
    attnplug_torch.reset()
    rows = torch.randn(3, 1, 2, 4, 8)
    torch.nn.functional.scaled_dot_product_attention(*rows)

    assert attnplug_torch.report() == ()


def test_a_backend_that_does_not_serve_is_an_error():
    with pytest.raises(NoBackendError, match="torch/flex"):
        list(bench.parts("cpu", "torch/flex"))


def test_a_call_that_does_not_run_on_a_backend_has_no_time(monkeypatch):
    monkeypatch.setattr(bench, "report", tuple)

    with pytest.raises(AttnplugError, match=r"(?s)does not run on a backend of attnplug.*no operator of attnplug"):
        list(bench.parts("cpu", None))


def test_a_wrong_result_has_no_time(monkeypatch):
    monkeypatch.setattr(torch, "allclose", lambda *_, **__: False)

    with pytest.raises(AttnplugError, match="torch/sdpa computes another result than torch"):
        list(bench.parts("cpu", None))
