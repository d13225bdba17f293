"""The backend as hosts see it: caches, the scales in them, who writes, graphs, long batches, and what is refused."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import GraphShape, Layer
from attnplug.errors import CacheError, LayerError
from attnplug_int8_ixformer import prompts, triton_provider
from attnplug_int8_ixformer.pages import of_planes
from attnplug_int8_ixformer.value_scales import ValueScales
from attnplug_kit.oracle.byte_rounding import by_channel
from attnplug_kit.oracle.cases import Case
from attnplug_kit.oracle.replay import check_replays, padded_for
from attnplug_kit.oracle.running import check, limits_of
from attnplug_kit.oracle.scene import materialize
from plugins.int8_ixformer.tests.dense import ask
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("offered")]

DTYPES = {1: "int8", 2: "int8_k"}
CASE = Case(query_lens=(1, 1, 20, 33), context_lens=(50, 0, 50, 0), head_size=64, dtype="bfloat16", block_size=32)


def load(requirements, **options):
    chosen = {"int8_ixformer": options} if options else None
    return attnplug.load(
        requirements, Device.cpu() if INTERPRETED else None, backend="int8_ixformer/triton", options=chosen
    )


def backend_of(level, **changed):
    return load(Requirements(**ask(level, block_size=16, **changed)))


@pytest.fixture
def merged(monkeypatch):
    """How many parts the merges that ran have room for."""
    made, real = [], triton_provider._merge_kernel.run

    def noted(programs, tensors, strides, numbers, constants, **options):
        made.append(constants[-1])
        real(programs, tensors, strides, numbers, constants, **options)

    monkeypatch.setattr(triton_provider._merge_kernel, "run", noted)
    return made


@pytest.fixture
def calls(monkeypatch):
    """The kernels that ran, by name."""
    made = []
    for module, name in (
        (triton_provider, "decode"), (triton_provider, "merge"), (triton_provider, "write"), (prompts, "gather"),
        (prompts, "prefill"),
    ):  # fmt: skip
        kernel = getattr(module, f"_{name}_kernel")
        real = kernel.run

        def noted(*rest, real=real, name=name, **options):
            made.append(name)
            real(*rest, **options)

        monkeypatch.setattr(kernel, "run", noted)
    attend = prompts._attend_described
    monkeypatch.setattr(prompts, "_attend_described", lambda *rest: made.append("prompt") or attend(*rest))
    return made


@pytest.mark.parametrize("level", [1, 2])
def test_decodes_write_by_themselves_beside_prompts_too(level, calls):
    scene = materialize(evolve(CASE, kv_cache_dtype=DTYPES[level]))

    check(load(scene.case.requirements()), scene)

    assert calls == ["write", "decode", *(["gather"] if level == 1 else []), "prefill"]


@pytest.mark.parametrize(
    "asked", [{}, {"head_size": 80}, {"sliding_window": 30}], ids=["plain", "heads of 80", "window"]
)
def test_long_prompts_are_loaded_by_descriptors(asked, calls, monkeypatch):
    monkeypatch.setattr(triton_provider, "_WORTH_DESCRIPTORS", 33)
    scene = materialize(evolve(CASE, kv_cache_dtype="int8", **asked))

    check(load(scene.case.requirements()), scene)

    assert calls == ["write", "decode", "gather", "prompt"]


def test_large_heads_and_level_2_are_read_from_pages():
    assert backend_of(1).provider.uses_descriptors
    assert not backend_of(1, head_size=256).provider.uses_descriptors
    assert not backend_of(2).provider.uses_descriptors


@pytest.mark.parametrize("level", [1, 2])
def test_a_decode_is_one_launch_and_two_where_it_is_split(level, calls):
    for length, launches in ((20, ["decode"]), (600, ["decode", "merge"])):
        calls.clear()
        case = Case(query_lens=(1,), context_lens=(length,), head_size=64, dtype="bfloat16", block_size=32)
        scene = materialize(evolve(case, kv_cache_dtype=DTYPES[level]))

        check(load(scene.case.requirements()), scene)

        assert calls == launches


@pytest.mark.parametrize("level", [1, 2])
def test_a_host_writes_prompts(level, calls):
    scene = materialize(evolve(CASE, kv_cache_dtype=DTYPES[level]))
    backend = load(scene.case.requirements())
    impl = backend.make_impl(scene.layer(device=DEVICE, cache_write="host"))
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, DEVICE)

    impl.write_kv(call.key[2:], call.value[2:], call.cache, call.batch.slot_mapping[2:])
    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)

    assert (impl.forward_writes, impl.host_writes) == ({"decode"}, {"prefill"})
    assert calls.count("write") == 1
    found = call.output.view(55, 4, 64).cpu().double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("prefills", [0, 1], ids=["decodes", "mixed"])
def test_a_row_without_a_slot_is_read_from_the_cache_and_not_written(level, prefills, calls):
    """As where another request of the same prefix has written it: it is not written a second time."""
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
    assert calls[:2] == ["write", "decode"]
    assert not builder.can_run_in_cudagraph(batch)
    assert builder.can_run_in_cudagraph(call.batch) is not bool(prefills)


def test_index_tensors_and_scales_need_not_lie_side_by_side():
    """A column of a host's own table, say."""
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
    cache = {**call.cache, "v_scale": rows[:, :64]}

    impl.forward(
        call.query, call.key, call.value, cache, builder.build(evolve(call.batch, **given, **hosts)), call.output
    )

    found = call.output.view(55, 4, 64).cpu().double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-5, atol=2**-5)


