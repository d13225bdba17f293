"""Steps one after another on a GPU: nothing waits, nothing is overwritten too early, graphs replay what was built."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve

from attnplug.contract import Batch, GraphKey, Layer, capture
from attnplug.testing import Case, Ran, check_replays, padded_for, realise
from attnplug.testing.kit.rig import Rig
from attnplug.testing.running import compare
from plugins.flashinfer.tests.real import VARIANTS
from tests.backends.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

KERNELS = ("cuda_cores", "tensor_cores")
DECODES = Case(query_lens=(1, 1, 1), context_lens=(300, 0, 17), num_q_heads=8, head_size=128, dtype="bfloat16")
LONG = 40_000_000  # cycles of a kernel that does nothing: tens of milliseconds


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def again(batch: Batch, **changed) -> Batch:
    """Return the batch without what earlier builds derived from it."""
    return Batch(**{**batch.to_dict(), **changed})


def captured(setting: Setting, key: GraphKey):
    """Capture a forward of every layer, and return the slot, its tensors and the replay."""
    asked = setting.backend.agreement.requirements
    query, rows, values = (
        torch.zeros(key.num_tokens, heads, asked.head_size, dtype=torch.bfloat16, device="cuda")
        for heads in (asked.num_q_heads, asked.num_kv_heads, asked.num_kv_heads)
    )
    slot = setting.state.slot(key)
    metadata = setting.builder.build(slot.dummy_batch(setting.builder), slot=slot)
    outputs = [query.new_zeros(key.num_tokens, impl.output_width) for impl in setting.impls]
    caches = setting.caches

    def forward() -> None:
        for impl, cache, output in zip(setting.impls, caches, outputs, strict=True):
            impl.forward(query, rows, values, cache, metadata, output)

    _, replay = capture(forward, torch.device("cuda"))
    return slot, (query, rows, values), outputs, replay


class Graphs(Setting):
    """Layers with different scales, each with a cache that outlives the steps."""

    def __init__(self, load, variant, **asked) -> None:
        sinks = torch.linspace(-1, 1, 8, device="cuda") if asked.get("sinks") else None
        layers = [Layer(name=f"layers.{i}", scale=0.05 * (i + 1), sinks=sinks) for i in range(2)]
        asked = {"head_size": 128, "num_q_heads": 8, **asked}
        super().__init__(load, layers, variant, cudagraph="uniform_batch", **asked)
        self.caches = [self.backend.make_cache(64) for _ in layers]
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, device="cuda"))

    def eagerly(self, batch: Batch, rows) -> list[torch.Tensor]:
        """Return what every layer gives without a graph."""
        metadata, outputs = self.builder.build(batch), []
        for impl, cache in zip(self.impls, self.caches, strict=True):
            outputs.append(rows[0].new_zeros(batch.num_actual_tokens, impl.output_width))
            impl.forward(*rows, cache, metadata, outputs[-1])
        return outputs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("asked", [{}, {"sinks": True, "head_size": 64}, {"decode_query_len": 3}], ids=str)
def test_graphs_of_several_sizes_replay_in_any_order(load_real, variant, asked) -> None:
    setting, query_len = Graphs(load_real, variant, **asked), asked.get("decode_query_len", 1)
    with setting.state.graph_capture(8):
        slots = [captured(setting, GraphKey(size, size * query_len, query_len, 128)) for size in (8, 4, 1)]
    steps = ([30, 9, 100], [64], [17] * 8, [5, 6, 7, 8], [3], [99, 98], [128, 33, 16, 15, 70])
    for number, lens in enumerate(steps):
        batch = setting.batch([query_len] * len(lens), lens, first_block=1 + 5 * number)
        step = setting.state.begin_forward({setting.builder: batch})
        _, rows, outputs, replay = next(found for found in slots if found[0] is step.slot)
        for tensor in rows:
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        replay()
        tokens = batch.num_actual_tokens
        for replayed, eager in zip(outputs, setting.eagerly(again(batch), [row[:tokens] for row in rows]), strict=True):
            torch.testing.assert_close(replayed[:tokens], eager, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_reqs", [3, 5, 64])
def test_replays_are_the_oracles(load_real, kernel, num_reqs) -> None:
    contexts = ((300, 0, 17), (41,), (17, 17))
    cases = [
        padded_for(evolve(DECODES, query_lens=(1,) * len(c), context_lens=c, seed=i), num_reqs - len(c))
        for i, c in enumerate(contexts)
    ]
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), decode_kernel=kernel)

    check_replays(backend, [realise(case) for case in cases], num_reqs=num_reqs, max_seq_len=400)


def test_a_fast_plan_gives_the_bits_of_the_plain_one(load_real, monkeypatch) -> None:
    from attnplug_flashinfer import library  # noqa: PLC0415 - it imports FlashInfer

    outputs = []
    for fast in (library._fast_decode_plan, None):
        monkeypatch.setattr(library, "_fast_decode_plan", fast)
        torch.manual_seed(1)
        setting = Graphs(load_real, "fa2", num_q_heads=16)
        with setting.state.graph_capture(4):
            slot, rows, results, replay = captured(setting, GraphKey(4, 4, 1, 128))
        for lens in ([30, 9, 100], [128, 1, 77, 5]):
            setting.builder.build(setting.batch([1] * len(lens), lens), slot=slot)
            for tensor in rows:
                tensor.fill_(0.5)
            replay()
        outputs.append([result.clone() for result in results])

    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("asked", [{}, {"decode_query_len": 3}, {"sinks": True, "head_size": 64}], ids=str)
def test_no_build_waits_for_the_device(load_real, variant, asked) -> None:
    setting, query_len = Graphs(load_real, variant, **asked), asked.get("decode_query_len", 1)
    mixed, decodes = setting.batch([1, 1, 20], [9, 100, 33]), setting.batch([query_len] * 2, [100, 33])
    key = GraphKey(4, 4 * query_len, query_len, 128)
    with setting.state.graph_capture(4):
        slot = setting.state.slot(key)
        setting.builder.build(slot.dummy_batch(setting.builder), slot=slot)
    kept = [setting.builder.build(again(mixed)) for _ in range(3)]  # compiles, and makes the wrappers
    kept.append(setting.builder.build(again(decodes)))
    torch.cuda._sleep(LONG)
    with nothing_waits():
        for batch in (mixed, decodes):
            metadata = setting.builder.build(again(batch))
            setting.builder.update_block_table(metadata, batch.block_table, batch.slot_mapping)
            setting.builder.advance_step(metadata, prefills_to_decodes=True)
        setting.builder.build(again(decodes), slot=slot)
        if query_len == 1:
            setting.builder.advance_step(setting.builder.build(again(decodes), slot=slot))


def test_no_cascade_waits_for_the_device(load_real) -> None:
    setting = Setting(load_real, cascade=True, head_size=128)
    batch = setting.batch([1, 1, 20], [40, 36, 60])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32, device="cuda")
    batch = again(batch, common_prefix_len=32, block_table_cpu=None)
    kept = [setting.builder.build(again(batch)) for _ in range(2)]
    with nothing_waits():
        setting.builder.build(again(batch))
    assert kept


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_may_be_built_while_others_run(load_real, variant) -> None:
    """Each forward stands behind a kernel that takes long: what its plan left in pinned memory has yet to be copied."""
    cases = [
        evolve(DECODES, query_lens=(1,) * count + (11,), context_lens=(*range(7, 7 + 9 * count, 9), 5), seed=count)
        for count in range(1, 7)
    ]
    scenes = [realise(case) for case in cases]
    backend = load_real(cases[0].requirements(return_lse=True), variant)
    rig = Rig(backend, scenes[0])
    calls = [rig.call(evolve(scene, scale=scenes[0].scale)) for scene in scenes]
    rig.forward(rig.call(scenes[0]), rig.builder.build(rig.call(scenes[0]).batch))  # compiles
    for call in calls:
        torch.cuda._sleep(LONG)
        rig.forward(call, rig.builder.build(call.batch))
    torch.cuda.synchronize()
    for scene, call in zip(scenes, calls, strict=True):
        tokens = scene.case.num_tokens
        compare(Ran(call, call.output[:tokens].view(tokens, 8, -1), call.lse[:tokens]), backend, scene)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_made_under_inference_mode_serves_outside(load_real, variant) -> None:
    setting = Setting(load_real, variant=variant, head_size=128)
    with torch.inference_mode():
        outputs = [setting.forward(setting.builder.build(setting.batch([1, 20], [9, 33]))).clone()]
    outputs.append(setting.forward(setting.builder.build(setting.batch([1, 20], [9, 33]))))

    assert torch.equal(*outputs)


@pytest.mark.parametrize("num_q_heads", [4, 16])
def test_replays_may_be_built_while_others_run(load_real, num_q_heads) -> None:
    setting = Graphs(load_real, "fa2", num_q_heads=num_q_heads)
    with setting.state.graph_capture(4):
        slot, rows, outputs, replay = captured(setting, GraphKey(4, 4, 1, 128))
    rows[0].copy_(torch.randn(rows[0].shape, device="cuda"))
    batches = [setting.batch([1] * len(lens), lens) for lens in ([100, 3], [7], [128, 64, 1, 9], [33, 32, 31])]

    def replayed(cycles: int) -> list[torch.Tensor]:
        """Return the rows of every batch, replayed one after another behind a kernel that takes so long."""
        found = []
        for batch in batches:
            torch.cuda._sleep(cycles)
            setting.builder.build(again(batch), slot=slot)
            replay()
            found += [output[: batch.num_actual_tokens].clone() for output in outputs]
            if not cycles:
                torch.cuda.synchronize()
        return found

    replayed(0)  # from now on the caches hold what each of them writes
    alone, queued = replayed(0), replayed(LONG)

    assert all(torch.equal(*pair) for pair in zip(alone, queued, strict=True))
