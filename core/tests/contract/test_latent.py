"""Latent attention: requests, pools of hosts, calls without values, scales, compiled calls, selected tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from attrs import evolve

import attnplug
import attnplug.torch_backend
import attnplug.torch_backend.builder as builder_module
import attnplug.torch_backend.impl as impl_module
from attnplug.contract import (
    PAD_SLOT_ID,
    AttentionImpl,
    Batch,
    GraphShape,
    Layer,
    Limits,
    forward_context,
    split_kv,
    warm_up,
)
from attnplug.errors import (
    CacheError,
    LayerError,
    ManifestError,
    NotNegotiatedError,
    PluginContractError,
    RequirementsError,
    TensorError,
)
from attnplug.manifest import read_manifest
from attnplug.ops import dequantize_latents, quantize_latents

L, R, HEADS, SCALE, BLOCK = 48, 16, 4, 40**-0.5, 4
SIZES = {"latent": True, "head_size": L + R, "head_size_v": L, "num_q_heads": HEADS, "num_kv_heads": 1}


def load(**more):
    request = {"dtype": "float32", "block_size": BLOCK, "return_lse": True, **SIZES, **more}
    return attnplug.load(attnplug.Requirements(**request), attnplug.Device.cpu(), backend="torch/sdpa")


def make(backend, **layer):
    impl = backend.make_impl(Layer(name="latents", scale=SCALE, **layer))
    state = backend.make_state(Limits(max_num_reqs=4, max_num_tokens=64, max_seq_len=64))
    return impl, backend.make_builder([impl], state)


def step(tokens, context=0, slots=True):
    """Return the batch of one request whose blocks are 3, 4, ...; its rows."""
    blocks = -(-(tokens + context) // BLOCK)
    first = 3 * BLOCK + context
    return Batch.from_lengths(
        [tokens],
        [tokens + context],
        block_table=torch.arange(3, 3 + blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(first, first + tokens) if slots else None,
    )


def rows(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, HEADS, L + R, generator=generator)
    return query, torch.randn(tokens, 1, L + R, generator=generator)


def expected(query, keys, value_size=L):
    """Return causal attention of the last rows over all keys, in float64."""
    scores = torch.einsum("qhd,kd->hqk", query.double(), keys[:, 0].double()) * SCALE
    late = torch.arange(len(keys)) > torch.arange(len(keys) - len(query), len(keys))[:, None]
    scores = scores.masked_fill(late, -torch.inf)
    out = torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, 0, :value_size].double())
    return out.flatten(1).float(), scores.logsumexp(-1).T.float()


def outputs(tokens):
    return torch.full((tokens, HEADS * L), torch.nan), torch.full((tokens, HEADS), torch.nan)


# --- requests ---


def test_the_form_follows():
    request = attnplug.Requirements(dtype="bfloat16", **SIZES)

    assert request.kv_cache_form == "latent"
    assert "kv_cache_form" not in request.to_dict()
    assert attnplug.Requirements.from_dict(request.to_dict()) == request
    assert request.evolve(latent=False).kv_cache_form is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "one latent per token"),
        ({"head_size_v": L + R + 1}, "the first head_size_v elements"),
        ({"paged": False}, "from a paged KV cache"),
        ({"attn_type": "encoder"}, "a paged KV cache"),
        ({"kv_cache_form": "joint"}, "leave kv_cache_form out"),
        ({"latent": False, "kv_cache_form": "latent"}, "leave kv_cache_form out"),
        ({"per_head_scales": True, "kv_cache_dtype": "fp8"}, "one scale"),
        ({"kv_lora_rank": 512}, r"head_size=kv_lora_rank \+ qk_rope_head_dim"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(RequirementsError, match=message):
        attnplug.Requirements(dtype="bfloat16", **{**SIZES, **changes})


def test_backends_without_it_refuse_it():
    request = attnplug.Requirements(dtype="bfloat16", **SIZES)
    found = attnplug.explain(request, attnplug.Device.cuda("9.0"), assume_installed=True)

    refused = {one.id: [reason.field for reason in one.reasons] for one in found.verdicts if one.reasons}
    assert "latent" in refused["torch/flex"]
    assert "kv_cache_form" not in {field for fields in refused.values() for field in fields}


def test_a_manifest_declares_the_feature_alone(tmp_path):
    text = Path(attnplug.torch_backend.__file__).with_name("attnplug.toml").read_text("utf-8")
    path = tmp_path / "attnplug.toml"
    path.write_text(text.replace('kv_cache_form = ["joint",', 'kv_cache_form = ["latent", "joint",'), "utf-8")

    with pytest.raises(ManifestError, match="list 'latent' in features"):
        read_manifest(path)


# --- calls ---


@pytest.mark.parametrize("layers", [1, 3])
def test_a_host_binds_its_own_pool(layers):
    """A pool of 3-D blocks, as engines have it: attention writes this layer's rows, and nothing else."""
    backend = load()
    impl, builder = make(backend)
    pool = torch.zeros(8, layers, BLOCK, L + R)
    cache = backend.bind_cache(split_kv(pool[:, -1], "latent", "NHD", L + R, L))
    (query, keys), (first, then) = rows(9), (slice(0, 6), slice(6, 9))
    for part, context in ((first, 0), (then, 6)):
        output, lse = outputs(len(query[part]))
        impl.forward(
            query[part], keys[part], None, cache, builder.build(step(len(query[part]), context)), output, lse=lse
        )
        whole = expected(query[part], keys[: part.stop])
        torch.testing.assert_close((output, lse), whole)

    assert torch.equal(pool[3:6, -1].flatten(0, 1)[:9], keys[:, 0])
    assert int(pool.count_nonzero()) == keys.numel()
    assert backend.bytes_per_block == BLOCK * (L + R) * 4


