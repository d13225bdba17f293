from __future__ import annotations

from collections import Counter
from math import exp, inf, nan

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnplug.errors import LimitsError, TensorError
from attnplug_transformers.engine.params import Sampling
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.sampling import NO_TOKEN, _pick, draw, ranked_weights, sample

pytestmark = pytest.mark.unmeasured


def request(sampling: Sampling, tokens: tuple[int, ...] = (1,)) -> Request:
    return Request(id=0, tokens=tokens, max_new_tokens=5, sampling=sampling)


def brute_force(logits: list[float], sampling: Sampling) -> list[float]:
    """Probabilities that sum up to 1, one token at a time."""
    highest = max(logits)
    weights = [exp((logit - highest) / sampling.temperature) for logit in logits]
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = ranking[: sampling.top_k]
    if sampling.top_p is not None:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if mass >= sampling.top_p * total and sampling.top_p < 1:
                break
            nucleus.append(token)
            mass += weights[token]
        kept = nucleus
    if sampling.min_p is not None:
        kept = [token for token in kept if weights[token] >= sampling.min_p * weights[kept[0]]]
    kept, total = set(kept), sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


# Few distinct values, so that ties are common, as they are in bfloat16.
rows = st.lists(st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, -inf]), min_size=5, max_size=5).filter(
    lambda row: max(row) > -inf
)
drawn = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 7),
    # No sum of these weights comes within rounding of one of these shares.
    top_p=st.none() | st.sampled_from([0.0137, 0.3141, 0.5773, 0.9071, 0.99713, 1.0]),
    # Nor does a ratio of two weights.
    min_p=st.none() | st.sampled_from([0.0, 0.0137, 0.3141, 0.7771, 1.0]),
)


def distribution(logits: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """Probabilities of requests with top-k, ``(rows, vocabulary)``."""
    order, weights = ranked_weights(logits, samplings)
    found = torch.zeros(logits.shape, dtype=torch.float64).scatter_(-1, order, weights)
    return found / found.sum(-1, keepdim=True)


def count(row: torch.Tensor, sampling: Sampling, draws: int) -> Counter[int]:
    """Count the tokens of as many requests with different seeds."""
    requests = [request(evolve(sampling, seed=seed)) for seed in range(draws)]
    return Counter(sample(row.expand(draws, -1), requests).tolist())


@given(st.lists(st.tuples(rows, drawn), min_size=1, max_size=5))
def test_probabilities_are_those_of_plain_code(batch: list[tuple[list[float], Sampling]]) -> None:
    batch = [(row, evolve(sampling, top_k=sampling.top_k or 5)) for row, sampling in batch]

    found = distribution(torch.tensor([row for row, _ in batch]), [sampling for _, sampling in batch])

    wanted = [brute_force(row, sampling) for row, sampling in batch]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "filters",
    [{"min_p": 0.17}, {"top_k": 20, "min_p": 0.05}, {"top_p": 0.83}, {"top_k": 30, "top_p": 0.7, "min_p": 0.11}],
)
def test_probabilities_are_those_of_transformers(temperature: float, filters: dict[str, float]) -> None:
    logits = 2 * torch.randn(3, 400, generator=torch.Generator().manual_seed(8))
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in filters:
            theirs.append(warper(filters[name]))
    wanted = theirs(torch.zeros(3, 1, dtype=torch.int64), logits.double()).softmax(-1)

    sampling = Sampling(temperature=temperature, **filters)
    found = distribution(logits, [evolve(sampling, top_k=sampling.top_k or 400)] * 3)

    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-6)
    assert (found == 0).equal(wanted == 0)
    drawn = count(logits[0], sampling, 300)  # the way without top-k keeps the same tokens
    assert all(wanted[0, token] > 0 for token in drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 30.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(50, None), (3000, None), (5000, 0.5), (40, 0.7), (2000, 0.9)])
def test_a_large_vocabulary_is_filtered_like_a_small_one(dtype, temperature, top_k, top_p) -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(4)).to(dtype)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)

    found = distribution(logits, [sampling, Sampling(temperature=1.0, top_k=1)])

    assert found[1].nonzero().flatten().tolist() == [logits[1].argmax()]
    wanted = torch.tensor(brute_force(logits[0].tolist(), sampling), dtype=torch.float64)
    torch.testing.assert_close(found[0], wanted)


