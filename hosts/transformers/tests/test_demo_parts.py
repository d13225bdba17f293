"""The parts of the demonstration: decisions, counters, and a comparison of every token."""

from __future__ import annotations

import json

import attrs
import pytest
import torch

import attnplug
from attnplug.cli.main import main
from attnplug.request.device import Device
from attnplug_transformers.demo import compare
from attnplug_transformers.demo.decisions import FIELDS, GPUS, Decision, decide, to_dict
from attnplug_transformers.demo.example import EXAMPLES
from attnplug_transformers.demo.outcome import (
    MIN_MARGIN,
    Computed,
    Distance,
    Outcome,
    Replay,
    draw_reference,
    smallest_margin,
)
from attnplug_transformers.demo.output import describe, show, show_decisions
from attnplug_transformers.demo.traffic import Arrival, arrivals, drive
from attnplug_transformers.engine import Engine
from hosts.transformers.tests.fakes.registry import replace_backends
from hosts.transformers.tests.fakes.separate_plans import MANIFEST
from hosts.transformers.tests.models import model

LLAMA, BERT = EXAMPLES[0], EXAMPLES[5]
TEXT = bytes(range(256))


@pytest.fixture
def open_engine(host):
    """Make engines of a tiny model, and close them afterwards."""
    made = []

    def opened(**how):
        made.append(Engine(model("llama", num_hidden_layers=1), block_size=4, **how))
        return made[-1]

    yield opened
    for engine in made:
        engine.close()


def outcome(tokens, expected, distance=None, traffic=None):
    return Outcome(LLAMA, {}, "something", expected, tokens, 1.0, traffic=traffic, distance=distance)


def shown(found, capsys, before=()):
    show(found, before)
    return " ".join(capsys.readouterr().out.split())


def traffic_of(engine, *coming):
    return drive(engine, [Arrival(*one) for one in coming])[1]


def test_one_request_alone(open_engine):
    found = traffic_of(open_engine(max_num_tokens=100, num_blocks=12), (0, TEXT[:10], 5))

    assert (found.num_requests, found.num_steps, found.peak_running, found.peak_tokens) == (1, 5, 1, 10)
    assert (found.num_chunked_prefills, found.num_prefill_chunks, found.num_mixed_steps) == (0, 1, 0)
    assert (found.num_prefix_hits, found.num_cached_tokens, found.num_queued, found.num_preemptions) == (0, 0, 0, 0)
    assert (found.num_blocks, found.block_size, found.peak_blocks) == (11, 4, 4)


def test_prefill_chunks_beside_a_decode(open_engine):
    found = traffic_of(open_engine(max_num_tokens=8, max_num_reqs=8), (0, TEXT[:3], 4), (1, TEXT[20:40], 1))

    # 3; 1 + 7; 1 + 7; 1 + 6 of 20
    assert (found.num_steps, found.peak_tokens, found.peak_running) == (4, 8, 2)
    assert (found.num_prefill_chunks, found.num_chunked_prefills, found.num_mixed_steps) == (4, 1, 3)


def test_a_prompt_of_one_token_is_not_a_chunk(open_engine):
    found = traffic_of(open_engine(), (0, TEXT[:1], 2), (1, TEXT[1:2], 2))

    assert (found.num_prefill_chunks, found.num_mixed_steps, found.peak_tokens) == (0, 0, 2)


def test_a_cached_prefix(open_engine):
    engine = open_engine()
    found = traffic_of(engine, (0, TEXT[:17], 3), (1, TEXT[:10] + TEXT[50:60], 2), (2, TEXT[:3], 2))

    assert (found.num_prefix_hits, found.num_cached_tokens) == (1, 8)
    assert found.peak_tokens == 17


def test_queued_requests(open_engine):
    found = traffic_of(open_engine(max_num_reqs=1), (0, TEXT[:4], 3), (0, TEXT[4:8], 3), (9, TEXT[8:12], 3))

    assert (found.num_queued, found.peak_running) == (1, 1)
    assert found.num_steps == 12  # three of them with nothing to do
    assert found.last_arrival == 9


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9, 10, 17])
def test_preemptions_are_those_that_the_scheduler_counts(open_engine, num_blocks):
    engine = open_engine(num_blocks=num_blocks, prefix_caching=False)
    found = traffic_of(engine, *((0, TEXT[4 * i : 4 * i + 4], 12) for i in range(4)))

    assert found.num_preemptions == engine._scheduler.num_preemptions
    assert (found.num_preemptions > 0) == (num_blocks < 17)
    assert found.peak_blocks <= num_blocks - 1
    assert found.num_prefix_hits == 0


def test_requests_arrive_at_their_step(open_engine):
    engine = open_engine()
    steps = {}
    submit = engine.submit

    def submitted(prompt, **how):
        steps[bytes(prompt)] = len(ran)
        return submit(prompt, **how)

    ran, step = [], engine.step
    engine.submit, engine.step = submitted, lambda: ran.append(None) or step()
    coming = [Arrival(0, b"one", 2), Arrival(3, b"two", 2), Arrival(9, b"three", 2)]
    requests, _ = drive(engine, coming)

    assert steps == {b"one": 0, b"two": 3, b"three": 9}
    assert [request.tokens[: request.num_prompt_tokens] for request in requests] == [list(a.prompt) for a in coming]


