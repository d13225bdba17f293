"""What an engine has done so far."""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from attnplug.contract import GraphShape, Limits
from attnplug.errors import LimitsError, TensorError
from attnplug.models import model_layers
from attnplug_transformers.engine.block_pool import BlockPool
from attnplug_transformers.engine.inspection import (
    check_call,
    check_kind,
    check_lengths,
    check_model,
    eos_tokens,
    inspect_layers,
    longest,
)
from attnplug_transformers.engine.layers import Groups, count_blocks, free_bytes, make_caches
from attnplug_transformers.engine.model_attention import ModelAttention
from attnplug_transformers.engine.request import (
    Request,
    check_choices,
    check_known,
    check_tokens,
    to_prompts,
    to_samplings,
    to_stop_tokens,
)
from attnplug_transformers.engine.runner import Runner, current, record
from attnplug_transformers.engine.sampling import Sampling, sample
from attnplug_transformers.engine.scheduler import Scheduler
from attnplug_transformers.engine.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from attnplug import Selection
    from attnplug.contract import AttentionImpl
    from attnplug.request import BackendNames, Options


@frozen
class EngineStats:
    """
    The counters of an engine, at one moment.

    Attributes:
        steps: Times that the model was run.
        replayed_steps: Those of them that were recorded decode steps, replayed.
        preemptions: Times that a request gave its blocks to an older one, to be computed again later.
        blocks_in_use: Blocks that requests own now.
    """

    steps: int
    replayed_steps: int
    preemptions: int
    blocks_in_use: int