def test_blocks_move_once():
    backend = load()
    source, target = (backend.make_cache(6) for _ in range(2))
    source.k.copy_(torch.randn(source.k.shape))
    backend.swap_blocks(source, target, [(2, 5)])

    assert torch.equal(target.k[5], source.k[2])
    assert torch.equal(target.v[5], source.k[2][..., :L])


@pytest.mark.parametrize(
    ("pool", "v", "message"),
    [
        (torch.zeros(8, BLOCK, 1, L + R), lambda pool: pool[..., R:], "where their key begins"),
        (torch.zeros(8, BLOCK, 1, L + R), lambda pool: pool[..., :L].clone(), "strides of 'v'"),
        (torch.zeros(8, BLOCK, 1, L + R + 8)[..., :-8], lambda pool: pool[..., :L], "strides of 'k'"),
    ],
)
def test_other_memory_is_refused(pool, v, message):
    with pytest.raises(CacheError, match=message) as caught:
        load().bind_cache({"k": pool, "v": v(pool)})
    assert "kv_cache_form='split'" not in str(caught.value)


def test_a_pool_of_other_axes_is_refused():
    with pytest.raises(CacheError, match=r"it is \(num_blocks, block_size, head_size\)"):
        split_kv(torch.zeros(8, BLOCK, 1, L + R), "latent", "NHD", L + R, L)


def test_a_layer_names_its_scale():
    with pytest.raises(LayerError, match="qk_nope_head_dim"):
        load().make_impl(Layer(name="latents"))


def test_values_are_refused():
    backend = load()
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(3), backend.make_cache(8), outputs(3)
    metadata = builder.build(step(3))
    with pytest.raises(TensorError, match="pass value=None"):
        impl.forward(query, keys, keys[..., :L], cache, metadata, output, lse=lse)
    with pytest.raises(TensorError, match="neither key nor value"):
        impl.forward(query, None, None, cache, metadata, output, lse=lse)
    host, _ = make(backend, cache_write="host")
    with pytest.raises(TensorError, match="pass key and value=None"):
        host.write_kv(keys, keys[..., :L], cache, step(3).slot_mapping)
    assert not cache.k.any()
    assert bool(output.isnan().all())


def test_a_profiling_run_succeeds():
    backend = load()
    impl, _ = make(backend)
    (query, keys), (output, lse) = rows(5), outputs(5)
    impl.forward(query, keys, None, None, None, output, lse=lse)
    assert bool(output.isfinite().all())


def test_the_host_writes():
    backend = load(kv_in_cache=True)
    impl, builder = make(backend, cache_write="host")
    (query, keys), cache, (output, lse) = rows(5), backend.make_cache(8), outputs(5)
    slots = step(5).slot_mapping
    impl.write_kv(torch.cat([keys, keys[:1]]), None, cache, torch.cat([slots, torch.tensor([PAD_SLOT_ID])]))
    impl.forward(query, None, None, cache, builder.build(step(5)), output, lse=lse)
    torch.testing.assert_close((output, lse), expected(query, keys))


