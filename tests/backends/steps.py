"""What holds for steps one after another on a GPU, whichever plugin: its tests say for which layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from attnplug.contract import Batch, GraphShape
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.oracle import RunResult, materialize
from attnplug_kit.oracle.running import compare
from tests.backends.graphs import LONG, Captured, Graphs, again, nothing_waits
from tests.backends.setting import BLOCK, Setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Backend, GraphBuffers
    from attnplug_kit.oracle import Case

    Load = Callable[..., Backend]


def check_graphs_of_several_sizes(load: Load, variant: str, *, decode_query_len: int = 1, **asked: Any) -> None:
    """Replay graphs of several sizes in any order: each gives what the layers give without one."""
    setting = Graphs(load, variant, decode_query_len=decode_query_len, **asked)
    with setting.state.graph_capture(8):
        captured = [
            Captured(setting, GraphShape(size, size * decode_query_len, decode_query_len, 128)) for size in (8, 4, 1)
        ]
    steps = ([30, 9, 100], [64], [17] * 8, [5, 6, 7, 8], [3], [99, 98], [128, 33, 16, 15, 70])
    for number, lens in enumerate(steps):
        batch = setting.batch([decode_query_len] * len(lens), lens, first_block=1 + 5 * number)
        step = setting.state.begin_forward({setting.builder: batch})
        one = next(found for found in captured if found.graph is step.graph)
        for tensor in one.rows:
            tensor.normal_()
        one.replay()
        tokens = batch.num_actual_tokens
        eager = setting.eagerly(again(batch), [row[:tokens] for row in one.rows])
        for replayed, expected in zip(one.outputs, eager, strict=True):
            torch.testing.assert_close(replayed[:tokens], expected, atol=2e-2, rtol=2e-2)


def check_that_no_build_waits(load: Load, variant: str, *, decode_query_len: int = 1, **asked: Any) -> None:
    """
    Build mixed and decoding steps while the device is busy: nothing waits for it.

    Those that decode are built into a slot as well, unless ``cudagraph="never"`` is asked for.
    """
    setting = Graphs(load, variant, decode_query_len=decode_query_len, **asked)
    mixed, decodes = setting.batch([1, 1, 20], [9, 100, 33]), setting.batch([decode_query_len] * 2, [100, 33])
    graph = None if asked.get("cudagraph") == "never" else _used_slot(setting, decode_query_len)
    kept = [setting.builder.build(again(mixed)) for _ in range(3)]  # compiles, and makes what is kept
    kept.append(setting.builder.build(again(decodes)))
    torch.cuda._sleep(LONG)
    with nothing_waits():
        for batch in (mixed, decodes):
            metadata = setting.builder.build(again(batch))
            setting.builder.update_block_table(metadata, batch.block_table, batch.slot_mapping)
            setting.builder.advance_step(metadata, prefills_to_decodes=True)
        if graph is None:
            return
        setting.builder.build(again(decodes), graph=graph)
        if decode_query_len == 1:
            setting.builder.advance_step(setting.builder.build(again(decodes), graph=graph))


def _used_slot(setting: Graphs, query_len: int) -> GraphBuffers:
    with setting.state.graph_capture(4):
        graph = setting.state.graph(GraphShape(4, 4 * query_len, query_len, 128))
        setting.builder.build(graph.dummy_batch(setting.builder), graph=graph)
    return graph


def check_that_no_forward_waits(load: Load, variant: str, **asked: Any) -> None:
    """Run mixed and decoding steps while the device is busy: nothing waits for it."""
    setting = Graphs(load, variant, **{"cudagraph": "never", **asked})
    heads = (setting.impls[0].num_q_heads, *(setting.impls[0].num_kv_heads,) * 2)
    batches = [setting.batch([1, 1, 20], [9, 100, 33]), setting.batch([1, 1], [100, 33])]
    rows = [[setting.rows(batch.num_actual_tokens, number) for number in heads] for batch in batches]
    first = [setting.eagerly(again(batch), found) for batch, found in zip(batches, rows, strict=True)]  # compiles
    torch.cuda._sleep(LONG)
    with nothing_waits():
        second = [setting.eagerly(again(batch), found) for batch, found in zip(batches, rows, strict=True)]
    for outputs in zip(first[-1], second[-1], strict=True):
        torch.testing.assert_close(*outputs)


def check_that_no_cascade_waits(load: Load, variant: str, **asked: Any) -> None:
    """Build a step with a shared prefix: nothing waits for the device."""
    setting = Setting(load, variant=variant, cascade=True, head_size=128, **asked)
    batch = setting.batch([1, 1, 20], [40, 36, 60])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)
    batch = again(batch, common_prefix_len=32, block_table_cpu=None)
    kept = [setting.builder.build(again(batch)) for _ in range(2)]
    with nothing_waits():
        setting.builder.build(again(batch))
    assert kept


def check_steps_built_while_others_run(load: Load, variant: str, decodes: Case, **asked: Any) -> None:
    """Let each forward stand behind a kernel that takes long: nothing that a build left is overwritten by the next."""
    cases = [
        evolve(decodes, query_lens=(1,) * count + (11,), context_lens=(*range(7, 7 + 9 * count, 9), 5), seed=count)
        for count in range(1, 7)
    ]
    scenes = [materialize(case) for case in cases]
    backend = load(cases[0].requirements(return_lse=True, **asked), variant)
    rig = Rig(backend, scenes[0])
    calls = [rig.call(evolve(scene, scale=scenes[0].scale)) for scene in scenes]
    rig.forward(rig.call(scenes[0]), rig.builder.build(rig.call(scenes[0]).batch))  # compiles
    for call in calls:
        torch.cuda._sleep(LONG)
        rig.forward(call, rig.builder.build(call.batch))
    torch.cuda.synchronize()
    for scene, call in zip(scenes, calls, strict=True):
        tokens, heads = scene.case.num_tokens, scene.case.num_q_heads
        compare(RunResult(call, call.output[:tokens].view(tokens, heads, -1), call.lse[:tokens]), backend, scene)


def check_replays_built_while_others_run(load: Load, variant: str, **asked: Any) -> None:
    """Queue builds into a slot and replays behind long kernels: each replay computes from its own build."""
    setting = Graphs(load, variant, **asked)
    with setting.state.graph_capture(4):
        captured = Captured(setting, GraphShape(4, 4, 1, 128))
    captured.rows[0].normal_()
    batches = [setting.batch([1] * len(lens), lens) for lens in ([100, 3], [7], [128, 64, 1, 9], [33, 32, 31])]

    def replayed(cycles: int) -> list[torch.Tensor]:
        """Return the rows of every batch, replayed one after another behind a kernel that takes so long."""
        found = []
        for batch in batches:
            torch.cuda._sleep(cycles)
            setting.builder.build(again(batch), graph=captured.graph)
            captured.replay()
            found += [output[: batch.num_actual_tokens].clone() for output in captured.outputs]
            if not cycles:
                torch.cuda.synchronize()
        return found

    replayed(0)  # from now on the caches hold what each of them writes
    alone, queued = replayed(0), replayed(LONG)

    assert all(torch.equal(*pair) for pair in zip(alone, queued, strict=True))


def check_replays_of_advanced_steps(load: Load, variant: str, **asked: Any) -> None:
    """Advance a slot and an eager step side by side, into blocks that neither had before: both attend the same."""
    setting = Graphs(load, variant, **asked)
    with setting.state.graph_capture(2):
        captured = Captured(setting, GraphShape(2, 2, 1, 128))
    table = torch.arange(1, 17, dtype=torch.int32).view(2, 8)
    slots = torch.stack([table[0, 1] * BLOCK + 13, table[1, 0] * BLOCK + 14]).long()  # of the last of 30 and 15 tokens
    batch = Batch.from_lengths([1, 1], [30, 15], block_table=table, slot_mapping=slots, device=setting.backend.device)
    replayed, eager = setting.builder.build(batch, graph=captured.graph), setting.builder.build(again(batch))
    for _ in range(40):
        replayed, eager = setting.builder.advance_step(replayed), setting.builder.advance_step(eager)
        for rows in captured.rows:
            rows.normal_()
        captured.replay()
        expected = setting.run(eager, list(captured.rows))
        for outputs in zip(captured.outputs, expected, strict=True):
            torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)

    assert replayed.batch.seq_lens.tolist() == eager.batch.seq_lens.tolist() == [70, 55]


def check_what_inference_mode_leaves(load: Load, variant: str, **asked: Any) -> None:
    """Build and run under inference mode, and then outside of it."""
    setting = Setting(load, variant=variant, head_size=128, **asked)
    with torch.inference_mode():
        outputs = [setting.forward(setting.builder.build(setting.batch([1, 20], [9, 33]))).clone()]
    outputs.append(setting.forward(setting.builder.build(setting.batch([1, 20], [9, 33]))))

    assert torch.equal(*outputs)