def test_requests_are_cut_from_any_text():
    for length in (200, 1000):
        coming = arrivals(bytes(index % 256 for index in range(length)))
        assert all(arrival.prompt for arrival in coming)
        assert len({arrival.prompt for arrival in coming}) == len(coming)
        shared = [arrival for arrival in coming[1:] if arrival.prompt[:48] == coming[0].prompt[:48]]
        assert len(shared) == 2


def test_all_tokens_are_compared():
    expected = ((1, 2, 3), (4, 5))

    assert outcome(expected, expected).agrees
    assert not outcome(((1, 2, 3), (4, 6)), expected).agrees
    short = outcome(((1, 2), (4, 5)), expected)
    assert (short.agrees, short.num_equal, short.num_tokens) == (False, 4, 5)
    long = outcome(((1, 2, 3), (4, 5, 6)), expected)
    assert (long.agrees, long.num_equal, long.num_tokens) == (False, 5, 5)


@pytest.mark.parametrize(
    ("found", "small"), [(0.0, True), (0.4, True), (0.6, False), (float("nan"), False), (float("inf"), False)]
)
def test_a_distance_counts_even_where_tokens_agree(found, small, capsys):
    distance = Distance.between("numbers", torch.tensor([1.0, found]), torch.tensor([1.0, 0.0]), 0.5)
    tried = outcome(((1, 2),), ((1, 2),), distance)

    assert (distance.count, distance.is_small) == (2, small)
    assert tried.agrees == small
    assert ("WRONG: 2 of 2 tokens agree; numbers differ by" in shown(tried, capsys)) == (not small)
    assert (describe(tried)["distance"]["largest"] is None) == (str(found) in ("nan", "inf"))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (((1, 2), (3, 9)), "3 of 4 tokens agree; token 1 of sequence 1 is 9 instead of 4"),
        (((1, 2), (3,)), "3 of 4 tokens agree; sequence 1 has 1 token instead of 2"),
    ],
)
def test_the_first_wrong_token_is_named(tokens, said, capsys):
    assert said in shown(outcome(tokens, ((1, 2), (3, 4))), capsys)


def test_equal_counters_are_printed_once(open_engine, capsys):
    found = traffic_of(open_engine(), (0, TEXT[:4], 2))
    first = outcome(((1,),), ((1,),), traffic=found)

    assert "max concurrency 1 (64 allowed), 0 of 1 requests were queued" in shown(first, capsys)
    assert "step by step as for Llama" in shown(attrs.evolve(first, example=EXAMPLES[1]), capsys, [first])
    other = attrs.evolve(first, traffic=attrs.evolve(found, num_steps=9))
    assert "9 steps, the last request" in shown(other, capsys, [first])


def test_a_replay_has_to_agree_too(capsys):
    tried = attrs.evolve(outcome(((1, 2),), ((1, 2),)), replay=Replay(3, ((1, 2),)))
    assert tried.agrees
    assert "all once more, with decodes replayed from 3 captured steps on graph buffers" in shown(tried, capsys)
    assert describe(tried)["replay"] == {"num_captured": 3, "num_equal": 2, "tokens": [[1, 2]]}

    wrong = attrs.evolve(tried, replay=Replay(3, ((1, 7),)))
    assert not wrong.agrees
    assert "WRONG: 2 of 2 tokens agree; 1 of 2 tokens agree where decodes are replayed" in shown(wrong, capsys)
    assert "token 1 of sequence 0 is 7 instead of 2" in shown(wrong, capsys)
    assert describe(wrong)["replay"] == {"num_captured": 3, "num_equal": 1, "tokens": [[1, 7]]}


@pytest.mark.slow
def test_no_replay_where_a_backend_has_no_graphs(host):
    assert compare.decode(LLAMA, TEXT).replay is not None

    replace_backends(MANIFEST, "hosts.transformers.tests.fakes.separate_plans", "separate")
    found = compare.decode(LLAMA, TEXT)

    assert found.agrees
    assert found.replay is None
    assert describe(found)["replay"] is None


def test_weights_are_drawn_until_the_margin_is_wide():
    margins = iter([0.0, MIN_MARGIN / 2, MIN_MARGIN, 1.0])

    _, found = draw_reference(BERT, lambda _: Computed(((1,),), next(margins)))

    assert found.margin == MIN_MARGIN


def test_the_draw_of_the_widest_margin_is_taken():
    margins = [MIN_MARGIN * part for part in (0.1, 0.7, 0.3, *[0.2] * 13)]
    coming = iter(margins)
    drawn = []

    made, found = draw_reference(BERT, lambda model: drawn.append(model) or Computed(((1,),), next(coming)))

    assert len(drawn) == len(margins)
    assert found.margin == margins[1]
    assert made is drawn[1]


