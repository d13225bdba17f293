"""The engine generates with whole models through the plugin on the fake, on a CPU."""

from __future__ import annotations

import pytest
import torch

from attnplug_transformers.engine import Engine
from tests.backends.accuracy import Accuracy, LogitRecorder, Reference
from tests.backends.models import NAMES, build, prompts

LENGTHS = (19, 1, 40, 27)
NEW = 8


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_match_the_model_alone(fakes, monkeypatch, name: str, graphs: bool) -> None:
    recorder, inputs = LogitRecorder.attach(monkeypatch), prompts(LENGTHS)
    model = build(name, device="cpu", small=True)
    limits = {"max_num_tokens": 32, "max_num_reqs": 3, "max_seq_len": 64}

    with Engine(model, backend="flashinfer_fake/fa2", graphs=graphs, **limits) as engine:
        tokens = engine.generate(inputs, max_new_tokens=NEW, stop_tokens=())
        assert bool(engine.stats.replayed_steps) is graphs

    Accuracy.of(Reference.of(model, inputs, tokens), recorder.take(), tokens).check()
