"""Requests that come and go while others run, and what the engine makes of them, watched from outside."""

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
    A request that is to come.

    Attributes:
        step: Steps that the engine has run by then.
        prompt: A token per byte.
        new_tokens: Tokens to generate.
    """

    step: int
    prompt: bytes
    new_tokens: int


# step, bytes in common with the first prompt, bytes of its own, new tokens
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
    """Return requests that are cut from a text: each begins elsewhere, but for two that begin as the first does."""
    apart = len(text) // len(_PLAN)
    return tuple(
        Arrival(step, text[:common] + text[place * apart :][:own], new_tokens)
        for place, (step, common, own, new_tokens) in enumerate(_PLAN)
    )


@define(kw_only=True)
class Traffic:
    """
    What the engine did.

    Attributes:
        num_requests: Requests that came.
        last_arrival: Steps that were run before the last one came.
        max_num_reqs: Requests that might run at once.
        max_num_tokens: Tokens that a step might have.
        num_blocks: Blocks that might be owned.
        block_size: Tokens per block.
        num_steps: Steps until all had ended.
        peak_running: Requests that ran in one step, at most.
        peak_tokens: Tokens of one step, at most.
        num_mixed_steps: Steps that computed pieces of some requests beside the next tokens of others.
        num_chunked_prefills: Prompts that were computed in several pieces.
        num_prefill_chunks: Pieces that all prompts were computed in.
        num_prefix_hits: Requests that found the beginning of their prompt in the cache when they were first admitted.
        num_cached_tokens: Tokens that they found there.
        num_queued: Requests that were in line for at least one step.
        num_preemptions: Times that a request gave its blocks to an older one, to be computed again later.
        peak_blocks: Blocks that were owned between two steps, at most.
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
    Submit each request when its time has come, run the engine until all have ended, and watch it.

    Args:
        engine: An idle engine.
        expected: The requests that are to come, in the order of their arrival.

    Returns:
        The requests in that order, and what the engine did.
    """
    watch = _Watch(engine, expected)
    coming = list(expected)
    while coming or engine.has_work:
        while coming and coming[0].step <= watch.traffic.num_steps:
            arrival = coming.pop(0)
            watch.add(engine.submit(arrival.prompt, max_new_tokens=arrival.new_tokens, stop_tokens=()))
        watch.step()
    return watch.requests, watch.finish()


@frozen
class _Before:
    """Where a request stood before a step."""

    status: str
    num_tokens: int
    num_computed_tokens: int


@frozen
class _Part:
    """What a step computed of a request: a piece of several tokens, or its newest one."""

    num_tokens: int
    is_chunk: bool
    is_prompt: bool


class _Watch:
    """Compares the requests after each step with what they were before it."""

    def __init__(self, engine: Engine, expected: Sequence[Arrival]) -> None:
        self.requests: list[Request] = []
        self.traffic = Traffic(
            num_requests=len(expected),
            last_arrival=expected[-1].step,
            max_num_reqs=engine.limits.max_num_reqs,
            max_num_tokens=engine.limits.max_num_tokens,
            num_blocks=(engine.limits.num_blocks or 1) - 1,  # nobody owns the null block
            block_size=engine.block_size,
        )
        self._engine = engine
        self._chunks: dict[Request, int] = {}
        self._waited: set[Request] = set()
        self._new: set[Request] = set()

    def add(self, request: Request) -> None:
        """Watch a new request."""
        self.requests.append(request)
        self._new.add(request)

    def step(self) -> None:
        """Run one step."""
        before = {
            request: _Before(request.status, request.num_tokens, request.num_computed_tokens)
            for request in self.requests
        }
        grown = set(self._engine.step())
        running = {request for request in self.requests if request.status == "running"}
        traffic = self.traffic
        traffic.num_steps += 1
        traffic.peak_running = max(traffic.peak_running, len(grown | running))
        traffic.peak_blocks = max(traffic.peak_blocks, len({block for one in running for block in one.blocks}))
        self._count_lines(before)
        self._count_parts({one: self._part(one, before[one], grew=one in grown) for one in grown | running})

    def finish(self) -> Traffic:
        """Return what was seen."""
        self.traffic.num_prefill_chunks = sum(self._chunks.values())
        self.traffic.num_chunked_prefills = sum(count > 1 for count in self._chunks.values())
        self.traffic.num_queued = len(self._waited)
        return self.traffic

    def _count_lines(self, before: dict[Request, _Before]) -> None:
        for request, then in before.items():
            if request.status == "waiting":
                self._waited.add(request)
                self.traffic.num_preemptions += then.status == "running"
            elif request in self._new:
                self._new.remove(request)
                self.traffic.num_prefix_hits += request.num_cached_tokens > 0
                self.traffic.num_cached_tokens += request.num_cached_tokens

    def _part(self, request: Request, then: _Before, *, grew: bool) -> _Part:
        start = request.num_cached_tokens if then.status == "waiting" else then.num_computed_tokens
        # What has ended owns nothing any more, so that it does not say how far it was computed.
        stop = then.num_tokens if grew else request.num_computed_tokens
        is_prompt = then.num_tokens == request.num_prompt_tokens
        return _Part(stop - start, is_chunk=then.num_tokens - start > 1, is_prompt=is_prompt)

    def _count_parts(self, parts: dict[Request, _Part]) -> None:
        traffic = self.traffic
        for request, part in parts.items():
            if part.is_chunk and part.is_prompt and part.num_tokens:
                self._chunks[request] = self._chunks.get(request, 0) + 1
        kinds = {part.is_chunk for part in parts.values() if part.num_tokens}
        traffic.num_mixed_steps += len(kinds) > 1
        traffic.peak_tokens = max(traffic.peak_tokens, sum(part.num_tokens for part in parts.values()))
