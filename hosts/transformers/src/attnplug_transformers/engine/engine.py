"""The engine: continuous batching of requests on one model."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from attnplug.contract import GraphShape, Limits
from attnplug.dense import use_device
from attnplug.errors import BatchError, LimitsError, TensorError
from attnplug.models import model_layers
from attnplug_transformers.engine.block_pool import BlockPool
from attnplug_transformers.engine.exclusive import ExclusiveCall
from attnplug_transformers.engine.generation import (
    check_generation,
    config_of,
    default_sampling,
    eos_tokens,
    make_processors,
    process,
)
from attnplug_transformers.engine.inspection import (
    KEEP,
    EvaluationMode,
    check_class,
    check_lengths,
    check_model,
    check_options,
    inspect_layers,
    resolve_max_seq_len,
)
from attnplug_transformers.engine.layers import Groups, count_blocks, free_bytes, make_caches
from attnplug_transformers.engine.model_attention import ModelAttention
from attnplug_transformers.engine.request import Request, check_vocabulary, to_prompts, to_samplings, to_stop_tokens
from attnplug_transformers.engine.runner import Runner
from attnplug_transformers.engine.sampling import sample
from attnplug_transformers.engine.scheduler import Scheduler
from attnplug_transformers.engine.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from typing_extensions import Self

    from attnplug import Selection
    from attnplug.contract import AttentionImpl
    from attnplug.request import BackendNames, Options
    from attnplug_transformers.engine.sampling import Sampling

_log = logging.getLogger(__name__)


@frozen
class EngineStats:
    """
    The counters of an engine.

    Attributes:
        steps: Forward passes of the model.
        replayed_steps: Those of them that were replays of captured decode steps.
        preemptions: Times that a request released its blocks for an older one, to be recomputed later.
        blocks_in_use: Blocks that requests own now.
    """

    steps: int
    replayed_steps: int
    preemptions: int
    blocks_in_use: int


class Engine:
    """
    Generates with an unmodified causal language model of transformers, over paged KV caches.

    The engine replaces the model's attention until `close`, until the end of a ``with`` block, or until it is
    garbage-collected. One engine serves one thread; several engines may run concurrently, on one model too.

    Each request reads the model's generation_config when it is submitted. What changes tokens is applied as by
    transformers' `generate`, or refused with its reason; a `Sampling` takes the place of the sampling in it.

        with Engine(model) as engine:
            tokens = engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20)

    Args:
        model: A causal language model in evaluation mode, on one device.
        num_blocks: Blocks of the KV caches, the null block included. None takes on CUDA what `memory_fraction` leaves,
            elsewhere up to 1 GiB, and never more than the requests of a step can fill.
        max_num_reqs: Requests that run concurrently.
        max_num_tokens: Tokens of one step; longer prompts are prefilled in chunks.
        max_seq_len: Tokens of one request, generated ones included; None is the number of positions of the model.
        block_size: Tokens per block; None leaves it to the backends.
        kv_cache_dtype: Dtype of the KV caches, of torch or by name; ``"auto"`` is the model's.
        features: Open features that every layer requires, by dotted name.
        backend: As for `attnplug.plan`.
        options: As for `attnplug.plan`.
        prefix_caching: Whether requests share the full blocks of equal prefixes.
        graphs: Whether decode steps are captured once and replayed, as CUDA graphs on CUDA: a step then takes little
            host time. True requires graphs of the backends; None captures on CUDA where backends and model allow it,
            and `why_eager` has the reason where they do not.
        memory_fraction: The share of a CUDA device's memory that may be in use, KV caches included.
        assume: Read a model type that attnplug does not know as this one; refused for a type that it knows.

    Raises:
        RequirementsError: The engine does not run this kind of model, or an option is invalid.
        NotNegotiatedError: The model's attention differs from its configuration.
        NoBackendError: No backend supports a layer.
        LimitsError: A number is out of its range, or memory does not suffice.

    Attributes:
        model: The model.
        limits: The limits of a step, the number of blocks included.
        why_eager: Why all steps run eagerly; None where decode steps are replayed.
    """

    def __init__(  # noqa: PLR0913 - each is an option of the engine, with a default
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        max_num_reqs: int = 64,
        max_num_tokens: int = 2048,
        max_seq_len: int | None = None,
        block_size: int | None = None,
        kv_cache_dtype: str | torch.dtype = "auto",
        features: Sequence[str] = (),
        backend: BackendNames | None = None,
        options: Options | None = None,
        prefix_caching: bool = True,
        graphs: bool | None = None,
        memory_fraction: float = 0.9,
        assume: str | None = None,
    ) -> None:
        check_options(graphs, prefix_caching, kv_cache_dtype)
        check_class(model)
        layers = model_layers(
            model.config,
            dtype=str(model.dtype).removeprefix("torch."),
            paged=True,
            assume=assume,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            features=features,
            cudagraph="single_token_decode" if graphs else "never",
            fix=KEEP,
        )
        check_model(model, layers)
        limits = Limits(
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=resolve_max_seq_len(model, max_seq_len),
            num_blocks=num_blocks,
        )
        check_lengths(model, limits.max_seq_len, max_num_tokens)
        self.model = model
        attention = ModelAttention(model)
        self._restore = weakref.finalize(self, attention.restore)
        try:
            with use_device(model.device):
                specs = inspect_layers(model, layers, kv_cache_dtype)
                self._groups = Groups.load(specs, model.device, backend, options)
                self._runner = attention.runner = Runner(model, self._groups)
                self.limits = self._init_caches(limits, memory_fraction)
                self.why_eager = self._runner.capture(graphs)
            num_blocks = self.limits.num_blocks or 0
            pool = BlockPool(num_blocks, self._groups.block_size, prefix_caching=prefix_caching)
            self._scheduler = Scheduler(pool, self.limits, **self._groups.window)
        except BaseException:
            self._restore()
            raise
        self._ids = count()
        self._submitted: weakref.WeakSet[Request] = weakref.WeakSet()
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._weights = Weights(model)
        self._evaluation = EvaluationMode(model)
        self._exclusive = ExclusiveCall()
        self._num_steps = 0

    def _init_caches(self, limits: Limits, memory_fraction: float) -> Limits:
        """Size and allocate the KV caches, and return the limits with their number of blocks."""
        groups, runner, device = self._groups, self._runner, self._runner.device
        sizes = (limits.max_num_tokens, limits.max_num_reqs, limits.max_seq_len)
        available = free_bytes(device, memory_fraction, lambda: runner.profile(*sizes))
        if limits.num_blocks is None:
            limits = attrs.evolve(limits, num_blocks=count_blocks(groups, limits, device, available))
        runner.init_caches(groups.make_builders(limits), make_caches(groups, limits.num_blocks or 0, device))
        if device.type == "cuda":
            shapes = [GraphShape(limits.max_num_reqs, limits.max_num_reqs, 1), GraphShape(1, limits.max_num_tokens)]
            for backend in groups.backends:
                backend.warmup(shapes)
        return limits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def selections(self) -> dict[str, Selection]:
        """The decision for each attention layer, by its module's name in `model.named_modules()`."""
        layers = self._groups.by_module_name(self.model)
        return {name: self._groups.plan[layer.spec.name] for name, layer in layers.items()}

    @property
    def implementations(self) -> dict[str, AttentionImpl]:
        """The implementation of each attention layer, under the same names: some record statistics of their layer."""
        return {name: layer.impl for name, layer in self._groups.by_module_name(self.model).items()}

    @property
    def stats(self) -> EngineStats:
        """The counters of this engine."""
        pool = self._scheduler.pool
        return EngineStats(
            steps=self._num_steps,
            replayed_steps=self._runner.num_replays,
            preemptions=self._scheduler.num_preemptions,
            blocks_in_use=pool.num_usable - pool.num_free,
        )

    @property
    def num_graphs(self) -> int:
        """Decode steps that were captured."""
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
        sampling: Sampling | None = None,
        stop_tokens: Iterable[int] | None = None,
    ) -> Request:
        """
        Enqueue a request.

        Args:
            prompt_ids: The tokens of the prompt.
            max_new_tokens: The most tokens to generate.
            sampling: How its tokens are sampled; None is as the model's generation_config has it, greedy by default.
            stop_tokens: Tokens that end the request; None takes the model's end-of-text tokens, and ``()`` has none.

        Raises:
            BatchError: The prompt is empty, or has tokens that the model's vocabulary lacks.
            LimitsError: It may grow longer than `max_seq_len`.
            CacheError: It may need more blocks than there are.
            RequirementsError: The model's generation_config has an unsupported or invalid field.
            NotNegotiatedError: The model's parameters were replaced, and captured steps read the old ones.
        """
        request = self._make_request(prompt_ids, max_new_tokens, sampling, stop_tokens)
        try:
            self._enqueue(request)
            return request  # noqa: TRY300 - an interrupt here leaves the caller without it, too
        except BaseException:
            self._cancel_all([request])
            raise

    def _make_request(
        self,
        prompt_ids: Iterable[int],
        max_new_tokens: int,
        sampling: Sampling | None,
        stop_tokens: Iterable[int] | None,
    ) -> Request:
        self._check_open()
        config = config_of(self.model)
        check_generation(config)
        request = Request(
            id=next(self._ids),
            tokens=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=default_sampling(config) if sampling is None else sampling,
            stop_tokens=eos_tokens(config) if stop_tokens is None else stop_tokens,
        )
        check_vocabulary(request.tokens, () if stop_tokens is None else request.stop_tokens, self._vocabulary)
        request.processors = make_processors(config, request, self.model)
        self._submitted.add(request)
        return request

    def _enqueue(self, request: Request) -> None:
        with self._exclusive.enter("submit"):
            self._check_open()
            if self._weights.have_changed(self.num_graphs):
                self._scheduler.reset_prefix_cache()
                self._weights.store()
            self._scheduler.add(request)

    def _cancel_all(self, requests: Iterable[Request]) -> None:
        """Cancel requests after an exception, unless that was the refusal of a concurrent call."""
        with suppress(LimitsError):
            for request in requests:
                self.cancel(request)

    def step(self) -> list[Request]:
        """
        Run the model once, and return the requests that got a token or failed; an empty list without work.

        A request with non-finite logits (NaN, infinity, or all tokens ruled out) fails: its `finish_reason` is
        ``"failed"``, and the others go on.

        After an exception, a KeyboardInterrupt included, no request of the step has advanced, or all have if the step
        was complete: the next one goes on with the same tokens.
        """
        with self._exclusive.enter("step"):
            self._check_open()
            self._evaluation.check()
            step = self._scheduler.schedule()
            if step is None:
                return []
            logits = self._runner.run(step)
            tokens = sample(process(logits, step.sampling), step.sampling).tolist()
            self._num_steps += 1
            moved = self._scheduler.finish_step(step, tokens)
        if failed := [request.id for request in moved if request.finish_reason == "failed"]:
            _log.warning("requests %s have failed: their logits are non-finite", failed)
        return moved

    def cancel(self, request: Request) -> None:
        """
        End a request, which keeps its generated tokens. One that has ended is left unchanged.

        Raises:
            BatchError: It was not submitted to this engine.
        """
        if not isinstance(request, Request) or request not in self._submitted:
            what = f"request {request.id}" if isinstance(request, Request) else repr(request)
            raise BatchError(
                f"cancel() was called with {what}",
                "it takes a request of this engine",
                "pass what submit() of this engine returned",
            )
        with self._exclusive.enter("cancel"):
            self._scheduler.cancel(request)

    def reset_prefix_cache(self) -> None:
        """
        Evict all cached prefixes, as is necessary after a change of the model.

        The next `submit` does so by itself after a parameter was written in place or replaced. It does not detect
        writes into a parameter's `data`, nor changes of anything else. Unfinished requests keep what they have
        computed: let them end first, or cancel them.
        """
        with self._exclusive.enter("reset_prefix_cache"):
            self._scheduler.reset_prefix_cache()

    def generate(
        self,
        prompts: Sequence[Iterable[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_tokens: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """
        Return the tokens generated from each prompt. Requests that were submitted before advance meanwhile.

        Args:
            prompts: The tokens of each prompt.
            max_new_tokens: As for `submit`.
            sampling: As for `submit`, or a list with one for each prompt.
            stop_tokens: As for `submit`.

        Raises:
            AttnplugError: As for `submit`, or from a step; all of these requests are canceled then.
            TensorError: The logits of one of these requests are non-finite; all of them are canceled.
        """
        found = to_prompts(prompts)
        samplings = to_samplings(sampling, len(found))
        stops = None if stop_tokens is None else to_stop_tokens(stop_tokens)
        requests = [
            self._make_request(prompt, max_new_tokens, how, stops) for prompt, how in zip(found, samplings, strict=True)
        ]
        try:
            for request in requests:
                self._enqueue(request)
            while not all(request.is_finished for request in requests):
                self.step()
                _check_finite(requests)
        except BaseException:
            self._cancel_all(requests)
            raise
        return [request.new_tokens for request in requests]

    def close(self) -> None:
        """Cancel all requests, free the KV caches, and restore the model's own attention."""
        with self._exclusive.enter("close"):
            if self._restore.alive:
                for request in (*self._scheduler.running, *self._scheduler.waiting):
                    self._scheduler.cancel(request)
                self._restore()

    def _check_open(self) -> None:
        if not self._restore.alive:
            raise LimitsError(
                "a closed engine was used",
                "its KV caches are freed, and its model has its own attention",
                "make a new one",
            )


def _check_finite(requests: Sequence[Request]) -> None:
    failed = {index: request.id for index, request in enumerate(requests) if request.finish_reason == "failed"}
    if failed:
        raise TensorError(
            f"the logits of prompts {list(failed)}, as requests {list(failed.values())}, are non-finite",
            "each row of logits has a finite highest value",
            "look for the first NaN in the model's layers, or submit() each prompt for the tokens of the others",
        )
