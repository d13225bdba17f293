"""What is reported of calls, and forecast."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug_torch
from attnplug_torch import routes
from hosts.torch.tests.reference import counted, tensors


def test_a_route_is_a_sentence() -> None:
    assert str(attnplug_torch.Route("varlen_attn", "cpu", "torch/sdpa")) == "varlen_attn on cpu: torch/sdpa"
    counted = attnplug_torch.Route("varlen_attn", "cuda", None, "dropout_p=0.1", calls=3)
    assert str(counted) == "3 × varlen_attn on cuda: torch's own operator (dropout_p=0.1)"  # noqa: RUF001


def test_routes_are_counted_most_first_and_from_zero_again(active) -> None:
    attnplug_torch.reset()
    for _ in range(2):
        routes.count("a", "cpu", "x/y")
    routes.count("b", "cpu", None, "why")

    assert [(one.operator, one.calls) for one in attnplug_torch.report()] == [("a", 2), ("b", 1)]
    attnplug_torch.reset()
    assert attnplug_torch.report() == ()


def test_reasons_without_end_take_no_memory_without_end(active) -> None:
    for index in range(2 * routes._MOST):
        routes.count("a", "cpu", None, f"reason {index}")

    report = attnplug_torch.report()
    assert len(report) <= routes._MOST + 1
    assert sum(one.calls for one in report) == 2 * routes._MOST


ARGUMENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.3},
    "boolean mask": {"attn_mask": torch.ones(9, 9, dtype=torch.bool)},
    "double mask": {"attn_mask": torch.zeros(9, 9, dtype=torch.float64)},
    "trained mask": {"attn_mask": torch.zeros(9, 9).requires_grad_()},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("axes", [3, 4])
def test_a_forecast_is_what_happens(arguments, axes, active) -> None:
    inputs = tensors((1, 2, 9, 64)[-axes:], (1, 2, 9, 64)[-axes:])
    try:
        sdpa(*inputs, **arguments)
    except RuntimeError:  # of torch: a mask of another dtype
        assert counted() == {}
        return

    forecast = attnplug_torch.explain(*inputs, **arguments)

    assert counted() == {(forecast.backend, forecast.reason): 1}
    assert forecast.calls == 0


def test_values_of_another_size_are_left_to_torch(active) -> None:
    query = torch.randn(1, 2, 9, 64)

    sdpa(query, query, query[..., :32])
    sdpa(query.transpose(2, 3), query.transpose(2, 3), query.transpose(2, 3))

    reasons = [reason for _, reason in counted()]
    assert any("another head size" in one for one in reasons)
    assert any("not contiguous" in one for one in reasons)


def test_names_are_public() -> None:
    assert set(dir(attnplug_torch)) == set(attnplug_torch.__all__)
    for name in attnplug_torch.__all__:
        assert getattr(attnplug_torch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'activate_all'"):
        _ = attnplug_torch.activate_all
