"""What one run of the model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_transformers.engine.request import Request


@frozen(eq=False)
class Scheduled:
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

    scheduled: tuple[Scheduled, ...]

    def __iter__(self) -> Iterator[Scheduled]:
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
