"""
A prefix that all requests share is attended once: all query rows of the batch against it, as if they were one request.

What follows the prefix is attended request by request, and the two are merged by their LSEs. That is exact: no query
stands before the end of the prefix, and none sees more of it than another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import evolve

from attnplug.ops.merge import merge_attention_states
from attnplug.torch_backend.grouping import Span
from attnplug.torch_backend.results import Results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.torch_backend.shape import Shape


def prefix_span(batch: Batch, spans: Sequence[Span]) -> Span:
    """Return the prefix as one request of all query rows, in the blocks of the first request that has any."""
    rows, keys = batch.num_actual_tokens, batch.common_prefix_len
    return Span(spans[0].request, rows, keys, first_row=0, first_key=0, fresh=False)


def prefix_shape(shape: Shape) -> Shape:
    """Return what planning has to know of the prefix: every row sees every key."""
    return evolve(shape, causal=False, window=(-1, -1))


def behind(prefix: int, spans: Sequence[Span]) -> list[Span]:
    """Return spans that were found without the prefix, where they stand in their requests."""
    return [evolve(span, first_key=span.first_key + prefix) for span in spans]


def pass_of(results: Results, rows: int, sinks: Tensor | None) -> Results:
    """Return room for one pass, in float32: what is merged is rounded once. A sink enters one of the passes alone."""
    shape, device = (rows, *results.output.shape[1:]), results.output.device
    output = torch.empty(shape, dtype=torch.float32, device=device)
    return Results(output, torch.empty(shape[:-1], dtype=torch.float32, device=device), sinks)


def merge(results: Results, prefix: Results, rest: Results) -> None:
    """Write what two passes give together."""
    rows = prefix.output.shape[0]
    states = [part.flatten(1, 2) for pair in (prefix, rest) for part in (pair.output, pair.lse) if part is not None]
    output, lse = merge_attention_states(*states, sink_in_b=rest.sinks is not None)
    results.output[:rows].copy_(output.view(prefix.output.shape))
    if results.lse is not None:
        results.lse[:rows].copy_(lse.view(rows, *results.lse.shape[1:]))
