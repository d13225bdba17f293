"""The accuracy check of generated tokens in bfloat16: correct attention passes, and each fault fails."""

from __future__ import annotations

import pytest
import torch

from attnplug_transformers.engine import Engine
from tests.backends.accuracy import FAULTS, Accuracy, LogitRecorder, Reference
from tests.backends.models import NAMES, build, prompts

NEW = 12
LENGTHS = (19, 1, 40, 27, 33, 14)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def measure(monkeypatch):
    """Return a function that generates with a small model through torch's own kernels, and returns the accuracy."""
    recorder = LogitRecorder.attach(monkeypatch)

    def measure(name: str, new: int = NEW) -> Accuracy:
        model, requests = build(name, device="cpu", small=True), prompts(LENGTHS)
        with Engine(model, backend="torch/sdpa", max_num_tokens=64, max_num_reqs=4, max_seq_len=128) as engine:
            tokens = engine.generate(requests, max_new_tokens=new, stop_tokens=())
        return Accuracy.of(Reference.of(model, requests, tokens), recorder.take(), tokens)

    return measure


@pytest.mark.parametrize("name", NAMES)
def test_correct_attention_passes(measure, name: str) -> None:
    accuracy = measure(name)

    accuracy.check()
    assert accuracy.match_rate > 0.8


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_faults_fail(measure, monkeypatch, name: str, fault) -> None:
    fault(monkeypatch)

    accuracy = measure(name)

    with pytest.raises(AssertionError, match="Accuracy"):
        accuracy.check()
    assert accuracy.error_ratio > 3
