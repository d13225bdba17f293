"""Requests in any order, through the assembler: compared with `Batch.from_lengths`, and run on the built-in backend."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.batching import BatchAssembler, positions_of, request_rows
from attnplug.contract import PAD_SLOT_ID, Batch
from attnplug.request.device import Device
from attnplug_kit.oracle import CANARY, Case, SceneRunner, cases, limits_of, materialize

FEATURES = ("sliding_window", "attention_chunk", "sinks", "decode_query_len", "kv_cache_dtype")


def load(case):
    requested = case.requirements(block_size=case.block_size, return_lse=True)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def in_order(case, order):
    return evolve(
        case, **{name: tuple(getattr(case, name)[i] for i in order) for name in ("query_lens", "context_lens")}
    )


def num_freed(case, context):
    """Leading blocks without a key that the first query of a step attends to, by trying all keys."""
    left = case.sliding_window or context + 1
    chunk = case.attention_chunk or context + 1
    first = next(k for k in range(context + 1) if context - k < left and k // chunk == context // chunk)
    return first // case.block_size


class Requests:
    """The requests of a scene as a host has them, and the batch that they are."""

    def __init__(self, draw, scene):
        case, size = scene.case, scene.case.block_size
        self.case = case
        self.more_reqs = draw(st.integers(0, 2))
        self.blocks, self.write_from = [], []
        for row, (context, end) in enumerate(zip(case.context_lens, case.seq_lens, strict=True)):
            blocks = scene.block_table[row, : -(-end // size)].tolist()
            for column in range(draw(st.sampled_from([0, num_freed(case, context)]))):
                blocks[column] = 0
            self.blocks.append(blocks)
            self.write_from.append(draw(st.sampled_from([0, 0, context + 1, end])))
        self.slots = scene.slot_mapping.clone()
        self.positions = [p for c, e in zip(case.context_lens, case.seq_lens, strict=True) for p in range(c, e)]
        starts = [w for w, count in zip(self.write_from, case.query_lens, strict=True) for _ in range(count)]
        self.unwritten = [row for row, (p, w) in enumerate(zip(self.positions, starts, strict=True)) if p < w]
        self.slots[self.unwritten] = PAD_SLOT_ID

    def expected(self):
        width = max(map(len, self.blocks))
        rows = [row + [0] * (width - len(row)) for row in self.blocks] + [[0] * width] * self.more_reqs
        none = [0] * self.more_reqs
        return Batch.from_lengths(
            [*self.case.query_lens, *none],
            [*self.case.seq_lens, *none],
            block_table=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=self.slots,
        )

    def add(self, draw, assembler):
        """Add them in parts: one by one, as lists, or as arrays."""
        count = len(self.blocks)
        ends = sorted(draw(st.lists(st.integers(0, count), max_size=2)))
        for start, end in zip([0, *ends], [*ends, count], strict=True):
            part = slice(start, end)
            queries, cached = self.case.query_lens[part], self.case.context_lens[part]
            blocks, written = self.blocks[part], self.write_from[part]
            how = draw(st.sampled_from(["add", "lists", "arrays"])) if end > start else "add"
            if how == "add":
                for query, computed, row, position in zip(queries, cached, blocks, written, strict=True):
                    assembler.add(query, computed, row, write_from=position)
                continue
            if how == "arrays":
                width = max(map(len, blocks))
                blocks = np.array([row + [77] * (width - len(row)) for row in blocks], dtype=np.int32)
                queries, cached = torch.tensor(queries), np.array(cached)
            assembler.add_many(queries, cached, blocks, write_from=written)
        return assembler.finish(count + self.more_reqs, self.case.num_tokens + self.case.num_padding_tokens)


def assert_same(batch, expected):
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        for one in (name, f"{name}_cpu"):
            assert getattr(batch, one).dtype == getattr(expected, one).dtype, one
            assert getattr(batch, one).tolist() == getattr(expected, one).tolist(), one
    for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "num_padded_reqs"):
        assert getattr(batch, name) == getattr(expected, name), name


def run(scene, requests, batch, backend):
    """Run a batch on the scene's tensors; tokens that the batch does not write are cached before."""
    runner = SceneRunner(backend, scene, limits=evolve(limits_of(scene), max_num_reqs=batch.num_reqs))
    call, full = runner.call(scene), scene.paged(backend, written=True)
    slots = [int(scene.slot_mapping[row]) for row in requests.unwritten]
    for slot in slots:
        place = divmod(slot, scene.case.block_size)
        for pages, filled in ((call.cache.k, full.cache.k), (call.cache.v, full.cache.v)):
            pages[place] = filled[place]
    call = evolve(call, batch=batch)
    metadata = runner.builder.build(batch)
    runner.forward(call, metadata)
    runner.compare(call, scene, "assembled in any order")
    assert bool((call.output[scene.case.num_tokens :] == CANARY).all())
    return metadata


