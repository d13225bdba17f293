"""SamplingParams: values out of range and names that the engine does not have are refused with a fix."""

from __future__ import annotations

import copy
import pickle
from math import inf, nan

import pytest
from attrs import evolve

from attnplug.errors import BatchError, LimitsError, RequirementsError
from attnplug_transformers.engine import Sampling, SamplingParams
from attnplug_transformers.engine.params import ELSEWHERE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, -1, 1.0, True, None)],
        *[("min_p", value) for value in (-0.1, 1.1, nan, "0.1", True)],
        *[("repetition_penalty", value) for value in (0, -1.0, inf, nan, "1", True)],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, nan, None)],
        *[("logit_bias", value) for value in ({1.0: 1}, {-1: 1}, {1: nan}, {1: inf}, {1: "a"}, [1, 2], 5, {True: 1})],
        *[("stop", value) for value in ("", ["a", ""], [1], 5)],
        *[("max_new_tokens", value) for value in (0, 1.0, True)],
        *[("min_tokens", value) for value in (-1, 1.0, True)],
        *[("bad_words", value) for value in ("", ["a", ""], [[]], 5)],
        *[("logprobs", value) for value in (-1, 1.0, True)],
        ("skip_special_tokens", None),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(LimitsError, match=rf"^{name}=") as caught:
        SamplingParams(**{name: value})

    assert caught.value.expected.startswith(f"{name} is ")
    assert caught.value.fix


def test_stop_tokens_are_token_ids() -> None:
    with pytest.raises(BatchError, match="an int from 0 on"):
        SamplingParams(stop_token_ids=["a"])


def test_samples_of_greedy_decoding_are_refused() -> None:
    with pytest.raises(LimitsError, match="all samples would be equal"):
        SamplingParams(n=2)

    assert SamplingParams(n=2, temperature=0.5).n == 2


@pytest.mark.parametrize(("name", "nearest"), [("temprature", "temperature"), ("topk", "top_k"), ("minp", "min_p")])
def test_an_unknown_name_is_refused_with_the_nearest_one(name: str, nearest: str) -> None:
    with pytest.raises(RequirementsError, match=f"was given '{name}'; did you mean '{nearest}'"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_field_of_another_library_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(RequirementsError, match=f"was given '{name}'") as caught:
        SamplingParams(**{name: 1})

    assert caught.value.expected == ELSEWHERE[name][0]
    assert caught.value.fix == ELSEWHERE[name][1]
    assert name not in SamplingParams.names()


def test_values_without_a_name_are_refused() -> None:
    with pytest.raises(RequirementsError, match="1 unnamed values"):
        SamplingParams(0.8)


def test_it_is_a_value() -> None:
    params = SamplingParams(temperature=0.8, logit_bias={7: 1, 3: -inf}, stop="end", stop_token_ids=[4], seed=3)

    assert params == SamplingParams(
        seed=3, temperature=0.8, logit_bias={3: -inf, 7: 1}, stop=["end"], stop_token_ids={4}
    )
    assert params.logit_bias == ((3, -inf), (7, 1))
    assert {params, pickle.loads(pickle.dumps(params)), copy.deepcopy(params), evolve(params)} == {params}
    assert evolve(params, seed=4) != params
    with pytest.raises(AttributeError):
        params.seed = 5


def test_its_repr_has_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(top_k=3, temperature=0.5)) == "SamplingParams(temperature=0.5, top_k=3)"


def test_the_former_name_is_the_same_class() -> None:
    assert Sampling is SamplingParams
