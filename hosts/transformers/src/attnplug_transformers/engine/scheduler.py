"""What one run of the model computes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from attrs import frozen

from attnplug.errors import BatchError, CacheError, LimitsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug_transformers.engine.block_pool import BlockPool
    from attnplug_transformers.engine.request import Request


@frozen(eq=False)
class ScheduledRequest:
    """
    One request's part of a step: its tokens from `start` on, as many as `num_new_tokens`.

    Attributes:
        request: The request; its `blocks` have a slot for each of the tokens.
        start: Position of the first new token: those before it are cached.
        num_new_tokens: Tokens to compute, from 1 on.
        samples: Whether the last of them is the last that is known, so that its logits choose the next token.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool

    @property
    def stop(self) -> int:
        """Tokens that are cached after the step: the sequence length of this step."""
        return self.start + self.num_new_tokens


@frozen(eq=False)
class Step:
    """
    The requests of one run of the model, those with a single new token first.

    Attributes:
        scheduled: One entry for each request, at least one.
    """

    scheduled: tuple[ScheduledRequest, ...]

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self.scheduled)

    def __len__(self) -> int:
        return len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(one.num_new_tokens for one in self.scheduled)

    @property
    def sampling(self) -> list[Request]:
        """The requests that get a token, in the order in which `Scheduler.finish_step` takes their tokens."""
        return [one.request for one in self.scheduled if one.samples]


