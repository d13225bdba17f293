"""The shape of a batch that is prepared ahead."""

from __future__ import annotations

from attrs import frozen

from attnplug.errors import LimitsError


@frozen
class GraphKey:
    """
    The shape of a batch that is prepared ahead, for warm-up and capture.

    Raises:
        LimitsError: A number is not positive, or contradicts another.

    Attributes:
        num_reqs: Requests, padded ones included.
        num_tokens: Query tokens, padded ones included.
        query_len: The query length that all requests share; None where they differ.
        max_seq_len: The longest sequence that a replay may have; None is the limits'. Where a kernel's work follows
            from it, a host may capture one batch size for several lengths.
    """

    num_reqs: int
    num_tokens: int
    query_len: int | None = None
    max_seq_len: int | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("num_reqs", "num_tokens", "query_len", "max_seq_len"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and (value is not None or name in {"num_reqs", "num_tokens"}):
                self._refuse(f"{name} is a whole number from 1 on")
        if self.num_tokens < self.num_reqs:
            self._refuse("each request has at least one token")
        if self.query_len is not None and self.num_tokens != self.num_reqs * self.query_len:
            self._refuse("where all queries have one length, num_tokens is num_reqs * query_len")
        if self.query_len is not None and self.max_seq_len is not None and self.max_seq_len < self.query_len:
            self._refuse("a sequence counts its query too: max_seq_len is at least query_len")

    @property
    def level(self) -> str:
        """The graph level that capturing this shape needs."""
        if self.query_len is None:
            return "always"
        return "single_token_decode" if self.query_len == 1 else "uniform_batch"

    def _refuse(self, allowed: str) -> None:
        raise LimitsError(f"{self} was given", allowed, "describe the shape of a batch, its padding included")
