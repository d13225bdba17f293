"""The loop of the engine: it owns the model's attention, the KV caches and the scheduler, and runs steps."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from attnplug.contract import GraphShape, Limits
from attnplug.dense import use_device
from attnplug.errors import BatchError, LimitsError
from attnplug.models import model_layers
from attnplug_transformers.engine.block_pool import BlockPool
from attnplug_transformers.engine.exclusive import ExclusiveCall
from attnplug_transformers.engine.inspection import (
    KEEP,
    EvaluationMode,
    check_autocast,
    check_class,
    check_lengths,
    check_model,
    check_options,
    inspect_layers,
    resolve_max_seq_len,
)
from attnplug_transformers.engine.layers import Groups, check_memory, count_blocks, free_bytes, make_caches
from attnplug_transformers.engine.metrics import EngineStats
from attnplug_transformers.engine.model_attention import ModelAttention
from attnplug_transformers.engine.options import check_options_known
from attnplug_transformers.engine.prefills import LatentPrefills, most_rows
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.runner import Runner
from attnplug_transformers.engine.sampler import Sampler, download
from attnplug_transformers.engine.scheduler import Scheduler
from attnplug_transformers.engine.submission import Submission
from attnplug_transformers.engine.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor
    from typing_extensions import Self

    from attnplug import Selection
    from attnplug.contract import Attention
    from attnplug.request import BackendNames, Options
    from attnplug_transformers.engine.runner import Inputs
    from attnplug_transformers.engine.schedule import Step

_log = logging.getLogger(__name__)


class EngineCore:
    """
    Runs requests on one model, step by step: what `Engine` has, without the calls that make requests.

    Arguments, errors and attributes are those of `Engine`.
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
        async_scheduling: bool | None = None,
        memory_fraction: float = 0.9,
        assume: str | None = None,
        tokenizer: Any = None,
        **unknown: object,
    ) -> None:
        check_options_known("Engine()", unknown, EngineCore.__init__)
        check_options(graphs, async_scheduling, prefix_caching, kv_cache_dtype)
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
        check_autocast(model.device)
        limits = Limits(
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=resolve_max_seq_len(model, max_seq_len),
            num_blocks=num_blocks,
        )
        check_lengths(model, limits.max_seq_len, max_num_tokens)
        self.model, self.tokenizer = model, tokenizer
        self._submission = Submission(model, tokenizer)
        attention = ModelAttention(model)
        self._restore = weakref.finalize(self, attention.restore)
        try:
            with use_device(model.device):
                specs = inspect_layers(model, layers, kv_cache_dtype)
                self._groups = Groups.load(specs, model.device, backend, options)
                self._prefills = LatentPrefills.decide(
                    self._groups.layers, model.device, most_rows(limits), backend, options
                )
                self._runner = attention.runner = Runner(model, self._groups, self._prefills)
                self.limits = self._init_caches(limits, memory_fraction)
                self.why_eager = self._runner.capture(graphs)
            num_blocks = self.limits.num_blocks or 0
            pool = BlockPool(num_blocks, self._groups.block_size, prefix_caching=prefix_caching)
            self._scheduler = Scheduler(pool, self.limits, **self._groups.window)
        except BaseException:
            self._restore()
            raise
        self._sampler = Sampler()
        self._submitted: weakref.WeakSet[Request] = weakref.WeakSet()
        self._weights = Weights(model)
        self._evaluation = EvaluationMode(model)
        self._exclusive = ExclusiveCall()
        on_cuda = self._runner.device.type == "cuda"
        self._runs_ahead = on_cuda if async_scheduling is None else async_scheduling
        self._launched: tuple[Step, Tensor] | None = None  # a step that runs already, with its logits
        self._num_steps = self._num_ahead = 0

    def _init_caches(self, limits: Limits, memory_fraction: float) -> Limits:
        """Size and allocate the KV caches, and return the limits with their number of blocks."""
        groups, runner, device = self._groups, self._runner, self._runner.device
        sizes = (limits.max_num_tokens, limits.max_num_reqs, limits.max_seq_len)
        available = free_bytes(device, memory_fraction, lambda: runner.profile(*sizes))
        if limits.num_blocks is None:
            limits = attrs.evolve(limits, num_blocks=count_blocks(groups, limits, device, available))
        check_memory(groups, limits.num_blocks or 0, device)
        runner.init_caches(groups.make_builders(limits), *make_caches(groups, limits.num_blocks or 0, device))
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
    def prefill_selections(self) -> dict[str, Selection]:
        """
        The decisions for long prefills of latents, which run with keys and values per head, by `attn_type`: causal
        calls of new tokens, and calls with cached ones. Empty where all run absorbed, on `selections`.
        """
        return dict(self._prefills.selections)

    @property
    def why_absorbed(self) -> str | None:
        """Why all prefills of latents run absorbed; None where long ones do not, or the model has no latents."""
        return self._prefills.why_absorbed

    @property
    def implementations(self) -> dict[str, Attention]:
        """The implementation of each attention layer, under the same names: some record statistics of their layer."""
        return {name: layer.impl for name, layer in self._groups.by_module_name(self.model).items()}

    @property
    def stats(self) -> EngineStats:
        """The counters of this engine."""
        pool = self._scheduler.pool
        return EngineStats(
            steps=self._num_steps,
            replayed_steps=self._runner.num_replays,
            steps_ahead=self._num_ahead,
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

    def _enqueue(self, request: Request) -> None:
        with self._exclusive.enter("submit"):
            self._check_open()
            if self._weights.have_changed(self.num_graphs):
                self._reset_prefix_cache()
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

        With `async_scheduling` the next step is launched before this returns, if it only decodes the same requests. Its
        tokens of requests that have finished are discarded. A request that is submitted now starts one step later.

        A request with non-finite logits (NaN, infinity, or all tokens ruled out) fails: its `finish_reason` is
        ``"failed"``, and the others go on.

        After an exception, a KeyboardInterrupt included, no request of the step has advanced, or all have if the step
        was complete: the next one goes on with the same tokens.
        """
        with self._exclusive.enter("step"):
            self._check_open()
            self._evaluation.check()
            check_autocast(self._runner.device)
            moved = self._step()
        failed = [request for request in moved if request.finish_reason == "failed"]
        if ids := [request.id for request in failed if request.error is None]:
            _log.warning("requests %s have failed: their logits are non-finite", ids)
        if ids := [request.id for request in failed if request.error is not None]:
            _log.warning("requests %s have failed: the tokenizer cannot decode their tokens", ids)
        return moved

    def _step(self) -> list[Request]:
        """Finish the launched step, or a new one, and launch the next step if it only decodes the same requests."""
        launched, self._launched = self._launched, None
        if launched is None or not self._scheduler.awaits(launched[0]):
            step = self._scheduler.schedule()
            if step is None:
                return []
            launched = self._launch(step, self._runner.prepare(step))
        step, logits = launched
        # The device computes meanwhile. Nothing here depends on the tokens of this step.
        following = self._scheduler.schedule_ahead() if self._runs_ahead else None
        inputs = None if following is None else self._runner.prepare(following)
        sampled, logprobs = self._sampler.run(logits, step.sampling)
        tokens = download(sampled)
        ahead = None
        if following is not None and inputs is not None:
            ahead = self._launch(following, inputs, sampled)
            self._num_ahead += 1
        moved = self._scheduler.finish_step(step, tokens(), logprobs)
        self._launched = ahead
        return moved

    def _launch(self, step: Step, inputs: Sequence[Inputs], sampled: Tensor | None = None) -> tuple[Step, Tensor]:
        logits = self._runner.run(inputs, sampled)
        self._num_steps += 1
        return step, logits

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
            self._reset_prefix_cache()

    def _reset_prefix_cache(self) -> None:
        self._launched = None  # the next step computes it again, with the changed model
        self._scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Cancel all requests, free the KV caches, and restore the model's own attention."""
        with self._exclusive.enter("close"):
            self._launched = None
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
