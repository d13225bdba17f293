"""Runs a scene as a replay: captured with a batch that stands in, then computed from what a build wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from attnplug.contract import GraphShape, Limits, capture
from attnplug_kit.oracle.byte_rounding import paged_tensors
from attnplug_kit.oracle.running import RunResult, compare
from attnplug_kit.oracle.scene import CANARY, Paged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import Backend
    from attnplug_kit.oracle.cases import Case
    from attnplug_kit.oracle.scene import Scene


def padded_for(case: Case, spare: int) -> Case:
    """Return a case of equally long queries with room for so many more requests in its rows."""
    return evolve(case, num_padding_tokens=spare * case.query_lens[0])


def check_replays(
    backend: Backend, scenes: Sequence[Scene], *, num_reqs: int, max_seq_len: int, num_tokens: int | None = None
) -> list[RunResult]:
    """
    Capture one shape, replay it for every scene, and assert that each result is the oracle's.

    On a CUDA device the forward is captured in a graph. Elsewhere it is called again with the metadata of the capture,
    which sees the same as a graph would: the tensors of that time, and its numbers.

    Args:
        backend: Loaded for the requirements of the scenes, with a graph level.
        scenes: Batches whose cases differ in lengths alone, and have room for the rows of the captured shape.
        num_reqs: Requests of the captured shape.
        max_seq_len: The longest sequence of the captured shape.
        num_tokens: Query tokens of a shape for batches of any kind; None is the shape of uniform batches, all of the
            query length of the first one (`padded_for`).

    Raises:
        AssertionError: A result is not the oracle's.
    """
    first, device = scenes[0], backend.device
    query_len = first.case.query_lens[0] if num_tokens is None else None
    key = GraphShape(num_reqs, num_tokens or num_reqs * first.case.query_lens[0], query_len, max_seq_len)
    impl = backend.make_impl(first.layer(device=device, scales=backend.impl_class.static_scales))
    limits = Limits(max_num_reqs=num_reqs, max_num_tokens=key.num_tokens, max_seq_len=max_seq_len)
    builder = backend.make_builder([impl], backend.make_state(limits))
    calls = [_roomy(scene, backend, key.num_tokens) for scene in scenes]
    static = _roomy(max(scenes, key=lambda scene: scene.num_blocks), backend, key.num_tokens)
    lse = static.lse if backend.agreement.requirements.return_lse else None
    keys = (static.key, static.value)
    with builder.state.graph_capture(num_reqs):
        graph = builder.state.graph(key)
        metadata = builder.build(graph.dummy_batch(), graph=graph)
        _, replay = capture(
            lambda: impl.forward(static.query, *keys, static.cache, metadata, static.output, lse=lse), device
        )
    results = []
    for scene, call in zip(scenes, calls, strict=True):
        _copy_inputs(call, static)
        builder.build(call.batch, graph=graph)
        replay()
        tokens, heads = scene.case.num_tokens, scene.case.num_q_heads
        ran = RunResult(call, static.output[:tokens].clone().view(tokens, heads, -1), static.lse[:tokens].clone())
        compare(ran, backend, scene)
        results.append(ran)
    return results


def _roomy(scene: Scene, backend: Backend, rows: int) -> Paged:
    call = scene.paged(backend, backend.device)
    if call.query.shape[0] != rows:
        raise AssertionError(
            f"a scene of {call.query.shape[0]} rows was given for {rows}: give its case that much padding"
        )
    return call


def _copy_inputs(call: Paged, static: Paged) -> None:
    """Put a scene where the graph reads: rows, and pages into the front of the largest cache."""
    static.output.fill_(CANARY)
    static.lse.fill_(CANARY)
    for mine, theirs in ((static.query, call.query), (static.key, call.key), (static.value, call.value)):
        if mine is not None and theirs is not None:
            mine.copy_(theirs)
    for mine, theirs in zip(_pages(static.cache), _pages(call.cache), strict=True):
        mine[: theirs.shape[0]].copy_(theirs)
    if isinstance(static.cache, Mapping) and isinstance(call.cache, Mapping) and "v_scale" in static.cache:
        static.cache["v_scale"].copy_(call.cache["v_scale"])


def _pages(cache: Any) -> list[torch.Tensor]:
    """Tensors with blocks first, as bytes where floats are narrow."""
    tensors = paged_tensors(cache).values()
    return [tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors]
