"""The most that a host will ask for, and the ranks that it runs on: plain data, no host-engine types."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen


def _to_sizes(sizes: Any) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


@frozen(kw_only=True)
class Limits:
    """
    Upper bounds of every batch, for workspaces, staging buffers and graphs.

    Attributes:
        max_num_reqs: Requests per batch, padded ones included.
        max_num_tokens: Query tokens per batch.
        max_seq_len: Keys per request.
        num_blocks: Blocks of the cache, the null block 0 included; None before it is known.
        capture_sizes: Token counts of the batches that are captured in CUDA graphs, rising.
        cudagraph: The graph level that the host uses; None is the agreed one.
        max_num_splits: Most pieces that a kernel may cut one request's keys into; None is the library's own choice.
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


@frozen(kw_only=True)
class Parallel:
    """
    The ranks that share this model.

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