class ExclusiveCall:
    """Lets one call in, and refuses another that comes meanwhile instead of letting it wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """
        Run the body alone.

        Raises:
            LimitsError: Another call is under way.
        """
        if not self._lock.acquire(blocking=False):
            raise LimitsError(
                f"{name}() was called while another call of this engine was under way",
                "one engine serves one thread, one call at a time",
                "call it from the thread that steps the engine, or make an engine for each thread",
            )
        try:
            yield
        finally:
            self._lock.release()


def failed(requests: Sequence[Request]) -> list[Request]:
    """Return those that have failed."""
    return [request for request in requests if request.finish_reason == "failed"]


def refuse_failed(requests: Sequence[Request]) -> None:
    """
    See that none of the requests of a call has failed.

    Args:
        requests: The request of each prompt.

    Raises:
        TensorError: One has; its id and the prompt's place are named.
    """
    found = failed(requests)
    if found:
        places = [place for place, request in enumerate(requests) if request in found]
        raise TensorError(
            f"the logits of prompts {places}, as requests {[request.id for request in found]}, choose no token",
            "logits are numbers, and not all of a row are minus infinity",
            "look for the first NaN in the model's layers, or submit() each prompt for the tokens of the others",
        )


_GREEDY = Sampling()
_log = logging.getLogger(__name__)


class Engine:
    """
    Generates with an unmodified causal language model of transformers, over paged caches.

    The model's attention is the engine's until `close`, until the end of a ``with``, or until the engine is gone. One
    engine serves one thread; several engines may run side by side, on one model too. Of the model's generation_config
    the end-of-text tokens are read, and nothing else: how tokens are chosen is what each request says.

        with Engine(model) as engine:
            tokens = engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20)

    Args:
        model: A causal language model in evaluation mode, on one device.
        num_blocks: Blocks of the caches, the null block included. None takes on CUDA what `memory_fraction` leaves,
            elsewhere up to 1 GiB, and never more than all requests of a step can fill.
        max_num_reqs: Requests that run at once.
        max_num_tokens: Tokens of one step; longer prompts are computed in chunks.
        max_seq_len: Tokens of one request, generated ones included; None is what the model has positions for.
        block_size: Tokens per block; None lets the backends choose.
        kv_cache_dtype: Dtype of the caches; ``"auto"`` is the model's.
        features: Open features that every layer asks for, by dotted name.
        backend: As for `attnplug.plan`.
        options: As for `attnplug.plan`.
        prefix_caching: Whether full blocks of equal prefixes are computed once.
        graphs: Whether decode steps are recorded once and replayed, from CUDA graphs on CUDA: a step then costs the
            host next to nothing. True asks it of the backends; None takes it on CUDA where backends and model allow
            it, and `why_eager` says why not.
        memory_fraction: The share of a CUDA device's memory that may be in use with the caches.
        assume: Read a model type that attnplug does not know as this one; refused for a type that it knows.

    Raises:
        RequirementsError: The engine does not run this kind of model, or a choice is none; the reason is said.
        NotNegotiatedError: The model attends otherwise than its configuration says.
        NoBackendError: Nothing can serve a layer.
        LimitsError: A number is out of its range, or memory does not suffice.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of whoever runs the engine, with a default
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        max_num_reqs: int = 64,
        max_num_tokens: int = 2048,
        max_seq_len: int | None = None,
        block_size: int | None = None,
        kv_cache_dtype: str = "auto",
        features: Sequence[str] = (),
        backend: BackendNames | None = None,
        options: Options | None = None,
        prefix_caching: bool = True,
        graphs: bool | None = None,
        memory_fraction: float = 0.9,
        assume: str | None = None,
    ) -> None:
        check_choices(graphs, prefix_caching, kv_cache_dtype)
        check_kind(model)
        self.model = model
        dtype = str(model.dtype).removeprefix("torch.")
        layers = model_layers(
            model.config,
            dtype=dtype,
            paged=True,
            assume=assume,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            features=features,
            cudagraph="single_token_decode" if graphs else "never",
            fix="keep transformers' own attention for this model",
        )
        check_model(model, layers)
        limits = Limits(
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=longest(model, max_seq_len),
            num_blocks=num_blocks,
        )
        check_lengths(model, limits.max_seq_len, max_num_tokens)
        loan = ModelAttention(model)
        self._end = weakref.finalize(self, loan.end)
        try:
            check_call(model)  # behind the attention: code that a model is published with often lacks both
            with current(model.device):
                self._groups = Groups.of(inspect_layers(model, layers, kv_cache_dtype), model.device, backend, options)
                self._runner = loan.runner = Runner(model, self._groups)
                self.limits = self._equip(limits, memory_fraction)
                self.why_eager = record(model, self._groups, self._runner, graphs)
            self._scheduler = Scheduler(
                BlockPool(self.limits.num_blocks or 0, self._groups.block_size, reuse=prefix_caching),
                max_num_reqs=max_num_reqs,
                max_num_tokens=max_num_tokens,
                max_seq_len=limits.max_seq_len,
            )
        except BaseException:
            self._end()
            raise
        self._ids = count()
        self._known: weakref.WeakSet[Request] = weakref.WeakSet()
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._weights = Weights(model)
        self._caller = ExclusiveCall()
        self._num_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def selections(self) -> dict[str, Selection]:
        """The decision for each attention layer, by its module's name as `model.named_modules()` has it."""
        return {name: self._groups.plan[layer.spec.name] for name, layer in self._groups.named(self.model).items()}

    @property
    def implementations(self) -> dict[str, AttentionImpl]:
        """The implementation of each attention layer, likewise: what a backend notes of a layer is found there."""
        return {name: layer.impl for name, layer in self._groups.named(self.model).items()}

    @property
    def stats(self) -> EngineStats:
        """What was done so far."""
        pool = self._scheduler.pool
        return EngineStats(
            steps=self._num_steps,
            replayed_steps=self._runner.num_replays,
            preemptions=self._scheduler.num_preemptions,
            blocks_in_use=pool.num_usable - pool.num_free,
        )

    @property
    def num_graphs(self) -> int:
        """Decode steps that were recorded."""
        return self._runner.num_graphs

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._groups.block_size

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_work

    def submit(
        self,
        prompt_ids: Iterable[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = _GREEDY,
        stop_tokens: Iterable[int] | None = None,
    ) -> Request:
        """
        Put a request in line.

        Args:
            prompt_ids: The tokens of the prompt.
            max_new_tokens: The most that is generated.
            sampling: How tokens are chosen.
            stop_tokens: Tokens that end the request; None takes the model's end-of-text tokens, and ``()`` has none.

        Raises:
            BatchError: The prompt is empty, or has tokens that the model does not know.
            LimitsError: It may grow longer than max_seq_len.
            CacheError: It may need more blocks than there are.
            NotNegotiatedError: The model's parameters were replaced, and recorded steps read the old ones.
        """
        with self._caller.call("submit"):
            return self._submit(prompt_ids, max_new_tokens, sampling, stop_tokens)

    def _submit(
        self,
        prompt_ids: Iterable[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: Iterable[int] | None,
    ) -> Request:
        self._check_open()
        if self._weights.have_changed(self.num_graphs):
            self._scheduler.pool.reset_prefix_cache()
        stops = eos_tokens(self.model) if stop_tokens is None else stop_tokens
        request = Request(
            id=next(self._ids),
            tokens=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stops,
        )
        check_tokens(request.tokens, () if stop_tokens is None else request.stop_tokens, self._vocabulary)
        self._scheduler.add(request)
        self._known.add(request)
        return request

    def step(self) -> list[Request]:
        """
        Run the model once, and return the requests that got a token or failed; none where nothing is to be done.

        A request fails, and the others go on without it, where its logits choose no token: they have NaN or infinity,
        or rule out all tokens. Its `finish_reason` is ``"failed"`` then.

        Whatever is raised on the way, no request has moved: the next step does the same again, unless a request is
        cancelled before it.
        """
        with self._caller.call("step"):
            self._check_open()
            step = self._scheduler.schedule()
            if step is None:
                return []
            logits = self._runner.run(step)
            tokens = sample(logits, step.sampling).tolist()
            self._num_steps += 1
            moved = self._scheduler.finish_step(step, tokens)
        if lost := failed(moved):
            _log.warning("the logits of requests %s choose no token; they have failed", [one.id for one in lost])
        return moved

    def cancel(self, request: Request) -> None:
        """
        End a request; what it has generated stays in it. One that has ended already stays as it is.

        Raises:
            BatchError: It is no request of this engine.
        """
        check_known(request, self._known)
        with self._caller.call("cancel"):
            self._scheduler.cancel(request)

    def reset_prefix_cache(self) -> None:
        """
        Compute every prompt anew from now on, as after a change of the model.

        The engine does so by itself at the next `submit` after a parameter was written in place or replaced; what it
        does not see are writes into a parameter's `data`, and changes of anything else. Requests under way keep what
        they have computed: let them end first, or cancel them.
        """
        with self._caller.call("reset_prefix_cache"):
            self._scheduler.pool.reset_prefix_cache()

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] = _GREEDY,
        stop_tokens: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """
        Return what follows each prompt. Requests that were submitted before move on meanwhile.

        Args:
            prompts: The tokens of each prompt.
            max_new_tokens: As for `submit`.
            sampling: As for `submit`, or a list with one for each prompt.
            stop_tokens: As for `submit`.

        Raises:
            AttnplugError: As for `submit`, or while the model runs; none of these requests stays then.
            TensorError: The logits of one of these requests choose no token; none of them stays.
        """
        asked = to_prompts(prompts)
        stops = None if stop_tokens is None else to_stop_tokens(stop_tokens)
        requests: list[Request] = []
        try:
            for prompt, how in zip(asked, to_samplings(sampling, len(asked)), strict=True):
                requests.append(self.submit(prompt, max_new_tokens=max_new_tokens, sampling=how, stop_tokens=stops))
            while not all(request.is_finished for request in requests):
                self.step()
                refuse_failed(requests)
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return [request.new_tokens for request in requests]

    def close(self) -> None:
        """Cancel all requests, free the caches, and give the model its own attention back."""
        with self._caller.call("close"):
            if self._end.alive:
                for request in (*self._scheduler.running, *self._scheduler.waiting):
                    self._scheduler.cancel(request)
                self._end()

    def _equip(self, limits: Limits, memory_fraction: float) -> Limits:
        """Size the caches, and get the runner ready for its first step."""
        groups, runner = self._groups, self._runner
        free = free_bytes(
            runner.device,
            memory_fraction,
            lambda: runner.measure(limits.max_num_tokens, limits.max_num_reqs, limits.max_seq_len),
        )
        if limits.num_blocks is None:
            limits = attrs.evolve(limits, num_blocks=count_blocks(groups, limits, runner.device, free))
        runner.equip(groups.make_builders(limits), make_caches(groups, limits.num_blocks or 0, runner.device))
        if runner.device.type == "cuda":
            shapes = [GraphShape(limits.max_num_reqs, limits.max_num_reqs, 1), GraphShape(1, limits.max_num_tokens)]
            for backend in groups.backends:
                backend.warmup(shapes)
        return limits

    def _check_open(self) -> None:
        if not self._end.alive:
            raise LimitsError(
                "a closed engine was used",
                "its caches are freed, and its model has its own attention",
                "make a new one",
            )
