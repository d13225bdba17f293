"""Captured decode steps generate the same tokens, without launching each kernel."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from attnplug import Device, Requirements, load
from attnplug.contract import Layer, Limits
from attnplug.errors import NoBackendError
from attnplug.torch_backend.builder import TorchBuilder
from attnplug_transformers.engine import Engine
from attnplug_transformers.engine.graphs import capture_sizes, common_lengths
from hosts.transformers.tests.engine.reference import NEW, reference


@pytest.fixture
def graphed(host):
    """Make an engine with graphs, and close it afterwards. On the CPU a replay repeats the captured call."""
    made = []

    def opened(name, **how):
        made.append(
            Engine(
                reference(name)[0],
                **{"graphs": True, "max_num_reqs": 5, "max_seq_len": 128, "async_scheduling": True, **how},
            )
        )
        return made[-1]

    yield opened
    for engine in made:
        engine.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_the_tokens_are_the_same(graphed, name):
    _, prompts, expected = reference(name)
    engine = graphed(name)

    replayed = []
    run = engine._runner._graphs.replay
    engine._runner._graphs.replay = lambda recorded, inputs: (
        replayed.append(inputs.batch.num_reqs) or run(recorded, inputs)
    )

    assert engine.generate(prompts, max_new_tokens=NEW) == expected
    assert engine.why_eager is None
    assert len(replayed) >= NEW - 1
    assert set(replayed) & {3, 4}  # padded sizes too


def test_sequences_grow_into_longer_graphs_and_beyond(graphed, monkeypatch):
    monkeypatch.setattr(TorchBuilder, "graph_lengths", (16, 24, 40))
    _, prompts, expected = reference("mistral")
    engine = graphed("mistral")
    used = []
    find = engine._runner._graphs.find
    engine._runner._graphs.find = lambda inputs: used.append((inputs.batch.max_seq_len, find(inputs))) or used[-1][1]

    assert engine.num_graphs == len(capture_sizes(5)) * 3
    assert engine.generate(prompts, max_new_tokens=NEW) == expected
    assert engine.generate([prompts[1]], max_new_tokens=NEW) == [expected[1]]

    lengths = {recorded and recorded.graphs[0].max_seq_len for longest, recorded in used}
    assert {16, 40, None} <= lengths
    assert all(recorded is None for longest, recorded in used if longest > 40)


def test_lengths_double_up_to_the_limit():
    backend = load(Requirements(head_size=16, num_q_heads=2, num_kv_heads=2, dtype="float32"), Device.cpu())
    impl = backend.make_impl(Layer(name="layer"))

    def lengths(max_num_reqs, max_seq_len):
        limits = Limits(max_num_reqs=max_num_reqs, max_num_tokens=max_num_reqs, max_seq_len=max_seq_len)
        return backend.make_builder([impl], backend.make_state(limits)).graph_lengths

    assert lengths(4, 100) == (100,)
    assert lengths(4, 256) == (256,)
    assert lengths(4, 1000) == (256, 512, 1000)
    assert lengths(2**14, 1000) == (256,)


def test_sizes_pad_little():
    assert capture_sizes(1) == (1,)
    assert capture_sizes(6) == (1, 2, 4, 6)
    assert capture_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert capture_sizes(8192)[-1] == 256
    for most in range(1, 257):
        sizes = capture_sizes(most)
        assert sizes[-1] == most
        assert all(b <= max(2 * a, a + 16) for a, b in pairwise(sizes))


def test_why_eager_has_the_reason(graphed):
    assert graphed("llama", graphs=False).why_eager == "graphs=False was requested"
    assert graphed("llama", graphs=None).why_eager == "cpu has no graphs; graphs=True captures steps there too"
    assert graphed("llama", graphs=None).num_graphs == 0


def test_graphs_are_required_of_the_backends(graphed):
    engine = graphed("llama")
    assert {one.requirements.cudagraph for one in engine.selections.values()} == {"single_token_decode"}
    with pytest.raises(NoBackendError, match="cudagraph"):
        graphed("llama", backend="torch/flex")


def test_a_model_that_cannot_be_captured_runs_eagerly(graphed, monkeypatch, caplog):
    def fail(*_, **__):
        message = "reads a value"
        raise RuntimeError(message)

    monkeypatch.setattr("attnplug_transformers.engine.graphs.capture", fail)
    with pytest.raises(RuntimeError, match="reads a value"):
        graphed("llama")
    engine = graphed("llama", graphs=None)
    engine._runner.device = torch.device("cuda")
    monkeypatch.setattr(engine._runner, "_capture", fail)
    reason = engine._runner.capture(None)
    assert "cannot be captured: reads a value" in reason
    assert reason in caplog.text


def test_a_closed_engine_has_freed_its_memory(graphed):
    """At once: the next engine measures the free memory."""
    engine = graphed("llama")
    state = weakref.ref(engine._runner._builders[0].state)
    gc.disable()
    try:
        engine.close()
        assert state() is None
    finally:
        gc.enable()


def test_a_garbage_collected_engine_has_freed_its_memory(host):
    """At once as well, though captured steps and their runner refer to each other."""
    engine = Engine(reference("llama")[0], graphs=True, max_num_reqs=2, max_seq_len=64)
    engine.generate([[1, 2, 3]], max_new_tokens=3)
    runner = engine._runner
    cache = next(iter(runner._caches.values()))
    references = [weakref.ref(one) for one in (runner, runner._builders[0].state, cache)]
    del runner, cache
    gc.disable()
    try:
        del engine
        assert [one() for one in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("given", "common"),
    [
        ([(256, 512, 1024)], (256, 512, 1024)),
        ([(256, 512, 1024), (1024,)], (256, 512, 1024)),
        ([(256, 512), (4096,)], (256, 512)),
        ([(256, 700), (512, 4096)], (256, 512, 700)),
    ],
)
def test_groups_of_different_lengths_are_captured_together(given, common):
    assert common_lengths(given) == common


def test_a_failed_capture_releases_graph_buffers(graphed, monkeypatch):
    def fail(*_, **__):
        message = "reads a value"
        raise RuntimeError(message)

    engine = graphed("llama", graphs=None)
    monkeypatch.setattr("attnplug_transformers.engine.graphs.capture", fail)
    with pytest.raises(RuntimeError, match="reads a value"):
        engine._runner.capture(True)
    assert engine.num_graphs == 0
    assert not any(builder.state.graphs for builder in engine._runner._builders)
    assert len(engine.generate([[1, 2, 3]], max_new_tokens=3)[0]) == 3
