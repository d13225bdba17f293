"""Graphs on the CPU: a step is captured, written again before each replay, and run from the captured tensors."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace as Names
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnplug
from attnplug.batching import SlotTable
from attnplug.contract import StepBuilder, capture
from attnplug.errors import LimitsError, NotNegotiatedError
from attnplug_sglang import steps
from hosts.sglang.tests.rig import ForwardMode, World, worst

if TYPE_CHECKING:
    from collections.abc import Callable

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
CLOSE = 1e-5
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
DRAFTS = len(TREE)


def padded(data: Any, rows: int) -> Any:
    """Return the data of a step with rows of padding behind."""
    return [tuple(torch.cat([t, torch.ones(rows, *t.shape[1:], dtype=t.dtype)]) for t in each) for each in data]


def tree_of(world: World, requests: list[int], *, chain: bool = False) -> tuple[Any, list[torch.Tensor] | None]:
    """Return SGLang's description of drafts, and the mask of each request."""
    if chain:
        return Names(custom_mask=None, draft_token_num=DRAFTS), None
    prefixes = [torch.ones(DRAFTS, world.requests[r]["length"], dtype=torch.bool) for r in requests]
    masks = [torch.cat([prefix, TREE], 1) for prefix in prefixes]
    flat = torch.cat([mask.flatten() for mask in masks] or [torch.ones(0, dtype=torch.bool)])
    # SGLang keeps a buffer for the longest sequences.
    spec = Names(custom_mask=torch.cat([flat, torch.ones(7, dtype=torch.bool)]), draft_token_num=DRAFTS)
    return spec, masks


