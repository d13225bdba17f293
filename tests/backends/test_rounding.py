"""The judgement of generated tokens in bfloat16: what is right passes, and each attention that is wrong does not."""

from __future__ import annotations

import pytest
import torch

from attnplug_transformers.engine import Engine
from tests.backends.models import NAMES, build, prompts
from tests.backends.rounding import Recorder, Reference, Verdict
from tests.backends.wrong import WRONG

NEW = 12
LENGTHS = (19, 1, 40, 27, 33, 14)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def judge(monkeypatch):
    """Return what generates with a small model through torch's own kernels, and says how it compares."""
    recorder = Recorder.listening(monkeypatch)

    def judged(name: str, new: int = NEW) -> Verdict:
        model, asked = build(name, device="cpu", small=True), prompts(LENGTHS)
        with Engine(model, backend="torch/sdpa", max_num_tokens=64, max_num_reqs=4, max_seq_len=128) as engine:
            tokens = engine.generate(asked, max_new_tokens=new, stop_tokens=())
        return Verdict.of(Reference.of(model, asked, tokens), recorder.take(), tokens)

    return judged


@pytest.mark.parametrize("name", NAMES)
def test_what_is_right_passes(judge, name: str) -> None:
    verdict = judge(name)

    verdict.check()
    assert verdict.same > 0.8


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_wrong_does_not(judge, monkeypatch, name: str, wrong) -> None:
    wrong(monkeypatch)

    verdict = judge(name)

    with pytest.raises(AssertionError, match="Verdict"):
        verdict.check()
    assert verdict.farther > 3