def spread(tensor):
    """The same numbers, with others between them."""
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def test_prompts_whose_values_do_not_fit_at_once_are_several_launches(calls, monkeypatch):
    monkeypatch.setattr(triton_provider, "_SPARE", 0)
    scene = materialize(evolve(CASE, query_lens=(150, 20, 70), context_lens=(0, 200, 60), kv_cache_dtype="int8"))

    check(load(scene.case.requirements()), scene)

    assert calls == ["write", *["gather", "prefill"] * 3]


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("level", [1, 2])
def test_a_graph_of_split_sequences_serves_longer_and_shorter_ones(level, query_len, calls):
    """A capture splits as its longest sequence would need; parts of shorter ones are empty, and padding has none."""
    contexts = ((3, 700), (1400,), (50, 20, 1200))
    cases = [
        Case(query_lens=(query_len,) * len(lens), context_lens=lens, head_size=64, dtype="bfloat16", block_size=32,
             kv_cache_dtype=DTYPES[level], seed=seed, decode_query_len=query_len)
        for seed, lens in enumerate(contexts)
    ]  # fmt: skip
    scenes = [materialize(padded_for(case, 3 - len(case.query_lens))) for case in cases]
    backend = load(cases[0].requirements(cudagraph="uniform_batch"))

    check_replays(backend, scenes, num_reqs=3, max_seq_len=1500)

    assert set(calls) == {"decode", "merge"}


def test_bytes_per_token_are_half_and_three_quarters():
    tokens, heads, size = 16, 2, 64
    sixteen_bit, scales = 2 * 2 * tokens * heads * size, 4 * tokens * heads

    assert backend_of(1).bytes_per_block == sixteen_bit / 2 + scales
    assert backend_of(2).bytes_per_block == sixteen_bit * 3 / 4 + scales
    at_128 = backend_of(1, head_size=128, num_q_heads=32, num_kv_heads=8).bytes_per_block
    assert 2 * 2 * tokens * 8 * 128 / at_128 == pytest.approx(1.97, abs=0.005)


def test_caches_are_heads_first():
    one, two = backend_of(1).make_cache(5), backend_of(2).make_cache(5)

    assert one["kv"].transpose(2, 3).shape == (2, 5, 2, 16, 64)
    assert one["kv"].transpose(2, 3).is_contiguous()
    assert (two["k"].dtype, two["v"].dtype) == (torch.int8, torch.bfloat16)
    assert two["k"].transpose(1, 2).is_contiguous()
    assert (one["k_scale"].shape, one["v_scale"].shape) == ((5, 2, 16), (2, 64))


@pytest.fixture
def scales(tmp_path):
    ValueScales({"layer": torch.rand(2, 64) + 0.1, "narrow": torch.ones(2, 32)}).save(tmp_path / "scales")
    return str(tmp_path / "scales")


