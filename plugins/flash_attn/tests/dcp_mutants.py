"""Sequences that are spread over ranks, computed wrongly: each mutant has one mistake, by name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from attrs import evolve

from attnplug.ops.ranks import Ranks, split_heads
from attnplug_flash_attn import dcp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@contextmanager
def active(name: str | None) -> Iterator[None]:
    """Make the mistake while the body runs; None makes none."""
    if name is None:
        yield
        return
    with patch.object(*MUTANTS[name]):
        yield


_combine, _local_lens, _context, _attend_context = dcp.combine, dcp.local_lens, dcp._context, dcp._attend_context


def _unscaled(out: Tensor, lse: Tensor, ranks: Ranks, kv_heads: int, **rest: Any) -> tuple[Tensor, Tensor]:
    """Ranks add up what they have, as if all weights were 1."""
    _, total = _combine(out, lse, ranks, kv_heads, **rest)
    share = torch.where((lse > -torch.inf).unsqueeze(-1), out.float(), 0.0)
    return ranks.reduce_scatter(split_heads(share, ranks.size, kv_heads).contiguous()), total


def _own_sum(out: Tensor, lse: Tensor, ranks: Ranks, kv_heads: int, **rest: Any) -> tuple[Tensor, Tensor]:
    """The LSE is that of this rank's keys."""
    found, _ = _combine(out, lse, ranks, kv_heads, **rest)
    return found, split_heads(lse, ranks.size, kv_heads)[ranks.rank]


def _with_new_tokens(builder: Any, batch: Any, *rest: Any) -> Any:
    """The new tokens count as cached, too."""
    right = _context(builder, batch, *rest)
    lens = dcp.local_lens(batch.seq_lens, builder.parallel)
    return evolve(right, seqused_k=lens, max_seqlen_k=right.max_seqlen_k + batch.max_query_len)


def _with_sink(*given: Any) -> tuple[Tensor, Tensor]:
    """The pass over cached tokens counts the sink, too."""
    out, lse = _attend_context(*given)
    total = torch.logaddexp(lse, given[-1].sinks)
    return out * (lse - total).exp().unsqueeze(-1), total


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "weights of 1": (dcp, "combine", _unscaled),
    "a rank's own LSE": (dcp, "combine", _own_sum),
    "no sum over ranks": (Ranks, "reduce_scatter", lambda self, parts, **_: parts[self.rank]),
    "rank after rank": (dcp, "gather_heads", lambda heads, _: heads.movedim(0, 1).flatten(1, 2)),
    "a causal mask over places": (dcp, "_context", lambda *given: evolve(_context(*given), causal=True)),
    "all cached": (dcp, "_context", _with_new_tokens),
    "the last token of a share left out": (dcp, "local_lens", lambda *given: (_local_lens(*given) - 1).clamp(min=0)),
    "the sink on both sides": (dcp, "_attend_context", _with_sink),
}