@given(rows, drawn)
@settings(max_examples=20)
def test_tokens_of_a_small_vocabulary_are_drawn_in_proportion(row: list[float], sampling: Sampling) -> None:
    draws = 1000
    counts = count(torch.tensor(row), sampling, draws)

    for token, probability in enumerate(brute_force(row, sampling)):
        spread = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) <= 6 * spread
        assert probability > 0 or not counts[token]


@pytest.mark.parametrize("size", [129, *(pytest.param(size, marks=pytest.mark.slow) for size in (127, 128, 1000))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.3),
        Sampling(temperature=0.8, top_p=0.2),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=2.0, top_p=0.5),
        Sampling(temperature=1.0, top_k=30, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.21),
        Sampling(temperature=1.5, top_p=0.9, min_p=0.1),
    ],
)
def test_frequencies_pass_a_chi_square_test(size: int, dtype: torch.dtype, sampling: Sampling) -> None:
    draws = 6000
    row = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    wanted = brute_force(row.tolist(), sampling)
    counts = count(row, sampling, draws)
    assert all(wanted[token] > 0 for token in counts)

    bins: list[tuple[float, int]] = []  # of neighbors with at least ten expected draws
    expected, seen = 0.0, 0
    for token, probability in enumerate(wanted):
        expected, seen = expected + probability * draws, seen + counts[token]
        if expected >= 10:
            bins.append((expected, seen))
            expected, seen = 0.0, 0
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in bins)
    degrees = len(bins) - 1
    assert degrees > 0
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def test_draws_cut_the_probabilities_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With draws at equal distances each token comes as often as its probability, but for one draw."""
    draws, row = 5000, torch.randn(300, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("attnplug_transformers.engine.sampling.draw", lambda seed, *_: (seed + 0.5) / draws)
    for sampling in (
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=20, top_p=0.9),
        Sampling(temperature=1.1, min_p=0.23),
        Sampling(temperature=1.1, top_k=100, min_p=0.23),
    ):
        counts = count(row, sampling, draws)

        for token, probability in enumerate(brute_force(row.tolist(), sampling)):
            assert abs(counts[token] - probability * draws) < 1 + 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8),
        Sampling(temperature=1.5, top_k=3),
        Sampling(temperature=1.0, top_k=4, top_p=0.8),
        Sampling(temperature=1.0, top_p=0.8),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    row, draws = [0.3, -1.0, 2.0, 1.0, 0.9, -inf], 20_000

    counts = count(torch.tensor(row), sampling, draws)

    for token, probability in enumerate(brute_force(row, sampling)):
        spread = (probability * (1 - probability) / draws) ** 0.5
        assert abs(counts[token] / draws - probability) <= 5 * spread
        assert (counts[token] > 0) == (probability > 0)


@pytest.mark.parametrize(("draws", "wanted"), [(0.0, 1), (0.2499, 1), (0.25, 3), (1 - 2**-53, 3)])
def test_excluded_tokens_are_not_picked_at_the_edges(draws: float, wanted: int) -> None:
    probabilities = torch.tensor([[0.0, 0.1, 0.0, 0.3, 0.0]], dtype=torch.float64)

    assert _pick(probabilities, [draws]).tolist() == [wanted]


def test_draws_fill_the_unit_interval_evenly() -> None:
    draws = [draw(seed, position) for seed in range(100) for position in range(100)]
    counts = Counter(int(value * 10) for value in draws)

    assert len(set(draws)) == len(draws)
    assert sorted(counts) == list(range(10))
    assert all(850 < count < 1150 for count in counts.values())  # 1000 each, five deviations of 30


@given(st.lists(rows, min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_greedy_takes_the_lowest_of_equal_tokens(batch: list[list[float]], dtype: torch.dtype) -> None:
    found = sample(torch.tensor(batch, dtype=dtype), [request(Sampling()) for _ in batch])

    assert found.dtype == torch.int64
    assert found.tolist() == [row.index(max(row)) for row in batch]


@given(st.lists(st.tuples(rows, drawn | st.just(Sampling()), st.integers(0, 99)), min_size=2, max_size=6))
def test_rows_are_independent(batch: list[tuple[list[float], Sampling, int]]) -> None:
    logits = torch.tensor([row for row, _, _ in batch])
    requests = [request(evolve(sampling, seed=seed)) for _, sampling, seed in batch]

    together = sample(logits, requests).tolist()

    assert together == [sample(logits[row : row + 1], requests[row : row + 1]).item() for row in range(len(batch))]
    assert together == sample(logits, requests).tolist()  # a step that is repeated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1000, 32000])
def test_rows_of_a_large_vocabulary_are_independent(dtype: torch.dtype, size: int) -> None:
    kinds = [
        {},
        {"top_k": 40},
        {"top_p": 0.9, "min_p": 0.2},
        {"min_p": 0.1},
        {"top_p": 0.3},
        {"top_k": 500, "top_p": 0.8},
    ]
    samplings = [Sampling(temperature=0.9, seed=seed, **kinds[seed % 6]) for seed in range(19)]
    requests = [request(sampling) for sampling in [*samplings, Sampling()]]
    logits = torch.randn(20, size, generator=torch.Generator().manual_seed(2)).to(dtype)

    together = sample(logits, requests).tolist()

    assert together == [sample(logits[row : row + 1], requests[row : row + 1]).item() for row in range(20)]
    assert together[::-1] == sample(logits.flip(0), requests[::-1]).tolist()


def test_each_position_has_its_own_draw() -> None:
    logits, sampling = torch.zeros(1, 1000), Sampling(temperature=1.0, seed=4)
    tokens = [sample(logits, [request(sampling, (1,) * length)]).item() for length in range(1, 30)]

    assert len(set(tokens)) > 25


def test_without_a_seed_each_request_draws_one() -> None:
    sampling = Sampling(temperature=1.0)

    assert len({request(sampling).seed for _ in range(20)}) == 20
    assert request(Sampling(temperature=1.0, seed=-3)).seed == -3


@pytest.mark.parametrize("temperature", [1e-307, 1e-8])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_almost_no_temperature_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 30000.0, 29999.0]])

    assert sample(logits, [request(Sampling(temperature=temperature, **filters))]).tolist() == [1]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.009}])
def test_of_equal_tokens_the_lowest_are_kept(filters: dict[str, float]) -> None:
    """More of them than a partial ranking looks at."""
    counts = count(torch.ones(300), Sampling(temperature=1.0, **filters), 200)

    assert sorted(counts) == [0, 1, 2]


def test_the_two_zeros_are_equally_likely() -> None:
    found = distribution(torch.tensor([[-1.0, -0.0, 0.0]]), [Sampling(temperature=1.0, top_k=1)])

    assert (found > 0).tolist() == [[False, True, False]]


def test_top_k_alone_keeps_unlikely_tokens() -> None:
    logits = torch.tensor([[1.0, -60.0, -70.0]], dtype=torch.float64)
    before = logits.clone()

    found = distribution(logits, [Sampling(temperature=1.0, top_k=2)])

    assert (found > 0).tolist() == [[True, True, False]]
    assert logits.equal(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, nan, inf, "1", None, True)],
        *[("top_k", value) for value in (0, -1, 1.0, True)],
        *[("top_p", value) for value in (0, 0.0, -0.5, 1.01, nan, "0.9", True)],
        *[("seed", value) for value in (1.5, "7", True)],
    ],
)
def test_parameters_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(LimitsError) as caught:
        Sampling(**{name: value})

    assert caught.value.problem == f"{name}={value!r} was given"
    assert caught.value.expected.startswith(f"{name} is ")


@pytest.mark.parametrize("shape", [(2, 8), (8,), (1, 1, 8)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorError, match="one row for each request"):
        sample(torch.zeros(shape), [request(Sampling())])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=2.0, top_p=0.5),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1),
    ],
)
@pytest.mark.parametrize("bad", [[nan] * 8, [-inf] * 8, [inf] + [0.0] * 7, [0.0] * 7 + [nan]])
def test_rows_of_non_finite_logits_get_no_token(sampling: Sampling, bad: list[float]) -> None:
    good = torch.arange(8.0)
    requests = [request(evolve(sampling, seed=3)) for _ in range(3)]

    found = sample(torch.stack([good, torch.tensor(bad), good]), requests).tolist()

    assert found == [*sample(good[None], requests[:1]).tolist(), NO_TOKEN, found[0]]
    assert found[0] >= 0
