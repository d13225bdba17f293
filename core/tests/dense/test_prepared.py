"""Calls that a host prepares, and repeats."""

from __future__ import annotations

import pytest
import torch

import attnplug
from attnplug.dense import prepare_attention, prepare_attention_varlen
from attnplug.errors import NoBackendError, TensorError


def padded():
    return torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"scale": 0.3, "return_lse": True}], ids=str)
def test_a_prepared_call_is_that_of_attention_for_other_tensors(arguments):
    prepared = prepare_attention(*padded(), **arguments)
    inputs = padded()

    output, lse = prepared.run(*(one.flatten(0, 1) for one in inputs))

    found = attnplug.attention(*inputs, **arguments)
    wanted, wanted_lse = found if arguments.get("return_lse") else (found, None)
    assert prepared.id == "torch/sdpa"
    assert output.shape == (10, 32)
    assert torch.equal(output.view_as(wanted), wanted)
    assert (lse is None) == (wanted_lse is None)
    assert lse is None or torch.equal(lse.view_as(wanted_lse), wanted_lse)


@pytest.mark.parametrize("window", [None, 2])
def test_a_prepared_packed_call_has_its_lengths(window):
    starts, key_starts = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 9])
    query, key, value = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    features = {"causal": True, "sliding_window": window, "scale": 0.3, "return_lse": True}

    prepared = prepare_attention_varlen(query, key, value, starts, key_starts, **features)
    starts.zero_()  # it has read them
    output, lse = prepared.run(query, key, value)

    starts = torch.tensor([0, 2, 5])
    wanted, wanted_lse = attnplug.attention_varlen(query, key, value, starts, key_starts, **features)
    assert torch.equal(output.view_as(wanted), wanted)
    assert torch.equal(lse, wanted_lse)


def test_tensors_of_other_shapes_are_refused():
    prepared = prepare_attention(*padded())
    query, key, value = (one.flatten(0, 1) for one in padded())

    for wrong in ((query[:9], key, value), (query, key[:13], value[:13]), (query.bfloat16(), key, value)):
        with pytest.raises(TensorError):
            prepared.run(*wrong)


def test_what_nothing_serves_is_refused_when_it_is_prepared():
    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        prepare_attention(*padded())
    with pytest.raises(TensorError, match="head size"):
        prepare_attention(torch.randn(2, 5, 4, 16), *padded()[1:])