def let_builders_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each replay be built, as for a backend that plans on the CPU."""
    monkeypatch.setattr(StepBuilder, "replays_without_build", False)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("options", [{}, {"swa": True}, {"sinks": True}, {"swa": True, "sinks": True, "cap": 5.0}])
@pytest.mark.parametrize("page", [1, 16])
def test_replays_of_padded_decodes(
    page: int, options: dict[str, Any], plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plans:
        let_builders_plan(monkeypatch)
    world = World(page, (20, -1), **options)
    backend = world.backend()
    requests = [world.new() for _ in range(3)]
    backend.init_cuda_graph_state(4, 4)
    assert world.step(backend, requests, [17, 33, 1], EXTEND) < CLOSE
    captured = {}
    for size in (4, 2):
        step = world.batch([], [], DECODE, pad=size)
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        backend.init_forward_metadata_in_graph(step)
        captured[size] = backend.forward_metadata
        world.run(backend, step, world.qkv(size))
    for count, size in ((3, 4), (2, 4), (2, 2), (1, 2), (0, 2), (3, 4)):  # a rank without requests replays, too
        chosen, lens = requests[:count], [1] * count
        step, data = world.batch(chosen, lens, DECODE, pad=size - count), world.qkv(count)
        backend.init_forward_metadata_out_graph(step)
        backend.forward_metadata = captured[size]  # what the graph has recorded
        backend.init_forward_metadata_in_graph(step)
        found = world.run(backend, step, padded(data, size - count))
        if chosen:
            assert worst(found, world.expected(chosen, lens, data)) < CLOSE
    assert world.step(backend, requests, [5, 1, 1], EXTEND) < CLOSE  # and eager steps go on


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("options", [{}, {"swa": True}, {"cap": 5.0}])
@pytest.mark.parametrize("page", [1, 16])
def test_drafts_are_verified_eagerly(page: int, options: dict[str, Any], chain: bool) -> None:
    world = World(page, (20, -1), **options)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    spec, masks = tree_of(world, [b, a], chain=chain)
    lens = [DRAFTS, DRAFTS]
    step, data = world.batch([b, a], lens, VERIFY, spec=spec), world.qkv(2 * DRAFTS)
    backend.init_forward_metadata(step)
    found = world.run(backend, step, data)
    assert worst(found, world.expected([b, a], lens, data, masks, commit=False)) < CLOSE
    if not chain:  # the mask matters
        assert worst(found, world.expected([b, a], lens, data, commit=False)) > CLOSE
    assert world.step(backend, [a, b], [1, 1], DECODE) < CLOSE  # rejected drafts are overwritten


class Recorded:
    """A graph over tensors of SGLang that never move: its attention, and what is prepared inside of it."""

    def __init__(self, world: World, backend: Any, size: int, *, drafts: int = 0) -> None:
        self.world, self.backend, self.rows = world, backend, size * max(drafts, 1)
        spec = Names(custom_mask=None, draft_token_num=drafts) if drafts else None
        self.step = world.batch([], [], VERIFY if drafts else DECODE, spec=spec, pad=size)
        self.step.out_cache_loc = torch.zeros(self.rows, dtype=torch.long)
        self.data = world.qkv(self.rows)
        backend.init_forward_metadata_out_graph(self.step, in_capture=True)
        metadata = backend.forward_metadata

        def forward() -> tuple[torch.Tensor, ...]:
            backend.forward_metadata = metadata
            backend.init_forward_metadata_in_graph(self.step)
            return tuple(world.run(backend, self.step, self.data))

        self.found, self._replay = capture(forward, torch.device("cpu"))

    def replay(self, requests: list[int]) -> None:
        """Replay decodes, or drafts, and compare with the oracle; nothing is launched ahead of the graph."""
        size = len(self.step.seq_lens)
        lens = [self.rows // size] * len(requests)
        given, data = self.batch(requests), self.world.qkv(sum(lens))
        self.fill(given)
        for into, values in zip(self.data, padded(data, self.rows - sum(lens)), strict=True):
            for tensor, value in zip(into, values, strict=True):
                tensor.copy_(value)
        with Operations() as operations:
            self.backend.init_forward_metadata_out_graph(given)
        assert not operations.count
        self._replay()
        if requests:
            commits = self.step.spec_info is None
            expected = self.world.expected(requests, lens, data, commit=commits)
            assert worst(list(self.found), expected) < CLOSE

    def batch(self, requests: list[int]) -> Any:
        """Return SGLang's step for a replay."""
        size, drafts = len(self.step.seq_lens), self.rows // len(self.step.seq_lens)
        pad, mode = size - len(requests), self.step.forward_mode
        return self.world.batch(requests, [drafts] * len(requests), mode, spec=self.step.spec_info, pad=pad)

    def fill(self, given: Any) -> None:
        """Write a step into SGLang's tensors, with slot 0 behind its tokens."""
        self.step.seq_lens.copy_(given.seq_lens)
        self.step.req_pool_indices.copy_(given.req_pool_indices)
        self.step.out_cache_loc.zero_()
        self.step.out_cache_loc[: len(given.out_cache_loc)].copy_(given.out_cache_loc)


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0
    is_paused = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.is_paused
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"swa": True}])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("drafts", [0, 3])
def test_graphs_prepare_their_replays(page: int, options: dict[str, Any], drafts: int) -> None:
    """All that a replay reads is computed inside of the graph, from SGLang's tensors: no length is read on the CPU."""
    world = World(page, (20, -1), **options)
    backend = world.backend()
    requests = [world.new() for _ in range(3)]
    backend.init_cuda_graph_state(4, 4 * max(drafts, 1))
    assert world.step(backend, requests, [17, 33, 1], EXTEND) < CLOSE
    graphs = [Recorded(world, backend, size, drafts=drafts) for size in (4, 2)]
    for graph, chosen in (
        (0, requests),
        (1, requests[:2]),
        (0, requests[1:]),
        (1, []),
        (1, requests[2:]),
        (0, requests),
    ):
        graphs[graph].replay(chosen)
    assert world.step(backend, requests, [5, 1, 1], EXTEND) < CLOSE
    graphs.append(Recorded(world, backend, 2, drafts=drafts))  # the shape again, as SGLang does for other outputs
    for graph in (0, 1, 2):
        graphs[graph].replay(requests[:2])


