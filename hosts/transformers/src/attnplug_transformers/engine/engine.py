"""The engine: continuous batching of requests on one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from attnplug.errors import AttnplugError, TensorError
from attnplug_transformers.engine.core import EngineCore
from attnplug_transformers.engine.options import check_options_known
from attnplug_transformers.engine.pretrained import load_pretrained
from attnplug_transformers.engine.progress import check_progress, progress_bar
from attnplug_transformers.engine.prompts import to_prompt, to_prompts, to_stop_tokens
from attnplug_transformers.engine.request import to_samplings
from attnplug_transformers.engine.streaming import stream
from attnplug_transformers.engine.submission import check_names, check_prompt_kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from os import PathLike

    import torch
    from typing_extensions import Self

    from attnplug_transformers.engine.params import SamplingParams
    from attnplug_transformers.engine.request import Request
    from attnplug_transformers.engine.streaming import StreamOutput


class Engine(EngineCore):
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
        async_scheduling: Whether the next decode step is scheduled and launched before the tokens of the current step
            are on the host. A stop then costs one extra token, which is discarded. None is True on CUDA.
        memory_fraction: The share of a CUDA device's memory that may be in use, KV caches included.
        assume: Read a model type that attnplug does not know as this one; refused for a type that it knows.
        tokenizer: A tokenizer of transformers, for prompts and stop strings as text, and for the text of requests.
        unknown: Refused, with the nearest name.

    Raises:
        RequirementsError: The engine does not run this kind of model, or an option is invalid.
        NotNegotiatedError: The model's attention differs from its configuration.
        NoBackendError: No backend supports a layer.
        LimitsError: A number is out of its range, or memory does not suffice.

    Attributes:
        model: The model.
        tokenizer: The tokenizer, or None.
        limits: The limits of a step, the number of blocks included.
        why_eager: Why all steps run eagerly; None where decode steps are replayed.
    """

    @classmethod
    def from_pretrained(
        cls,
        model: str | PathLike[str],
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        tokenizer: Any = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        local_files_only: bool = False,
        **options: Any,
    ) -> Self:
        """
        Load a model with its tokenizer, and make an engine of both.

        Args:
            model: The id of a model on the Hugging Face Hub, or a folder that `save_pretrained` wrote.
            dtype: The dtype of the weights, such as ``"bfloat16"``; ``"auto"`` is that of the checkpoint.
            device: Where it runs; None is the first CUDA device, or the CPU where there is none.
            tokenizer: A tokenizer; None loads the one beside the model, where there is one.
            revision: The branch, tag or commit on the Hub.
            trust_remote_code: Whether code that comes with the model may run.
            local_files_only: Whether nothing is downloaded.
            options: Options of the engine, such as `backend` and `max_num_reqs`.

        Raises:
            RequirementsError: There is no such model, dtype, device or option, or the engine does not run the model.
            AttnplugError: As for the constructor.
        """
        check_options_known("Engine.from_pretrained()", options, cls.__init__, cls.from_pretrained)
        made, found = load_pretrained(
            model,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
        )
        return cls(made, tokenizer=found, **options)

    def submit(
        self,
        prompt: Iterable[int] | str,
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop_tokens: Iterable[int] | None = None,
        **unknown: object,
    ) -> Request:
        """
        Enqueue a request, or n of them where `sampling` has n samples.

        Args:
            prompt: The tokens of the prompt, as a list, a tensor or an array; or its text where the engine has a
                tokenizer.
            max_new_tokens: The most tokens to generate; that of `sampling` takes its place. None is that of the model's
                generation_config.
            sampling: How its tokens are sampled; None is as the model's generation_config has it, greedy by default.
            stop_tokens: Tokens that end the request; None takes the model's end-of-text tokens, and ``()`` has none.
            unknown: Refused.

        Returns:
            The request; of several samples the first, and its `samples` has all.

        Raises:
            BatchError: The prompt is empty, or has tokens that the model's vocabulary lacks.
            LimitsError: It may grow longer than `max_seq_len`, or has no `max_new_tokens`.
            CacheError: It may need more blocks than there are.
            RequirementsError: The model's generation_config has an unsupported or invalid field, stop strings lack a
                tokenizer, or a name is unknown.
            NotNegotiatedError: The model's parameters were replaced, and captured steps read the old ones.
        """
        check_names("submit", unknown)
        check_prompt_kind(prompt)
        requests = self._make_requests(to_prompt(prompt, self.tokenizer), max_new_tokens, sampling, stop_tokens)
        try:
            for request in requests:
                self._enqueue(request)
            return requests[0]
        except BaseException:
            self._cancel_all(requests)
            raise

    def _make_requests(
        self,
        prompt: Iterable[Any],
        max_new_tokens: int | None,
        sampling: SamplingParams | None,
        stop_tokens: Iterable[int] | None,
    ) -> list[Request]:
        self._check_open()
        requests = self._submission.make(prompt, max_new_tokens, sampling, stop_tokens)
        self._submitted.update(requests)
        return requests

    def _make_batch(
        self,
        prompts: Any,
        max_new_tokens: int | None,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop_tokens: Iterable[int] | None,
    ) -> list[tuple[int, Request]]:
        """Return the requests of all prompts, each with the index of its prompt."""
        found = to_prompts(prompts, self.tokenizer)
        samplings = to_samplings(sampling, len(found))
        stops = None if stop_tokens is None else to_stop_tokens(stop_tokens)
        return [
            (index, request)
            for index, (prompt, how) in enumerate(zip(found, samplings, strict=True))
            for request in self._make_requests(prompt, max_new_tokens, how, stops)
        ]

    @overload
    def generate(
        self,
        prompts: Sequence[Iterable[int] | str],
        *,
        max_new_tokens: int | None = ...,
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        stop_tokens: Iterable[int] | None = ...,
        progress: bool = ...,
        return_requests: Literal[False] = ...,
        **unknown: object,
    ) -> list[list[int]]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Iterable[int] | str],
        *,
        max_new_tokens: int | None = ...,
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        stop_tokens: Iterable[int] | None = ...,
        progress: bool = ...,
        return_requests: Literal[True],
        **unknown: object,
    ) -> list[Request]: ...

    def generate(
        self,
        prompts: Sequence[Iterable[int] | str],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_tokens: Iterable[int] | None = None,
        progress: bool = False,
        return_requests: bool = False,
        **unknown: object,
    ) -> list[list[int]] | list[Request]:
        """
        Return the tokens generated from each prompt. Requests that were submitted before advance meanwhile.

        Args:
            prompts: The tokens of each prompt, without padding, or its text where the engine has a tokenizer.
            max_new_tokens: As for `submit`.
            sampling: As for `submit`, or a list with one for each prompt.
            stop_tokens: As for `submit`.
            progress: Whether standard error has a progress bar, where it is a terminal.
            return_requests: Whether the finished requests are returned, with text, log-probabilities and metrics.
            unknown: Refused.

        Returns:
            One list of tokens or request for each prompt; n of them in a row for a prompt with n samples, as `generate`
            of transformers does for `num_return_sequences`.

        Raises:
            AttnplugError: As for `submit`, or from a step; all of these requests are canceled then.
            TensorError: The logits of one of these requests are non-finite; all of them are canceled.
        """
        check_names("generate", unknown, "progress", "return_requests")
        check_progress(progress)
        batch = self._make_batch(prompts, max_new_tokens, sampling, stop_tokens)
        requests = [request for _, request in batch]
        try:
            with progress_bar(requests, shown=progress) as update:
                for request in requests:
                    self._enqueue(request)
                while not all(request.is_finished for request in requests):
                    self.step()
                    _check_complete(batch)
                    update()
        except BaseException:
            self._cancel_all(requests)
            raise
        return requests if return_requests else [request.new_tokens for request in requests]

    def stream(
        self,
        prompts: Sequence[Iterable[int] | str],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_tokens: Iterable[int] | None = None,
        **unknown: object,
    ) -> Iterator[StreamOutput]:
        """
        Return an iterator over what is generated from each prompt, as soon as a step has ended.

        The requests are checked at once, and enqueued when the iteration begins. Closing the iterator cancels those
        that have not ended, and so does leaving a loop that alone refers to it. A request that fails ends with the
        `finish_reason` ``"failed"``, and the others go on.

        Args:
            prompts: As for `generate`.
            max_new_tokens: As for `submit`.
            sampling: As for `generate`.
            stop_tokens: As for `submit`.
            unknown: Refused.

        Raises:
            AttnplugError: As for `submit`; the iterator raises those of a step, and all of these requests are canceled.
        """
        check_names("stream", unknown)
        batch = self._make_batch(prompts, max_new_tokens, sampling, stop_tokens)
        return self._stream(batch)

    def _stream(self, batch: list[tuple[int, Request]]) -> Iterator[StreamOutput]:
        requests = [request for _, request in batch]
        try:
            for request in requests:
                request.decodes = request.detokenizer is not None
                self._enqueue(request)
            yield from stream(batch, self.step)
        finally:
            self._cancel_all(requests)


def _check_complete(batch: Sequence[tuple[int, Request]]) -> None:
    failed = [(index, request) for index, request in batch if request.finish_reason == "failed"]
    if not failed:
        return
    prompts = sorted({index for index, _ in failed})
    which = f"prompts {prompts}, as requests {[request.id for _, request in failed]}"
    error = next((request.error for _, request in failed if request.error is not None), None)
    if error is None:
        raise TensorError(
            f"the logits of {which}, are non-finite",
            "each row of logits has a finite highest value",
            "look for the first NaN in the model's layers, or for biases and bad_words that rule all tokens out;"
            " submit() each prompt for the tokens of the others",
        )
    raise AttnplugError(
        f"the tokenizer cannot decode the tokens of {which}: {error!r}",
        "tokenizer.decode() takes any token of the model",
        "use the model's own tokenizer, or submit() each prompt for the tokens of the others",
    ) from error
