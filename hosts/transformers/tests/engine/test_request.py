from __future__ import annotations

import pytest
import torch

from attnplug.errors import BatchError, LimitsError
from attnplug_transformers.engine.request import Request


def test_a_new_request_waits_with_its_prompt() -> None:
    prompt = [5, 6, 7]
    request = Request(id=1, tokens=prompt, max_new_tokens=4, stop_tokens=[9])
    request.append(8)

    assert prompt == [5, 6, 7]
    assert (request.status, request.finish_reason, request.is_finished) == ("waiting", None, False)
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (3, 4, 7)
    assert request.new_tokens == [8]


def test_a_stop_token_finishes_it_and_is_kept() -> None:
    request = Request(id=1, tokens=[9], max_new_tokens=1, stop_tokens=[9])
    assert not request.is_finished  # a stop token of the prompt stops nothing

    request.append(9)

    assert request.finish_reason == "stop"  # and not for its length, which it has reached as well
    assert request.new_tokens == [9]


def test_its_length_finishes_it() -> None:
    request = Request(id=1, tokens=[1, 2], max_new_tokens=2)
    reasons = []
    for token in (3, 4):
        request.append(token)
        reasons.append(request.finish_reason)

    assert reasons == [None, "length"]


def test_requests_are_compared_by_identity() -> None:
    first, second = (Request(id=1, tokens=[1], max_new_tokens=1) for _ in range(2))

    assert first != second
    assert len({first, second}) == 2


@pytest.mark.parametrize(
    "tokens", [[1.0], ["a"], [True], [-1], [None], torch.tensor([1.0]), torch.ones(1, 2).long(), [[1, 2]], 7.5, None]
)
def test_invalid_tokens_are_refused(tokens: object) -> None:
    with pytest.raises(BatchError, match=r"an int from 0 on[\s\S]*a flat list"):
        Request(id=1, tokens=tokens, max_new_tokens=1)
    with pytest.raises(BatchError, match="an int from 0 on"):
        Request(id=1, tokens=[1], max_new_tokens=1, stop_tokens=tokens)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BatchError, match="empty prompt"):
        Request(id=1, tokens=(), max_new_tokens=1)


@pytest.mark.parametrize("value", [0, -1, 1.0, None, True])
def test_invalid_max_new_tokens_are_refused(value: object) -> None:
    with pytest.raises(LimitsError, match=f"max_new_tokens={value!r} was given"):
        Request(id=1, tokens=[1], max_new_tokens=value)
