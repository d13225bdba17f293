"""Captures the forward of layers for a shape, replays it for scenes, and compares the results with the oracle's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import evolve
from torch import Tensor

from attnplug.contract import GraphShape, Limits, capture
from attnplug_kit.oracle.rounding import paged_tensors
from attnplug_kit.oracle.running import RunResult, SceneRunner, compare
from attnplug_kit.oracle.scene import CANARY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.contract import Batch, GraphBuffers, LoadedBackend, Metadata
    from attnplug_kit.oracle.scene import Paged, Scene


class ReplayRunner(SceneRunner):
    """
    A layer whose forward is captured for one shape, and replayed for scenes of that shape.

    On a CUDA device the forward is captured in a graph. Elsewhere it is called again with the metadata of the capture,
    and so it reads what a graph would read: the tensors and the numbers of that time. A host's own cache write is not
    part of it.

    Args:
        backend: Loaded for the requirements of the scenes, with a graph level.
        scenes: Batches whose cases differ in lengths only, padded to the rows of the shape.
        shape: The shape.
        prepares: Whether the graph prepares itself (`StepBuilder.prepare`).
        options: Layer and state, as for `SceneRunner`.

    Attributes:
        static: The tensors that the forward reads and writes.
        metadata: What the capture was built with.
    """

    static: Paged
    metadata: Metadata

    def __init__(
        self,
        backend: LoadedBackend,
        scenes: Sequence[Scene],
        shape: GraphShape,
        *,
        prepares: bool = False,
        **options: Any,
    ) -> None:
        most = shape.max_seq_len or 1024
        limits = Limits(max_num_reqs=shape.num_reqs, max_num_tokens=shape.num_tokens, max_seq_len=most)
        super().__init__(backend, scenes[0], limits=limits, **options)
        self._shape = shape
        self._prepares = prepares
        self.static = self.padded_call(max(scenes, key=lambda scene: scene.num_blocks))

    def padded_call(self, scene: Scene) -> Paged:
        """
        Return the arguments of a step, with the rows of the shape.

        Raises:
            AssertionError: The scene's case has other rows.
        """
        call, rows = scene.paged(self.backend, self.backend.device), self._shape.num_tokens
        if call.query.shape[0] != rows:
            raise AssertionError(
                f"the scene has {call.query.shape[0]} rows, and the captured shape {rows}: pad its case to as many"
            )
        return call

    def build_for_capture(self, graph: GraphBuffers, batch: Batch | None = None) -> None:
        """Build the metadata of the capture: of a dummy batch, or of the host's batch where it owns the inputs."""
        self.metadata = self.builder.build(graph.dummy_batch(self.builder) if batch is None else batch, graph=graph)

    def capture(self) -> tuple[GraphBuffers, Callable[[], object]]:
        """Capture the shape. Return its graph buffers, and what replays it."""
        with self.state.graph_capture(self._shape.num_reqs):
            graph = self.state.graph(self._shape)
            self.build_for_capture(graph)
            _, replay = capture(self.forward_captured, self.backend.device)
        return graph, replay

    def forward_captured(self) -> None:
        """Run what is captured."""
        if self._prepares:
            self.builder.prepare(self.metadata)
        call = self.static
        lse = call.lse if self.backend.agreement.requirements.return_lse else None
        rows = (call.query, call.key, call.value)
        self.impl.forward(*rows, call.cache, self.metadata, call.output, lse=lse, **call.selection)

    def place(self, call: Paged) -> None:
        """Copy the inputs of a step into the tensors that the graph reads."""
        _copy_inputs(call, self.static)

    def replayed(self, call: Paged, scene: Scene) -> RunResult:
        """
        Return the results of a replay, compared with the oracle's.

        Raises:
            AssertionError: They differ.
        """
        tokens, heads = scene.case.num_tokens, scene.case.num_q_heads
        output, lse = self.static.output[:tokens].clone(), self.static.lse[:tokens].clone()
        ran = RunResult(call, output.view(tokens, heads, -1), lse)
        compare(ran, self.backend, scene)
        if self._shape.query_len is not None:
            self._check_padding(tokens)
        return ran

    def _check_padding(self, tokens: int) -> None:
        """Check the rows of padded requests, which have a query and no key."""
        output, lse = self.static.output[tokens:], self.static.lse[tokens:]
        if not bool(output.isfinite().all()):
            raise AssertionError(
                "after a replay, output rows of padded requests are not finite: where all queries of a graph's shape "
                "have one length, a padded request has a query and no key, and a backend writes 0 into its rows"
            )
        if not self.backend.agreement.requirements.return_lse:
            return
        wrong, sinks = lse != -math.inf, self.impl.layer.sinks
        if sinks is not None and self.impl.lse_includes_sink:  # kernels that skip a request without keys skip its sink
            wrong &= ~torch.isclose(lse, sinks.to(lse).expand_as(lse))
        if bool(wrong.any()):
            raise AssertionError(
                f"after a replay, the LSE of a padded request is {float(lse[wrong][0]):.6g}: a row without a key has "
                "the LSE -inf, or its sink where that is counted"
            )


