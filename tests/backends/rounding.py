"""
Whether an engine generates what a model does, in a dtype whose rounding may decide between two tokens.

What the engine has chosen is held against the model alone, token by token, each after the engine's own tokens before
it: a choice that rounding made leaves no trace in the next. The truth is the same model in float32, with the same
weights. How far rounding moves a logit is not guessed: it is how far transformers' own attention in bfloat16 is from
the truth.

- The engine's logits may be no farther from the truth than 1.5 times that, in the root mean square over all of them.
- Each token that the engine chose is the truth's choice, unless the truth has the two closer together than six such
  distances of two logits: rounding decides there, and transformers itself chooses either.
- At least a third of the tokens are chosen by more than that: the second point is not empty.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

_FARTHER: Final = 1.5
_SIGMAS: Final = 6.0


@frozen(eq=False)
class Recorder:
    """
    The logits that an engine chose from.

    Attributes:
        rows: By request, the logits of each of its new tokens.
    """

    rows: dict[int, list[Tensor]] = field(factory=dict)

    @classmethod
    def listening(cls, monkeypatch: pytest.MonkeyPatch) -> Recorder:
        """Return a recorder of all engines from now on."""
        from attnplug_transformers.engine import engine  # noqa: PLC0415 - beside its only use

        recorder, sample = cls(), engine.sample

        def listen(logits: Tensor, requests: Sequence[Any]) -> Tensor:
            for row, request in zip(logits.detach().float().cpu(), requests, strict=True):
                recorder.rows.setdefault(request.id, []).append(row)
            return sample(logits, requests)

        monkeypatch.setattr(engine, "sample", listen)
        return recorder

    def take(self) -> list[Tensor]:
        """Return ``(new tokens, vocabulary)`` for each request of one engine in the order of submission, and forget."""
        found = [torch.stack(rows) for _, rows in sorted(self.rows.items())]
        self.rows.clear()
        return found


@frozen(eq=False)
class Reference:
    """
    A model's logits after given tokens.

    Attributes:
        truth: In float32, ``(new tokens, vocabulary)`` for each request.
        theirs: The same by transformers' own attention in the model's dtype.
    """

    truth: list[Tensor]
    theirs: list[Tensor]

    @classmethod
    def of(
        cls, model: Any, asked: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], *, attention: str = "eager"
    ) -> Reference:
        """
        Run a model after each of the tokens.

        Args:
            model: The model, with its own attention.
            asked: The prompts.
            tokens: The new tokens of each.
            attention: The attention of transformers whose rounding is measured.
        """
        exact = deepcopy(model).float()
        exact.set_attn_implementation("eager")
        model.set_attn_implementation(attention)
        return cls(list(_forced(exact, asked, tokens)), list(_forced(model, asked, tokens)))

    @property
    def noise(self) -> float:
        """The root mean square of what rounding moves a logit."""
        return _distance(self.theirs, self.truth)

    @property
    def least_margin(self) -> float:
        """From which margin on rounding does not decide."""
        return _SIGMAS * 2**0.5 * self.noise

    def decided(self) -> float:
        """Return the share of tokens that rounding does not decide."""
        best = torch.cat(self.truth).topk(2).values
        return float((best[:, 0] - best[:, 1] > self.least_margin).float().mean())


@frozen
class Verdict:
    """
    How an engine compares.

    Attributes:
        farther: The distance of its logits from the truth, in units of transformers'.
        worst: The largest margin of the truth's choice over the engine's, in units of `Reference.least_margin`.
        same: The share of tokens that transformers' own attention would choose.
        decided: The share of tokens that rounding does not decide.
    """

    farther: float
    worst: float
    same: float
    decided: float

    @classmethod
    def of(cls, reference: Reference, logits: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> Verdict:
        """Compare the logits that an engine chose from, and its choices."""
        truth, chosen = torch.cat(reference.truth), torch.tensor([token for row in tokens for token in row])
        margins = truth.amax(-1) - truth.gather(-1, chosen[:, None])[:, 0]
        same = torch.cat(reference.theirs).argmax(-1) == chosen
        return cls(
            _distance(logits, reference.truth) / reference.noise,
            float(margins.max()) / reference.least_margin,
            float(same.float().mean()),
            reference.decided(),
        )

    def check(self) -> None:
        """
        Assert that rounding explains all that differs.

        Raises:
            AssertionError: It does not, or it would explain anything.
        """
        assert self.decided >= 1 / 3, f"rounding decides most tokens of this model: {self}"
        assert self.worst <= 1, f"a token was chosen that rounding does not explain: {self}"
        assert self.farther <= _FARTHER, f"the logits are farther from the truth than rounding takes them: {self}"


@torch.inference_mode()
def _forced(model: Any, asked: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    for prompt, new in zip(asked, tokens, strict=True):
        ids = torch.tensor([[*prompt, *new[:-1]]], device=model.device)
        yield model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return float((torch.cat(list(some)) - torch.cat(list(others))).square().mean().sqrt())
