"""What one forward pass computes: its requests, and the tokens of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_transformers.engine.request import Request


@frozen(eq=False)
class ScheduledRequest:
    """
    The tokens of one request that a step computes.

    Attributes:
        request: The request; its `blocks` have a slot for each of the tokens.
        start: Position of the first token: the tokens before it are in the KV cache.
        num_new_tokens: Tokens to compute, at least 1.
        samples: Whether they end with the request's last token, so that its logits give the next one.
    """

    request: Request
    start: int
    num_new_tokens: int
    samples: bool

    @property
    def stop(self) -> int:
        """Tokens in the KV cache after the step, which is the sequence length of the step."""
        return self.start + self.num_new_tokens


@frozen(eq=False)
class Step:
    """
    The requests of one forward pass, those with a single new token first.

    Attributes:
        scheduled: One entry per request, at least one.
        follows: Of a step that was scheduled ahead: the index of each request in the `sampling` of the previous step,
            whose token it decodes. None for other steps.
    """

    scheduled: tuple[ScheduledRequest, ...]
    follows: tuple[int, ...] | None = None

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
        """The requests that get a token, in the order in which `Scheduler.finish_step` takes the tokens."""
        return [one.request for one in self.scheduled if one.samples]