def check_replays(
    backend: LoadedBackend,
    scenes: Sequence[Scene],
    *,
    num_reqs: int,
    max_seq_len: int,
    num_tokens: int | None = None,
    prepares: bool = False,
) -> list[RunResult]:
    """
    Capture one shape, replay it for every scene with an eager step behind it, and compare each result with the oracle's
    (see `ReplayRunner`).

    Args:
        backend: Loaded for the requirements of the scenes, with a graph level.
        scenes: Batches whose cases differ in lengths only, padded to the rows of the captured shape.
        num_reqs: Requests of the captured shape.
        max_seq_len: The longest sequence of the captured shape.
        num_tokens: Query tokens of a shape for batches of any kind. None for the shape of uniform batches, in which
            all queries are as long as the first one (`padded_for`).
        prepares: Whether the graph prepares itself.

    Raises:
        AssertionError: A result differs.
    """
    query_len = scenes[0].case.query_lens[0]
    shape = GraphShape(num_reqs, num_tokens or num_reqs * query_len, None if num_tokens else query_len, max_seq_len)
    runner = ReplayRunner(backend, scenes, shape, prepares=prepares)
    calls = [runner.padded_call(scene) for scene in scenes]
    graph, replay = runner.capture()
    results = []
    for scene, call, between in zip(scenes, calls, (*scenes[1:], scenes[0]), strict=True):
        runner.place(call)
        runner.builder.build(call.batch, graph=graph)
        if backend.device.type == "cuda":
            torch.cuda.empty_cache()  # what the graph reads and nobody holds would be read all the same until then
        replay()
        results.append(runner.replayed(call, scene))
        eager = runner.padded_call(between)
        runner.forward(eager, runner.builder.build(eager.batch))
        runner.compare(eager, between, "an eager step between replays")
    return results


def check_shapes(backend: LoadedBackend, shapes: Sequence[GraphShape], scenes: Sequence[Sequence[Scene]]) -> None:
    """
    Capture shapes of one builder, replay them in turns, and compare each result with the oracle's.

    Args:
        backend: Loaded for the requirements of the scenes, with a graph level.
        shapes: The shapes, the largest first.
        scenes: The steps of each shape, padded to its rows.

    Raises:
        AssertionError: A result differs.
    """
    runners: list[ReplayRunner] = []
    for shape, steps in zip(shapes, scenes, strict=True):
        runner = ReplayRunner(backend, steps, shape, state=runners[0].state if runners else None)
        if runners:
            runner.impl, runner.builder = runners[0].impl, runners[0].builder
        runners.append(runner)
    captured = [runner.capture() for runner in runners]
    for step in range(max(map(len, scenes))):
        for runner, (graph, replay), steps in zip(runners, captured, scenes, strict=True):
            scene = steps[step % len(steps)]
            call = runner.padded_call(scene)
            runner.place(call)
            runner.builder.build(call.batch, graph=graph)
            replay()
            runner.replayed(call, scene)


def check_advanced_replays(backend: LoadedBackend, steps: Sequence[Scene], *, max_seq_len: int) -> None:
    """
    Capture the shape of decodes, build and replay the first step, advance its metadata for each later one and replay.

    Args:
        backend: Loaded for the requirements of the steps, with a graph level.
        steps: Steps with one new token in each request, as `step_of` returns them; without padding.
        max_seq_len: The longest sequence of the captured shape.

    Raises:
        AssertionError: A result differs.
    """
    requests = len(steps[0].case.query_lens)
    runner = ReplayRunner(backend, steps, GraphShape(requests, requests, 1, max_seq_len))
    graph, replay = runner.capture()
    metadata = None
    for step in steps:
        call = runner.padded_call(step)
        runner.place(call)
        if metadata is None:
            metadata = runner.builder.build(call.batch, graph=graph)
        else:
            metadata = runner.builder.advance_step(metadata)
        replay()
        runner.replayed(call, step)


