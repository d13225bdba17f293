"""A step to measure: its requests, and the layer that they run through. No tensors yet."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from attnplug.request import Requirements


@frozen
class Step:
    """
    One step of an engine.

    Attributes:
        what: The step in words.
        query_lens: New tokens of each request, decodes first.
        cached_lens: Tokens of each request whose K/V are cached.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a head.
    """

    what: str
    query_lens: tuple[int, ...]
    cached_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def num_reqs(self) -> int:
        """Requests."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.query_lens)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys of each request, new ones included."""
        return tuple(new + old for new, old in zip(self.query_lens, self.cached_lens, strict=True))

    @property
    def is_decode(self) -> bool:
        """Whether every request has one new token."""
        return set(self.query_lens) == {1}

    @property
    def is_ragged(self) -> bool:
        """Whether requests differ in length."""
        return len(set(self.seq_lens)) > 1

    def requirements(self, dtype: str, **engine: Any) -> Requirements:
        """Return what the layer asks for; block size and layout are left to the negotiation."""
        return Requirements(
            head_size=self.head_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            dtype=dtype,
            **engine,
        )


def decodes(requests: int, length: int, **layer: int) -> Step:
    """Return a step in which all requests decode, each of the same length, the new token included."""
    return Step(
        f"decode, {requests} request{'s' * (requests > 1)} of {length} tokens",
        (1,) * requests,
        (length - 1,) * requests,
        **layer,
    )


def ragged_decodes(requests: int, shortest: int, longest: int, **layer: int) -> Step:
    """Return a step in which all requests decode, their lengths spread evenly between two."""
    spread = max(1, requests - 1)
    cached = tuple(shortest + (longest - shortest) * i // spread - 1 for i in range(requests))
    return Step(f"decode, {requests} requests of {shortest} to {longest} tokens", (1,) * requests, cached, **layer)


def first_prefills(requests: int, length: int, **layer: int) -> Step:
    """Return a step in which prompts of one length are computed whole."""
    return Step(
        f"first prefill, {requests} prompt{'s' * (requests > 1)} of {length} tokens",
        (length,) * requests,
        (0,) * requests,
        **layer,
    )


def mixed(decoding: int, length: int, prompts: int, prompt: int, **layer: int) -> Step:
    """Return a step in which some requests decode, and the prompts of others are computed."""
    return Step(
        f"{decoding} decodes of {length} tokens and {prompts} first prefills of {prompt}",
        (1,) * decoding + (prompt,) * prompts,
        (length - 1,) * decoding + (0,) * prompts,
        **layer,
    )
