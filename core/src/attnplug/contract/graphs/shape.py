"""The shape of a batch that a graph is captured for."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attrs import frozen

from attnplug.contract.inputs.phase import BatchSplit
from attnplug.errors import LimitsError, shown
from attnplug.request.domains import GRAPH_LEVELS, MOST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.requirements import Requirements


@frozen(cache_hash=True)  # each build looks for its buffers
class GraphShape:
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
            may_be_none = name not in {"num_reqs", "num_tokens"}
            if not (type(value) is int and 1 <= value <= MOST) and not (value is None and may_be_none):
                self._refuse(f"{name} is a whole number from 1 to {MOST}")
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

    def _refuse(self, expected: str) -> None:
        raise LimitsError(f"{shown(self)} was given", expected, "describe the shape of a batch, its padding included")


def split_of_shape(key: GraphShape, split: BatchSplit, batch: Batch, requested: Requirements) -> BatchSplit:
    """
    Return the split of a graph's shape, which is the same for every batch that runs in it.

    Args:
        key: The shape.
        split: The split of the batch before it was padded.
        batch: The batch as the graph sees it.
        requested: The requirements of the agreement.
    """
    decodes = key.query_len is not None and key.query_len <= requested.decode_query_len
    return BatchSplit(
        batch=batch,
        num_decodes=key.num_reqs if decodes else 0,
        num_prefills=0 if decodes else key.num_reqs,
        num_decode_tokens=key.num_tokens if decodes else 0,
        num_prefill_tokens=0 if decodes else key.num_tokens,
        num_key_rows=0 if requested.attn_type == "encoder_decoder" else key.num_tokens,
        highest_block=split.highest_block,
    )


def graph_level(agreement: Agreement, limits: Limits) -> str:
    """Return the level that graphs are used at: the agreed one, or less where the engine said so."""
    return agreement.cudagraph if limits.cudagraph is None else limits.cudagraph


def runs_at(level: str, query_len: int | None, decode_query_len: int) -> bool:
    """
    Whether a graph level covers a batch. Padded requests, of query length 0, count for nothing.

    Args:
        level: The graph level.
        query_len: The query length of all its requests; None where they differ.
        decode_query_len: The longest query of a decode.
    """
    if level in {"never", "always"}:
        return level == "always"
    return query_len is not None and query_len <= (1 if level == "single_token_decode" else decode_query_len)


def allows_graphs(agreements: Iterable[Agreement], limits: Limits) -> bool:
    """Whether any of these agreements, which share a state, has graphs."""
    return any(graph_level(agreement, limits) != "never" for agreement in agreements)


def check_key(key: GraphShape, agreements: Iterable[Agreement], limits: Limits, max_batch_size: int) -> None:
    """
    Check a shape that is to be captured.

    Args:
        key: The shape.
        agreements: Those that share the state. One that allows it is enough: `build` checks each builder's.
        limits: How large batches become.
        max_batch_size: Most requests of a captured batch.

    Raises:
        LimitsError: No agreement allows it, or it is larger than the limits.
    """
    objections = [_objection(key, agreement, limits) for agreement in agreements]
    if None not in objections:
        _refuse(key, cast("str", objections[0]))
    for name, given, most in (
        ("max_batch_size", key.num_reqs, max_batch_size),
        ("max_num_tokens", key.num_tokens, limits.max_num_tokens),
        ("max_seq_len", key.max_seq_len or 1, limits.max_seq_len),
    ):
        if given > most:
            _refuse(key, f"{name}={most}")


def _objection(key: GraphShape, agreement: Agreement, limits: Limits) -> str | None:
    """Return why an agreement does not allow a shape; None where it does."""
    level, requested = graph_level(agreement, limits), agreement.requirements
    if GRAPH_LEVELS.index(key.level) > GRAPH_LEVELS.index(level):
        return f"it needs the graph level {key.level!r}, and {level!r} is in use"
    if key.query_len is not None and level != "always" and key.query_len > requested.decode_query_len:
        return f"decode_query_len={requested.decode_query_len} was negotiated"
    return None


def _refuse(key: GraphShape, expected: str) -> None:
    raise LimitsError(
        f"graph buffers for {key} were requested",
        expected,
        "request a smaller shape, or select and set limits for larger ones",
    )
