"""The inputs of a step, and a profile run without KV caches."""

from __future__ import annotations

import torch

from attnplug.batching import BatchAssembler, positions_of
from attnplug_transformers.engine import Engine, Request
from attnplug_transformers.engine.runner import prepare
from attnplug_transformers.engine.schedule import ScheduledRequest, Step
from hosts.transformers.tests.engine.reference import reference

CPU = torch.device("cpu")


def scheduled(tokens, blocks, start, count):
    request = Request(id=0, tokens=tokens, max_new_tokens=5)
    request.blocks = blocks
    return ScheduledRequest(request, start, count, samples=start + count == len(tokens))


def test_requests_are_concatenated():
    decode = scheduled([10, 11, 12, 13, 14], [3, 7], 4, 1)
    last = scheduled([20, 21, 22, 23, 24, 25], [2, 5], 3, 3)
    first = scheduled(list(range(30, 40)), [1, 4, 6], 0, 2)

    inputs = prepare(Step((decode, last, first)), BatchAssembler(4), CPU)

    assert inputs.input_ids.tolist() == [[14, 23, 24, 25, 30, 31]]
    assert inputs.positions.tolist() == [[4, 3, 4, 5, 0, 1]]
    assert inputs.rows.tolist() == [0, 3]
    assert inputs.batch.slot_mapping.tolist() == [28, 11, 20, 21, 4, 5]
    assert inputs.batch.seq_lens.tolist() == [5, 6, 2]
    assert positions_of(inputs.batch).tolist() == inputs.positions[0].tolist()


def test_a_step_of_decodes_samples_every_row():
    inputs = prepare(Step((scheduled([1, 2], [1], 1, 1), scheduled([3], [2], 0, 1))), BatchAssembler(4), CPU)

    assert inputs.rows is None


def test_a_failed_step_leaves_nothing_in_the_next():
    assembler = BatchAssembler(4)
    good, bad = scheduled([1, 2], [1], 1, 1), scheduled([1, 2, 3, 4, 5], [1], 4, 1)  # it lacks a block

    for _ in range(2):
        try:
            prepare(Step((good, bad)), assembler, CPU)
        except ValueError:
            found = prepare(Step((good,)), assembler, CPU)

    assert found.batch.num_reqs == 1
    assert found.input_ids.tolist() == [[2]]


def test_a_profile_run_needs_no_kv_caches(host, monkeypatch):
    made = reference("gpt_oss")[0]
    engine = Engine(made, max_num_reqs=3)
    runner = engine._runner
    runner.free()
    seen = []
    watch = made.lm_head.register_forward_hook(lambda module, given, found: seen.append(tuple(found.shape)))

    runner.profile(40, 3, 32)

    watch.remove()
    engine.close()
    assert seen == [(1, 3, 257)]
