"""The limits of a host's batches, and the ranks that it runs on: plain data, no host-engine types."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import field, frozen

from attnplug.errors import LimitsError, shown
from attnplug.request.domains import GRAPH_LEVELS, MOST

if TYPE_CHECKING:
    from attnplug.negotiation.agreement import Agreement


def _to_sizes(sizes: Any) -> tuple[int, ...]:
    if isinstance(sizes, str) or not isinstance(sizes, (Sequence, AbstractSet)):
        _refuse("capture_sizes", sizes, "a list of token counts")
    return tuple(sorted(set(sizes))) if all(type(size) is int for size in sizes) else tuple(sizes)


@frozen(kw_only=True)
class Limits:
    """
    Upper bounds of every batch, for workspaces, staging buffers and graphs.

    Raises:
        LimitsError: A number is not positive, or contradicts another.

    Attributes:
        max_num_reqs: Requests per batch, padded ones included.
        max_num_tokens: Query tokens per batch.
        max_seq_len: Keys per request.
        num_blocks: Blocks of the cache, the null block 0 included; None before it is known.
        capture_sizes: Token counts of the batches that are captured in CUDA graphs, rising.
        cudagraph: The graph level that the host uses; None is the agreed one.
        max_num_splits: Most pieces that a kernel may cut one request's keys into; None is the library's own choice. It
            bounds what graphs hold memory for: beyond the largest of `capture_sizes`, and without any, a backend may
            cut keys into more of them, but for a bound of 1.
        batch_invariant: Whether results may not depend on what else is in the batch; None is as agreed.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_seq_len: int
    num_blocks: int | None = None
    capture_sizes: tuple[int, ...] = field(default=(), converter=_to_sizes)
    cudagraph: str | None = None
    max_num_splits: int | None = None
    batch_invariant: bool | None = None

    def __attrs_post_init__(self) -> None:
        _check_counts(self, "max_num_reqs", "max_num_tokens", "max_seq_len")
        if self.num_blocks is not None and (type(self.num_blocks) is not int or not 2 <= self.num_blocks <= MOST):
            expected = f"at least 2 and at most {MOST}: block 0 is a null block that no request gets"
            _refuse("num_blocks", self.num_blocks, expected)
        if self.max_num_splits is not None:
            _check_counts(self, "max_num_splits")
        if self.batch_invariant is not None and type(self.batch_invariant) is not bool:
            _refuse("batch_invariant", self.batch_invariant, "true or false, or None")
        if self.cudagraph is not None and not (isinstance(self.cudagraph, str) and self.cudagraph in GRAPH_LEVELS):
            _refuse("cudagraph", self.cudagraph, f"one of {', '.join(map(repr, GRAPH_LEVELS))}")
        if any(type(size) is not int or not 1 <= size <= self.max_num_tokens for size in self.capture_sizes):
            _refuse("capture_sizes", self.capture_sizes, f"token counts from 1 to max_num_tokens={self.max_num_tokens}")


@frozen(kw_only=True)
class Parallel:
    """
    The ranks that share this model.

    Raises:
        LimitsError: A size is not positive, or a rank is not below its size.

    Attributes:
        tp_rank: Rank in tensor parallelism.
        tp_size: Ranks of tensor parallelism.
        dcp_rank: Rank in decode context parallelism.
        dcp_size: Ranks of decode context parallelism.
        dcp_interleave: Consecutive tokens that one rank holds.
        dcp_group: The torch process group of the DCP ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    dcp_interleave: int = 1
    dcp_group: Any = field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        _check_counts(self, "tp_size", "dcp_size", "dcp_interleave")
        for kind in ("tp", "dcp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if type(rank) is not int or not 0 <= rank < size:
                _refuse(f"{kind}_rank", rank, f"a whole number from 0 to {size - 1}, below {kind}_size={size}")


# --- machinery ---


def check_limits(limits: Limits, parallel: Parallel, agreement: Agreement, *, supports_splits: bool) -> None:
    """
    Check that limits and ranks fit the agreement.

    Raises:
        LimitsError: They do not.
    """
    _check_graphs(limits, agreement)
    if limits.max_num_splits is not None and not supports_splits:
        raise LimitsError(
            f"max_num_splits={limits.max_num_splits} was given in the limits",
            f"{agreement.id} does not support a split-KV limit: its kernels choose the number of splits",
            "leave max_num_splits out, or select a backend with `supports_max_num_splits`",
        )
    requested = agreement.requirements
    if limits.batch_invariant and not requested.batch_invariant:
        raise LimitsError(
            "batch_invariant=True was given in the limits",
            "batch_invariant was not requested, so the chosen backend may not offer it",
            "select again with batch_invariant=True, or leave it out of the limits",
        )
    if parallel.dcp_size != requested.dcp_size:
        raise LimitsError(
            f"dcp_size={parallel.dcp_size} was given in Parallel",
            f"dcp_size={requested.dcp_size} was negotiated",
            f"select again with dcp_size={parallel.dcp_size}, or pass Parallel(dcp_size={requested.dcp_size}, ...)",
        )


def _check_graphs(limits: Limits, agreement: Agreement) -> None:
    agreed = agreement.cudagraph
    if limits.cudagraph is not None and GRAPH_LEVELS.index(limits.cudagraph) > GRAPH_LEVELS.index(agreed):
        raise LimitsError(
            f"cudagraph={limits.cudagraph!r} was given in the limits",
            f"{agreement.id} captures up to {agreed!r}",
            f"select again with cudagraph={limits.cudagraph!r}, or pass a level up to {agreed!r}",
        )
    if limits.capture_sizes and agreed == "never":
        raise LimitsError(
            f"capture_sizes={limits.capture_sizes} were given",
            f"{agreement.id} runs without CUDA graphs in this agreement",
            "select again with the cudagraph level that you need, or leave capture_sizes out",
        )


def _check_counts(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or not 1 <= value <= MOST:
            _refuse(name, value, f"a whole number from 1 to {MOST}")


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise LimitsError(f"{name}={shown(value)} was given", f"{name} is {expected}", f"pass another {name}")