def test_a_size_that_was_not_captured_is_refused() -> None:
    world = World(1)
    backend = world.backend()
    backend.init_cuda_graph_state(4, 4)
    Recorded(world, backend, 4)
    with pytest.raises(LimitsError, match="num_reqs=3"):
        backend.init_forward_metadata_out_graph(world.batch([], [], DECODE, pad=3))


@pytest.mark.parametrize(("plans", "replay", "eager"), [(False, (7, 0), (96, 27)), (True, (107, 20), (96, 27))])
def test_what_a_step_of_64_requests_costs(
    plans: bool, replay: tuple[int, int], eager: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Python calls and operations of torch, those of core and of the backend included.

    Block table, lengths and slots count as one operation: on a GPU they are one launch.
    """
    write = SlotTable.write

    def written(*args: Any, **tensors: Any) -> None:
        Operations.is_paused = True
        write(*args, **tensors)
        Operations.is_paused = False
        torch.empty(0)

    monkeypatch.setattr(SlotTable, "write", written)
    if plans:
        let_builders_plan(monkeypatch)
    world = World(16, (-1, -1), rows=72, slots=16384)
    backend = world.backend()
    requests = [world.new() for _ in range(64)]
    for first in range(0, 64, 16):
        world.step(backend, requests[first : first + 16], [20] * 16, EXTEND)
    backend.init_cuda_graph_state(64, 64)
    graph = Recorded(world, backend, 64)
    given = graph.batch(requests)
    found = cost(lambda: backend.init_forward_metadata_out_graph(given))
    assert all(each <= most for each, most in zip(found, replay, strict=True)), found
    found = cost(lambda: backend.init_forward_metadata(given))
    assert all(each <= most for each, most in zip(found, eager, strict=True)), found


def cost(call: Callable[[], None]) -> tuple[int, int]:
    """Return the Python calls, and the operations of torch, of a call that was made before."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        del frame, argument
        calls += event == "call"

    for _ in range(2):
        call()
    before = sys.getprofile()
    gc.disable()  # finalizers of other tests are no calls of this one
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    with Operations() as operations:
        call()
    return calls - 1, operations.count


def test_lengths_that_no_backend_reads_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has none on the CPU then. The built-in backend is taken for another one here: core reads them for it."""
    monkeypatch.setattr(steps, "_reads_no_lengths", lambda agreement: agreement.reads_lengths)
    world = World(16, (20, -1), swa=True)
    backend = world.backend()
    assert not backend.needs_cpu_seq_lens
    requests = [world.new() for _ in range(3)]
    assert world.step(backend, requests, [17, 33, 1], EXTEND) < CLOSE
    monkeypatch.setattr("attnplug_sglang.backend.lengths_of", None)
    for lens in ([1, 1, 1], [1, 1]):
        assert world.step(backend, requests[: len(lens)], lens, DECODE, on_cpu=False) < CLOSE


def test_lengths_that_a_backend_or_a_tree_reads_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World(16).backend().needs_cpu_seq_lens  # the built-in backend plans eager steps with them
    monkeypatch.setattr(steps, "_reads_no_lengths", lambda agreement: agreement.reads_lengths)
    assert World(16, server={"speculative_eagle_topk": 4}).backend().needs_cpu_seq_lens


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_replays_of_padded_drafts(page: int, chain: bool) -> None:
    world = World(page, (20, -1))
    backend = world.backend()
    requests = [world.new() for _ in range(3)]
    backend.init_cuda_graph_state(4, 4 * DRAFTS)
    world.step(backend, requests, [17, 33, 1], EXTEND)
    spec, _ = tree_of(world, [], chain=chain)
    step = world.batch([], [], VERIFY, spec=spec, pad=4)
    step.out_cache_loc = torch.zeros(4 * DRAFTS, dtype=torch.long)
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    captured = backend.forward_metadata
    for count in (3, 1, 0, 2):
        chosen, lens = requests[:count], [DRAFTS] * count
        spec, masks = tree_of(world, chosen, chain=chain)
        step, data = world.batch(chosen, lens, VERIFY, spec=spec, pad=4 - count), world.qkv(count * DRAFTS)
        backend.init_forward_metadata_out_graph(step)
        backend.forward_metadata = captured
        found = world.run(backend, step, padded(data, (4 - count) * DRAFTS))
        if chosen:
            assert worst(found, world.expected(chosen, lens, data, masks, commit=False)) < CLOSE


def test_a_chain_has_no_mask_whatever_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes a mask for chains, too: a backend without masks verifies them all the same."""
    plan = attnplug.plan

    def refusing(requests: dict[str, attnplug.Requirements], *args: Any, **keywords: Any) -> attnplug.Plan:
        assert not any(each.custom_mask for each in requests.values())
        return plan(requests, *args, **keywords)

    monkeypatch.setattr(steps.attnplug, "plan", refusing)
    world = World(16)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    causal = [torch.ones(DRAFTS, n + DRAFTS, dtype=torch.bool).tril(n).flatten() for n in (33, 17)]
    spec = Names(custom_mask=torch.cat(causal), draft_token_num=DRAFTS, topk=1)
    lens = [DRAFTS, DRAFTS]
    step, data = world.batch([b, a], lens, VERIFY, spec=spec), world.qkv(2 * DRAFTS)
    backend.init_forward_metadata(step)
    expected = world.expected([b, a], lens, data, commit=False)
    assert worst(world.run(backend, step, data), expected) < CLOSE
    backend.init_cuda_graph_state(2, 2 * DRAFTS)
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    captured = backend.forward_metadata
    backend.init_forward_metadata_out_graph(step)
    backend.forward_metadata = captured
    assert worst(world.run(backend, step, data), expected) < CLOSE


def test_graphs_of_prefills_are_refused() -> None:
    world = World(1)
    backend = world.backend()
    with pytest.raises(NotNegotiatedError, match="captures a step of the mode EXTEND"):
        backend.init_forward_metadata_out_graph(world.batch([world.new()], [3], EXTEND), in_capture=True)


def test_a_draft_model_extends_by_what_was_accepted() -> None:
    world = World(16)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    step, data = world.batch([b, a], [3, 1], EXTEND), world.qkv(4)
    step.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    backend.init_forward_metadata(step)
    assert worst(world.run(backend, step, data), world.expected([b, a], [3, 1], data)) < CLOSE


@pytest.mark.parametrize(("drafts", "expected"), [(0, ("single_token_decode", 1)), (DRAFTS, ("uniform_batch", DRAFTS))])
def test_graphs_are_requested_once_sglang_has_some(drafts: int, expected: tuple[str, int]) -> None:
    world = World(16)
    backend = world.backend()
    name = "verify" if drafts else "extend"

    def requested() -> tuple[str, int]:
        groups = [group.selection.agreement.requirements for group in backend._kind(name, drafts).plan.groups]
        (found,) = {(each.cudagraph, each.decode_query_len) for each in groups}
        return found

    assert requested()[0] == "never"
    backend.init_cuda_graph_state(4, 4 * max(drafts, 1))
    assert requested() == expected


def test_what_is_prepared_in_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(StepBuilder, "prepare", lambda builder, metadata: prepared.append((builder, metadata)))
    world = World(16, (20, -1), swa=True)
    backend = world.backend()
    backend.init_cuda_graph_state(2, 2)
    step = world.batch([], [], DECODE, pad=2)
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    backend.init_forward_metadata_in_graph(step)
    assert prepared == list(backend.forward_metadata.metadata.items())
    assert len(prepared) == 2  # one for each pool
    backend.init_forward_metadata(world.batch([world.new()], [3], EXTEND))
    prepared.clear()
    backend.init_forward_metadata_in_graph(step)
    assert not prepared  # an eager step has nothing in a graph