def test_the_smallest_logit_margin_of_all_rows():
    assert smallest_margin([torch.tensor([[3.0, 1.0, 2.5]]), torch.tensor([[0.0, 9.0, 8.75]])]) == 0.25


def test_a_failed_run_restores_the_models_attention(host, monkeypatch):
    def fail(engine, coming):
        assert engine.model.config._attn_implementation == "attnplug_engine"
        models.append(engine.model)
        raise RuntimeError

    models = []
    monkeypatch.setattr(compare, "drive", fail)
    with pytest.raises(RuntimeError):
        compare.decode(LLAMA, TEXT)

    assert models[0].config._attn_implementation == "eager"


KERNELS = """\
api = "1.0"
backend = { name = "kernels", summary = "kernels of one GPU, and slower ones of all" }
[supports]
device_type = ["cpu", "cuda"]
compute_capability = { min = "8.0" }
dtype = ["bfloat16"]
head_size = { min = 1 }
block_size = [16]
kv_layout = ["NHD"]
features = ["paged", "sliding_window", "sinks"]
[variants.fast]
requires = ["no-such-distribution >=1"]
supports = { device_type = "cuda", compute_capability = "9.0" }
[variants.slow]
emulates = { paged = "gathers pages" }
[variants.plain]
emulates = { paged = "gathers pages", sinks = "rescales" }
"""


@pytest.fixture
def kernels():
    """Put a backend in place of all others that decides differently for each device."""
    replace_backends(KERNELS, "no.such.module", "kernels")  # nothing of a plugin is imported to decide


def test_one_request_is_decided_for_each_device(kernels):
    decisions = {str(decision.explanation.device): decision for decision in decide()}

    assert list(decisions) == ["cpu", *(f"cuda:{capability}" for capability in GPUS)]
    assert {name: decision.explanation.chosen.id for name, decision in decisions.items()} == {
        "cpu": "kernels/slow",
        "cuda:8.0": "kernels/slow",
        "cuda:9.0": "kernels/fast",  # though its kernel library is not installed
        "cuda:10.0": "kernels/slow",
    }
    assert {name: decision.runner_up.id for name, decision in decisions.items()} == {
        "cpu": "kernels/plain",
        "cuda:8.0": "kernels/plain",
        "cuda:9.0": "kernels/slow",
        "cuda:10.0": "kernels/plain",
    }
    assert decisions["cpu"].least_refused.id == "kernels/fast"
    assert not decisions["cpu"].explanation.assumed_installed


def test_a_refused_candidate_is_no_runner_up(kernels):
    with attnplug.using(backend="kernels/fast"):
        decisions = decide()

    assert decisions[0].explanation.chosen is None
    assert decisions[0].runner_up is None
    assert decisions[0].least_refused.status == "refused"
    hopper = next(decision for decision in decisions if "9.0" in decision.label)
    assert hopper.explanation.chosen.id == "kernels/fast"
    assert hopper.runner_up is None  # those that could serve are not permitted


def test_the_decisions_as_text(kernels, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    show_decisions(decide(), "README.md")

    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert "decided between 3 installed candidates of 1 backend" in text
    assert "head_size=64, num_q_heads=64, num_kv_heads=8, dtype=bfloat16, sliding_window=128, sinks=True" in text
    assert "cuda:9.0 (H100) kernels/fast " in text
    assert "runner-up kernels/slow: it has no kernel for paged, and computes it in a slower way" in text
    assert len([line for line in lines if "runner-up" in line]) == 1 + len(GPUS)
    assert "a token per byte of README.md" in text


def test_the_decisions_as_json(kernels):
    found = to_dict(decide())

    assert json.loads(json.dumps(found)) == found
    assert [one["label"] for one in found][1:] == [f"cuda:{gpu} ({name})" for gpu, name in GPUS.items()]
    assert [one["chosen"] for one in found] == ["kernels/slow", "kernels/slow", "kernels/fast", "kernels/slow"]
    assert all({verdict["id"] for verdict in one["verdicts"]} >= {one["chosen"], one["runner_up"]} for one in found)


def test_a_decision_that_no_backend_supports(kernels, capsys):
    explanation = attnplug.explain(attnplug.Requirements(**FIELDS | {"dtype": "float64"}), Device.cpu())
    show_decisions([Decision("cpu", explanation)], "README.md")

    text = " ".join(capsys.readouterr().out.split())
    assert "cpu no backend supports it not chosen kernels/slow: refused, " in text


def test_the_command_of_the_decisions_prints_every_verdict(kernels, capsys):
    show_decisions(decide(), "README.md")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("every verdict: attnplug "))

    assert main([*line.removeprefix("every verdict: attnplug ").split(), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)["explanations"]
    assert [one["chosen"] for one in found] == [one["chosen"] for one in to_dict(decide())[1:]]
    assert found[0]["requirements"].items() >= FIELDS.items()
