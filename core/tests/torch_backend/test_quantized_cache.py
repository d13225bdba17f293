"""An FP8 KV cache: attention reads what the cache holds, whether forward or the host writes it, in any chunks."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import PAD_SLOT_ID, Backend, Layer, split_kv
from attnplug.errors import NotNegotiatedError
from attnplug.request.device import Device
from attnplug.torch_backend import builder, sdpa
from attnplug_kit.oracle import Case, assert_close, cases, check, limits_of, materialize, run
from core.tests.torch_backend.tiers import in_two_tiers

FEATURES = ("sliding_window", "attention_chunk", "logits_soft_cap", "alibi", "sinks", "head_size_v", "causal")
layouts = st.sampled_from(["NHD", "HND"])
quantized = st.sampled_from(["fp8_e4m3", "fp8_e5m2"]).flatmap(
    lambda dtype: st.builds(
        evolve,
        cases(features=FEATURES),
        kv_cache_dtype=st.just(dtype),
        k_scale=st.sampled_from([1.0, 0.3, 0.004]),
        v_scale=st.sampled_from([1.0, 0.3, 0.004]),
        per_head_scales=st.booleans(),
    )
)


def load(case: Case, layout: str = "NHD", **engine: object) -> Backend:
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, **engine)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def check_quantized(case: Case, layout: str, return_lse: bool, host_writes: bool) -> None:
    ran = check(load(case, layout, return_lse=return_lse), scene := materialize(case), host_writes=host_writes)

    if not case.per_head_scales:
        # A single scale is a factor of scores and outputs, and rounds nothing.
        assert_close(ran.output, scene.expected().output, dtype=ran.output.dtype, scale=scene.largest_value)


test_attends_to_what_the_cache_holds, test_attends_to_it_at_length = in_two_tiers(
    check_quantized, quantized, layouts, st.booleans(), st.booleans(), fast=40, full=120
)


@pytest.mark.parametrize("kernel", ["fused without LSE", "unfused"])
@given(case=quantized, layout=layouts)
@settings(max_examples=30)
def test_every_kernel(kernel: str, case: Case, layout: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "unfused":
            patch.setattr(builder, "choose_kernel", lambda *_: sdpa.UNFUSED)
        else:
            patch.setattr(sdpa, "fused_cpu_op", lambda: None)
        check(load(case, layout), materialize(case))


@given(st.integers(2, 60), st.lists(st.integers(1, 59), max_size=3), quantized)
@settings(max_examples=40)
def test_a_prompt_in_chunks_gives_what_it_gives_in_one(length: int, cuts: list[int], case: Case) -> None:
    case = evolve(case, query_lens=(length,), context_lens=(0,), num_padding_tokens=0, causal=True)
    whole, backend = materialize(case), load(case)
    whole_output = run(backend, whole).output.double()
    ends = sorted({cut for cut in cuts if cut < length} | {length})

    for start, end in zip([0, *ends], ends, strict=False):
        chunk = evolve(
            whole,
            case=evolve(case, query_lens=(end - start,), context_lens=(start,)),
            queries=(whole.queries[0][start:end],),
            keys=(whole.keys[0][:end],),
            values=(whole.values[0][:end],),
        )
        output = run(backend, chunk).output
        assert_close(
            output,
            whole_output[start:end],
            dtype=output.dtype,
            scale=whole.largest_value,
            scaled_keys=case.per_head_scales,
        )


@given(quantized, layouts, st.booleans())
@settings(max_examples=40)
def test_the_cache_changes_in_the_given_slots_alone(case: Case, layout: str, host_writes: bool) -> None:
    scene, backend = materialize(case), load(case, layout)
    expected = backend.make_cache(scene.num_blocks)
    scene.fill(expected, written=True)

    cache = run(backend, scene, host_writes=host_writes).call.cache  # type: ignore[union-attr]

    for got, wanted in zip((cache.k, cache.v), (expected.k, expected.v), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@given(quantized, layouts, st.integers(0, 2))
@settings(max_examples=30)
def test_a_layer_of_a_tensor_with_all_layers(case: Case, layout: str, layer: int) -> None:
    case = evolve(case, head_size_v=None)
    scene, backend = materialize(case), load(case, layout)
    call = scene.paged(backend)
    page = (case.block_size, case.num_kv_heads) if layout == "NHD" else (case.num_kv_heads, case.block_size)
    layers = torch.zeros(2, scene.num_blocks, 3, *page, case.head_size).to(call.cache.k.dtype)
    layers = layers.movedim(2, 0)
    cache = backend.bind_cache(split_kv(layers[layer], "joint", layout, case.head_size))
    scene.fill(cache)
    impl = backend.make_impl(scene.layer())
    metadata = backend.make_builder([impl], backend.make_state(limits_of(scene))).build(call.batch)

    impl.forward(call.query, call.key, call.value, cache, metadata, call.output)

    got = call.output[: case.num_tokens].view(case.num_tokens, case.num_q_heads, -1)
    assert_close(got, scene.expected().output, dtype=got.dtype, scale=scene.largest_value, scaled_keys=True)
    assert not layers.float()[[other for other in range(3) if other != layer]].any()


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
@pytest.mark.parametrize("writer", ["forward", "host"])
def test_writes_saturate_and_keep_nan(dtype: str, largest: float, writer: str) -> None:
    case = Case(query_lens=(3,), context_lens=(0,), kv_cache_dtype=dtype, k_scale=0.5)
    scene, backend = materialize(case), load(case)
    call = scene.paged(backend)
    impl = backend.make_impl(Layer(name="layer", k_scale=0.5, cache_write=writer))
    call.key[0], call.key[1] = 1e6, torch.nan  # type: ignore[index]
    slots = call.batch.slot_mapping
    assert slots is not None
    slots[2] = PAD_SLOT_ID

    if writer == "host":
        impl.write_kv(call.key, call.value, call.cache, slots)  # type: ignore[arg-type]
    else:
        metadata = backend.make_builder([impl], backend.make_state(limits_of(scene))).build(call.batch)
        impl.forward(call.query, call.key, call.value, call.cache, metadata, call.output)

    keys = call.cache.k.float().flatten(0, 1)
    assert keys[slots[0]].eq(largest).all()
    assert keys[slots[1]].isnan().all()
    assert (~keys.isnan()).flatten(1).any(1).sum() == 1, "the padded row is not written"


def test_a_scale_of_queries_is_refused() -> None:
    backend = load(Case(query_lens=(1,), context_lens=(0,), kv_cache_dtype="fp8"))

    with pytest.raises(NotNegotiatedError, match="q_scale"):
        backend.make_impl(Layer(name="layer", q_scale=0.5))


@pytest.mark.parametrize("requested", [{"per_head_scales": True}, {"kv_cache_dtype": "int8"}], ids=str)
def test_scales_require_an_fp8_kv_cache(requested: dict[str, object]) -> None:
    with pytest.raises(attnplug.NoBackendError):
        attnplug.select(
            evolve(Case(query_lens=(), context_lens=()).requirements(), **requested), Device.cpu(), backend="torch"
        )


@given(quantized, layouts)
@settings(max_examples=20)
def test_a_profiling_run_succeeds(case: Case, layout: str) -> None:
    backend, scene = load(case, layout), materialize(case)
    impl, call = backend.make_impl(scene.layer()), scene.dense()
    rows = min(call.key.shape[0], call.query.shape[0])  # type: ignore[union-attr]

    impl.forward(call.query[:rows], call.key[:rows], call.value[:rows], None, None, call.output[:rows])  # type: ignore[index]

    assert bool((call.output[:rows] != 12288.0).any())


@pytest.mark.parametrize("head_size_v", [None, 8])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "auto"])
def test_moved_blocks_give_the_same(dtype: str, layout: str, head_size_v: int | None) -> None:
    case = Case(
        query_lens=(1, 3), context_lens=(40, 20), kv_cache_dtype=dtype, head_size_v=head_size_v, num_spare_blocks=9
    )
    scene, backend = materialize(case), load(case, layout)
    impl = backend.make_impl(scene.layer(cache_write="host"))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call, away = scene.paged(backend, written=True), backend.make_cache(scene.num_blocks)
    used = sorted({int(block) for block in scene.block_table.flatten() if block < scene.num_blocks})
    spare = [block for block in range(1, scene.num_blocks) if block not in used][: len(used)]
    moved = evolve(scene, block_table=scene.block_table.clone())
    for old, new in zip(used, spare, strict=True):
        moved.block_table[scene.block_table == old] = new

    backend.swap_blocks(call.cache, away, [(block, block) for block in used])
    backend.copy_blocks([away], dict(zip(used, ([block] for block in spare), strict=True)))

    again = moved.paged(backend)
    for rows in ((call, call.cache), (again, away)):
        impl.forward(call.query, call.key, call.value, rows[1], builder.build(rows[0].batch), rows[0].output)
    assert torch.equal(call.output, again.output)