# --- scales ---


@pytest.mark.parametrize("given", [{"k_scale": 0.25}, {"k_scale": 0.25, "v_scale": 0.25}])
def test_values_have_the_scale_of_keys(given):
    backend = load(kv_cache_dtype="fp8")
    impl, builder = make(backend, **given)
    (query, keys), cache, (output, lse) = rows(5), backend.make_cache(8), outputs(5)
    for scale in (0.25, 0.5):
        if scale != 0.25:
            impl.update_scales(k_scale=scale)
        assert impl.layer.v_scale == impl.layer.k_scale == scale
        impl.forward(query, keys, None, cache, builder.build(step(5)), output, lse=lse)
        rounded = (keys / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close((output, lse), expected(query, rounded))


def test_other_scales_of_values_are_refused():
    backend = load(kv_cache_dtype="fp8")
    with pytest.raises(LayerError, match="leave v_scale out"):
        make(backend, k_scale=0.5, v_scale=0.25)
    impl, _ = make(backend, k_scale=0.5)
    with pytest.raises(LayerError, match="leave v_scale out"):
        impl.update_scales(v_scale=0.25)
    assert impl.layer.v_scale == 0.5


# --- records ---

RECORDS = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla", "head_size": 576, "head_size_v": 512}


@pytest.mark.parametrize(
    "changes",
    [{"latent": False}, {"dtype": "float16"}, {"head_size": 512}, {"head_size_v": None}],
)
def test_records_of_other_layers_are_refused(changes):
    with pytest.raises(RequirementsError, match=r"(?s)kv_cache_dtype='fp8_ds_mla'.*656 bytes.*head_size_v=512"):
        attnplug.Requirements(**{**SIZES, **RECORDS, **changes})


def test_a_host_binds_a_pool_of_records():
    """Attention writes records and reads them, those of an earlier step and of its own."""
    backend = load(**RECORDS)
    impl, builder = make(backend)
    pool = torch.full((8, 2, BLOCK, 656), 255, dtype=torch.uint8)
    cache = backend.bind_cache(split_kv(pool[:, 1], "latent", "NHD", 656, 512))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(9, HEADS, 576, generator=generator).bfloat16()
    keys = torch.randn(9, 1, 576, generator=generator).bfloat16()
    seen = dequantize_latents(quantize_latents(keys), torch.empty_like(keys))
    for part, context in ((slice(0, 6), 0), (slice(6, 9), 6)):
        count = part.stop - part.start
        output, lse = torch.full((count, HEADS * 512), torch.nan).bfloat16(), torch.full((count, HEADS), torch.nan)
        impl.forward(query[part], keys[part], None, cache, builder.build(step(count, context)), output, lse=lse)
        wanted, sums = expected(query[part], seen[: part.stop], 512)
        torch.testing.assert_close(output.float(), wanted, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, sums, atol=2e-2, rtol=2e-2)

    assert torch.equal(pool[3:6, 1].flatten(0, 1)[:9], quantize_latents(keys)[:, 0])
    assert bool((pool[:, 0] == 255).all())
    assert backend.bytes_per_block == BLOCK * 656


def test_a_host_writes_records():
    backend = load(kv_in_cache=True, **RECORDS)
    impl, _ = make(backend, cache_write="host")
    keys, cache = torch.randn(3, 1, 576).bfloat16(), backend.make_cache(8)
    impl.write_kv(keys, None, cache, torch.tensor([12, PAD_SLOT_ID, 17]))

    assert torch.equal(cache.k.view(-1, 656)[[12, 17]], quantize_latents(keys)[[0, 2], 0])
    assert cache.k.data_ptr() == cache.v.data_ptr()
    assert int((cache.k.view(-1, 656) != 0).any(1).sum()) == 2


@pytest.mark.parametrize("given", [{"k_scale": 0.5}, {"k_scale_tensor": torch.full((1,), 0.5)}, {"q_scale": 2.0}])
def test_scales_of_records_are_refused(given):
    backend = load(**RECORDS)
    with pytest.raises(NotNegotiatedError, match="records hold their own scales"):
        make(backend, **given)


@pytest.mark.parametrize("pool", [torch.zeros(8, BLOCK, 1, 656), torch.zeros(8, BLOCK, 1, 576, dtype=torch.uint8)])
def test_caches_of_other_records_are_refused(pool):
    with pytest.raises(CacheError, match=r"\(num_blocks, 4, 1, 656\) torch.uint8"):
        load(**RECORDS).bind_cache({"k": pool, "v": pool[..., :512]})


# --- warm-up ---


@pytest.mark.parametrize(
    ("more", "runs"),
    [({}, [None]), ({"topk": 3}, [False, True]), ({"topk": 3, "kv_in_cache": True}, [False, True] * 2)],
)
def test_a_step_of_zeros_has_what_a_call_has(monkeypatch, more, runs):
    found = []
    backend = load(**more)
    monkeypatch.setattr(backend.impl_class, "run", lambda *_: found.append(None))
    monkeypatch.setattr(backend.impl_class, "run_sparse", lambda *given: found.append(given[6] is not None))
    warm_up(backend, [backend.dummy_batch(GraphShape(2, 2, 1))])

    assert sorted(found, key=str) == sorted(runs, key=str)


# --- compiled ---


def test_a_compiled_model_writes_and_attends():
    backend = load(kv_in_cache=True)
    impl, builder = make(backend, cache_write="host")
    (query, keys), cache, (output, lse) = rows(5), backend.make_cache(8), outputs(5)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def model(query, keys, output, lse):
        impl.write_kv_op(keys * 1.0, None, cache)
        impl.forward_op(query * 1.0, None, None, cache, output, lse=lse)
        return output + 0.0

    with torch.inference_mode(), forward_context({"latents": builder.build(step(5))}):
        model(query, keys, output, lse)
    torch.testing.assert_close((output, lse), expected(query, keys))


# --- selected tokens ---

TOPK = 6


def selection(tokens, keys, seed=0):
    """Return slots of some of `keys` tokens in blocks 3, ... for each token, -1 at any place, and none for the last."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    for row in range(tokens - 1):
        count = row % TOPK + 1
        places = torch.randperm(TOPK, generator=generator)[:count]
        found[row, places] = torch.randperm(keys, generator=generator)[:count].int() + 3 * BLOCK
    return found


def expected_of(query, keys, indices, size=L):
    """Return attention of each row to the slots of its own, in float64."""
    flat = torch.zeros(64, keys.shape[2], dtype=torch.float64)
    flat[3 * BLOCK : 3 * BLOCK + len(keys)] = keys[:, 0].double()
    output, lse = torch.zeros(len(query), HEADS, size), torch.full((len(query), HEADS), -torch.inf)
    for row, slots in enumerate(indices.long()):
        if bool((slots >= 0).any()):
            chosen = flat[slots[slots >= 0]]
            scores = query[row].double() @ chosen.T * SCALE
            output[row], lse[row] = (scores.softmax(-1) @ chosen[:, :size]).float(), scores.logsumexp(-1).float()
    return output.flatten(1), lse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent": False, "head_size_v": None}, "from a KV cache of latents"),
        ({"sliding_window": 8}, "topk=6 and sliding_window"),
        ({"attention_chunk": 8, "alibi": "linear"}, "topk=6 and attention_chunk and alibi"),
        ({"custom_mask": True}, "no backend is told"),
        ({"cascade": True}, "no backend is told"),
        ({"topk": 0}, "whole number from 1"),
    ],
)
def test_contradictions_of_topk_are_refused(changes, message):
    with pytest.raises(RequirementsError, match=message):
        attnplug.Requirements(dtype="bfloat16", **{**SIZES, "topk": TOPK, **changes})


def test_backends_without_topk_refuse_it():
    request = attnplug.Requirements(dtype="bfloat16", topk=2048, **{**SIZES, "head_size": 576, "head_size_v": 512})
    found = attnplug.explain(request, attnplug.Device.cuda("9.0"), assume_installed=True)

    refused = {one.id: [reason.field for reason in one.reasons] for one in found.verdicts if one.reasons}
    assert "topk" in refused["torch/flex"]
    assert "topk" in refused["flashinfer/fa3"]
    assert "topk" not in refused.get("torch/sdpa", ())


def test_a_manifest_bounds_topk(tmp_path):
    text = Path(attnplug.torch_backend.__file__).with_name("attnplug.toml").read_text("utf-8")
    path = tmp_path / "attnplug.toml"
    path.write_text(
        text.replace('"latent", "topk"]', '"latent"]\ntopk = { multiple_of = 64, max = 2048 }'), encoding="utf-8"
    )
    declared = next(one for one in read_manifest(path).variants if one.name == "sdpa").supports["topk"]

    assert [declared.allows(topk) for topk in (64, 100, 2048, 4096)] == [True, False, True, False]


@pytest.mark.parametrize("has_lens", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_selected_tokens_are_attended_to(monkeypatch, at_once, has_lens):
    """Causality hides none of them, and what is not selected may be NaN."""
    sizes = evolve(builder_module.sizes_on("cpu"), gathered=at_once)
    monkeypatch.setattr(impl_module, "sizes_on", lambda _: sizes)
    backend = load(topk=TOPK)
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    cache.k.fill_(torch.nan)
    indices, lens = selection(9, 9), None
    whole = expected_of(query, keys, indices)
    if has_lens:
        lens = torch.tensor([TOPK, 0, 1, 2, 3, 4, 5, 6, 2], dtype=torch.int32)
        beyond = torch.arange(TOPK) >= lens[:, None]
        whole = expected_of(query, keys, indices.masked_fill(beyond, -1))
        indices = indices.masked_fill(beyond, 2**30)
    metadata = builder.build(step(9))
    impl.forward(query, keys, None, cache, metadata, output, lse=lse, indices=indices, index_lens=lens)

    torch.testing.assert_close((output, lse), whole)
    assert not output[-1].any()
    assert bool((lse[-1] == -torch.inf).all())


def test_no_slot_beyond_the_pages_is_read():
    """Slots on a device are not checked: the built-in backend masks those outside of the KV cache."""
    backend = load(topk=TOPK)
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    indices = selection(9, 9)
    wild = indices.masked_fill(indices < 0, 2**31 - 1)
    wild[0, 0] = 8 * BLOCK
    indices[0, 0] = -1
    impl.wrapped.run_sparse(query, keys, cache, builder.build(step(9)), wild, None, output, lse)

    torch.testing.assert_close((output, lse), expected_of(query, keys, indices))


def test_selected_tokens_of_an_fp8_cache():
    backend = load(topk=TOPK, kv_cache_dtype="fp8")
    impl, builder = make(backend, k_scale=0.25)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    indices = selection(9, 9)
    impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, indices=indices)

    rounded = (keys / 0.25).to(torch.float8_e4m3fn).float() * 0.25
    torch.testing.assert_close((output, lse), expected_of(query, rounded, indices))


def test_selected_tokens_of_records():
    backend = load(topk=TOPK, **RECORDS)
    impl, builder = make(backend)
    query, keys = torch.randn(9, HEADS, 576).bfloat16(), torch.randn(9, 1, 576).bfloat16()
    cache, (output, lse) = backend.make_cache(8), (torch.zeros(9, HEADS * 512).bfloat16(), torch.zeros(9, HEADS))
    cache.k.fill_(255)  # NaN where nothing is written
    indices = selection(9, 9)
    impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, indices=indices)

    seen = dequantize_latents(quantize_latents(keys), torch.empty_like(keys))
    wanted, sums = expected_of(query, seen, indices, 512)
    torch.testing.assert_close((output.float(), lse), (wanted, sums), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TensorError, r"topk=6 was negotiated.*\(tokens, 6\) int32"),
        ({"index_lens": torch.zeros(9, dtype=torch.int32)}, TensorError, "was given no indices"),
        ({"indices": selection(9, 9)[:, :5]}, TensorError, r"indices is \(9, 6\) int32"),
        ({"indices": selection(8, 9)}, TensorError, r"indices is \(9, 6\) int32"),
        ({"indices": selection(9, 9).long()}, TensorError, r"indices is \(9, 6\) int32"),
        ({"indices": selection(9, 9).T.contiguous().T}, TensorError, "its last axis contiguous"),
        (
            {"indices": selection(9, 9), "index_lens": torch.zeros(9, dtype=torch.int64)},
            TensorError,
            r"index_lens is \(9,\) int32",
        ),
        ({"indices": selection(9, 9).to("meta")}, TensorError, "int32 on meta"),
        (
            {"indices": selection(9, 9), "index_lens": torch.zeros(9, 2, dtype=torch.int32)[:, 0]},
            TensorError,
            r"index_lens is \(9,\) int32",
        ),
        ({"indices": selection(9, 9).clamp(max=12) - 1}, CacheError, "indices from -2 to 11.*0 to 31, or -1"),
        ({"indices": selection(9, 9) + 20}, CacheError, "0 to 31, or -1 for no token"),
    ],
)
def test_wrong_selections_are_refused(given, error, message):
    backend = load(topk=TOPK)
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, **given)
    assert not cache.k.any()
    assert bool(output.isnan().all())


def test_written_selections_are_refused():
    backend = load(topk=TOPK)
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    indices = output.view(torch.int32)[:, :TOPK]
    with pytest.raises(TensorError, match="output and indices that share memory"):
        impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, indices=indices)
    indices = cache.k.view(-1, L + R)[:9].view(torch.int32)[:, :TOPK]
    with pytest.raises(TensorError, match="the KV cache and indices that share memory"):
        impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, indices=indices)


def test_autocast_leaves_a_selection_alone():
    backend = load(topk=TOPK)
    impl, builder = make(backend)
    (query, keys), cache, (output, lse), indices = rows(9), backend.make_cache(8), outputs(9), selection(9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, indices=indices)

    torch.testing.assert_close((output, lse), expected_of(query, keys, indices))


def test_rows_beyond_the_batch_select_nothing():
    """What they hold is not looked at, and their output stays as it is."""
    backend = load(topk=TOPK)
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    indices = selection(7, 7)
    padded = torch.cat([indices, torch.full((2, TOPK), 8 * BLOCK, dtype=torch.int32)])
    impl.forward(query, keys, None, cache, builder.build(step(7)), output, lse=lse, indices=padded)

    torch.testing.assert_close((output[:7], lse[:7]), expected_of(query[:7], keys[:7], indices))
    assert bool(output[7:].isnan().all() & lse[7:].isnan().all())


def test_selections_that_were_not_negotiated_are_refused():
    backend = load()
    impl, builder = make(backend)
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    with pytest.raises(NotNegotiatedError, match="would attend to all tokens"):
        impl.forward(query, keys, None, cache, builder.build(step(9)), output, lse=lse, indices=selection(9, 9))
    with pytest.raises(NotNegotiatedError, match="topk was not requested"):
        make(backend, topk=TOPK)


def test_slots_are_checked_on_request():
    backend = load(topk=TOPK)
    impl, _ = make(backend)
    cache, indices = backend.make_cache(8), selection(9, 9)
    indices[3, 5] = 8 * BLOCK
    impl.check_indices(indices, cache, torch.full((9,), 5, dtype=torch.int32))
    with pytest.raises(CacheError, match="0 to 31, or -1"):
        impl.check_indices(indices, cache)


@pytest.mark.parametrize(("more", "lengths"), [({"topk": TOPK}, (1024,)), ({}, (256, 512, 1024))])
def test_nothing_is_planned_for_selected_tokens(more, lengths):
    """Neither memory nor graphs depend on the longest sequence, whose keys are not gathered."""
    backend = load(cudagraph="uniform_batch", **more)
    limits = Limits(max_num_reqs=4, max_num_tokens=64, max_seq_len=1024)
    impl = backend.make_impl(Layer(name="latents", scale=SCALE))

    assert backend.make_builder([impl], backend.make_state(limits)).graph_lengths == lengths
    assert bool(backend.workspace_bytes(limits)) == (not more)


def test_a_profiling_run_may_have_no_selection():
    impl, _ = make(load(topk=TOPK))
    (query, keys), (output, lse) = rows(5), outputs(5)
    for given in ({}, {"indices": selection(5, 5)}):
        impl.forward(query, keys, None, None, None, output, lse=lse, **given)
        assert bool(output.isfinite().all())


def test_a_class_without_run_sparse_is_refused():
    backend = load(topk=TOPK)
    backend.impl_class = type("Dense", (backend.impl_class,), {"run_sparse": AttentionImpl.run_sparse})
    with pytest.raises(PluginContractError, match="write run_sparse in Dense"):
        make(backend)


def test_a_compiled_model_attends_to_selected_tokens():
    backend = load(topk=TOPK, kv_in_cache=True)
    impl, builder = make(backend, cache_write="host")
    (query, keys), cache, (output, lse) = rows(9), backend.make_cache(8), outputs(9)
    indices = selection(9, 9)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def model(query, keys, output, lse, indices):
        impl.write_kv_op(keys * 1.0, None, cache)
        impl.forward_op(query * 1.0, None, None, cache, output, lse=lse, indices=indices)
        return output + 0.0

    with torch.inference_mode(), forward_context({"latents": builder.build(step(9))}):
        model(query, keys, output, lse, indices)
    torch.testing.assert_close((output, lse), expected_of(query, keys, indices))
