"""The warm-up: one tiny step for each kernel, so that they are compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import Parallel, dummy_batch_of, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.contract import Batch, LoadedBackend
    from attnplug_blocksparse.backend import BlocksparseBackend


def run_warmup(backend: BlocksparseBackend, loaded: LoadedBackend) -> None:
    """Run decodes, and prefills with contiguous and with paged K/V, short and long."""
    warm_up(loaded, _batches(backend), parallel=_first_rank(backend))


def _first_rank(backend: BlocksparseBackend) -> Parallel:
    """Return the first of the ranks that hold the model's KV heads."""
    # Kernels take the rank as an argument: it is not compiled in.
    requested = backend.agreement.requirements
    total = dict(requested.block_sparse or {}).get("total_kv_heads") or requested.num_kv_heads
    return Parallel(tp_size=max(1, total // requested.num_kv_heads))


def _batches(backend: BlocksparseBackend) -> Iterator[Batch]:
    requested = backend.agreement.requirements
    if not requested.paged:
        yield dummy_batch_of(backend.agreement, backend.device, [2])
        return
    max_seqlen = int(dict(requested.block_sparse or {})["max_seqlen"])
    steps = []
    if "decode" in requested.phases:
        steps += [(1, length) for length in sorted({1, max_seqlen})]  # one split, and as many as there may be
    if "prefill" in requested.phases:
        steps += [(2, 2), (2, 3)]  # contiguous K/V, and with a token of context paged K/V
        long = backend.builder_class.min_single_launch
        steps += [(long, long)] if backend.has_tma else []
        steps += [(long, long + 1)] if backend.hopper_tiles is not None else []
    for query_len, seq_len in steps:
        if seq_len <= max_seqlen:
            yield dummy_batch_of(backend.agreement, backend.device, [query_len], [seq_len])
