"""A KeyboardInterrupt at any line leaves an engine that goes on with the same tokens, and leaks no block."""

from __future__ import annotations

import pytest
import torch

from attnplug.batching import assembler, block_table
from attnplug.errors import BatchError
from attnplug_transformers.engine import (
    Engine,
    Sampling,
    block_pool,
    core,
    detokenizer,
    exclusive,
    penalties,
    runner,
    schedule,
    scheduler,
    streaming,
    weights,
)
from attnplug_transformers.engine import engine as engine_module
from attnplug_transformers.engine import request as request_module
from attnplug_transformers.engine.request import Request
from hosts.transformers.tests.fakes import interrupts
from hosts.transformers.tests.fakes import model as fake
from hosts.transformers.tests.models import model
from hosts.transformers.tests.tokenizers import SIZE, byte_level

pytestmark = pytest.mark.unmeasured

HOST_CODE = (scheduler, schedule, block_pool, request_module)
ENGINE_CODE = (engine_module, core, exclusive, weights, runner)
STEP_CODE = (*ENGINE_CODE, assembler, block_table)
OUTPUT_CODE = (core, scheduler, request_module, detokenizer, penalties, streaming)
PROMPTS = [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1, 2, 2], [1, 1, 1], [2, 2, 1], [0, 1, 2, 0, 2]]
LENGTHS = [6, 5, 9, 7, 4]
CANCELED = 2
DRAWING = Sampling(temperature=1.0, seed=3)
WINDOWS = [None, 3]


class Workload:
    """Requests that share prefixes, are preempted and canceled, step by step: each call may be interrupted."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.host = fake.Host(
            9 if window is None else 5, 2, max_num_reqs=3, max_num_tokens=6, sliding_window=window, ahead=True
        )
        self.requests = [
            Request(id=number, tokens=prompt, max_new_tokens=length)
            for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]

    def calls(self):
        """Yield the calls of the workload, in order."""
        add, step = self.host.scheduler.add, self.host.step
        yield lambda: add(self.requests[0])
        yield lambda: add(self.requests[1])
        for _ in range(4):
            yield step
        yield lambda: add(self.requests[CANCELED])
        yield lambda: add(self.requests[3])
        yield step
        yield step
        yield lambda: self.host.scheduler.cancel(self.requests[CANCELED])
        yield self.host.scheduler.reset_prefix_cache
        yield lambda: add(self.requests[4])
        for _ in range(4):
            yield step

    def run(self) -> None:
        """Make each call, and run to the end; what is interrupted is called again."""
        for call in self.calls():
            again(call)
            again(self.host.check)
        while again(lambda: self.host.scheduler.has_work):
            again(self.host.step)
            again(self.host.check)

    def check(self) -> None:
        """Check the tokens of all requests, and that all blocks are free."""
        for number, request in enumerate(self.requests):
            wanted = fake.generate(PROMPTS[number], LENGTHS[number], sliding_window=self.window)
            assert not request.blocks
            if number == CANCELED:
                assert request.new_tokens == wanted[: len(request.new_tokens)]
                assert request.status == request.finish_reason == "cancelled"
            else:
                assert request.new_tokens == wanted
                assert (request.status, request.finish_reason) == ("finished", "length")
        assert self.host.pool.num_free == self.host.pool.num_usable


def again(call):
    """Call until no interrupt comes."""
    for _ in range(3):
        try:
            return call()
        except KeyboardInterrupt:
            interrupts.resume()
        except BatchError:  # add() is refused where the interrupted one has ended
            return None
    raise AssertionError(call)


def all_places(window):
    workload = Workload(window)
    found = interrupts.places(HOST_CODE, workload.run)
    workload.check()
    assert workload.host.scheduler.num_preemptions or window  # with a window they need few blocks
    assert any(request.num_cached_tokens for request in workload.requests)
    assert workload.host.num_ahead
    return found


def interrupt(window, *at):
    workload = Workload(window)
    with interrupts.interrupted(HOST_CODE, *at) as reached:
        workload.run()
    workload.check()
    return reached


@pytest.mark.parametrize("window", WINDOWS)
def test_an_interrupt_at_a_sample_of_lines(window):
    found = all_places(window)
    first = {place[:2]: place for place in reversed(found)}  # each line once

    for place in {*first.values(), *found[::40]}:
        assert interrupt(window, place) == [place]


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
def test_an_interrupt_at_every_line(window, record_property):
    found = all_places(window)
    record_property("lines", len({place[:2] for place in found}))
    record_property("injections", len(found))

    for place in found:
        assert interrupt(window, place) == [place]


@pytest.mark.parametrize("every", [240, pytest.param(40, marks=pytest.mark.slow)])
def test_an_interrupt_during_recovery(every):
    """The second one comes at each line of the recovery from the first."""
    pairs = [(first, second) for first in all_places(None)[::every] for second in recovery_from(first)]
    assert len({second[1] for _, second in pairs}) > 10

    for first, second in pairs:
        assert interrupt(None, first, second) == [first, second]


def recovery_from(first):
    """Return the places of `_recover` that run after a first interrupt; none where it came between two calls."""
    workload = Workload(None)
    code = scheduler.Scheduler._recover.__code__
    lines = {line for *_, line in code.co_lines() if line}
    found = []

    def visit(place):
        if place == first:
            raise KeyboardInterrupt
        if place[0] == code.co_filename and place[1] in lines and place[1] > code.co_firstlineno + 3:
            found.append(place)

    with interrupts.traced(HOST_CODE, visit):
        workload.run()
    workload.check()
    return found


class TestEngine:
    """The engine's own lines: no request is lost or runs on, and no later call is refused."""

    def run(self, made, watch):
        """Generate, submit and step; what is interrupted is called again."""
        limits = {"block_size": 4, "num_blocks": 9, "max_num_reqs": 2, "max_seq_len": 32}
        with Engine(made, **limits, async_scheduling=True) as engine:
            with watch:
                found = again(lambda: engine.generate(PROMPTS[:3], max_new_tokens=3, sampling=DRAWING))
                assert not again(lambda: engine.has_work)  # what an interrupted generate() has begun is canceled
                request = again(lambda: engine.submit(PROMPTS[3], max_new_tokens=4))
                assert len(engine._scheduler._unfinished) == 1
                again(engine.step)
                other = again(lambda: engine.submit(PROMPTS[4], max_new_tokens=9))
                again(lambda: engine.cancel(other))
                again(engine.reset_prefix_cache)
                while again(lambda: engine.has_work):
                    again(engine.step)
            assert engine.stats.blocks_in_use == 0
            assert engine.stats.steps_ahead
            assert other.finish_reason == "cancelled"
            return [*found, request.new_tokens]

    def places(self, made, modules):
        found = []
        return self.run(made, interrupts.traced(modules, found.append)), found

    def check(self, made, modules, expected, places):
        for place in places:
            assert self.run(made, interrupts.interrupted(modules, place)) == expected

    def test_an_interrupt_at_a_sample_of_lines(self, host):
        made = model("llama", num_hidden_layers=1)
        expected, found = self.places(made, STEP_CODE)
        first = {place[:2]: place for place in found}

        self.check(made, STEP_CODE, expected, sorted(first.values())[::8])

    @pytest.mark.slow
    def test_an_interrupt_at_every_line(self, host, record_property):
        made = model("llama", num_hidden_layers=1)
        expected, found = self.places(made, ENGINE_CODE)
        record_property("injections", len(found))

        self.check(made, ENGINE_CODE, expected, found)

    @pytest.mark.slow
    def test_an_interrupt_while_a_batch_is_assembled(self, host):
        """Of each line the first, the second and the last time that it runs."""
        made = model("llama", num_hidden_layers=1)
        expected, found = self.places(made, STEP_CODE)
        last = {place[:2]: place for place in found}

        self.check(made, STEP_CODE, expected, [place for place in found if place[2] < 3 or place == last[place[:2]]])

    @pytest.mark.slow
    def test_an_interrupted_change_of_the_weights(self, host):
        """The prefixes of the old weights are not matched after any interrupt of the submit that evicts them."""
        made = model("llama", num_hidden_layers=1)
        prompt = list(range(1, 30))

        def changed(watch):
            with Engine(made, block_size=4) as engine:
                engine.generate([prompt], max_new_tokens=1)
                with torch.no_grad():
                    made.lm_head.weight.neg_()
                with watch:
                    request = again(lambda: engine.submit(prompt, max_new_tokens=1))
                engine.step()
                return request.num_cached_tokens

        found = []
        assert changed(interrupts.traced(ENGINE_CODE, found.append)) == 0
        for place in found:
            assert changed(interrupts.interrupted(ENGINE_CODE, place)) == 0


