"""The ixformer provider on a fake of the library, which checks and records every call."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Device
from attnplug.contract import GraphShape, Layer, Limits
from attnplug.errors import CacheError, LimitsError, PluginLoadError
from attnplug_int8_ixformer.impl import Int8Impl
from attnplug_int8_ixformer.pages import of_planes
from attnplug_int8_ixformer.plugin import IXFORMER_MODULES
from attnplug_kit.oracle import Case, check, check_replays, limits_of, materialize, padded_for, paged_tensors
from attnplug_kit.tune.running import Order, run_order
from plugins.int8_ixformer.tests.conftest import FAKE, FAKES, IS_REAL_HERE

FEATURES = [{}, {"sliding_window": 9}, {"logits_soft_cap": 3.0}, {"alibi": "linear"}, {"alibi": "sqrt"}]
LEVELS = [("int8", "int8"), ("int8_k", "mix")]
DECODES = {"query_lens": (1, 1, 1), "context_lens": (3, 40, 0)}
PREFILLS = {"query_lens": (9, 20), "context_lens": (0, 33)}
MIXED = {"query_lens": (1, 1, 12), "context_lens": (5, 18, 7)}
QUERY = {"window_left", "window_right", "softcap", "scale", "alibi_slopes", "use_sqrt_alibi", "causal"}
LENGTHS = {"block_tables", "context_lens", "block_size", "max_context_len", "cu_query_lens", "max_query_len"}
CACHE = {"key_cache", "value_cache", "key_scale_cache", "num_kv_heads"}
LIMITS = Limits(max_num_reqs=4, max_num_tokens=32, max_seq_len=64)
SAVED = {"save_key", "save_value", "save_key_scale"}


@pytest.fixture
def journal(fakes):
    """The module in which the fake records the calls of this test."""
    return import_module("ixformer.journal")


def scene_of(dtype, **fields):
    return materialize(Case(head_size=32, dtype="bfloat16", kv_cache_dtype=dtype, num_padding_tokens=2, **fields))


def load(scene, **engine):
    return FAKES.load(scene.case.requirements(**engine), "ixformer")


def test_a_split_kv_limit_is_refused(journal):
    backend = load(scene_of("int8_k", **DECODES))

    with pytest.raises(LimitsError, match=r"max_num_splits=2 was given"):
        backend.make_state(evolve(LIMITS, max_num_splits=2))


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_decode_is_one_call_that_writes(journal, dtype, suffix, features):
    scene = scene_of(dtype, **DECODES, **features)

    check(load(scene), scene)

    (given,) = journal.named(f"vllm_paged_attention_{suffix}")
    of_values = {"value_scale_cache"} if suffix == "int8" else set()
    assert set(given) == QUERY | LENGTHS | CACHE | SAVED | of_values | {
        "output",
        "query",
        "query_scale",
        "use_cuda_graph",
    }
    assert given["save_key"].shape == (3, 2, 32)
    assert given["use_cuda_graph"] is False
    assert not journal.named(f"reshape_and_cache_flash_{suffix}")
    (quantized, *_) = journal.named("scaled_int8_quant_for_attn")
    assert (quantized["mode"], quantized["transpose_scale"]) == (2, False)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_prefill_is_a_write_and_a_call(journal, dtype, suffix, features):
    scene = scene_of(dtype, **PREFILLS, **features)

    check(load(scene), scene)

    (given,), (written,) = (
        journal.named("flash_attn_varlen_int8_func"),
        journal.named(f"reshape_and_cache_flash_{suffix}"),
    )
    assert set(given) == {
        "q", "k", "v", "q_scale", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
        "softmax_scale", "causal", "window_size", "alibi_slopes", "softcap", "sqrt_alibi", "out", "block_table",
        "output_dtype",
    }  # fmt: skip
    assert (given["v_scale"] is None) == (suffix == "mix")
    assert written["slot_mapping"].tolist() == scene.slot_mapping[:29].tolist()
    assert [each["transpose_scale"] for each in journal.named("scaled_int8_quant_for_attn") if each["mode"] == 2] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_mixed_batches_write_first(journal, dtype, suffix):
    scene = scene_of(dtype, **MIXED)

    check(load(scene), scene)

    (written,), (decoded,) = (
        journal.named(f"{name}_{suffix}") for name in ("reshape_and_cache_flash", "vllm_paged_attention")
    )
    assert written["slot_mapping"].tolist() == scene.slot_mapping[:14].tolist()
    assert all(decoded[name] is None for name in SAVED)
    assert [name for name, _ in journal.journal][-1] == "flash_attn_varlen_int8_func"
    modes = [
        (each["mode"], each["transpose_scale"], len(each["x"])) for each in journal.named("scaled_int8_quant_for_attn")
    ]
    assert (2, True, 2) in modes  # the decodes of a mixed batch
    assert (2, True, 12) in modes


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_the_host_writes_prefills_only(journal, dtype, suffix):
    scene = scene_of(dtype, **MIXED)
    backend = load(scene)
    impl = backend.make_impl(scene.layer(cache_write="host"))
    call = scene.paged(backend)
    assert impl.host_writes == {"prefill"}
    builder = backend.make_builder([impl], backend.make_state(LIMITS))
    impl.write_kv(call.key[2:14], call.value[2:14], call.cache, call.batch.slot_mapping[2:14])

    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)

    written = [each["slot_mapping"].tolist() for each in journal.named(f"reshape_and_cache_flash_{suffix}")]
    assert written == [scene.slot_mapping[2:14].tolist(), scene.slot_mapping[:2].tolist()]
    torch.testing.assert_close(
        call.output[:14].view(14, 4, -1).double(), scene.expected().output, rtol=2**-7, atol=2**-6
    )


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_float16(journal, dtype, suffix):
    scene = materialize(evolve(scene_of(dtype, **MIXED).case, dtype="float16"))

    check(load(scene), scene)

    (given,) = journal.named("flash_attn_varlen_int8_func")
    assert given["output_dtype"] == torch.float16
    assert journal.named(f"vllm_paged_attention_{suffix}")[0]["output"].dtype == torch.float16


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_decode_of_several_tokens(journal, dtype, suffix):
    scene = scene_of(dtype, query_lens=(3, 1, 2), context_lens=(3, 40, 0), decode_query_len=3)

    check(load(scene), scene)

    (given,) = journal.named(f"vllm_paged_attention_{suffix}")
    assert given["max_query_len"] == 3
    assert given["cu_query_lens"].tolist() == [0, 3, 4, 6]


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_shared_caches_are_not_written(journal, dtype, suffix):
    scene = scene_of(dtype, **MIXED, kv_sharing=True)

    check(load(scene), scene)

    assert not journal.named(f"reshape_and_cache_flash_{suffix}")
    assert all(given["save_key"] is None for given in journal.named(f"vllm_paged_attention_{suffix}"))


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_rows_without_a_slot_are_written_by_slot_mapping(journal, dtype, suffix):
    scene = scene_of(dtype, **DECODES)
    backend = load(scene)
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    call = scene.paged(backend, written=True)
    call.batch.slot_mapping[1], call.key[1] = -1, torch.nan

    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)

    (written,), (given,) = (
        journal.named(f"{name}_{suffix}") for name in ("reshape_and_cache_flash", "vllm_paged_attention")
    )
    assert written["slot_mapping"].tolist() == call.batch.slot_mapping[:3].tolist()
    assert all(given[name] is None for name in SAVED)
    found = call.output[:3].view(3, 4, -1).double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_graph_padding_has_one_key(journal, dtype, suffix):
    cases = [Case(head_size=32, dtype="bfloat16", kv_cache_dtype=dtype, seed=seed, query_lens=(1,) * count,
                  context_lens=(7, 30)[:count]) for seed, count in ((0, 2), (1, 1))]  # fmt: skip
    scenes = [materialize(padded_for(case, 3 - len(case.query_lens))) for case in cases]
    backend = load(scenes[0], cudagraph="single_token_decode")

    check_replays(backend, scenes, num_reqs=3, max_seq_len=64)

    given = journal.named(f"vllm_paged_attention_{suffix}")
    replays = [each["context_lens"].tolist() for each in given if each["use_cuda_graph"]]
    assert replays[-1] == [8, 1, 1]
    assert all(len(lens) == 3 for lens in replays)
    eager = [each["context_lens"].tolist() for each in given if not each["use_cuda_graph"]]  # a step after each replay
    assert eager
    assert all(8 in lens and len(lens) < 3 for lens in eager)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_padding_is_written_to_the_null_block_only(journal, dtype, suffix, graphs):
    """Padding rows of a block table may name blocks of other requests."""
    engine = {"cudagraph": "single_token_decode"} if graphs else {}
    scene = materialize(Case(head_size=32, dtype="bfloat16", kv_cache_dtype=dtype, num_padding_tokens=int(graphs),
                         query_lens=(1, 1, 0), context_lens=(30, 7, 0)))  # fmt: skip
    backend = load(scene, **engine)
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(Limits(max_num_reqs=3, max_num_tokens=3, max_seq_len=64)))
    call = scene.paged(backend)
    call.batch.block_table[2] = call.batch.block_table[0]
    graph = None
    if graphs:
        with builder.state.graph_capture(3):
            graph = builder.state.graph(GraphShape(3, 3, 1, 64))
            builder.build(graph.dummy_batch(), graph=graph)

    impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch, graph=graph), call.output)

    (given,) = journal.named(f"vllm_paged_attention_{suffix}")
    assert given["block_tables"][2].tolist() == [0] * given["block_tables"].shape[1]
    assert given["context_lens"].tolist() == [31, 8, 1]
    assert call.batch.block_table[2].any()  # the host's table is not changed
    expected, block = paged_tensors(scene.paged(backend, written=True).cache), scene.block_table[0, 0]
    assert all(torch.equal(pages[block], expected[name][block]) for name, pages in paged_tensors(call.cache).items())


@pytest.mark.parametrize(
    ("role", "tensor", "problem"),
    [
        ("k_scale", torch.ones(9, 16, 2), r"\(9, 16, 2\).*\(num_blocks, 2, 16\)"),
        ("k_scale", torch.ones(9, 2, 16).bfloat16(), r"bfloat16.*float32"),
        ("v_scale", torch.ones(32, 2), r"\(32, 2\).*\(2, 32\)"),
        ("v_scale", torch.ones(2, 32).double(), r"float64.*float32"),
        ("v", torch.ones(9, 16, 2, 32), r"float32.*int8"),
    ],
)
def test_invalid_caches_are_refused_before_any_call(journal, role, tensor, problem):
    scene = scene_of("int8", **DECODES)
    backend = load(scene)
    call = scene.paged(backend)
    journal.journal.clear()

    with pytest.raises(CacheError, match=f"(?s){role!r}.*{problem}"):
        backend.bind_cache({**call.cache.tensors, role: tensor})

    assert journal.journal == []


def test_the_vendor_s_cache_layout(journal):
    scene = scene_of("int8_k", **MIXED)
    backend = load(scene)
    impl = backend.make_impl(scene.layer())
    call = scene.paged(backend)
    planes = torch.zeros(3, scene.num_blocks, 2, 16, 32, dtype=torch.int8)
    cache = backend.bind_cache({**of_planes(planes, torch.bfloat16), "k_scale": call.cache["k_scale"]})
    for role in ("k", "v"):
        cache[role].copy_(call.cache[role])
    builder = backend.make_builder([impl], backend.make_state(LIMITS))

    impl.forward(call.query, call.key, call.value, cache, builder.build(call.batch), call.output)

    found = call.output[:14].view(14, 4, -1).double()
    torch.testing.assert_close(found, scene.expected().output, rtol=2**-7, atol=2**-6)
    (written,) = journal.named("reshape_and_cache_flash_mix")
    assert written["value_cache"].shape == written["key_cache"].shape == (scene.num_blocks, 2, 16, 32)


@pytest.mark.parametrize(("dtype", "suffix"), LEVELS)
def test_warmup_makes_every_call(journal, dtype, suffix):
    load(scene_of(dtype, **MIXED)).warmup([GraphShape(1, 1, 1)])

    assert {name for name, _ in journal.journal} == {
        "scaled_int8_quant_for_attn",
        f"reshape_and_cache_flash_{suffix}",
        f"vllm_paged_attention_{suffix}",
        "flash_attn_varlen_int8_func",
    }


def test_merge_calls_the_library(journal):
    scene = scene_of("int8", **DECODES)
    backend = load(scene)
    parts = [(torch.randn(3, 4, 32), torch.randn(3, 4)) for _ in range(2)]
    out = torch.empty(3, 4, 32)

    backend.wrapped.provider.merge(*parts, out)

    share = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
    torch.testing.assert_close(out, parts[0][0] * share[0] + parts[1][0] * share[1])
    assert len(journal.named("merge_attn_states")) == 1


@pytest.mark.skipif(IS_REAL_HERE, reason="ixformer is installed, and its fake would replace it")
def test_missing_modules_are_reported(monkeypatch):
    monkeypatch.setattr("attnplug_int8_ixformer.plugin.IXFORMER_MODULES", ("ixformer.inference.elsewhere",))
    scene = scene_of("int8", **DECODES)

    with (
        FAKES.environment({"ixformer": "0.1"}).active(),  # another environment: a failed load is not retried
        pytest.raises(PluginLoadError, match=r"ixformer\.inference\.elsewhere is missing"),
    ):
        load(scene)


@pytest.mark.skipif(IS_REAL_HERE, reason="ixformer is installed, and its fake would replace it")
@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("vllm_paged_attention_mix", r"ixformer\.inference\.functions has no vllm_paged_attention_mix"),
        ("flash_attn_varlen_int8_func", r"vllm_flash_attn has no flash_attn_varlen_int8_func"),
    ],
)
def test_missing_functions_are_reported(monkeypatch, call, problem):
    scene = scene_of("int8", **DECODES)

    with FAKES.environment({"ixformer": f"0.{len(call)}"}).active():  # as above
        modules = map(import_module, IXFORMER_MODULES)
        monkeypatch.delattr(next(module for module in modules if hasattr(module, call)), call)
        with pytest.raises(PluginLoadError, match=f"(?s){problem}"):
            load(scene)


def test_selection_imports_no_library(journal):
    scene = scene_of("int8", **DECODES)
    for name in [name for name in sys.modules if name.startswith(("ixformer.inference", "ixformer.contrib"))]:
        del sys.modules[name]

    attnplug.select(evolve(scene.case, kv_cache_dtype="int8").requirements(), Device.cpu(), backend=FAKE)

    assert not [name for name in sys.modules if name.startswith(("ixformer.inference", "ixformer.contrib"))]
    assert load(scene).make_impl(Layer(name="layer")).backend.variant == "ixformer"


@pytest.mark.parametrize(("dtype", "is_wrong"), [("int8", False), ("int8_k", False), ("int8", True), ("int8_k", True)])
def test_tune_measures_int8_caches(journal, tmp_path, monkeypatch, capsys, dtype, is_wrong):
    """One that is wrong in long sequences alone is found by rows of the measured batch."""
    run = Int8Impl.run

    def wrong(self, query, key, value, kv_cache, metadata, output, lse):
        run(self, query, key, value, kv_cache, metadata, output, lse)
        if is_wrong and metadata.batch.max_seq_len > 400 and metadata.num_prefills == 0:
            output.mul_(1.5)

    monkeypatch.setattr(Int8Impl, "run", wrong)
    layer = attnplug.Requirements(head_size=32, num_q_heads=4, num_kv_heads=2, dtype="bfloat16", kv_cache_dtype=dtype)
    order = Order((layer,), tmp_path, batch=["decode:2x410"], device="cpu", json=True)

    code = run_order(order)

    found = json.loads(capsys.readouterr().out)
    name = f"{FAKE}/ixformer"
    if is_wrong:
        assert (code, found["entries"]) == (1, [])
        assert f"{name}: request 0 of decode, 2 x 410 differs from the oracle" in found["unserved"][0]["reason"]
    else:
        assert (code, set(found["entries"][0]["times"])) == (0, {name})
