"""
A fake model without tensors, whose every token depends on all tokens before it, read back from the KV cache.

A slot holds a number that follows from its token and all before it; the next token follows from the numbers of all
slots. A block that is stale, of another prefix, or written by another request changes the tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attnplug.contract import Limits
from attnplug_transformers.engine.block_pool import BlockPool
from attnplug_transformers.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug_transformers.engine.request import Request
    from attnplug_transformers.engine.schedule import Step

VOCABULARY = 3
_START = 17


def next_token(state: int) -> int:
    return state % VOCABULARY


def states_of(tokens: Sequence[int]) -> list[int]:
    states, state = [], _START
    for token in tokens:
        state = hash((state, token))
        states.append(state)
    return states


def generate(
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_tokens: frozenset[int] = frozenset(),
    sliding_window: int | None = None,
) -> list[int]:
    """Return the tokens of a request that runs alone."""
    first = 0 if sliding_window is None else -sliding_window
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(next_token(hash(tuple(states_of(tokens)[first:]))))
        if tokens[-1] in stop_tokens:
            break
    return tokens[len(prompt) :]


class Host:
    """A scheduler, the fake model's KV cache, and the invariants between the two."""

    def __init__(
        self,
        num_blocks: int = 12,
        block_size: int = 2,
        *,
        prefix_caching: bool = True,
        max_num_reqs: int = 8,
        max_num_tokens: int = 16,
        max_seq_len: int = 1000,
        sliding_window: int | None = None,
        ahead: bool = False,
        choose: Callable[[list[int], list[Request]], list[int]] | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.limits = Limits(max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len)
        self.scheduler = Scheduler(self.pool, self.limits, sliding_window=sliding_window)
        self.sliding_window = sliding_window  # at least 2: a slot's number follows from the one before
        self.choose = choose or (lambda states, _: [next_token(state) for state in states])
        self.cache = [0] * (num_blocks * block_size)
        self.ahead = ahead  # schedules as an engine with async_scheduling
        self.num_ahead = 0
        self._launched: tuple[Step, list[int]] | None = None

    def step(self) -> list[Request]:
        launched, self._launched = self._launched, None
        if launched is None or not self.scheduler.awaits(launched[0]):
            step = self.scheduler.schedule()
            if step is None:
                assert not self.scheduler.has_work
                return []
            self.check_step(step)
            launched = step, self.states(step, [one.request.tokens[one.start : one.stop] for one in step])
        step, states = launched
        following = self.scheduler.schedule_ahead() if self.ahead else None
        tokens = self.choose(states, step.sampling)
        if following is not None:
            self.check_ahead(step, following)
            self.num_ahead += 1
            launched = following, self.states(following, [[tokens[place]] for place in following.follows])
        moved = self.scheduler.finish_step(step, tokens)
        self._launched = launched if following is not None else None
        return moved

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def slots(self, request: Request, start: int, stop: int) -> list[int]:
        size = self.pool.block_size
        return [request.blocks[at // size] * size + at % size for at in range(start, stop)]

    def run(self, step: Step) -> list[int]:
        tokens = [one.request.tokens[one.start : one.stop] for one in step]
        return self.choose(self.states(step, tokens), step.sampling)

    def states(self, step: Step, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Write the tokens of a step into the cache, and return what its next tokens follow from."""
        for one, given in zip(step, tokens, strict=True):
            slots = self.slots(one.request, max(one.start - 1, 0), one.stop)
            state = self.cache[slots.pop(0)] if one.start else _START
            for token, slot in zip(given, slots, strict=True):
                state = self.cache[slot] = hash((state, token))
        seen = [self.slots(one.request, self.first_seen(one.stop), one.stop) for one in step if one.samples]
        return [hash(tuple(self.cache[slot] for slot in slots)) for slots in seen]

    def first_seen(self, stop: int) -> int:
        """Return the first token that the last one of a sequence attends to."""
        return 0 if self.sliding_window is None else max(0, stop - self.sliding_window)

    def check_step(self, step: Step) -> None:
        assert 1 <= len(step) <= self.limits.max_num_reqs
        assert step.num_tokens <= self.limits.max_num_tokens
        lengths = [one.num_new_tokens for one in step]
        assert lengths[: lengths.count(1)] == [1] * lengths.count(1)
        for one in step:
            assert one.start == one.request.num_computed_tokens
            assert 1 <= one.num_new_tokens <= len(one.request.tokens) - one.start
            assert one.samples == (one.stop == len(one.request.tokens))
        self._check_slots(step)

    def check_ahead(self, step: Step, following: Step) -> None:
        """Check a step of decodes whose tokens are those of the step before."""
        places = following.follows
        assert places is not None
        assert len(places) == len(following)
        assert [step.sampling[place] for place in places] == following.sampling
        stops = {one.request: one.stop for one in step}
        assert stops.keys() >= set(self.scheduler.running)  # nobody is left behind
        for one in following:
            assert (one.start, one.num_new_tokens, one.samples) == (stops[one.request], 1, True)
            assert one.stop < one.request.max_tokens
        self._check_slots(following)

    def _check_slots(self, step: Step) -> None:
        pool, slots = self.pool, list[int]()
        assert len({one.request for one in step}) == len(step)
        for one in step:
            assert one.request.status == "running"
            slots += self.slots(one.request, one.start, one.stop)
        assert len(set(slots)) == len(slots)
        written = {slot // pool.block_size for slot in slots}
        assert all(pool.num_owners(block) == 1 and block not in pool._prefixes for block in written)
        assert 0 not in written

    def check(self) -> None:
        """Check that each block is owned or free, once, and that only equal full computed prefixes are shared."""
        pool, size = self.pool, self.pool.block_size
        running = self.scheduler.running
        owners = Counter(block for request in running for block in request.blocks if block)
        free = [*pool._free, *pool._free_cached]
        assert sorted([*owners, *free]) == list(range(1, pool.num_blocks))
        assert all(pool.num_owners(block) == owners[block] for block in range(pool.num_blocks))
        assert pool.num_free == len(free)
        assert {block: key for key, block in pool._cached.items()} == pool._prefixes
        assert pool._prefixes.keys() >= pool._free_cached.keys()
        assert not pool._prefixes.keys() & set(pool._free)
        prefixes: dict[int, list[int]] = {}
        for request in running:
            assert request.status == "running"
            assert (
                pool.blocks_for(request.num_computed_tokens)
                <= len(request.blocks)
                <= pool.blocks_for(request.num_tokens)
            )
            # A released block holds no token that the next one attends to; the last full block is kept.
            unseen = min(self.first_seen(request.num_computed_tokens + 1), request.num_computed_tokens - size) // size
            assert request.blocks.count(0) == max(0, unseen)
            assert not any(request.blocks[: max(0, unseen)])
            for place, block in enumerate(request.blocks):
                if owners[block] > 1:
                    assert request.num_computed_tokens >= (place + 1) * size
                    prefix = request.tokens[: (place + 1) * size]
                    assert prefixes.setdefault(block, prefix) == prefix
        for request in self.scheduler.waiting:
            assert request.status == "waiting"
            assert not request.blocks
            assert not request.num_computed_tokens
        ages = [request.id for request in (*running, *self.scheduler.waiting)]
        assert ages == sorted(ages)  # running requests are older than waiting ones