def test_a_calibration_is_loaded_into_the_cache_and_no_step_changes_it(scales, calls):
    scene = materialize(evolve(CASE, kv_cache_dtype="int8"))
    backend = load(scene.case.requirements(), value_scales=scales)
    impl = backend.make_impl(scene.layer(device=DEVICE))
    call = scene.paged(backend, DEVICE)
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    wanted = ValueScales.load(scales).of_layers["layer"]

    assert torch.equal(backend.make_cache(3, impl=impl)["v_scale"].cpu(), wanted)
    impl.init_cache(call.cache)
    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)

    assert torch.equal(call.cache["v_scale"].cpu(), wanted)
    block, slot = divmod(int(scene.slot_mapping[30]), 32)
    held = call.cache["kv"][1, block, slot].cpu().double()
    assert torch.equal(held, by_channel(call.value[30:31].cpu(), wanted)[0])


def test_the_cache_of_level_1_wants_a_calibration():
    impl = backend_of(1).make_impl(Layer(name="layer"))

    with pytest.raises(LayerError, match=r"(?s)no value scales were given.*of a calibration.*value_scales.*'int8_k'"):
        impl.backend.make_cache(3, impl=impl)
    assert backend_of(1).make_cache(3)["v_scale"].isnan().all()  # a cache that only holds what was swapped out
    two = backend_of(2)
    assert set(two.make_cache(3, impl=two.make_impl(Layer(name="layer")))) == {"k", "v", "k_scale"}


@pytest.mark.parametrize(
    ("name", "told"), [("narrow", r"shape \(2, 32\).*\(2, 64\)"), ("other", "those of 2 layers"), ("", "no such file")]
)
def test_a_calibration_that_does_not_fit_is_refused_where_the_layer_is_made(scales, name, told):
    backend = load(Requirements(**ask(1, block_size=16)), value_scales=scales if name else f"{scales}.gone")

    with pytest.raises(LayerError, match=f"(?s){told}"):
        backend.make_impl(Layer(name=name or "layer"))


def test_a_layer_that_shares_a_cache_needs_no_scales_of_its_own(scales):
    backend = load(Requirements(**ask(1, block_size=16, kv_sharing=True)), value_scales=scales)

    assert backend.make_impl(Layer(name="other", kv_sharing_target="layer")).forward_writes == frozenset()


@pytest.mark.parametrize("level", [1, 2])
def test_a_warm_up_runs_every_kernel(level, merged, calls):
    backend_of(level).warmup([GraphShape(1, 1, 1)])

    assert {"decode", "merge", "write", "prefill"} <= set(calls)
    assert len(set(merged)) == 2


def test_a_warm_up_needs_no_scales_of_its_own_in_the_calibration_s_file(scales, calls):
    load(Requirements(**ask(1, block_size=16, phases=("decode",))), value_scales=scales).warmup([GraphShape(1, 1, 1)])

    assert set(calls) == {"decode", "merge"}


def test_a_warm_up_of_a_layer_that_shares_a_cache_writes_nothing(calls):
    backend_of(2, kv_sharing=True, alibi="linear").warmup([GraphShape(1, 1, 1)])
    backend_of(2).warmup([])

    assert "write" not in calls


def test_planes_of_the_vendor_s_layout_are_roles_whose_blocks_move():
    backend = backend_of(2)
    planes = torch.zeros(3, 5, 2, 16, 64, dtype=torch.int8, device=DEVICE)
    cache = {**of_planes(planes, torch.bfloat16), "k_scale": torch.ones(5, 2, 16, device=DEVICE)}
    cache["v"][3] = 2.5
    cache["k"][3] = 7

    backend.copy_blocks([cache], {3: [1]})

    assert (cache["v"][1] == 2.5).all()
    assert (cache["k"][1] == 7).all()
    assert not planes[1:, 1].any(-1)[0].any()  # values of block 1 are not at index 1 of their planes
    assert planes[1, 2:4].any()
    assert not cache["v"][2].any()
    for wrong in (planes[:2], planes[:, ::2], planes.float()):
        with pytest.raises(CacheError, match="level 2 cache"):
            of_planes(wrong, torch.bfloat16)
