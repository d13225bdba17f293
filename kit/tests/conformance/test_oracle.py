"""The oracle compared with results that can be computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from attnplug_kit.oracle import attend

INF = math.inf


def test_one_key_gives_its_value_and_its_score() -> None:
    query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0, 1.0]]])
    value = torch.tensor([[[7.0, -5.0, 1.0]]])

    result = attend(query, key, value, scale=0.5)

    assert result.output.tolist() == [[[7.0, -5.0, 1.0]]]
    assert result.lse.item() == pytest.approx(5.0)


def test_uniform_scores_give_the_mean_of_the_visible_values() -> None:
    value = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)

    result = attend(torch.zeros(4, 1, 2), torch.randn(4, 1, 2), value, scale=1.0)

    assert result.output.flatten().tolist() == pytest.approx([1.0, 3 / 2, 7 / 3, 15 / 4])
    assert result.lse.flatten().tolist() == pytest.approx([math.log(n) for n in (1, 2, 3, 4)])


def test_queries_are_the_last_tokens_of_the_sequence() -> None:
    value = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)

    result = attend(torch.zeros(2, 1, 2), torch.zeros(4, 1, 2), value, scale=1.0)

    assert result.output.flatten().tolist() == pytest.approx([7 / 3, 15 / 4])


@pytest.mark.parametrize(
    ("features", "seen"),
    [
        ({}, [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]),
        ({"causal": False}, [{0, 1, 2, 3}] * 4),
        ({"window": (0, 0)}, [{0}, {1}, {2}, {3}]),
        ({"window": (1, 0)}, [{0}, {0, 1}, {1, 2}, {2, 3}]),
        ({"window": (1, 1), "causal": False}, [{0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3}]),
        ({"window": (-1, 1), "causal": False}, [{0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3}]),
        ({"attention_chunk": 2}, [{0}, {0, 1}, {2}, {2, 3}]),
        ({"attention_chunk": 3}, [{0}, {0, 1}, {0, 1, 2}, {3}]),
    ],
)
def test_each_mask_shows_exactly_these_keys(features: dict[str, object], seen: list[set[int]]) -> None:
    # With powers of two as values, the mean times the count names the set of keys.
    value = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1)

    result = attend(torch.zeros(4, 1, 2), torch.zeros(4, 1, 2), value, scale=1.0, **features)

    sums = [mean * len(keys) for mean, keys in zip(result.output.flatten().tolist(), seen, strict=True)]
    assert sums == pytest.approx([sum(2.0**key for key in keys) for keys in seen])


def test_a_mask_hides_visible_keys() -> None:
    value = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1)
    mask = torch.tensor([[True, True, True], [False, True, True], [False, False, False]])

    result = attend(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2), value, scale=1.0, custom_mask=mask)

    assert result.output.flatten().tolist() == [1.0, 2.0, 0.0]
    assert result.lse.flatten().tolist() == [0.0, 0.0, -INF]


def test_two_scores_are_weighted_by_the_logistic_function() -> None:
    query, key = torch.tensor([[[1.0]]]), torch.tensor([[[2.0]], [[-1.0]]])
    value = torch.tensor([[[1.0]], [[0.0]]])

    result = attend(query, key, value, scale=1.0)

    assert result.output.item() == pytest.approx(1 / (1 + math.exp(-3.0)))
    assert result.lse.item() == pytest.approx(math.log(math.exp(2) + math.exp(-1)))


def test_the_soft_cap_bends_the_scaled_score_before_the_mask() -> None:
    query, key, value = torch.full((2, 1, 1), 6.0), torch.full((2, 1, 1), 2.0), torch.ones(2, 1, 1)

    result = attend(query, key, value, scale=0.5, logits_soft_cap=4.0)

    assert result.lse[0].item() == pytest.approx(4 * math.tanh(6 / 4))
    assert result.lse[1].item() == pytest.approx(4 * math.tanh(6 / 4) + math.log(2))


@pytest.mark.parametrize(("form", "biases"), [("linear", [-2.0, -1.0, 0.0]), ("sqrt", [-math.sqrt(2), -1.0, 0.0])])
def test_alibi_lowers_distant_scores(form: str, biases: list[float]) -> None:
    slopes = torch.tensor([0.5])

    result = attend(
        torch.zeros(1, 1, 1), torch.zeros(3, 1, 1), torch.ones(3, 1, 1), scale=1.0, alibi=form, alibi_slopes=slopes
    )

    assert result.lse.item() == pytest.approx(math.log(sum(math.exp(0.5 * bias) for bias in biases)))


def test_a_sink_has_a_weight_and_no_value() -> None:
    result = attend(
        torch.zeros(1, 1, 1), torch.zeros(3, 1, 1), torch.ones(3, 1, 1), scale=1.0, sinks=torch.tensor([math.log(2.0)])
    )

    assert result.output.item() == pytest.approx(3 / 5)
    assert result.lse.item() == pytest.approx(math.log(3))
    assert result.lse_with_sink.item() == pytest.approx(math.log(5))


def test_rows_that_attend_to_nothing_are_zero() -> None:
    query, key, value = torch.randn(3, 1, 2), torch.randn(2, 1, 2), torch.randn(2, 1, 2)

    result = attend(query, key, value, scale=1.0)
    with_sink = attend(query, key, value, scale=1.0, sinks=torch.tensor([1.5]))

    assert result.output[0].tolist() == [[0.0, 0.0]]
    assert result.lse[:, 0].isinf().tolist() == [True, False, False]
    assert with_sink.output[0].tolist() == [[0.0, 0.0]]
    assert with_sink.lse_with_sink[0].item() == 1.5


def test_without_any_keys() -> None:
    result = attend(torch.randn(2, 2, 4), torch.empty(0, 1, 4), torch.empty(0, 1, 3), scale=1.0, causal=False)

    assert result.output.shape == (2, 2, 3)
    assert not result.output.any()
    assert result.lse.tolist() == [[-INF, -INF]] * 2


def test_query_heads_share_key_heads_in_order() -> None:
    value = torch.tensor([[[1.0], [2.0]]])

    result = attend(torch.zeros(1, 4, 1), torch.zeros(1, 2, 1), value, scale=1.0)

    assert result.output.flatten().tolist() == [1.0, 1.0, 2.0, 2.0]


def test_spread_is_the_deviation_of_the_output_by_that_of_the_weights() -> None:
    """Against many outputs whose weights have random relative errors."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 1, 8) for rows in (2, 30, 30))
    result = attend(query, key, value, scale=0.4)
    weights = torch.exp(0.4 * query[:, 0].double() @ key[:, 0].double().T - result.lse)
    weights[0, 29] = 0.0  # causal
    errors = torch.randn(4000, 2, 30, dtype=torch.float64)
    outputs = (weights * (1 + 1e-3 * errors)) @ value[:, 0].double()

    assert torch.allclose(outputs.std(0), 1e-3 * result.spread[:, 0], rtol=0.1)
    seen = value[:, 0].double().square().sum(0).sqrt()
    assert torch.allclose(result.peak[1, 0], weights[1].max() * seen)


def test_no_key_leaves_the_sink() -> None:
    result = attend(torch.zeros(2, 2, 4), torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), scale=1.0, sinks=torch.ones(2))

    assert torch.equal(result.output, torch.zeros(2, 2, 4, dtype=torch.float64))
    assert result.lse.isinf().all()
    assert torch.equal(result.lse_with_sink, torch.ones(2, 2, dtype=torch.float64))
