"""Consecutive steps on a GPU: nothing synchronizes, nothing is overwritten early, graphs replay the last build."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import GraphShape
from attnplug_kit.oracle import Case, check_replays, materialize, padded_for
from plugins.flashinfer.tests.real import VARIANTS
from tests.backends import checks
from tests.backends.harness import CapturedForward, GraphHarness

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

KERNELS = ("cuda_cores", "tensor_cores")
DECODES = Case(query_lens=(1, 1, 1), context_lens=(300, 0, 17), num_q_heads=8, head_size=128, dtype="bfloat16")
LATENTS = {"latent": True, "head_size": 576, "head_size_v": 512, "num_q_heads": 16, "num_kv_heads": 1}
LAYERS = ({}, {"sinks": True, "head_size": 64}, {"decode_query_len": 3})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("required", LAYERS, ids=str)
def test_graphs_of_several_sizes_replay_in_any_order(load_real, variant, required) -> None:
    checks.check_graph_sizes(load_real, variant, **required)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_reqs", [3, 5, 64])
def test_replays_match_the_oracle(load_real, kernel, num_reqs) -> None:
    contexts = ((300, 0, 17), (41,), (17, 17))
    cases = [
        padded_for(evolve(DECODES, query_lens=(1,) * len(c), context_lens=c, seed=i), num_reqs - len(c))
        for i, c in enumerate(contexts)
    ]
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), decode_kernel=kernel)

    check_replays(backend, [materialize(case) for case in cases], num_reqs=num_reqs, max_seq_len=400)


def test_fast_and_plain_plans_are_bitwise_equal(load_real, monkeypatch) -> None:
    from attnplug_flashinfer import library  # noqa: PLC0415 - imports FlashInfer

    outputs = []
    for fast in (library._fast_decode_plan, None):
        monkeypatch.setattr(library, "_fast_decode_plan", fast)
        torch.manual_seed(1)
        harness = GraphHarness(load_real, "fa2", num_q_heads=16)
        with harness.state.graph_capture(4):
            captured = CapturedForward(harness, GraphShape(4, 4, 1, 128))
        for lens in ([30, 9, 100], [128, 1, 77, 5]):
            harness.builder.build(harness.batch([1] * len(lens), lens), graph=captured.graph)
            for tensor in captured.rows:
                tensor.fill_(0.5)
            captured.replay()
        outputs.append([result.clone() for result in captured.outputs])

    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("required", [*LAYERS, LATENTS, {**LATENTS, "decode_query_len": 3}], ids=str)
def test_builds_do_not_synchronize(load_real, variant, required) -> None:
    checks.check_build_does_not_synchronize(load_real, variant, **required)


def test_cascades_do_not_synchronize(load_real) -> None:
    checks.check_cascade_does_not_synchronize(load_real, "fa2")


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_may_be_built_while_others_run(load_real, variant) -> None:
    """The pinned memory of a plan is still being copied when the next plan is made."""
    checks.check_queued_steps(load_real, variant, DECODES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_made_under_inference_mode_run_outside(load_real, variant) -> None:
    checks.check_after_inference_mode(load_real, variant)


@pytest.mark.parametrize("num_q_heads", [4, 16])
def test_replays_may_be_built_while_others_run(load_real, num_q_heads) -> None:
    checks.check_queued_replays(load_real, "fa2", num_q_heads=num_q_heads)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "required", [{"num_q_heads": 4}, {"num_q_heads": 16}, {"sinks": True, "head_size": 64}], ids=str
)
def test_replays_of_advanced_steps_match_eager_ones(load_real, variant, required) -> None:
    checks.check_advanced_replays(load_real, variant, **required)
