"""Requests that arrive while others run, and counters of how the engine serves them, observed from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import define, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug_transformers.engine.engine import Engine
    from attnplug_transformers.engine.request import Request


@frozen
class Arrival:
    """
    A request to submit.

    Attributes:
        step: Steps of the engine before it arrives.
        prompt: A token per byte.
        new_tokens: Tokens to generate.
    """

    step: int
    prompt: bytes
    new_tokens: int


# step, bytes in common with the first prompt, other bytes, new tokens
_PLAN: Final = (
    (0, 0, 67, 32),
    (0, 0, 9, 48),
    (3, 64, 13, 24),
    (3, 0, 41, 32),
    (4, 0, 5, 48),
    (5, 48, 30, 20),
    (6, 0, 90, 16),
    (9, 0, 23, 32),
    (12, 0, 56, 28),
    (15, 0, 14, 40),
)


def arrivals(text: bytes) -> tuple[Arrival, ...]:
    """Return requests cut from a text. Each begins elsewhere, except for two that share a prefix with the first."""
    apart = len(text) // len(_PLAN)
    return tuple(
        Arrival(step, text[:common] + text[place * apart :][:own], new_tokens)
        for place, (step, common, own, new_tokens) in enumerate(_PLAN)
    )


@define(kw_only=True)
class Traffic:
    """
    Counters of the engine.

    Attributes:
        num_requests: Requests.
        last_arrival: Steps before the last one arrived.
        max_num_reqs: Requests that may run concurrently.
        max_num_tokens: Tokens that a step may have.
        num_blocks: Blocks that requests can own.
        block_size: Tokens per block.
        num_steps: Steps until all were finished.
        peak_running: Max concurrency, the most requests of one step.
        peak_tokens: The most tokens of one step.
        num_mixed_steps: Steps with both prefill chunks and decodes.
        num_chunked_prefills: Prompts that were prefilled in several chunks.
        num_prefill_chunks: Prefill chunks of all prompts.
        num_prefix_hits: Requests whose first admission found a prefix in the prefix cache.
        num_cached_tokens: Tokens of these prefixes.
        num_queued: Requests that were queued for at least one step.
        num_preemptions: Times that a running request was preempted.
        peak_blocks: The most blocks with an owner between two steps.
    """

    num_requests: int
    last_arrival: int
    max_num_reqs: int
    max_num_tokens: int
    num_blocks: int
    block_size: int
    num_steps: int = 0
    peak_running: int = 0
    peak_tokens: int = 0
    num_mixed_steps: int = 0
    num_chunked_prefills: int = 0
    num_prefill_chunks: int = 0
    num_prefix_hits: int = 0
    num_cached_tokens: int = 0
    num_queued: int = 0
    num_preemptions: int = 0
    peak_blocks: int = 0


def drive(engine: Engine, expected: Sequence[Arrival]) -> tuple[list[Request], Traffic]:
    """
    Submit each request at its step, and run the engine until all are finished.

    Args:
        engine: An idle engine.
        expected: The requests, in the order of their arrival.

    Returns:
        The requests in that order, and the counters.
    """
    monitor = _Monitor(engine, expected)
    coming = list(expected)
    while coming or engine.has_work:
        while coming and coming[0].step <= monitor.traffic.num_steps:
            arrival = coming.pop(0)
            monitor.add(engine.submit(arrival.prompt, max_new_tokens=arrival.new_tokens, stop_tokens=()))
        monitor.step()
    return monitor.requests, monitor.finish()


@frozen
class _Before:
    """A request before a step."""

    status: str
    num_tokens: int
    num_computed_tokens: int


@frozen
class _Computed:
    """What a step computed of a request: a prefill chunk of several tokens, or a decode."""

    num_tokens: int
    is_chunk: bool
    is_prompt: bool


class _Monitor:
    """Compares the requests after each step with their state before it."""

    def __init__(self, engine: Engine, expected: Sequence[Arrival]) -> None:
        self.requests: list[Request] = []
        self.traffic = Traffic(
            num_requests=len(expected),
            last_arrival=expected[-1].step,
            max_num_reqs=engine.limits.max_num_reqs,
            max_num_tokens=engine.limits.max_num_tokens,
            num_blocks=(engine.limits.num_blocks or 1) - 1,  # the null block has no owner
            block_size=engine.block_size,
        )
        self._engine = engine
        self._chunks: dict[Request, int] = {}
        self._queued: set[Request] = set()
        self._new: set[Request] = set()

    def add(self, request: Request) -> None:
        """Add a submitted request."""
        self.requests.append(request)
        self._new.add(request)

    def step(self) -> None:
        """Run one step."""
        before = {
            request: _Before(request.status, request.num_tokens, request.num_computed_tokens)
            for request in self.requests
        }
        moved = set(self._engine.step())
        running = {request for request in self.requests if request.status == "running"}
        traffic = self.traffic
        traffic.num_steps += 1
        traffic.peak_running = max(traffic.peak_running, len(moved | running))
        traffic.peak_blocks = max(traffic.peak_blocks, len({block for one in running for block in one.blocks}))
        self._count_queue(before)
        self._count_computed({one: self._computed(one, before[one], got_token=one in moved) for one in moved | running})

    def finish(self) -> Traffic:
        """Return the counters."""
        self.traffic.num_prefill_chunks = sum(self._chunks.values())
        self.traffic.num_chunked_prefills = sum(count > 1 for count in self._chunks.values())
        self.traffic.num_queued = len(self._queued)
        return self.traffic

    def _count_queue(self, before: dict[Request, _Before]) -> None:
        for request, then in before.items():
            if request.status == "waiting":
                self._queued.add(request)
                self.traffic.num_preemptions += then.status == "running"
            elif request in self._new:
                self._new.remove(request)
                self.traffic.num_prefix_hits += request.num_cached_tokens > 0
                self.traffic.num_cached_tokens += request.num_cached_tokens

    def _computed(self, request: Request, then: _Before, *, got_token: bool) -> _Computed:
        start = request.num_cached_tokens if then.status == "waiting" else then.num_computed_tokens
        # A finished request owns no blocks, and its num_computed_tokens is 0 again.
        stop = then.num_tokens if got_token else request.num_computed_tokens
        is_prompt = then.num_tokens == request.num_prompt_tokens
        return _Computed(stop - start, is_chunk=then.num_tokens - start > 1, is_prompt=is_prompt)

    def _count_computed(self, computed: dict[Request, _Computed]) -> None:
        traffic = self.traffic
        for request, part in computed.items():
            if part.is_chunk and part.is_prompt and part.num_tokens:
                self._chunks[request] = self._chunks.get(request, 0) + 1
        kinds = {part.is_chunk for part in computed.values() if part.num_tokens}
        traffic.num_mixed_steps += len(kinds) > 1
        traffic.peak_tokens = max(traffic.peak_tokens, sum(part.num_tokens for part in computed.values()))
