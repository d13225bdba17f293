"""Checks of kernels on a GPU that plugins share. The tests of a plugin choose variants and layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from attnplug.contract import Batch, GraphShape, Limits
from attnplug_kit.oracle import RunResult, SceneRunner, check, compare, materialize, run
from tests.backends.harness import (
    BLOCK,
    BUSY_CYCLES,
    CapturedForward,
    GraphHarness,
    Harness,
    no_synchronization,
    uncached,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import GraphBuffers, LoadedBackend
    from attnplug_kit.oracle import Case

    Load = Callable[..., LoadedBackend]


def check_graph_sizes(load: Load, variant: str, *, decode_query_len: int = 1, **requirements: Any) -> None:
    """Replay graphs of several sizes in any order, and compare each with an eager step."""
    harness = GraphHarness(load, variant, decode_query_len=decode_query_len, **requirements)
    with harness.state.graph_capture(8):
        captured = [
            CapturedForward(harness, GraphShape(size, size * decode_query_len, decode_query_len, 128))
            for size in (8, 4, 1)
        ]
    steps = ([30, 9, 100], [64], [17] * 8, [5, 6, 7, 8], [3], [99, 98], [128, 33, 16, 15, 70])
    for number, lens in enumerate(steps):
        batch = harness.batch([decode_query_len] * len(lens), lens, first_block=1 + 5 * number)
        step = harness.state.begin_forward({harness.builder: batch})
        one = next(found for found in captured if found.graph is step.graph)
        for tensor in one.rows:
            tensor.normal_()
        one.replay()
        tokens = batch.num_actual_tokens
        eager = harness.run_eager(uncached(batch), [row[:tokens] for row in one.rows])
        for replayed, expected in zip(one.outputs, eager, strict=True):
            torch.testing.assert_close(replayed[:tokens], expected, atol=2e-2, rtol=2e-2)


def check_build_does_not_synchronize(
    load: Load, variant: str, *, decode_query_len: int = 1, **requirements: Any
) -> None:
    """
    Build mixed and decode steps while the device is busy, without a synchronization.

    Decode steps are built into graph buffers as well, unless ``cudagraph="never"`` is requested.
    """
    harness = GraphHarness(load, variant, decode_query_len=decode_query_len, **requirements)
    mixed, decodes = harness.batch([1, 1, 20], [9, 100, 33]), harness.batch([decode_query_len] * 2, [100, 33])
    graph = None if requirements.get("cudagraph") == "never" else _built_graph(harness, decode_query_len)
    kept = [harness.builder.build(uncached(mixed)) for _ in range(3)]  # compiles, and allocates buffers
    kept.append(harness.builder.build(uncached(decodes)))
    torch.cuda._sleep(BUSY_CYCLES)
    with no_synchronization():
        for batch in (mixed, decodes):
            metadata = harness.builder.build(uncached(batch))
            harness.builder.update_block_table(metadata, batch.block_table, batch.slot_mapping)
            harness.builder.advance_step(metadata, prefills_to_decodes=True)
        if graph is None:
            return
        harness.builder.build(uncached(decodes), graph=graph)
        if decode_query_len == 1:
            harness.builder.advance_step(harness.builder.build(uncached(decodes), graph=graph))


def _built_graph(harness: GraphHarness, query_len: int) -> GraphBuffers:
    with harness.state.graph_capture(4):
        graph = harness.state.graph(GraphShape(4, 4 * query_len, query_len, 128))
        harness.builder.build(graph.dummy_batch(harness.builder), graph=graph)
    return graph


def check_forward_does_not_synchronize(load: Load, variant: str, **requirements: Any) -> None:
    """Run mixed and decode steps while the device is busy, without a synchronization."""
    harness = GraphHarness(load, variant, **{"cudagraph": "never", **requirements})
    heads = (harness.impls[0].num_q_heads, *(harness.impls[0].num_kv_heads,) * 2)
    batches = [harness.batch([1, 1, 20], [9, 100, 33]), harness.batch([1, 1], [100, 33])]
    rows = [[harness.rows(batch.num_actual_tokens, number) for number in heads] for batch in batches]
    first = [harness.run_eager(uncached(batch), found) for batch, found in zip(batches, rows, strict=True)]  # compiles
    torch.cuda._sleep(BUSY_CYCLES)
    with no_synchronization():
        second = [harness.run_eager(uncached(batch), found) for batch, found in zip(batches, rows, strict=True)]
    for outputs in zip(first[-1], second[-1], strict=True):
        torch.testing.assert_close(*outputs)


def check_cascade_does_not_synchronize(load: Load, variant: str, **requirements: Any) -> None:
    """Build a step with a shared prefix without a synchronization."""
    harness = Harness(load, variant=variant, cascade=True, head_size=128, **requirements)
    batch = harness.batch([1, 1, 20], [40, 36, 60])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)
    batch = uncached(batch, common_prefix_len=32, block_table_cpu=None)
    kept = [harness.builder.build(uncached(batch)) for _ in range(2)]
    with no_synchronization():
        harness.builder.build(uncached(batch))
    assert kept


def check_queued_steps(load: Load, variant: str, decodes: Case, **requirements: Any) -> None:
    """Queue builds and forwards behind long kernels: no build overwrites the buffers of an earlier one."""
    cases = [
        evolve(decodes, query_lens=(1,) * count + (11,), context_lens=(*range(7, 7 + 9 * count, 9), 5), seed=count)
        for count in range(1, 7)
    ]
    scenes = [materialize(case) for case in cases]
    backend = load(cases[0].requirements(return_lse=True, **requirements), variant)
    runner = SceneRunner(backend, scenes[0])
    calls = [runner.call(evolve(scene, scale=scenes[0].scale)) for scene in scenes]
    runner.forward(runner.call(scenes[0]), runner.builder.build(runner.call(scenes[0]).batch))  # compiles
    for call in calls:
        torch.cuda._sleep(BUSY_CYCLES)
        runner.forward(call, runner.builder.build(call.batch))
    torch.cuda.synchronize()
    for scene, call in zip(scenes, calls, strict=True):
        runner.compare(call, scene, f"{len(scene.case.query_lens)} requests")


def check_queued_replays(load: Load, variant: str, **requirements: Any) -> None:
    """Queue builds and replays of one graph behind long kernels: each replay reads the buffers of its build."""
    harness = GraphHarness(load, variant, **requirements)
    with harness.state.graph_capture(4):
        captured = CapturedForward(harness, GraphShape(4, 4, 1, 128))
    captured.rows[0].normal_()
    batches = [harness.batch([1] * len(lens), lens) for lens in ([100, 3], [7], [128, 64, 1, 9], [33, 32, 31])]

    def replayed(cycles: int) -> list[torch.Tensor]:
        """Return the outputs of every batch, each replayed behind a kernel of this many cycles."""
        found = []
        for batch in batches:
            torch.cuda._sleep(cycles)
            harness.builder.build(uncached(batch), graph=captured.graph)
            captured.replay()
            found += [output[: batch.num_actual_tokens].clone() for output in captured.outputs]
            if not cycles:
                torch.cuda.synchronize()
        return found

    replayed(0)  # writes the caches, so that the next two replays read the same
    alone, queued = replayed(0), replayed(BUSY_CYCLES)

    assert all(torch.equal(*pair) for pair in zip(alone, queued, strict=True))


def check_advanced_replays(load: Load, variant: str, **requirements: Any) -> None:
    """Advance a graph and an eager step by 40 tokens, into new blocks, and compare their outputs."""
    harness = GraphHarness(load, variant, **requirements)
    with harness.state.graph_capture(2):
        captured = CapturedForward(harness, GraphShape(2, 2, 1, 128))
    table = torch.arange(1, 17, dtype=torch.int32).view(2, 8)
    slots = torch.stack([table[0, 1] * BLOCK + 13, table[1, 0] * BLOCK + 14]).long()  # of the last of 30 and 15 tokens
    batch = Batch.from_lengths([1, 1], [30, 15], block_table=table, slot_mapping=slots, device=harness.backend.device)
    replayed, eager = harness.builder.build(batch, graph=captured.graph), harness.builder.build(uncached(batch))
    for _ in range(40):
        replayed, eager = harness.builder.advance_step(replayed), harness.builder.advance_step(eager)
        for rows in captured.rows:
            rows.normal_()
        captured.replay()
        expected = harness.run(eager, list(captured.rows))
        for outputs in zip(captured.outputs, expected, strict=True):
            torch.testing.assert_close(*outputs, atol=2e-2, rtol=2e-2)

    assert replayed.batch.seq_lens.tolist() == eager.batch.seq_lens.tolist() == [70, 55]


def check_after_inference_mode(load: Load, variant: str, **requirements: Any) -> None:
    """Build and run in inference mode, and then outside it."""
    harness = Harness(load, variant=variant, head_size=128, **requirements)
    with torch.inference_mode():
        outputs = [harness.forward(harness.builder.build(harness.batch([1, 20], [9, 33]))).clone()]
    outputs.append(harness.forward(harness.builder.build(harness.batch([1, 20], [9, 33]))))

    assert torch.equal(*outputs)


# --- single calls --------------------------------------------------------------------------------------------------


def check_lse_of_single_key(load: Load, variant: str, layer: Case) -> None:
    """Check that it equals the key's score: the logarithm is natural, and no sum has rounded it."""
    scene = materialize(evolve(layer, query_lens=(1, 1), context_lens=(0, 0)))
    group = layer.num_q_heads // layer.num_kv_heads
    ran = run(load(scene.case.requirements(return_lse=True), variant), scene)
    scores = torch.stack(
        [
            (query[0].double() * key[0].double().repeat_interleave(group, 0)).sum(-1) * scene.scale
            for query, key in zip(scene.queries, scene.keys, strict=True)
        ]
    )

    torch.testing.assert_close(ran.lse.cpu().double(), scores, atol=2e-2, rtol=1e-2)


