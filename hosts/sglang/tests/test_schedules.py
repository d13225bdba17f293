"""Steps as SGLang's schedules give them: halves that take turns, ranks that pad, graphs that break at attention."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from attnplug.errors import BatchError
from hosts.sglang.tests.rig import ForwardMode, World, worst

EXTEND, DECODE, IDLE = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE
CLOSE = 1e-5
PREFILL_GRAPH = "sglang.srt.model_executor.runner_utils.prefill_graph"


def padded(data: Any, rows: int) -> Any:
    """Return the data of a step with rows of padding behind, whose keys would show wherever they are read."""
    return [tuple(torch.cat([t, t.new_full((rows, *t.shape[1:]), 9.0)]) for t in each) for each in data]


@pytest.mark.parametrize("mode", [EXTEND, DECODE])
def test_halves_of_a_batch_take_turns(mode: ForwardMode) -> None:
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend  # noqa: PLC0415 - the rig lets SGLang import

    world = World(16, (20, -1), swa=True, sinks=True)
    whole = TboAttnBackend.init_new(world.backend)
    a, b, c = world.new(), world.new(), world.new()
    assert world.step(whole.primary, [a, b, c], [17, 33, 9], EXTEND) < CLOSE
    halves = [([a], [1]), ([b, c], [1, 1])] if mode is DECODE else [([a], [21]), ([b, c], [3, 40])]
    steps = [world.batch(*half, mode) for half in halves]
    both = world.batch([a, b, c], [n for _, lens in halves for n in lens], mode)
    both.tbo_children = steps
    whole.init_forward_metadata(both)
    data = [world.qkv(sum(lens)) for _, lens in halves]
    found: list[list[torch.Tensor]] = [[], []]
    for i in range(len(world.layers)):  # each layer of both halves, before the next layer of either
        for half, child in enumerate(whole.children):
            found[half].append(world.call(i, child, steps[half], data[half][i]))
    for half, (requests, lens) in enumerate(halves):
        assert worst(found[half], world.expected(requests, lens, data[half])) < CLOSE


@pytest.mark.parametrize("swa", [False, True])
def test_what_sglang_changes_behind_a_prepared_decode(swa: bool) -> None:
    """The overlapped schedule prepares the next batch while this one runs: it writes lengths and the table of slots."""
    world = World(16, (20, -1), swa=swa)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    step, data = world.batch([b, a], [1, 1], DECODE), world.qkv(2)
    table = world.table.req_to_token.clone()
    backend.init_forward_metadata(step)
    world.table.req_to_token.zero_()
    for tensor in (step.seq_lens, step.seq_lens_cpu, step.req_pool_indices):
        tensor.fill_(7)
    found = world.run(backend, step, data)
    world.table.req_to_token.copy_(table)
    assert worst(found, world.expected([b, a], [1, 1], data)) < CLOSE


def test_a_rank_without_requests_extends_beside_others() -> None:
    """Ranks that run together need a step: SGLang makes up a request without slots, in row 0 of its table."""
    world = World(16, (20, -1), swa=True)
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [17], EXTEND)
    step = world.batch([], [], IDLE)
    step.forward_mode, step._original_forward_mode, step.batch_size = EXTEND, IDLE, 1
    step.req_pool_indices = torch.zeros(1, dtype=torch.long)
    step.seq_lens = step.seq_lens_cpu = step.extend_seq_lens = torch.tensor([24])
    step.extend_seq_lens_cpu, step.out_cache_loc = [24], torch.zeros(24, dtype=torch.long)
    pool = [buffer.clone() for part in (world.pool.full_kv_pool, world.pool.swa_kv_pool) for buffer in part.k_buffer]
    backend.init_forward_metadata(step)
    found = world.run(backend, step, world.qkv(24))
    assert [tuple(each.shape) for each in found] == [(24, 64), (24, 64)]
    assert not any(each.any() for each in found)
    written = [buffer for part in (world.pool.full_kv_pool, world.pool.swa_kv_pool) for buffer in part.k_buffer]
    assert all(torch.equal(now, before) for now, before in zip(written, pool, strict=True))
    assert world.step(backend, [a], [1], DECODE) < CLOSE


def test_tokens_of_padding_behind_an_extend() -> None:
    world = World(16, (20, -1), swa=True)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    step, data = world.batch([b, a], [5, 3], EXTEND), world.qkv(8)
    step.out_cache_loc = torch.cat([step.out_cache_loc, torch.zeros(4, dtype=torch.long)])
    backend.init_forward_metadata(step)
    found = world.run(backend, step, padded(data, 4))
    assert worst(found, world.expected([b, a], [5, 3], data)) < CLOSE
    assert not any(each[8:].any() for each in found)
    assert world.step(backend, [a, b], [1, 1], DECODE) < CLOSE


def test_requests_of_padding_behind_an_extend() -> None:
    """A rank's decodes are extends of a token where another rank extends; padding may have query tokens."""
    world = World(16, (20, -1))
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    step, data = world.batch([b, a], [1, 1], EXTEND), world.qkv(2)
    more = torch.zeros(2, dtype=torch.long)
    step.batch_size = 4
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
        setattr(step, name, torch.cat([getattr(step, name), more]))
    step.extend_seq_lens, step.extend_seq_lens_cpu = torch.tensor([1, 1, 4, 4]), [1, 1, 4, 4]
    backend.init_forward_metadata(step)
    found = world.run(backend, step, padded(data, 2))
    assert worst(found, world.expected([b, a], [1, 1], data)) < CLOSE


