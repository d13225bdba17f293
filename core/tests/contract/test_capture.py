"""Calls that are recorded and replayed on the same tensors."""

from __future__ import annotations

import weakref

import pytest
import torch

from attnplug.contract import capture

CPU = torch.device("cpu")


def test_a_replay_reads_what_is_there_now():
    given = torch.zeros(3)
    result, replay = capture(lambda: given + 1, CPU)
    kept = result
    given.fill_(4)
    replay()
    assert kept.tolist() == [5, 5, 5]


def test_results_of_several_tensors_and_none():
    given = torch.zeros(2)
    (one, (two,)), replay = capture(lambda: (given + 1, (given * 2,)), CPU)
    given += 3
    replay()
    assert (one.tolist(), two.tolist()) == ([4, 4], [6, 6])


def test_calls_that_return_nothing():
    given = torch.zeros(1)

    def call() -> None:
        given.add_(1)

    result, replay = capture(call, CPU)
    replay()
    assert (result, given.tolist()) == (None, [2])


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
def test_what_a_replay_reads_lives_as_long_as_it(device):
    """A graph knows addresses alone: memory that nobody holds any more is somebody else's soon."""
    given = torch.ones(3, device=device)
    (result, replay), alive = capture(given.exp, device), weakref.ref(given)
    del given
    replay()
    assert alive() is not None
    assert torch.allclose(result, torch.ones(3, device=device).exp())