def check_cascade(load: Load, variant: str, shared: Case) -> None:
    """Check a step with a shared prefix as a cascade, and as a plain step."""
    backend, scene = load(shared.requirements(return_lse=True), variant), materialize(shared)

    check(backend, scene)
    check(backend, evolve(scene, case=evolve(shared, common_prefix_len=0)))


def check_shared_state(load: Load, variant: str, layer: Case) -> None:
    """Build layers with different windows before either runs, as in models whose layers alternate."""
    scenes = [materialize(evolve(layer, sliding_window=window)) for window in (None, 9)]
    backends = [load(scene.case.requirements(return_lse=True), variant) for scene in scenes]
    state = backends[0].make_state(Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=512))
    calls = [scene.paged(backend, backend.device) for scene, backend in zip(scenes, backends, strict=True)]
    impls = [b.make_impl(s.layer(device=b.device)) for b, s in zip(backends, scenes, strict=True)]
    built = [
        backend.make_builder([impl], state).build(call.batch)
        for backend, impl, call in zip(backends, impls, calls, strict=True)
    ]
    for _ in range(2):
        for impl, call, metadata in zip(impls, calls, built, strict=True):
            impl.forward(call.query, call.key, call.value, call.cache, metadata, call.output, lse=call.lse)
    tokens, heads = layer.num_tokens, layer.num_q_heads
    for scene, backend, call in zip(scenes, backends, calls, strict=True):
        compare(RunResult(call, call.output[:tokens].view(tokens, heads, -1), call.lse[:tokens]), backend, scene)