@pytest.mark.skipif(find_spec(PREFILL_GRAPH) is None, reason="this version of SGLang has another prefill graph")
def test_a_prefill_graph_that_breaks_at_attention() -> None:
    """SGLang's default on CUDA: graphs of what is between layers of attention, which run eagerly on the real tokens."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (  # noqa: PLC0415 - likewise
        enable_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch  # noqa: PLC0415 - likewise
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope  # noqa: PLC0415 - likewise

    world = World(16, (20, -1), swa=True, sinks=True)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    step, data = world.batch([b, a], [5, 3], EXTEND), world.qkv(8)
    step.global_num_token_non_padded_cpu = 8
    backend.init_forward_metadata(step)
    with ExitStack() as scopes:
        scopes.enter_context(enable_breakable_cuda_graph())
        scopes.enter_context(prefill_graph_scope(full_graph=False, raw_num_tokens=8))
        scopes.enter_context(set_forward_batch(step))
        found = world.run(backend, step, padded(data, 8))
    assert worst(found, world.expected([b, a], [5, 3], data)) < CLOSE
    assert not any(each[8:].any() for each in found)
    assert world.step(backend, [a, b], [1, 1], DECODE) < CLOSE


@pytest.mark.parametrize("more", [1, 500])
def test_a_request_that_is_made_up_to_capture_prefills(more: int) -> None:
    """SGLang captures a prefill of a whole chunk, as one request: a model of a short context has no such sequence."""
    world = World(16, (20, -1), swa=True, sinks=True)
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [17], EXTEND)
    tokens = world.table.req_to_token.shape[1] + more
    step = world.batch([], [], EXTEND)
    step.batch_size, step.req_pool_indices = 1, torch.zeros(1, dtype=torch.long)
    step.seq_lens = step.seq_lens_cpu = step.extend_seq_lens = step.extend_seq_lens_cpu = torch.tensor([tokens])
    step.out_cache_loc = torch.zeros(tokens, dtype=torch.long)
    pool = [buffer.clone() for part in (world.pool.full_kv_pool, world.pool.swa_kv_pool) for buffer in part.k_buffer]
    backend.init_forward_metadata(step)
    found = world.run(backend, step, world.qkv(tokens))
    assert [tuple(each.shape) for each in found] == [(tokens, 64), (tokens, 64)]
    assert not any(each.any() for each in found)
    written = [buffer for part in (world.pool.full_kv_pool, world.pool.swa_kv_pool) for buffer in part.k_buffer]
    assert all(torch.equal(now, before) for now, before in zip(written, pool, strict=True))
    assert world.step(backend, [a], [1], DECODE) < CLOSE


def test_a_sequence_that_is_too_long_is_refused_where_it_has_slots() -> None:
    world = World(16)
    backend = world.backend()
    tokens = world.table.req_to_token.shape[1] + 1
    step = world.batch([], [], EXTEND)
    step.batch_size, step.req_pool_indices = 1, torch.ones(1, dtype=torch.long)
    step.seq_lens = step.seq_lens_cpu = step.extend_seq_lens = step.extend_seq_lens_cpu = torch.tensor([tokens])
    step.out_cache_loc = torch.arange(tokens)
    with pytest.raises(BatchError, match=str(tokens)):
        backend.init_forward_metadata(step)
