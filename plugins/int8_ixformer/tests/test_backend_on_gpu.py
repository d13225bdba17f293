"""The backend through its public interface: KV caches, scales, writes, graphs, warm-up, and refusals."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import GraphShape, Layer
from attnplug.errors import CacheError, LayerError
from attnplug.ops import Kernel
from attnplug_int8_ixformer import triton_provider
from attnplug_int8_ixformer.pages import of_planes
from attnplug_int8_ixformer.value_scales import ValueScales
from attnplug_kit.oracle import Case, by_channel, check, check_replays, limits_of, materialize, padded_for
from plugins.int8_ixformer.tests.requests import fields_of
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("registered")]

DTYPES = {1: "int8", 2: "int8_k"}
CASE = Case(query_lens=(1, 1, 20, 33), context_lens=(50, 0, 50, 0), head_size=64, dtype="bfloat16", block_size=32)


def load(requirements, **options):
    chosen = {"int8_ixformer": options} if options else None
    return attnplug.load(
        requirements, Device.cpu() if INTERPRETED else None, backend="int8_ixformer/triton", options=chosen
    )


def backend_of(level, **changed):
    return load(Requirements(**fields_of(level, block_size=16, **changed)))


@pytest.fixture
def launches(monkeypatch):
    """The names and constants of the kernels that ran."""
    made, run = [], Kernel.run

    def record(kernel, programs, tensors, strides, scalars, constants, **options):
        made.append((kernel.function.fn.__name__, constants))
        run(kernel, programs, tensors, strides, scalars, constants, **options)

    monkeypatch.setattr(Kernel, "run", record)
    return made


def names(launches):
    """Return the names of the kernels that ran."""
    return [name for name, _ in launches]


@pytest.mark.parametrize("level", [1, 2])
def test_decodes_write_their_rows_in_mixed_batches(level, launches):
    scene = materialize(evolve(CASE, kv_cache_dtype=DTYPES[level]))

    check(load(scene.case.requirements()), scene)

    assert names(launches) == ["_write", "_decode", *(["_gather"] if level == 1 else []), "_prefill"]


@pytest.mark.parametrize(
    "requested", [{}, {"head_size": 80}, {"sliding_window": 30}], ids=["plain", "heads of 80", "window"]
)
def test_long_prefills_use_tma_descriptors(requested, launches, monkeypatch):
    monkeypatch.setattr(triton_provider, "_MIN_TMA_ROWS", 33)
    scene = materialize(evolve(CASE, kv_cache_dtype="int8", **requested))

    check(load(scene.case.requirements()), scene)

    assert names(launches) == ["_write", "_decode", "_gather", "_prefill_tma"]


def test_large_heads_and_level_2_use_pointer_loads():
    assert backend_of(1).wrapped.provider.uses_tma
    assert not backend_of(1, head_size=256).wrapped.provider.uses_tma
    assert not backend_of(2).wrapped.provider.uses_tma


@pytest.mark.parametrize("level", [1, 2])
def test_decode_is_one_launch_and_two_with_splits(level, launches):
    for length, expected in ((20, ["_decode"]), (600, ["_decode", "_merge"])):
        launches.clear()
        case = Case(query_lens=(1,), context_lens=(length,), head_size=64, dtype="bfloat16", block_size=32)
        scene = materialize(evolve(case, kv_cache_dtype=DTYPES[level]))

        check(load(scene.case.requirements()), scene)

        assert names(launches) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_the_host_writes_prefills(level, launches):
    scene = materialize(evolve(CASE, kv_cache_dtype=DTYPES[level]))
    backend = load(scene.case.requirements())
    impl = backend.make_impl(scene.layer(device=DEVICE, cache_write="host"))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, DEVICE)

    impl.write_kv(call.key[2:], call.value[2:], call.cache, call.batch.slot_mapping[2:])
    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)

    assert (impl.forward_writes, impl.host_writes) == ({"decode"}, {"prefill"})
    assert names(launches).count("_write") == 1
    found = call.output.view(55, 4, 64).cpu().double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("prefills", [0, 1], ids=["decodes", "mixed"])
def test_rows_without_a_slot_are_not_written(level, prefills, launches):
    """They are in the KV cache already, for example in a shared prefix."""
    lens = (1, 1, 20)[: 2 + prefills]
    scene = materialize(
        evolve(CASE, query_lens=lens, context_lens=(50, 7, 0)[: len(lens)], kv_cache_dtype=DTYPES[level])
    )
    backend = load(scene.case.requirements(cudagraph="single_token_decode"))
    impl = backend.make_impl(scene.layer(device=DEVICE))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, DEVICE, written=True)
    slots = scene.slot_mapping.clone()
    slots[0] = -1
    batch = evolve(call.batch, slot_mapping=slots.to(DEVICE), slot_mapping_cpu=slots)
    call.key[0], call.value[0] = torch.nan, torch.nan

    impl.forward(call.query, call.key, call.value, call.cache, builder.build(batch), call.output)

    found = call.output.view(len(call.output), 4, 64).cpu().double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-5, atol=2**-5)
    assert names(launches)[:2] == ["_write", "_decode"]
    assert not builder.can_run_in_cudagraph(batch)
    assert builder.can_run_in_cudagraph(call.batch) is not bool(prefills)


def test_strided_index_tensors_and_scales():
    """A host may pass a column of its own table."""
    scene = materialize(evolve(CASE, kv_cache_dtype="int8", alibi="linear"))
    backend = load(scene.case.requirements())
    layer = scene.layer(device=DEVICE)
    impl = backend.make_impl(evolve(layer, alibi_slopes=spread(layer.alibi_slopes)))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, DEVICE)
    names = ("query_start_loc", "seq_lens", "slot_mapping")
    given = {name: spread(getattr(call.batch, name)) for name in names}
    hosts = {f"{name}_cpu": getattr(call.batch, f"{name}_cpu") for name in names}
    rows = torch.cat([call.cache["v_scale"], torch.full_like(call.cache["v_scale"], 9)], 1)
    cache = impl.backend.bind_cache({**call.cache.tensors, "v_scale": rows[:, :64]})

    impl.forward(
        call.query, call.key, call.value, cache, builder.build(evolve(call.batch, **given, **hosts)), call.output
    )

    found = call.output.view(55, 4, 64).cpu().double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-5, atol=2**-5)


def spread(tensor):
    """Return the same numbers with a stride of 2."""
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def test_values_beyond_the_workspace_take_several_launches(launches, monkeypatch):
    monkeypatch.setattr(triton_provider, "_SPARE_UNITS", 0)
    scene = materialize(evolve(CASE, query_lens=(150, 20, 70), context_lens=(0, 200, 60), kv_cache_dtype="int8"))

    check(load(scene.case.requirements()), scene)

    assert names(launches) == ["_write", *["_gather", "_prefill"] * 3]


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_of_split_sequences(level, query_len, launches):
    """A capture has the splits of its longest sequence; some splits of shorter ones are empty."""
    contexts = ((3, 700), (1400,), (50, 20, 1200))
    cases = [
        Case(query_lens=(query_len,) * len(lens), context_lens=lens, head_size=64, dtype="bfloat16", block_size=32,
             kv_cache_dtype=DTYPES[level], seed=seed, decode_query_len=query_len)
        for seed, lens in enumerate(contexts)
    ]  # fmt: skip
    scenes = [materialize(padded_for(case, 3 - len(case.query_lens))) for case in cases]
    backend = load(cases[0].requirements(cudagraph="uniform_batch"))

    check_replays(backend, scenes, num_reqs=3, max_seq_len=1500)

    assert set(names(launches)) == {"_decode", "_merge"}


def test_bytes_per_token():
    tokens, heads, size = 16, 2, 64
    sixteen_bit, scales = 2 * 2 * tokens * heads * size, 4 * tokens * heads

    assert backend_of(1).bytes_per_block == sixteen_bit / 2 + scales
    assert backend_of(2).bytes_per_block == sixteen_bit * 3 / 4 + scales
    at_128 = backend_of(1, head_size=128, num_q_heads=32, num_kv_heads=8).bytes_per_block
    assert 2 * 2 * tokens * 8 * 128 / at_128 == pytest.approx(1.97, abs=0.005)


def test_cache_layouts():
    one, two = backend_of(1).make_cache(5), backend_of(2).make_cache(5)

    assert one.k.transpose(1, 2).shape == one.v.transpose(1, 2).shape == (5, 2, 16, 64)
    assert one.k.transpose(1, 2).is_contiguous()
    assert (two["k"].dtype, two["v"].dtype) == (torch.int8, torch.bfloat16)
    assert two["k"].transpose(1, 2).is_contiguous()
    assert (one["k_scale"].shape, one["v_scale"].shape) == ((5, 2, 16), (2, 64))


@pytest.fixture
def scales(tmp_path):
    ValueScales({"layer": torch.rand(2, 64) + 0.1, "narrow": torch.ones(2, 32)}).save(tmp_path / "scales")
    return str(tmp_path / "scales")


def test_a_calibration_is_loaded_and_no_step_changes_it(scales):
    scene = materialize(evolve(CASE, kv_cache_dtype="int8"))
    backend = load(scene.case.requirements(), value_scales=scales)
    impl = backend.make_impl(scene.layer(device=DEVICE))
    call = scene.paged(backend, DEVICE)
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    expected = ValueScales.load(scales).layers["layer"]

    assert torch.equal(backend.make_cache(3, impl=impl)["v_scale"].cpu(), expected)
    impl.wrapped.init_cache(call.cache)
    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)

    assert torch.equal(call.cache["v_scale"].cpu(), expected)
    block, slot = divmod(int(scene.slot_mapping[30]), 32)
    held = call.cache.v[block, slot].cpu().double()
    assert torch.equal(held, by_channel(call.value[30:31].cpu(), expected)[0])


def test_level_1_requires_a_calibration():
    impl = backend_of(1).make_impl(Layer(name="layer"))

    with pytest.raises(LayerError, match=r"(?s)has no value scales.*of a calibration.*value_scales.*'int8_k'"):
        impl.backend.make_cache(3, impl=impl)
    assert backend_of(1).make_cache(3)["v_scale"].isnan().all()  # such a cache holds swapped-out blocks only
    two = backend_of(2)
    assert set(two.make_cache(3, impl=two.make_impl(Layer(name="layer"))).tensors) == {"k", "v", "k_scale"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [("narrow", r"shape \(2, 32\).*\(2, 64\)"), ("other", "one of its 2 layers"), ("", "there is no file")],
)
def test_an_unsuitable_calibration_is_refused_with_the_layer(scales, name, problem):
    backend = load(Requirements(**fields_of(1, block_size=16)), value_scales=scales if name else f"{scales}.gone")

    with pytest.raises(LayerError, match=f"(?s){problem}"):
        backend.make_impl(Layer(name=name or "layer"))


def test_a_layer_that_shares_a_cache_needs_no_scales(scales):
    backend = load(Requirements(**fields_of(1, block_size=16, kv_sharing=True)), value_scales=scales)

    assert backend.make_impl(Layer(name="other", kv_sharing_target="layer")).forward_writes == frozenset()


@pytest.mark.parametrize("level", [1, 2])
def test_warmup_runs_every_kernel(level, launches):
    backend_of(level).warmup([GraphShape(1, 1, 1)])

    assert {"_decode", "_merge", "_write", "_prefill"} <= set(names(launches))
    assert len({constants for name, constants in launches if name == "_merge"}) == 2  # few and many splits


def test_warmup_needs_no_scales_in_the_calibration(scales, launches):
    load(Requirements(**fields_of(1, block_size=16, phases=("decode",))), value_scales=scales).warmup(
        [GraphShape(1, 1, 1)]
    )

    assert set(names(launches)) == {"_decode", "_merge"}


def test_warmup_with_a_shared_cache_writes_nothing(launches):
    backend_of(2, kv_sharing=True, alibi="linear").warmup([GraphShape(1, 1, 1)])
    backend_of(2).warmup([])

    assert "_write" not in names(launches)


def test_blocks_of_the_vendor_s_layout_are_copied():
    backend = backend_of(2)
    planes = torch.zeros(3, 5, 2, 16, 64, dtype=torch.int8, device=DEVICE)
    views = {**of_planes(planes, torch.bfloat16), "k_scale": torch.ones(5, 2, 16, device=DEVICE)}
    cache = backend.bind_cache(views)
    cache["v"][3] = 2.5
    cache["k"][3] = 7

    backend.copy_blocks([cache], {3: [1]})

    assert (cache["v"][1] == 2.5).all()
    assert (cache["k"][1] == 7).all()
    assert not planes[1:, 1].any(-1)[0].any()  # values of block 1 are not at index 1 of their planes
    assert planes[1, 2:4].any()
    assert not cache["v"][2].any()
    for invalid in (planes[:2], planes[:, ::2], planes.float()):
        with pytest.raises(CacheError, match="level 2 cache"):
            of_planes(invalid, torch.bfloat16)