def check_replays_without_build(backend: LoadedBackend, scenes: Sequence[Scene], *, max_seq_len: int) -> bool:
    """
    Capture a shape that reads a host's own tensors, write each scene into those on the device, replay, and compare.

    Args:
        backend: Loaded for the requirements of the scenes, with a graph level.
        scenes: Batches of equally many requests, whose queries all have one length.
        max_seq_len: The longest sequence of the captured shape.

    Returns:
        Whether the backend's builder says that it replays without a build; nothing is compared where it does not.

    Raises:
        AssertionError: A result differs.
    """
    case = scenes[0].case
    shape = GraphShape(len(case.query_lens), case.num_tokens, case.query_lens[0], max_seq_len)
    runner = ReplayRunner(backend, scenes, shape, prepares=True)
    if not runner.builder.replays_without_build:
        return False
    calls = [runner.padded_call(scene) for scene in scenes]
    batches = [call.batch for call in calls]
    columns = max(_table_of(batch).shape[1] for batch in batches)
    tables = [_widened(_table_of(batch), columns) for batch in batches]
    table = tables[0].clone()
    host = evolve(batches[0], block_table=table, block_table_cpu=table if table.device.type == "cpu" else None)
    with runner.state.graph_capture(shape.num_reqs):
        runner.build_for_capture(runner.state.graph(shape, host_owned_inputs=True), host)
        _, replay = capture(runner.forward_captured, backend.device)
    for scene, call, pages in zip(scenes, calls, tables, strict=True):
        runner.place(call)
        for mine, theirs in ((table, pages), (host.seq_lens, call.batch.seq_lens), (_slots(host), _slots(call.batch))):
            mine.copy_(theirs)
        replay()
        runner.replayed(call, scene)
    return True


def _table_of(batch: Batch) -> Tensor:
    return cast("Tensor", batch.block_table)


def _slots(batch: Batch) -> Tensor:
    return cast("Tensor", batch.slot_mapping)


def _widened(table: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, columns - table.shape[1]))


def check_shared_state(backends: Sequence[LoadedBackend], scenes: Sequence[Sequence[Scene]], shape: GraphShape) -> None:
    """
    Run layers of several agreements in one state: eager steps, and replays of one graph that holds all of them.

    All are built before any runs, as a host does it: what one agreement's build leaves in the state for its forwards
    outlives the builds of the others.

    Args:
        backends: One for each agreement, of one backend and variant.
        scenes: The steps of each agreement, padded to the rows of the shape.
        shape: The shape of the graph. Without a graph level only eager steps run.

    Raises:
        AssertionError: A result differs, or a step of the shape finds no graph.
    """
    runners: list[ReplayRunner] = []
    for backend, steps in zip(backends, scenes, strict=True):
        runners.append(ReplayRunner(backend, steps, shape, state=runners[0].state if runners else None))
    replay = None
    if runners[0].builder.graph_level != "never":
        with runners[0].state.graph_capture(shape.num_reqs):
            for runner in runners:
                runner.build_for_capture(runner.state.graph(shape))
            _, replay = capture(lambda: _forward_each(runners), backends[0].device)
    for step in zip(*scenes, strict=True):
        _run_each(runners, step)
        if replay is not None:
            _replay_each(runners, step, replay)


def _run_each(runners: Sequence[ReplayRunner], step: Sequence[Scene]) -> None:
    calls = [runner.padded_call(scene) for runner, scene in zip(runners, step, strict=True)]
    built = [runner.builder.build(call.batch) for runner, call in zip(runners, calls, strict=True)]
    for runner, call, metadata in zip(runners, calls, built, strict=True):
        runner.forward(call, metadata)
    for runner, call, scene in zip(runners, calls, step, strict=True):
        runner.compare(call, scene, "an eager step")


def _replay_each(runners: Sequence[ReplayRunner], step: Sequence[Scene], replay: Callable[[], object]) -> None:
    calls = [runner.padded_call(scene) for runner, scene in zip(runners, step, strict=True)]
    for runner, call in zip(runners, calls, strict=True):
        runner.place(call)
    batches = {runner.builder: call.batch for runner, call in zip(runners, calls, strict=True)}
    if runners[0].state.begin_forward(batches).graph is None:
        raise AssertionError("a step of the captured shape finds no graph")
    replay()
    for runner, call, scene in zip(runners, calls, step, strict=True):
        runner.replayed(call, scene)


def _forward_each(runners: Sequence[ReplayRunner]) -> None:
    for runner in runners:
        runner.forward_captured()


def _copy_inputs(call: Paged, static: Paged) -> None:
    """Copy a scene into the tensors that the graph reads: rows, and pages into the front of the largest cache."""
    static.output.fill_(CANARY)
    static.lse.fill_(CANARY)
    static.output[call.batch.num_actual_tokens :] = math.nan  # as uninitialized memory may be
    static.lse[call.batch.num_actual_tokens :] = math.nan
    selections = zip(static.selection.values(), call.selection.values(), strict=True)
    for mine, theirs in ((static.query, call.query), (static.key, call.key), (static.value, call.value), *selections):
        if mine is not None and theirs is not None:
            mine.copy_(theirs)
    for mine, theirs in zip(_pages(static.cache), _pages(call.cache), strict=True):
        mine[: theirs.shape[0]].copy_(theirs)
    if "v_scale" in static.cache and "value scale" not in paged_tensors(static.cache):  # those of a calibration
        static.cache["v_scale"].copy_(call.cache["v_scale"])


def _pages(cache: Any) -> list[Tensor]:
    """Return tensors with blocks first, those of narrow floats as bytes: torch copies no part of these."""
    tensors = paged_tensors(cache).values()
    return [tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors]
