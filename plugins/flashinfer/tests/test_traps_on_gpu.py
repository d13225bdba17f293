"""
What FlashInfer gets wrong in silence when it is asked in the wrong way: on a GPU, and held against the oracle.

The kit asks for every declared value as well. Here is what it cannot know: which kernels there are, and what one
process does to another layer's.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import GraphShape, Layer
from attnplug_flashinfer.prebuilt import needed_modules
from attnplug_kit.oracle import Case, check, materialize
from plugins.flashinfer.tests.real import VARIANTS
from tests.backends import checks
from tests.backends.harness import Harness

pytestmark = pytest.mark.gpu

KERNELS = ("cuda_cores", "tensor_cores")
LLAMA = Case(query_lens=(1, 1, 1, 40), context_lens=(300, 0, 17, 5), num_q_heads=8, head_size=128, dtype="bfloat16")
DECODES = evolve(LLAMA, query_lens=(1, 1, 1), context_lens=(300, 0, 17))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sinks_count_in_both_head_sizes_of_one_process(load_real, variant) -> None:
    """The library names both modules alike: the second would be given the first's, and compute with its head size."""
    for head_size in (64, 128, 64):
        for lens in (LLAMA, DECODES):
            case = evolve(lens, head_size=head_size, sinks=True)
            backend = load_real(case.requirements(return_lse=True), variant)
            scene = materialize(case)
            outputs = [check(backend, evolve(scene, sinks=sinks)).output for sinks in (scene.sinks, scene.sinks + 3.0)]
            assert not torch.equal(*outputs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lens", [LLAMA, DECODES], ids=["mixed", "decodes"])
def test_sinks_count_beside_a_window(load_real, variant, lens) -> None:
    case = evolve(lens, head_size=64, sinks=True, sliding_window=9)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sinks_count_in_decodes_of_several_rows(load_real, variant) -> None:
    case = evolve(LLAMA, query_lens=(3, 3, 2), context_lens=(300, 0, 17), head_size=64, sinks=True, decode_query_len=3)

    check(load_real(case.requirements(), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_both_kernels_decode_and_their_lse_is_natural(load_real, variant, kernel, group) -> None:
    case = evolve(DECODES, num_q_heads=2 * group)

    check(load_real(case.requirements(return_lse=True), variant, decode_kernel=kernel), materialize(case))


@pytest.mark.parametrize("group", [5, 16])
def test_other_groups_decode_on_tensor_cores(load_real, group) -> None:
    case = evolve(DECODES, num_q_heads=2 * group)

    check(load_real(case.requirements(return_lse=True)), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lse_of_a_single_key_is_its_score(load_real, variant) -> None:
    checks.check_lse_of_single_key(load_real, variant, LLAMA)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("query_lens", [(4, 4, 4), (4, 2, 1), (1, 4, 4)])
def test_every_row_of_a_decode_is_written(load_real, variant, query_lens) -> None:
    case = evolve(LLAMA, query_lens=query_lens, context_lens=(300, 0, 17), decode_query_len=4, num_padding_tokens=3)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_8_bit_caches_are_read_with_their_scales(load_real, layout, kernel, dtype) -> None:
    case = evolve(LLAMA, kv_cache_dtype=dtype, k_scale=0.25, v_scale=3.0)
    backend = load_real(case.requirements(return_lse=True, kv_layout=layout), decode_kernel=kernel)

    check(backend, materialize(case))


@pytest.mark.parametrize(("variant", "dtype"), [("fa2", "auto"), ("fa3", "auto"), ("fa2", "fp8_e4m3")])
@pytest.mark.parametrize("lens", [LLAMA, DECODES], ids=["mixed", "decodes"])
def test_a_cascade_is_what_the_flat_step_is(load_real, variant, dtype, lens) -> None:
    scales = {} if dtype == "auto" else {"k_scale": 0.5, "v_scale": 2.0}
    case = evolve(lens, kv_cache_dtype=dtype, **scales).with_shared_prefix(2)

    checks.check_cascade(load_real, variant, case)


@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_with_different_windows_share_a_state_and_nothing_else(load_real, variant) -> None:
    """They use one workspace."""
    checks.check_shared_state(load_real, variant, LLAMA)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_requests_may_stand_anywhere(load_real, variant) -> None:
    checks.check_padded_requests(load_real, variant, LLAMA)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_calls_and_profiling_runs(load_real, variant) -> None:
    checks.check_dense_calls(load_real, variant, LLAMA)
    checks.check_profiling_run(load_real, variant, computes=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_output_that_is_not_contiguous_is_written_where_it_is(load_real, variant) -> None:
    checks.check_strided_output(load_real, variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "required",
    [
        {},
        {"phases": ("decode",)},
        {"decode_query_len": 3},
        {"cascade": True, "return_lse": True},
        {"sinks": True, "head_size": 64},
        {"paged": False, "block_size": None},
    ],
    ids=str,
)
def test_warm_up_and_a_profiling_run_load_what_the_probe_names(load_real, variant, required) -> None:
    from flashinfer.jit.core import jit_spec_registry  # noqa: PLC0415 - there is a GPU

    setting = Harness(load_real, [_layer(required)], variant, **{"head_size": 128, "num_q_heads": 8, **required})
    backend, known = setting.backend, set(jit_spec_registry.get_all_specs())
    backend.warmup([GraphShape(4, 4, 1)])
    rows = [torch.zeros(50, n, setting.impls[0].head_size, device=backend.device).bfloat16() for n in (8, 2, 2)]
    setting.impls[0].forward(*rows, None, None, rows[0].flatten(1).clone())
    now, needed = (
        set(jit_spec_registry.get_all_specs()),
        set(needed_modules(backend.agreement, backend.device_properties)),
    )

    assert needed <= now
    assert now - known <= needed


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_wrapper_takes_the_memory_that_the_documentation_tells(load_real, kind) -> None:
    setting = Harness(load_real, variant="fa2")
    workspace = setting.state.workspace
    from attnplug_flashinfer.kinds import make_kind  # noqa: PLC0415 - it imports FlashInfer

    made = make_kind(kind, setting.impls[0], workspace)
    before = torch.cuda.memory_allocated()
    wrapper = made.make(None)

    assert wrapper is not None
    assert 8 <= (torch.cuda.memory_allocated() - before) / 2**20 < 9


def _layer(required: dict[str, object]) -> Layer:
    return Layer(name="layers.0", sinks=torch.zeros(8, device="cuda") if required.get("sinks") else None)
