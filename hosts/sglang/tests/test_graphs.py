"""Graphs on the CPU: a step is captured, written again before each replay, and run from the captured tensors."""

from __future__ import annotations

from types import SimpleNamespace as Names
from typing import Any

import pytest
import torch

import attnplug
from attnplug.contract import StepBuilder
from attnplug.errors import NotNegotiatedError
from attnplug_sglang import steps
from hosts.sglang.tests.rig import ForwardMode, World, worst

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


@pytest.mark.parametrize("options", [{}, {"swa": True}, {"sinks": True}, {"swa": True, "sinks": True, "cap": 5.0}])
@pytest.mark.parametrize("page", [1, 16])
def test_replays_of_padded_decodes(page: int, options: dict[str, Any]) -> None:
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