def check_padded_requests(load: Load, variant: str, layer: Case) -> None:
    """Place requests without tokens before, between and after others."""
    for query_lens in ((0, 1, 1), (1, 0, 1), (1, 0, 40), (1, 40, 0), (0, 40, 0)):
        context = tuple(17 if length else 0 for length in query_lens)
        case = evolve(layer, query_lens=query_lens, context_lens=context)
        check(load(case.requirements(return_lse=True), variant), materialize(case))


def check_dense_calls(load: Load, variant: str, layer: Case) -> None:
    """Check contiguous K/V, with a causal mask and without."""
    for attn_type, causal in (("decoder", True), ("encoder_only", False)):
        case = evolve(layer, query_lens=(40, 1, 300), context_lens=(0, 0, 0), attn_type=attn_type, causal=causal)
        check(load(case.requirements(paged=False, return_lse=True), variant), materialize(case))


def check_profiling_run(load: Load, variant: str, *, computes: bool, **requirements: Any) -> None:
    """Run without metadata and KV cache. Whether the output is computed depends on the plugin."""
    harness = Harness(load, variant=variant, head_size=128, **requirements)
    rows = [torch.randn(50, heads, 128, device=harness.backend.device).bfloat16() for heads in (4, 2, 2)]
    output = rows[0].new_zeros(50, 512)
    harness.impls[0].forward(*rows, None, None, output)

    assert bool(output.any()) is computes


def check_strided_output(load: Load, variant: str, **requirements: Any) -> None:
    """Pass output and LSE as columns of wider tensors: only these columns are written."""
    harness = Harness(load, variant=variant, head_size=128, return_lse=True, **requirements)
    metadata = harness.builder.build(harness.batch([1, 5], [9, 5]))
    rows = [torch.randn(6, heads, 128, device=harness.backend.device).bfloat16() for heads in (4, 2, 2)]
    wide, sums = rows[0].new_zeros(6, 1024), rows[0].new_zeros(6, 8, dtype=torch.float32)
    plain, plain_sums = wide[:, :512].clone(), sums[:, :4].clone()
    cache = harness.backend.make_cache(8)
    for output, lse in ((wide[:, :512], sums[:, :4]), (plain, plain_sums)):
        harness.impls[0].forward(*rows, cache, metadata, output, lse=lse)

    assert torch.equal(wide[:, :512], plain)
    assert torch.equal(sums[:, :4], plain_sums)
    assert not wide[:, 512:].any()
    assert not sums[:, 4:].any()
