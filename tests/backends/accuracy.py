"""
The accuracy of an engine's tokens, in a dtype whose rounding may decide between two tokens.

The engine's choices are compared with the model alone, token by token, each after the engine's own tokens before it, so
that one choice by rounding does not affect the next. The reference is the same model with the same weights in float32.
The rounding error of a logit is measured: the error of transformers' own attention in bfloat16.

- The RMS error of the engine's logits is at most 1.5 times the RMS rounding error.
- Each token is the reference's choice, unless the reference's margin is below six standard deviations of the rounding
  error of a difference of two logits: rounding decides there, and transformers itself chooses either.
- At least a third of the tokens have a larger margin, so that the second point tests something.

`FAULTS` are models and wrong attention that these points must detect.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract import AttentionImpl, Layer
from attnplug_transformers.engine import Engine, layers, sampler
from tests.backends.models import build, prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

NEW: Final = 24
LENGTHS: Final = (300, 1, 130, 70, 257, 17)  # some exceed the windows, and the tokens of one step
LIMITS: Final = {"max_num_tokens": 256, "max_num_reqs": 4, "max_seq_len": 512}
NATIVE: Final = {"llama": "sdpa", "gpt_oss": "eager", "gemma2": "eager"}
"""The attention of transformers that each model has in bfloat16, sinks and soft cap included."""

_MAX_ERROR_RATIO: Final = 1.5
_SIGMAS: Final = 6.0


@frozen(eq=False)
class LogitRecorder:
    """
    The logits that an engine chose from.

    Attributes:
        rows: By request, the logits of each of its new tokens.
    """

    rows: dict[int, list[Tensor]] = field(factory=dict)

    @classmethod
    def attach(cls, monkeypatch: pytest.MonkeyPatch) -> LogitRecorder:
        """Return a recorder of all engines from now on."""
        recorder, sample = cls(), sampler.sample

        def record(logits: Tensor, requests: Sequence[Any]) -> Tensor:
            for row, request in zip(logits.detach().float().cpu(), requests, strict=True):
                recorder.rows.setdefault(request.id, []).append(row)
            return sample(logits, requests)

        monkeypatch.setattr(sampler, "sample", record)
        return recorder

    def take(self) -> list[Tensor]:
        """Return ``(new tokens, vocabulary)`` for each request of one engine in the order of submission, and clear."""
        found = [torch.stack(rows) for _, rows in sorted(self.rows.items())]
        self.rows.clear()
        return found


@frozen(eq=False)
class Reference:
    """
    A model's logits after given tokens.

    Attributes:
        exact: In float32, ``(new tokens, vocabulary)`` for each request.
        native: The same by transformers' own attention in the model's dtype.
    """

    exact: list[Tensor]
    native: list[Tensor]

    @classmethod
    def of(
        cls, model: Any, requests: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], *, attention: str = "eager"
    ) -> Reference:
        """
        Run a model after each of the tokens.

        Args:
            model: The model, with its own attention.
            requests: The prompts, as token ids.
            tokens: The new tokens of each.
            attention: The attention of transformers whose rounding is measured.
        """
        exact = deepcopy(model).float()
        exact.set_attn_implementation("eager")
        model.set_attn_implementation(attention)
        return cls(list(_forced(exact, requests, tokens)), list(_forced(model, requests, tokens)))

    @property
    def noise(self) -> float:
        """The RMS rounding error of a logit."""
        return _distance(self.native, self.exact)

    @property
    def least_margin(self) -> float:
        """The margin between two logits above which rounding does not decide."""
        return _SIGMAS * 2**0.5 * self.noise

    def decided(self) -> float:
        """Return the fraction of tokens that rounding does not decide."""
        best = torch.cat(self.exact).topk(2).values
        return float((best[:, 0] - best[:, 1] > self.least_margin).float().mean())


@frozen
class Accuracy:
    """
    The comparison of an engine's logits and tokens with a reference.

    Attributes:
        error_ratio: The RMS error of the engine's logits, in units of transformers' own.
        worst_margin: The largest margin of the reference's choice over the engine's, in units of `least_margin`.
        match_rate: The fraction of tokens that transformers' own attention would choose.
        decided: The fraction of tokens that rounding does not decide.
    """

    error_ratio: float
    worst_margin: float
    match_rate: float
    decided: float

    @classmethod
    def of(cls, reference: Reference, logits: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> Accuracy:
        """Compare the logits that an engine chose from, and its choices."""
        exact, chosen = torch.cat(reference.exact), torch.tensor([token for row in tokens for token in row])
        margins = exact.amax(-1) - exact.gather(-1, chosen[:, None])[:, 0]
        same = torch.cat(reference.native).argmax(-1) == chosen
        return cls(
            _distance(logits, reference.exact) / reference.noise,
            float(margins.max()) / reference.least_margin,
            float(same.float().mean()),
            reference.decided(),
        )

    def check(self) -> None:
        """
        Assert that rounding explains all differences.

        Raises:
            AssertionError: It does not, or it would explain anything.
        """
        assert self.decided >= 1 / 3, f"rounding decides most tokens of this model: {self}"
        assert self.worst_margin <= 1, f"a token was chosen that rounding does not explain: {self}"
        assert self.error_ratio <= _MAX_ERROR_RATIO, f"the logits have a larger error than rounding explains: {self}"


@torch.inference_mode()
def _forced(model: Any, requests: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    for prompt, new in zip(requests, tokens, strict=True):
        ids = torch.tensor([[*prompt, *new[:-1]]], device=model.device)
        yield model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return float((torch.cat(list(some)) - torch.cat(list(others))).square().mean().sqrt())


# --- models of real shapes on a GPU -------------------------------------------------------------------------------


@cache
def built(name: str) -> Any:
    """Return a model on the GPU, built once per process."""
    return build(name, device="cuda")


def free_models() -> None:
    """Free the memory of the models."""
    built.cache_clear()
    torch.cuda.empty_cache()


def generate(recorder: LogitRecorder, name: str, backend: str, *, graphs: bool) -> Accuracy:
    """Return the accuracy of a model generated through ``backend/variant`` alone."""
    model, requests = built(name), prompts(LENGTHS)
    with Engine(model, backend=backend, graphs=graphs, **LIMITS) as serving:
        tokens = serving.generate(requests, max_new_tokens=NEW, stop_tokens=())
        assert {selection.id for selection in serving.selections.values()} == {backend}
        assert (serving.why_eager is None) is graphs
        assert bool(serving.stats.replayed_steps) is graphs
    return Accuracy.of(Reference.of(model, requests, tokens, attention=NATIVE[name]), recorder.take(), tokens)


def check_accuracy(accuracy: Accuracy, record_property: Callable[[str, object], None]) -> None:
    """Assert that rounding explains all differences, and record the measured values."""
    record_property("tokens as by transformers in bfloat16", f"{100 * accuracy.match_rate:.1f} %")
    record_property("error of the logits in units of its", f"{accuracy.error_ratio:.2f}")
    record_property("tokens that rounding does not decide, all equal", f"{100 * accuracy.decided:.0f} %")
    accuracy.check()


# --- wrong attention, which the comparison must detect ------------------------------------------------------------


def no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give sinks no weight, as a backend that ignores them does."""
    _change_layers(monkeypatch, "sinks", lambda sinks: None if sinks is None else torch.full_like(sinks, -1e4))


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale scores by a further 1.25."""
    _change_layers(monkeypatch, "scale", lambda scale: 1.25 * scale)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore sliding windows."""
    _override(monkeypatch, "window", (-1, -1))


def no_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the soft cap of the logits."""
    _override(monkeypatch, "logits_soft_cap", None)


FAULTS: Final = (
    ("llama", wrong_scale),
    ("gpt_oss", no_sinks),
    ("gpt_oss", no_window),
    ("gemma2", no_window),
    ("gemma2", no_soft_cap),
)
"""Models, and a fault that changes the tokens of each."""


def _change_layers(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    monkeypatch.setattr(layers, "Layer", lambda **given: Layer(**given | {name: change(given[name])}))


def _override(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    construct = AttentionImpl.__init__

    @wraps(construct)  # core compares the signatures of plugins with this one's
    def construct_changed(made: AttentionImpl, *given: Any) -> None:
        construct(made, *given)
        setattr(made, name, value)

    monkeypatch.setattr(AttentionImpl, "__init__", construct_changed)