@settings(max_examples=60)
@given(st.data(), cases(features=FEATURES), st.sampled_from([0, 8]))
def test_any_order_gives_the_batch_and_the_results_of_the_oracle(data, case, few_requests):
    case = in_order(case, data.draw(st.permutations(range(len(case.query_lens)))))
    scene = materialize(case)
    backend = load(case)
    assembler = BatchAssembler.of(backend.agreement)
    requests = Requests(data.draw, scene)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_rows, "FEW_REQUESTS", few_requests)
        for _ in range(2):  # the second time with the rows of a step before
            batch = requests.add(data.draw, assembler)

            assert_same(batch, requests.expected())
            assert positions_of(batch).tolist() == requests.positions + [0] * case.num_padding_tokens

    metadata = run(scene, requests, batch, backend)
    decodes = list(takewhile(lambda count: count <= case.decode_query_len, case.query_lens))
    assert metadata.num_decode_tokens == sum(decodes)


@pytest.mark.parametrize("count", [3, 40])
def test_orders_of_the_same_requests_change_from_step_to_step(count):
    """The rows of a step are not those of the step before, and nothing of them is left."""
    assembler = BatchAssembler(4)
    requests = [(1 if row % 3 else 5, 3 + row % 5, [3 * row + 1, 3 * row + 2, 3 * row + 3]) for row in range(count)]
    for order in (range(count), range(count - 1, -1, -1), sorted(range(count), key=lambda row: row * 7 % count)):
        chosen = [requests[row] for row in order]
        for query_len, computed, blocks in chosen:
            assembler.add(query_len, computed, blocks)
        slots = [blocks[p // 4] * 4 + p % 4 for q, c, blocks in chosen for p in range(c, c + q)]

        batch = assembler.finish()

        assert batch.slot_mapping.tolist() == slots
        assert batch.query_start_loc.diff().tolist() == [query_len for query_len, *_ in chosen]


@pytest.mark.parametrize("kind", ["lists", "arrays"])
def test_a_decode_may_follow_a_prefill_of_an_earlier_call(kind):
    assembler = BatchAssembler(4)
    assembler.add(6, 0, [1, 2])
    blocks = [[3], [4, 5]] if kind == "lists" else torch.tensor([[3, 0], [4, 5]])

    assert assembler.add_many([1, 2], [2, 3], blocks) == range(1, 3)
    assert assembler.add(1, 0, [6]) == 3

    batch = assembler.finish()
    assert batch.query_start_loc.tolist() == [0, 6, 7, 9, 10]
    assert batch.slot_mapping.tolist() == [4, 5, 6, 7, 8, 9, 14, 19, 20, 24]
    assert (batch.max_query_len, batch.max_seq_len) == (6, 6)


def test_decodes_behind_a_prefill_count_as_prefills():
    """The result is that of the oracle; only the split counts fewer decodes."""
    case = Case(query_lens=(1, 9, 1, 1), context_lens=(17, 3, 40, 0), head_size=16)
    scene = materialize(case)
    backend = load(case)
    assembler = BatchAssembler.of(backend.agreement)
    for row in zip(case.query_lens, case.context_lens, scene.block_table, strict=True):
        assembler.add(row[0], row[1], row[2][: -(-sum(row[:2]) // case.block_size)].tolist())
    runner = SceneRunner(backend, scene)
    call = evolve(runner.call(scene), batch=assembler.finish())
    metadata = runner.builder.build(call.batch)
    runner.forward(call, metadata)

    runner.compare(call, scene, "decodes behind a prefill")
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 3)