class TestOutputs:
    """Text, log-probabilities, penalties and times have each token once, whatever line an interrupt comes at."""

    def run(self, made, watch):
        """Generate with all of them; what is interrupted is called again."""
        how = {"frequency_penalty": 0.5, "temperature": 1.0, "seed": 3, "logprobs": 1, "n": 2}
        limits = {"block_size": 4, "num_blocks": 12, "max_num_reqs": 3}
        with Engine(made, **limits, tokenizer=byte_level(), async_scheduling=True) as engine:
            sampling = Sampling(**how, stop=["\n\n", "zz"], max_new_tokens=4)
            with watch:
                found = again(lambda: engine.generate(PROMPTS[:2], sampling=sampling, return_requests=True))
                first = again(lambda: engine.submit(PROMPTS[2], sampling=sampling))
                while again(lambda: engine.has_work):
                    again(engine.step)
                streamed = again(lambda: list(engine.stream(PROMPTS[:1], sampling=sampling)))
            assert engine.stats.blocks_in_use == 0
        for one in (*found, *first.samples):
            assert [each.token for each in one.logprobs] == one.new_tokens
            assert len(one.metrics.inter_token_latencies) == len(one.new_tokens) - 1
        texts = [(one.new_tokens, one.text, one.finish_reason) for one in (*found, *first.samples)]
        # An interrupt may change which sample comes first, by the prefixes that it evicts.
        return texts, sorted(((one.sample, one.tokens, one.text) for one in streamed), key=lambda one: one[0])

    def places(self, made):
        found = []
        return self.run(made, interrupts.traced(OUTPUT_CODE, found.append)), found

    def check(self, made, expected, places):
        for place in places:
            assert self.run(made, interrupts.interrupted(OUTPUT_CODE, place)) == expected

    def test_an_interrupt_at_a_sample_of_lines(self, host):
        made = model("llama", num_hidden_layers=1, vocab_size=SIZE)
        expected, found = self.places(made)
        first = {place[:2]: place for place in found}
        assert {place[0] for place in found} == {module.__file__ for module in OUTPUT_CODE}

        self.check(made, expected, sorted(first.values())[::8])

    @pytest.mark.slow
    def test_an_interrupt_at_every_line(self, host, record_property):
        """Of each line the first and the last time that it runs."""
        made = model("llama", num_hidden_layers=1, vocab_size=SIZE)
        expected, found = self.places(made)
        last = {place[:2]: place for place in found}
        chosen = [place for place in found if place[2] == 1 or place == last[place[:2]]]
        record_property("injections", len(chosen))

        self.check(made, expected, chosen)
