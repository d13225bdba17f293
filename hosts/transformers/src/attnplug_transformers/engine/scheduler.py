"""Continuous batching: which requests run in the next step, and for how many tokens."""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter
from typing import TYPE_CHECKING

from attnplug.batching import NULL_BLOCK, num_freeable_blocks
from attnplug.errors import BatchError, CacheError, LimitsError
from attnplug_transformers.engine.schedule import ScheduledRequest, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug.contract import Limits
    from attnplug_transformers.engine.block_pool import BlockPool
    from attnplug_transformers.engine.logprobs import TokenLogprobs
    from attnplug_transformers.engine.request import Request


class Scheduler:
    """
    Schedules decodes first, then prefill chunks, first come, first served (FCFS).

    Every running request is older than every waiting one, and none overtakes another, with one exception: the samples
    of one prompt wait until the first of them has computed it, and then share its blocks. When blocks run out, the
    youngest running request is preempted: it returns to the head of the queue and is recomputed later. So the oldest
    request always makes progress, and all requests finish. An admitted request owns the blocks of all its tokens; only
    a decode ever needs one more. Where a window or chunk bounds the attention, it owns those of its next tokens alone:
    blocks that no later query attends to are released as soon as the window or chunk has left them.

    Each call is a transaction, whatever line an exception or a KeyboardInterrupt leaves it at. The truth is the
    unfinished requests in order of age, with their tokens. All else follows from it, so nothing needs a log: after a
    call that did not end, the next one removes the tokens of that call, clears the pool, and lets all unfinished
    requests wait, to be recomputed as after a preemption.

    Args:
        pool: The blocks of the KV cache, which only this scheduler allocates.
        limits: Requests and tokens per step, and tokens per request.
        sliding_window: As for `num_freeable_blocks`: the largest window, where each layer has one; None keeps all.
        attention_chunk: Likewise.

    Raises:
        LimitsError: `max_num_tokens` is below `max_num_reqs`.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        sliding_window: int | None = None,
        attention_chunk: int | None = None,
    ) -> None:
        if limits.max_num_tokens < limits.max_num_reqs:
            raise LimitsError(
                f"max_num_tokens={limits.max_num_tokens} was given with max_num_reqs={limits.max_num_reqs}",
                "a step has at least one token for each of its requests",
                "raise max_num_tokens or lower max_num_reqs",
            )
        self.limits = limits
        self.num_preemptions = 0
        self._pool = pool
        self._window = {"sliding_window": sliding_window, "attention_chunk": attention_chunk}
        self._frees = sliding_window is not None or attention_chunk is not None
        # In order of age; all that `_recover` needs. The three below it follow from it.
        self._unfinished: dict[Request, None] = {}
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: dict[Request, None] = {}
        # Unfinished steps in order: what `schedule` returned, and what `schedule_ahead` returned.
        self._steps: list[Step] = []
        # None between calls. During one: what was scheduled for the requests whose new tokens are not final yet.
        self._uncommitted: Sequence[ScheduledRequest] | None = None

    @property
    def pool(self) -> BlockPool:
        """The blocks of the KV cache."""
        self._recover()
        return self._pool

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        self._recover()
        return bool(self._waiting or self._running)

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that own blocks, oldest first."""
        self._recover()
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests in the queue, oldest first."""
        self._recover()
        return tuple(self._waiting)

    def add(self, request: Request) -> None:
        """
        Enqueue a new request.

        Raises:
            BatchError: It was added before.
            LimitsError: It may grow longer than `max_seq_len`.
            CacheError: It may need more blocks than the pool has.
        """
        self._recover()
        if request.status != "waiting" or request in self._waiting:
            raise BatchError(
                f"request {request.id} was added, and it is {request.status} already",
                "a request is added once",
                "make a new Request of its tokens",
            )
        self._check_fits(request)
        self._uncommitted = ()
        self._waiting[request] = None
        self._unfinished[request] = None
        self._uncommitted = None

    def cancel(self, request: Request) -> None:
        """End a request and release its blocks; a finished or unknown one is left unchanged."""
        self._recover()
        if request not in self._unfinished:
            return
        self._uncommitted = ()
        request.finish_reason = "cancelled"  # it ends here: `_recover` does the rest after an exception
        if request in self._running:
            self._stop_running(request)
        else:
            del self._waiting[request]
        request.status = "cancelled"
        del self._unfinished[request]
        self._uncommitted = None

    def reset_prefix_cache(self) -> None:
        """Evict all prefixes, as `BlockPool.reset_prefix_cache` does."""
        self._recover()
        self._uncommitted = ()
        self._pool.reset_prefix_cache()
        self._uncommitted = None

    def schedule(self) -> Step | None:
        """
        Return the next step, or None without work.

        Only `finish_step` advances requests: a step that was not finished is scheduled again.
        """
        self._recover()
        self._uncommitted = ()
        decodes = self._schedule_decodes()
        budget = self.limits.max_num_tokens - len(decodes)
        chunks = self._schedule_chunks(budget, has_decodes=bool(decodes))
        chunks += self._admit(budget - sum(one.num_new_tokens for one in chunks))
        # The last chunk of a prompt may be one token: before the longer ones it runs as a decode, which is faster.
        chunks.sort(key=lambda one: one.num_new_tokens > 1)
        self._steps = [Step((*decodes, *chunks))] if decodes or chunks else []
        self._uncommitted = None
        return self._steps[0] if self._steps else None

    def schedule_ahead(self) -> Step | None:
        """
        Return the next step while the scheduled one runs and its tokens are unknown; None if that is not possible.

        The next step decodes the token of each request that may continue. `finish_step` discards its results for
        requests that have finished meanwhile. It is not possible if a prompt has further chunks, a waiting request may
        be admitted, or a request would have to be preempted.
        """
        self._recover()
        # At most one running request has an unfinished prompt, and each step has a chunk of it.
        if len(self._steps) != 1 or not all(one.samples for one in self._steps[0]) or self._may_admit():
            return None
        pool = self._pool
        going = [
            (place, one)
            for place, one in enumerate(self._steps[0])
            if one.request in self._running
            and one.stop + 1 < one.request.max_tokens  # this step's token is not its last
        ]
        short = [one.request for _, one in going if len(one.request.blocks) * pool.block_size <= one.stop]
        if not going or len(short) > pool.num_free:
            return None
        self._uncommitted = ()
        for request in short:
            request.blocks += pool.allocate(1)
        decodes = tuple(ScheduledRequest(one.request, one.stop, 1, samples=True) for _, one in going)
        self._steps.append(Step(decodes, follows=tuple(place for place, _ in going)))
        self._uncommitted = None
        return self._steps[1]

    def _may_admit(self) -> bool:
        """Whether the next step may admit a waiting request. Each step may free blocks outside of windows."""
        if not self._waiting or len(self._running) >= self.limits.max_num_reqs:
            return False
        return self._frees or self._pool.num_free > sum(map(self._growth, self._running))

    def awaits(self, step: Step) -> bool:
        """Return whether `finish_step` takes this step next, and one of its requests still runs."""
        self._recover()
        return self._steps[:1] == [step] and any(one.request in self._running for one in step)

    def finish_step(
        self, step: Step, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None = None
    ) -> list[Request]:
        """
        Record the results of a step: its keys and values are in the KV cache, and these tokens were sampled.

        They are recorded for all requests, or, after an exception, for all or none of them.

        Args:
            step: The oldest unfinished step: of `schedule`, then of `schedule_ahead`.
            tokens: One for each of ``step.sampling``, in that order. A negative one is no token: its request fails, and
                its blocks leave the prefix cache.
            logprobs: The log-probabilities of each token, in the same order; None without.

        Returns:
            The requests that got a token or failed, without those canceled since the step was scheduled.

        Raises:
            BatchError: It is not the oldest unfinished step, or there is not one token for each request that samples.
        """
        self._recover()
        self._check_results(step, tokens)
        sampled, now = iter(tokens), perf_counter()
        reported = {} if logprobs is None else dict(zip(step.sampling, logprobs, strict=True))
        results = [(one, next(sampled) if one.samples else None) for one in step.scheduled]
        results = [(one, token) for one, token in results if one.request in self._running]
        self._uncommitted = [one for one, _ in results]
        self._steps = self._steps[1:]
        for one, token in results:
            self._advance(one, token, now, reported)
        self._uncommitted = ()  # from here on the tokens are final
        for one, _ in results:
            if one.request.is_finished:
                del self._unfinished[one.request]
        self._uncommitted = None
        return [one.request for one, token in results if token is not None]

    def _recover(self) -> None:
        """Undo a call that did not end. Each line may run again: this may be left halfway as well."""
        if self._uncommitted is None:
            return
        for one in self._uncommitted:
            if one.samples:
                one.request.truncate(one.stop)
        for request in self._unfinished:
            request.blocks = []
            request.num_computed_tokens = 0
            ended = request.finish_reason
            request.status = "waiting" if ended is None else "cancelled" if ended == "cancelled" else "finished"
        self._unfinished = {request: None for request in self._unfinished if not request.is_finished}
        self._waiting = OrderedDict.fromkeys(self._unfinished)
        self._running = {}
        self._steps = []
        self._pool.clear()
        self._uncommitted = None

    def _schedule_decodes(self) -> list[ScheduledRequest]:
        decodes = []
        for request in tuple(self._running):
            if request.status != "running":
                break  # preempted by an older decode, as are all younger requests
            if request.num_tokens - request.num_computed_tokens == 1 and self._allocate_slot(request):
                decodes.append(ScheduledRequest(request, request.num_computed_tokens, 1, samples=True))
        return decodes

    def _schedule_chunks(self, budget: int, *, has_decodes: bool) -> list[ScheduledRequest]:
        chunks: list[ScheduledRequest] = []
        for request in tuple(self._running):
            if budget < 1 or request.status != "running":
                break
            if request.num_tokens - request.num_computed_tokens > 1:
                # A step without any other token has to go on with its oldest request.
                size = self._allocate_chunk(request, budget, preempts=not (has_decodes or chunks))
                if size:
                    chunks.append(_chunk(request, size))
                    budget -= size
        return chunks

    def _allocate_chunk(self, request: Request, budget: int, *, preempts: bool) -> int:
        """Give a prefill the blocks of its next tokens, preempting the youngest if need be; return how many fit."""
        pool, start = self._pool, request.num_computed_tokens
        while preempts and len(request.blocks) * pool.block_size == start and not pool.num_free:
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is request:
                return 0
        stop = min(request.num_tokens, start + budget, (len(request.blocks) + pool.num_free) * pool.block_size)
        request.blocks += pool.allocate(max(0, pool.blocks_for(stop) - len(request.blocks)))
        return stop - start

    def _admit(self, budget: int) -> list[ScheduledRequest]:
        """Start waiting requests, as long as tokens, places and blocks suffice."""
        if not self._waiting:
            return []
        chunks: list[ScheduledRequest] = []
        # Running requests may need more blocks: an admission into those would soon be preempted.
        reserved = sum(map(self._growth, self._running))
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_reqs:
            request = next((one for one in self._waiting if not self._awaits_prompt(one)), None)
            if request is None or not self._allocate_prompt(request, reserved, budget):
                break
            del self._waiting[request]
            self._running[request] = None
            request.admit()
            reserved += self._growth(request)
            owned = len(request.blocks) * self._pool.block_size - request.num_computed_tokens
            chunks.append(_chunk(request, min(budget, owned)))
            budget -= chunks[-1].num_new_tokens
        return chunks

    def _awaits_prompt(self, request: Request) -> bool:
        """Whether an earlier sample of the same prompt is about to compute full blocks that this one can share."""
        first = request.samples[0]
        if first is request or not self._pool.prefix_caching or first not in self._unfinished:
            return False
        size = self._pool.block_size
        return first.num_computed_tokens < (request.num_prompt_tokens - 1) // size * size

    def _allocate_prompt(self, request: Request, reserved: int, budget: int) -> bool:
        """Give a request the blocks of its tokens, cached ones first; False where too few others are free."""
        pool = self._pool
        if pool.num_free <= reserved:  # it needs at least one: save the lookup of its prefix
            return False
        # The last token is computed even where it is cached: its logits give the next one.
        cached = pool.match(request.tokens)[: (request.num_tokens - 1) // pool.block_size]
        computed = len(cached) * pool.block_size
        released = self._num_released(computed)
        kept = cached[released:]
        free = pool.num_free_without(kept) - reserved
        needed = pool.blocks_for(request.num_tokens) - len(cached)
        if self._frees:  # those of its first chunk, or of a shorter one
            needed = pool.blocks_for(min(request.num_tokens, computed + budget)) - len(cached)
            needed = min(needed, max(free, self._most_attended - len(kept)))
        if free < needed:
            return False
        pool.share(kept)
        request.blocks = [NULL_BLOCK] * released + kept + pool.allocate(needed)
        request.num_computed_tokens = request.num_cached_tokens = computed
        return True

    def _allocate_slot(self, request: Request) -> bool:
        """Give a decode a slot for its token, preempting the youngest for it; False where it is the youngest itself."""
        if len(request.blocks) * self._pool.block_size > request.num_computed_tokens:
            return True
        while not self._pool.num_free:
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is request:
                return False
        request.blocks += self._pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        request.status = "waiting"
        request.num_preemptions += 1
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        self.num_preemptions += 1

    def _stop_running(self, request: Request) -> None:
        del self._running[request]
        self._pool.release([block for block in request.blocks if block != NULL_BLOCK])
        request.blocks = []
        request.num_computed_tokens = 0

    def _advance(
        self, one: ScheduledRequest, token: int | None, now: float, logprobs: Mapping[Request, TokenLogprobs | None]
    ) -> None:
        request, size = one.request, self._pool.block_size
        if token is not None and token < 0:
            # The cause may be in any of its blocks, released ones included: no other request may match them.
            self._pool.evict(self._pool.match(request.tokens[: self._num_released(one.start) * size]))
            self._pool.evict(request.blocks)
            self._stop_running(request)
            request.status, request.finish_reason = "finished", "failed"
            return
        request.num_computed_tokens = one.stop
        if one.start // size < one.stop // size:
            self._pool.register(request.blocks, request.tokens, one.start // size, one.stop // size)
        if self._frees:
            self._release_unattended(request, one.start)
        if token is not None:
            request.append(token, logprobs.get(request) if logprobs else None, now)
            if request.is_finished:
                self._stop_running(request)
                request.status = "finished"

    def _num_released(self, num_computed_tokens: int) -> int:
        """Return how many leading blocks of a request with so many computed tokens are released."""
        if not self._frees:
            return 0
        size = self._pool.block_size
        unattended = num_freeable_blocks(num_computed_tokens, size, **self._window)
        # The last full block is kept: `BlockPool.register` derives from it the prefixes that continue it.
        return max(0, min(unattended, num_computed_tokens // size - 1))

    def _release_unattended(self, request: Request, start: int) -> None:
        """Release the blocks that no query attends to any more, since `start` tokens were computed or none."""
        first = self._num_released(start)
        last = self._num_released(request.num_computed_tokens)
        if first < last:
            self._pool.release(request.blocks[first:last])
            request.blocks[first:last] = [NULL_BLOCK] * (last - first)

    def _growth(self, request: Request) -> int:
        """Return how many more blocks a running request may need at once."""
        if len(request.blocks) >= self._pool.blocks_for(request.max_tokens - 1):
            return 0
        if not self._frees:
            return 1
        owned = len(request.blocks) - request.blocks.count(NULL_BLOCK)
        return max(1, self._max_blocks(request) - owned)

    def _max_blocks(self, request: Request) -> int:
        """Return the most blocks that a request needs at once, where its prefill has chunks of a token."""
        # Its last generated token never enters the KV cache.
        every = self._pool.blocks_for(request.max_tokens - 1)
        return min(every, self._most_attended) if self._frees else every

    @property
    def _most_attended(self) -> int:
        """The blocks of a token and of those before it that it attends to; of two, the earlier one is kept."""
        before = max(width - 1 for width in self._window.values() if width is not None)
        return max(2, 1 + self._pool.blocks_for(before))

    def _check_fits(self, request: Request) -> None:
        lengths = f"{request.num_prompt_tokens} tokens of prompt and max_new_tokens={request.max_new_tokens} were given"
        if request.max_tokens > self.limits.max_seq_len:
            raise LimitsError(
                lengths,
                f"max_seq_len={self.limits.max_seq_len} holds both",
                "shorten the prompt, request fewer tokens, or raise max_seq_len",
            )
        if self._max_blocks(request) > self._pool.num_usable:
            raise CacheError(
                f"{lengths}, which take {self._max_blocks(request)} blocks of {self._pool.block_size} tokens",
                f"{self._pool.num_usable} of the cache's {self._pool.num_blocks} blocks hold tokens",
                "shorten the prompt, request fewer tokens, or give the KV cache more blocks",
            )

    def _check_results(self, step: Step, tokens: Sequence[int]) -> None:
        if self._steps[:1] != [step]:
            raise BatchError(
                "a step was finished that is not the last one scheduled",
                "a step is finished once, before the next one is scheduled",
                "run what schedule() returned last, then what schedule_ahead() returned",
            )
        count = len(step.sampling)
        if len(tokens) != count or any(type(token) is not int for token in tokens):
            raise BatchError(
                f"{tokens!r} was given for the {count} requests that sample",
                "each gets one token, an int",
                "pass the tokens of step.sampling in its order, as tensor.tolist() gives them",
            )


def _chunk(request: Request, budget: int) -> ScheduledRequest:
    left = request.num_tokens - request.num_computed_tokens
    size = min(left, budget)
    return ScheduledRequest(request, request.num_computed_tokens, size, samples=size == left)
