"""Latent attention: requests, pools of hosts, layers and calls without values, scales, compiled calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attnplug
import attnplug.torch_backend
from attnplug.contract import PAD_SLOT_ID, Batch, Layer, Limits, forward_context, split_kv
from attnplug.errors import CacheError, LayerError, ManifestError, NotNegotiatedError, RequirementsError, TensorError
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
