"""Continuous batching: requests join and leave a model's batch at any step."""

from __future__ import annotations

import logging
import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs

from attnplug.contract import GraphKey, Limits
from attnplug.errors import BatchError, LimitsError
from attnplug.hosts.transformers.engine.blocks import BlockPool
from attnplug.hosts.transformers.engine.caches import count_blocks, make_caches
from attnplug.hosts.transformers.engine.groups import Groups
from attnplug.hosts.transformers.engine.lending import give_back, lend
from attnplug.hosts.transformers.engine.memory import free_bytes
from attnplug.hosts.transformers.engine.request import Request
from attnplug.hosts.transformers.engine.runner import Runner, current
from attnplug.hosts.transformers.engine.sampling import Sampling, sample
from attnplug.hosts.transformers.engine.scheduler import Scheduler
from attnplug.hosts.transformers.engine.support import check_model, longest
from attnplug.hosts.transformers.engine.trial import learn
from attnplug.hosts.transformers.requirements import model_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attnplug.request.settings import Options
    from attnplug.selection.scope import BackendNames
    from attnplug.selection.selection import Selection

_GREEDY = Sampling()
_log = logging.getLogger(__name__)


class Engine:
    """
    Generates with an unmodified causal language model of transformers, over paged caches.

    The model's attention is the engine's until `close`, or until the engine is gone. One engine serves one thread;
    several engines may run side by side, on one model too. Of the model's generation_config the end-of-text tokens are
    read, and nothing else: how tokens are chosen is what each request says.

        engine = Engine(model)
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
        backend: As for `attnplug.plan`.
        options: As for `attnplug.plan`.
        reuse_prefixes: Whether full blocks of equal prefixes are computed once.
        graphs: Whether decode steps are recorded once and replayed, from CUDA graphs on CUDA: a step then costs the
            host next to nothing. True asks it of the backends; None takes it on CUDA where backends and model allow
            it, and `why_eager` says why not.
        memory_fraction: The share of a CUDA device's memory that may be in use with the caches.
        assume: Read a model type that attnplug does not know as this one.

    Raises:
        RequirementsError: The engine does not run this kind of model; the reason is said.
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
        backend: BackendNames | None = None,
        options: Options | None = None,
        reuse_prefixes: bool = True,
        graphs: bool | None = None,
        memory_fraction: float = 0.9,
        assume: str | None = None,
    ) -> None:
        self.model = model
        limits = Limits(
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=longest(model, max_seq_len),
            num_blocks=num_blocks,
        )
        dtype = str(model.dtype).removeprefix("torch.")
        layers = model_layers(
            model.config,
            dtype=dtype,
            paged=True,
            assume=assume,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            cudagraph="single_token_decode" if graphs else "never",
        )
        check_model(model, layers, limits.max_seq_len, max_num_tokens)
        lend(model)
        self._end = weakref.finalize(self, give_back, model)
        try:
            with current(model.device):
                self._groups = Groups.of(learn(model, layers, kv_cache_dtype), model.device, backend, options)
                self._runner = Runner(model, self._groups)
                self.limits = self._equip(limits, memory_fraction)
                self.why_eager = self._record(graphs)
            self._scheduler = Scheduler(
                BlockPool(self.limits.num_blocks or 0, self._groups.block_size, reuse=reuse_prefixes),
                max_num_reqs=max_num_reqs,
                max_num_tokens=max_num_tokens,
                max_seq_len=limits.max_seq_len,
            )
        except BaseException:
            self._end()
            raise
        self._ids = count()
        self._vocabulary = model.get_input_embeddings().num_embeddings

    @property
    def selections(self) -> dict[str, Selection]:
        """The decision for each attention layer, by name."""
        return {layer.learned.name: self._groups.plan[layer.learned.name] for layer in self._groups.layers}

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
        """
        self._check_open()
        stops = self._end_of_text() if stop_tokens is None else stop_tokens
        request = Request(
            id=next(self._ids),
            tokens=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stops,
        )
        asked = () if stop_tokens is None else request.stop_tokens
        for what, tokens in (("a prompt with the token", request.tokens), ("the stop token", asked)):
            if max(tokens, default=0) >= self._vocabulary:
                raise BatchError(
                    f"{what} {max(tokens)} was given",
                    f"the model knows tokens from 0 to {self._vocabulary - 1}",
                    "use the model's own tokenizer",
                )
        self._scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """
        Run the model once, and return the requests that got a token; none where nothing is to be done.

        Whatever is raised on the way, no request has moved: the next step does the same again, unless a request is
        cancelled before it.
        """
        self._check_open()
        step = self._scheduler.schedule()
        if step is None:
            return []
        logits = self._runner.run(step)
        tokens = sample(logits, step.sampling).tolist()
        return self._scheduler.finish_step(step, tokens)

    def cancel(self, request: Request) -> None:
        """End a request; what it has generated stays in it. One that has ended already stays as it is."""
        self._scheduler.cancel(request)

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = _GREEDY,
        stop_tokens: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """
        Return what follows each prompt. Requests that were submitted before move on meanwhile.

        Args:
            prompts: The tokens of each prompt.
            max_new_tokens: As for `submit`.
            sampling: As for `submit`.
            stop_tokens: As for `submit`.

        Raises:
            AttnplugError: As for `submit`, or while the model runs; none of these requests stays then.
        """
        stops = None if stop_tokens is None else tuple(stop_tokens)
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(  # noqa: PERF401 - those before one that is refused have to be known
                    self.submit(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop_tokens=stops)
                )
            while not all(request.is_finished for request in requests):
                self.step()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return [request.new_tokens for request in requests]

    def close(self) -> None:
        """Cancel all requests, free the caches, and give the model its own attention back."""
        if self._end.alive:
            for request in (*self._scheduler.running, *self._scheduler.waiting):
                self.cancel(request)
            self._runner.equip((), {})
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
            shapes = [GraphKey(limits.max_num_reqs, limits.max_num_reqs, 1), GraphKey(1, limits.max_num_tokens)]
            for backend in groups.backends:
                backend.warmup(shapes)
        return limits

    def _record(self, graphs: bool | None) -> str | None:  # noqa: FBT001 - the choice of whoever makes the engine
        """Record decode steps where they are wanted; return why all steps run eagerly, or None."""
        if graphs is False or (graphs is None and self._runner.device.type != "cuda"):
            return "graphs=False was asked for" if graphs is False else f"{self._runner.device} has no graphs"
        weakest = self._groups.plan.weakest.selection
        if weakest.agreement.cudagraph == "never":
            return f"{weakest.id} runs without graphs here"
        try:
            self._runner.record()
        except Exception as error:
            if graphs:
                raise
            # A model may look at values on the host, which a graph cannot; its steps are as right without.
            reason = f"{type(self.model).__name__} cannot be recorded: {error}"
            _log.warning("%s; its steps run eagerly", reason)
            return reason
        return None

    def _end_of_text(self) -> tuple[int, ...]:
        found = self.model.generation_config.eos_token_id
        return () if found is None else (found,) if isinstance(found, int) else tuple(found)

    def _check_open(self) -> None:
        if not self._end.alive:
            raise LimitsError(
                "a closed engine was used",
                "its caches are freed, and its model has its own attention",
                "make a new one",
            )
