"""
Calls for which FlashInfer can return wrong results without an error, compared with the oracle on a GPU.

The kit tests every declared value too. These tests add what the kit does not know: which kernels exist, and what the
layers of one process share.
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
LATENTS = evolve(LLAMA, latent=True, head_size=576, head_size_v=512, num_q_heads=16, num_kv_heads=1, scale=192**-0.5)
DECODES = evolve(LLAMA, query_lens=(1, 1, 1), context_lens=(300, 0, 17))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sinks_apply_to_both_head_sizes_of_one_process(load_real, variant) -> None:
    """The library gives both modules one name: the second layer would load the first module, with its head size."""
    for head_size in (64, 128, 64):
        for lens in (LLAMA, DECODES):
            case = evolve(lens, head_size=head_size, sinks=True)
            backend = load_real(case.requirements(return_lse=True), variant)
            scene = materialize(case)
            outputs = [check(backend, evolve(scene, sinks=sinks)).output for sinks in (scene.sinks, scene.sinks + 3.0)]
            assert not torch.equal(*outputs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lens", [LLAMA, DECODES], ids=["mixed", "decodes"])
def test_sinks_apply_together_with_a_window(load_real, variant, lens) -> None:
    case = evolve(lens, head_size=64, sinks=True, sliding_window=9)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sinks_apply_to_decodes_of_several_rows(load_real, variant) -> None:
    case = evolve(LLAMA, query_lens=(3, 3, 2), context_lens=(300, 0, 17), head_size=64, sinks=True, decode_query_len=3)

    check(load_real(case.requirements(), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_both_decode_kernels_return_a_natural_lse(load_real, variant, kernel, group) -> None:
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
def test_fp8_kv_caches_are_read_with_their_scales(load_real, layout, kernel, dtype) -> None:
    case = evolve(LLAMA, kv_cache_dtype=dtype, k_scale=0.25, v_scale=3.0)
    backend = load_real(case.requirements(return_lse=True, kv_layout=layout), decode_kernel=kernel)

    check(backend, materialize(case))


@pytest.mark.parametrize(("variant", "dtype"), [("fa2", "auto"), ("fa3", "auto"), ("fa2", "fp8_e4m3")])
@pytest.mark.parametrize("lens", [LLAMA, DECODES], ids=["mixed", "decodes"])
def test_a_cascade_equals_the_flat_step(load_real, variant, dtype, lens) -> None:
    scales = {} if dtype == "auto" else {"k_scale": 0.5, "v_scale": 2.0}
    case = evolve(lens, kv_cache_dtype=dtype, **scales).with_shared_prefix(2)

    checks.check_cascade(load_real, variant, case)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_with_different_windows_share_a_state(load_real, variant) -> None:
    """Their wrappers share one workspace."""
    checks.check_shared_state(load_real, variant, LLAMA)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_requests_may_be_anywhere(load_real, variant) -> None:
    checks.check_padded_requests(load_real, variant, LLAMA)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_padded_requests_over_latents_may_be_anywhere(load_real, variant, heads) -> None:
    checks.check_padded_requests(load_real, variant, evolve(LATENTS, num_q_heads=heads))


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_between_the_heads_of_a_row_hide_its_last_key(variant) -> None:
    """Why the plugin pads the number of heads: the library misses a key, or refuses the plan from 0.7.2 on."""
    from attnplug_flashinfer import library  # noqa: PLC0415 - imports FlashInfer

    heads, rows, keys = 20, 9, 67  # a tile of 128 ends between the heads of row 6, whose last key begins a tile of 64
    wrapper = library.latent_wrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), backend=variant, buffers=None
    )
    starts, pages, lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, rows], [0, 1], [keys]))
    values = {"num_heads": heads, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 128, "sm_scale": 0.07}
    values |= {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    indices = torch.zeros(1, dtype=torch.int32, device="cuda")
    try:
        library.plan_latents(wrapper, (starts, pages, indices, lens), values, has_lse=False)
    except ValueError as error:
        assert "would omit a visible key" in str(error)  # noqa: PT017 - one of two outcomes
        return
    latents = torch.zeros(1, 128, 576, device="cuda").bfloat16()
    latents[0, 64, :512] = 65.0
    query, out = torch.zeros(rows, heads, 576, device="cuda").bfloat16(), latents.new_empty(rows, heads, 512)
    library.latent_run(wrapper, (512, 64), has_lse=False)(query, latents, out=out)

    assert torch.allclose(out[6, 8:].float(), torch.ones((), device="cuda"), atol=0.02)
    assert not out[6, :8].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_calls_and_profiling_runs(load_real, variant) -> None:
    checks.check_dense_calls(load_real, variant, LLAMA)
    checks.check_profiling_run(load_real, variant, computes=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_non_contiguous_output_is_written_in_place(load_real, variant) -> None:
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
def test_warm_up_and_profiling_load_the_modules_of_the_probe(load_real, variant, required) -> None:
    from flashinfer.jit.core import jit_spec_registry  # noqa: PLC0415 - requires a GPU

    harness = Harness(load_real, [_layer(required)], variant, **{"head_size": 128, "num_q_heads": 8, **required})
    backend, before = harness.backend, set(jit_spec_registry.get_all_specs())
    backend.warmup([GraphShape(4, 4, 1)])
    rows = [torch.zeros(50, n, harness.impls[0].head_size, device=backend.device).bfloat16() for n in (8, 2, 2)]
    harness.impls[0].forward(*rows, None, None, rows[0].flatten(1).clone())
    after = set(jit_spec_registry.get_all_specs())
    needed = set(needed_modules(backend.agreement, backend.device_properties))

    assert needed <= after
    assert after - before <= needed


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_wrapper_takes_the_documented_memory(load_real, kind) -> None:
    harness = Harness(load_real, variant="fa2")
    workspace = harness.state.workspace
    from attnplug_flashinfer.kinds import make_kind  # noqa: PLC0415 - imports FlashInfer

    made = make_kind(kind, harness.impls[0], workspace)
    before = torch.cuda.memory_allocated()
    wrapper = made.make(None)

    assert wrapper is not None
    assert 8 <= (torch.cuda.memory_allocated() - before) / 2**20 < 9


def _layer(required: dict[str, object]) -> Layer:
    return Layer(name="layers.0", sinks=torch.zeros(8, device="cuda") if required.get("sinks") else None)