class Scheduler:
    """
    Decodes first, then prompts in chunks, in the order of arrival.

    Everyone that runs is older than everyone that waits: the first in line is never overtaken, and when blocks run out
    the youngest goes back to the head of the line, to be computed again. So the oldest always moves on, and all finish.
    A request owns the blocks of all its known tokens from its admission on; only a decode ever needs one more.

    Args:
        pool: The blocks of the cache. Nobody else takes from it.
        max_num_reqs: Requests per step.
        max_num_tokens: Tokens per step.
        max_seq_len: Tokens per request, generated ones included.

    Raises:
        LimitsError: A limit is not positive, or the step has no token for each of its requests.
    """

    def __init__(self, pool: BlockPool, *, max_num_reqs: int, max_num_tokens: int, max_seq_len: int) -> None:
        _check_limits(max_num_reqs, max_num_tokens, max_seq_len)
        self.pool = pool
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_seq_len = max_seq_len
        self.num_preemptions = 0
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: dict[Request, None] = {}
        self._step: Step | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that own blocks, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that do not, oldest first."""
        return tuple(self._waiting)

    def add(self, request: Request) -> None:
        """
        Put a new request at the end of the line.

        Raises:
            BatchError: It was added before.
            LimitsError: It may grow longer than max_seq_len.
            CacheError: It may need more blocks than there are.
        """
        self._refuse_known(request)
        self._refuse_too_long(request)
        self._waiting[request] = None

    def cancel(self, request: Request) -> None:
        """End a request and free its blocks, at any time; one that has ended already stays as it is."""
        if request in self._waiting:
            del self._waiting[request]
        elif request in self._running:
            self._leave(request)
        else:
            return
        request.status = request.finish_reason = "cancelled"

    def schedule(self) -> Step | None:
        """
        Return the next step, or None when nobody waits or runs.

        No request moves on before `finish_step`: a step that was not finished is simply scheduled again.
        """
        chosen = self._schedule_decodes()
        budget = self.max_num_tokens - len(chosen)
        chunks = self._schedule_chunks(budget)
        budget -= sum(one.num_new_tokens for one in chunks)
        chunks += self._admit(budget)
        # The end of a prompt may be one token, and then counts as a decode.
        chosen += [one for one in chunks if one.num_new_tokens == 1]
        chosen += [one for one in chunks if one.num_new_tokens > 1]
        self._step = Step(tuple(chosen)) if chosen else None
        return self._step

    def finish_step(self, step: Step, tokens: Sequence[int]) -> list[Request]:
        """
        Take what a step computed: its keys and values are cached, and these tokens were chosen.

        Args:
            step: What `schedule` returned last.
            tokens: One for each of ``step.sampling``, in that order. One below 0 is none: its request fails, and what
                it has computed is shared no more.

        Returns:
            The requests that got a token, or failed. One that was cancelled meanwhile gets none.

        Raises:
            BatchError: The step is not the last one, or there is not one token for each request that samples.
        """
        self._refuse_answer(step, tokens)
        self._step = None
        chosen = iter(tokens)
        grown = []
        for one in step.scheduled:
            token = next(chosen) if one.samples else None
            if one.request in self._running:
                self._move(one, token)
                if token is not None:
                    grown.append(one.request)
        return grown

    def _schedule_decodes(self) -> list[ScheduledRequest]:
        chosen = []
        for request in tuple(self._running):
            if request.status != "running":
                break  # preempted just now, like all that are younger
            if len(request.tokens) - request.num_computed_tokens == 1 and self._make_room(request):
                chosen.append(ScheduledRequest(request, request.num_computed_tokens, 1, samples=True))
        return chosen

    def _schedule_chunks(self, budget: int) -> list[ScheduledRequest]:
        chosen: list[ScheduledRequest] = []
        for request in self._running:
            if budget < 1:
                break
            if len(request.tokens) - request.num_computed_tokens > 1:
                chosen.append(_chunk(request, budget))
                budget -= chosen[-1].num_new_tokens
        return chosen

    def _admit(self, budget: int) -> list[ScheduledRequest]:
        if not self._waiting:
            return []
        chosen: list[ScheduledRequest] = []
        # Each of the running may need one more block: an admission into those would soon be undone.
        kept = sum(map(self._may_grow, self._running))
        while self._waiting and budget > 0 and len(self._running) < self.max_num_reqs:
            request = next(iter(self._waiting))
            if not self._enter(request, kept):
                break
            kept += self._may_grow(request)
            chosen.append(_chunk(request, budget))
            budget -= chosen[-1].num_new_tokens
        return chosen

    def _enter(self, request: Request, kept: int) -> bool:
        """Give the first in line the blocks of its known tokens, unless too few are free besides those kept."""
        pool = self.pool
        if pool.num_free <= kept:  # it needs at least one: spare the look for its prefix
            return False
        # The last token is computed even if it is cached: its logits choose the next one.
        reused = pool.match(request.tokens)[: (request.num_tokens - 1) // pool.block_size]
        needed = pool.blocks_for(request.num_tokens) - len(reused)
        if pool.num_free_without(reused) < needed + kept:
            return False
        pool.share(reused)
        request.blocks = reused + pool.allocate(needed)
        request.num_computed_tokens = request.num_cached_tokens = len(reused) * pool.block_size
        request.status = "running"
        del self._waiting[request]
        self._running[request] = None
        return True

    def _make_room(self, request: Request) -> bool:
        """Give a decode the slot of its token; the youngest make room for it, and it may be the youngest itself."""
        if len(request.blocks) * self.pool.block_size > request.num_computed_tokens:
            return True
        while not self.pool.num_free:
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is request:
                return False
        request.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.status = "waiting"
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        self.num_preemptions += 1

    def _leave(self, request: Request) -> None:
        del self._running[request]
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed_tokens = 0

    def _move(self, one: ScheduledRequest, token: int | None) -> None:
        if token is not None and token < 0:
            self._fail(one.request)
            return
        self._advance(one)
        if token is not None:
            self._append(one.request, token)

    def _fail(self, request: Request) -> None:
        """What made the request fail may lie in any of its blocks: nobody is to find them again."""
        self.pool.forget(request.blocks)
        self._leave(request)
        request.status, request.finish_reason = "finished", "failed"

    def _advance(self, one: ScheduledRequest) -> None:
        request, size = one.request, self.pool.block_size
        request.num_computed_tokens = one.stop
        if one.start // size < one.stop // size:
            self.pool.register(request.blocks, request.tokens, one.start // size, one.stop // size)

    def _append(self, request: Request, token: int) -> None:
        request.append(token)
        if request.is_finished:
            self._leave(request)
            request.status = "finished"

    def _may_grow(self, request: Request) -> bool:
        return len(request.blocks) < self._most_blocks(request)

    def _most_blocks(self, request: Request) -> int:
        """Return the blocks of a request at its longest: the last token that it generates is never computed."""
        return self.pool.blocks_for(request.max_tokens - 1)

    def _refuse_known(self, request: Request) -> None:
        if request.status != "waiting" or request in self._waiting:
            raise BatchError(
                f"request {request.id} was added, and it is {request.status} already",
                "a request is added once",
                "make a new Request of its tokens",
            )

    def _refuse_too_long(self, request: Request) -> None:
        asked = f"{request.num_prompt_tokens} tokens of prompt and max_new_tokens={request.max_new_tokens} were given"
        if request.max_tokens > self.max_seq_len:
            raise LimitsError(
                asked,
                f"max_seq_len={self.max_seq_len} holds both",
                "shorten the prompt, ask for fewer tokens, or raise max_seq_len",
            )
        if self._most_blocks(request) > self.pool.num_usable:
            raise CacheError(
                f"{asked}, which take {self._most_blocks(request)} blocks of {self.pool.block_size} tokens",
                f"{self.pool.num_usable} of the cache's {self.pool.num_blocks} blocks hold tokens",
                "shorten the prompt, ask for fewer tokens, or give the cache more blocks",
            )

    def _refuse_answer(self, step: Step, tokens: Sequence[int]) -> None:
        if step is not self._step:
            raise BatchError(
                "a step was finished that is not the last one scheduled",
                "a step is finished once, before the next one is scheduled",
                "run what schedule() returned last",
            )
        wanted = sum(one.samples for one in step.scheduled)
        if len(tokens) != wanted or any(type(token) is not int for token in tokens):
            raise BatchError(
                f"{tokens!r} was given for the {wanted} requests that sample",
                "each gets one token, an int",
                "pass the tokens of step.sampling in its order, as tensor.tolist() gives them",
            )


def _chunk(request: Request, budget: int) -> ScheduledRequest:
    left = len(request.tokens) - request.num_computed_tokens
    size = min(left, budget)
    return ScheduledRequest(request, request.num_computed_tokens, size, samples=size == left)


def _check_limits(max_num_reqs: int, max_num_tokens: int, max_seq_len: int) -> None:
    limits = {"max_num_reqs": max_num_reqs, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise LimitsError(
                f"{name}={value!r} was given", f"{name} is a whole number from 1 on", f"pass another {name}"
            )
    if max_num_tokens < max_num_reqs:
        raise LimitsError(
            f"max_num_tokens={max_num_tokens} was given with max_num_reqs={max_num_reqs}",
            "a step has at least one token for each of its requests",
            "raise max_num_tokens or lower max_num_reqs",
        )
