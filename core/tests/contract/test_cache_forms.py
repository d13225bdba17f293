"""The forms of a KV cache: pools of hosts, bound or refused; copies between forms; graphs that write them."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import CacheTensor, KVCache, forward_context, split_kv
from attnplug.errors import CacheError, PluginContractError
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import (
    copy_of,
    make_backend,
    make_batch,
    make_builder,
    make_layer,
    make_qkv,
    random_cache,
    refused,
    same,
)

FORMS = ("joint", "interleaved", "split", "packed")
ALL = (*FORMS, "independent")
LAYOUTS = ("NHD", "HND")
BLOCKS = 32


def pool_of(form, layout, size_v=8, layers=1, blocks=BLOCKS):
    """Return the pool of a host whose blocks hold several layers, and the views of the last of these."""
    inner = (4, 2) if layout == "NHD" else (2, 4)
    if form == "packed":
        pool = torch.zeros(blocks, layers, *inner, 8 + size_v)
        return pool, split_kv(pool[:, -1], form, layout, 8)
    if form == "interleaved":
        pool = torch.zeros(blocks, layers, 2, *inner, 8)
        return pool, split_kv(pool[:, -1], form, layout, 8)
    pool = torch.zeros(2, blocks, layers, *inner, 8)
    views = split_kv(pool[:, :, -1], "joint", layout, 8)
    return pool, {role: view.clone() for role, view in views.items()} if form == "split" and layers == 1 else views


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("form", "layout"), list(product(FORMS, LAYOUTS)))
def test_a_host_binds_its_own_pool(form, layout, layers):
    """Attention writes the views, and nothing else of the pool."""
    backend = make_backend(kv_cache_form=form, kv_layout=layout)
    impl = make_layer(backend)
    metadata = make_builder(backend, impl).build(make_batch([1, 4], [6, 4]))
    query, key, value, output = make_qkv(backend, 5)
    plain, expected = make_layer(make_backend()), output.clone()
    reference = random_cache(plain.backend, BLOCKS)
    pool, views = pool_of(form, layout, layers=layers)
    for role, view in views.items():
        view.copy_(reference[role])

    cache = backend.bind_cache(views)
    impl.forward(query, key, value, cache, metadata, output)
    plain.forward(
        query, key, value, reference, make_builder(plain.backend, plain).build(make_batch([1, 4], [6, 4])), expected
    )

    torch.testing.assert_close(output, expected)
    assert same(cache, reference)
    assert (cache.form, cache.num_blocks) == (form, BLOCKS)
    assert all(cache[role].data_ptr() == view.data_ptr() for role, view in views.items())
    others = {"packed": pool[:, :-1], "interleaved": pool[:, :-1]}.get(form, pool[:, :, :-1])
    assert not others.any()


@pytest.mark.parametrize("wanted", ALL)
@pytest.mark.parametrize("given_form", FORMS)
@pytest.mark.parametrize(("layout", "given_layout"), list(product(LAYOUTS, LAYOUTS)))
def test_a_pool_of_another_form_is_refused(wanted, given_form, layout, given_layout):
    """Two tensors have room for others: pools whose blocks are dense are two tensors as well."""
    backend = make_backend(kv_cache_form=wanted, kv_layout=layout)
    _, views = pool_of(given_form, given_layout)
    fits = layout == given_layout and (
        wanted == given_form or (wanted in ("split", "independent") and given_form != "packed")
    )

    if fits:
        assert backend.bind_cache(views).form == wanted
        return
    strides = str(views["k"].stride())
    with refused(CacheError, problem=strides, expected=f"kv_cache_form='{wanted}'", fix=f"kv_layout='{given_layout}'"):
        backend.bind_cache(views)


def test_the_fix_names_forms_that_the_variant_declares():
    backend = make_backend()
    _, views = pool_of("interleaved", "NHD")
    with refused(CacheError, fix="kv_cache_form='interleaved', kv_layout='NHD' or kv_cache_form='split'"):
        backend.bind_cache(views)
    backend.kv_cache_forms = ("joint", "split")
    with pytest.raises(CacheError) as caught:
        backend.bind_cache(views)
    assert "interleaved" not in caught.value.fix
    backend.kv_cache_forms = ("joint",)
    with refused(CacheError, fix="make_cache"):
        backend.bind_cache(views)


def changed(**change):
    _, views = pool_of("joint", "NHD")
    return {**views, **change}


POOL = torch.zeros(2, BLOCKS, 4, 2, 8)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (POOL, "a mapping of roles"),
        (None, "a mapping of roles"),
        ({"k": 3, "v": 4}, "a mapping of roles"),
        ({"k": POOL[0]}, "the cache tensors 'k', 'v'"),
        ({**changed(), "scale": POOL}, "the cache tensors 'k', 'v'"),
        (changed(v=torch.zeros(BLOCKS, 4, 2, 16)), "(num_blocks, 4, 2, 8) torch.float32"),
        (changed(v=torch.zeros(BLOCKS, 4, 2, 8).half()), "(num_blocks, 4, 2, 8) torch.float32"),
        (changed(v=torch.zeros(BLOCKS, 4, 2, 8, device="meta")), "on cpu"),
        (changed(v=torch.zeros(BLOCKS - 1, 4, 2, 8)), "as many blocks"),
        ({role: POOL[i, :1] for i, role in enumerate("kv")}, "from 2"),
        (dict.fromkeys("kv", POOL[0]), "behind all keys"),
        ({"k": POOL[1], "v": POOL[0]}, "behind all keys"),
        (changed(v=torch.zeros(BLOCKS, 4, 2, 8)), "in the memory of the keys"),
        ({role: torch.zeros(2, 1, 4, 2, 8).expand(2, BLOCKS, 4, 2, 8)[i] for i, role in enumerate("kv")}, "strides"),
        ({role: torch.zeros(2, BLOCKS, 4, 2, 16)[i, ..., ::2] for i, role in enumerate("kv")}, "strides of 'k'"),
        ({role: torch.zeros(2, BLOCKS, 8, 2, 8)[i, :, ::2] for i, role in enumerate("kv")}, "strides of 'k'"),
    ],
)
def test_what_is_no_cache_of_the_agreement_is_refused(tensors, said):
    with refused(CacheError, expected=said):
        make_backend().bind_cache(tensors)


def test_tensors_that_share_memory_are_refused():
    backend, one = make_backend(kv_cache_form="split"), torch.zeros(BLOCKS + 1, 4, 2, 8)
    with refused(CacheError, problem="'k' and 'v' share memory", fix="different parts"):
        backend.bind_cache({"k": one[1:], "v": one[:-1]})
    packed, pool = make_backend(kv_cache_form="packed"), torch.zeros(BLOCKS, 4, 2, 16)
    with refused(CacheError, expected="right behind their key"):
        packed.bind_cache({"k": pool[..., :8], "v": pool[..., :8]})


def apart(layout, gaps, size_v=8, blocks=BLOCKS):
    """Return keys and values of a pool each, with so many elements behind each block."""
    inner, views = ((4, 2) if layout == "NHD" else (2, 4)), []
    for size, gap in zip((8, size_v), gaps, strict=True):
        rows = torch.zeros(blocks, 4 * 2 * size + gap)[:, : 4 * 2 * size].unflatten(1, (*inner, size))
        views.append(rows if layout == "NHD" else rows.transpose(1, 2))
    return dict(zip("kv", views, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gaps", [(64, 0), (0, 64), (64, 8)])
def test_unequal_strides_are_those_of_an_independent_cache(layout, gaps):
    """A kernel with one set of strides for both would read another layer's values."""
    views = apart(layout, gaps)
    backend = make_backend(kv_cache_form="split", kv_layout=layout)
    found, equal = (str(views[role].stride()) for role in ("v", max("kv", key=lambda role: views[role].stride())))

    fits = f"select again with kv_cache_form='independent', kv_layout='{layout}'"
    with refused(
        CacheError, problem=found, expected=f"strides of 'k' and of 'v' are equal, {equal} for both", fix=fits
    ):
        backend.bind_cache(views)
    backend.kv_cache_forms = ("joint", "split")
    with refused(CacheError, problem=found, expected=f"equal, {equal} for both", fix="make_cache"):
        backend.bind_cache(views)
    assert make_backend(kv_cache_form="independent", kv_layout=layout).bind_cache(views).num_blocks == BLOCKS
    alike = apart(layout, (max(gaps), max(gaps)))
    assert backend.bind_cache(alike).num_blocks == BLOCKS


@pytest.mark.parametrize(("layout", "form", "size_v"), list(product(LAYOUTS, ["split", "independent"], [4, 8, 16])))
def test_a_pool_each_is_read_and_written_where_it_is(layout, form, size_v):
    """Of two head sizes, the strides of K and V cannot be equal: every split KV cache has its own then."""
    gaps = (64, 0) if form == "independent" or size_v != 8 else (64, 64)
    requested = {"kv_cache_form": form, "kv_layout": layout, "head_size_v": size_v}
    backend, plain = make_backend(**requested), make_backend(**requested)
    impl, other = make_layer(backend), make_layer(plain)
    reference, views = random_cache(plain, BLOCKS), apart(layout, gaps, size_v)
    for role, view in views.items():
        view.copy_(reference[role])
    query, key, value, output = make_qkv(backend, 5)
    expected = output.clone()
    cache = backend.bind_cache(views)

    impl.forward(query, key, value, cache, make_builder(backend, impl).build(make_batch([1, 4], [6, 4])), output)
    other.forward(query, key, value, reference, make_builder(plain, other).build(make_batch([1, 4], [6, 4])), expected)

    assert torch.equal(output, expected)
    assert same(cache, reference)
    memory = views["k"].untyped_storage()
    assert not torch.empty(0).set_(memory).view(BLOCKS, -1)[:, 64:].any()  # the gaps belong to the host


@pytest.mark.parametrize(("form", "layout", "size_v"), list(product(["interleaved", "packed"], LAYOUTS, [4, 16])))
def test_a_block_of_two_sizes_has_one_stride(form, layout, size_v):
    """Values that are further apart than their keys would be written over the keys of other blocks."""
    backend = make_backend(kv_cache_form=form, kv_layout=layout, head_size_v=size_v)
    fresh = backend.make_cache(BLOCKS)
    step, *inner = fresh.v.stride()
    more = torch.zeros(2 * BLOCKS * (step + 8))
    start = fresh.v.storage_offset()
    keys = more.as_strided(fresh.k.shape, fresh.k.stride())
    values = more[start:].as_strided(fresh.v.shape, (step + 8, *inner))

    with refused(CacheError, problem=str(values.stride()), expected="a block has both"):
        backend.bind_cache({"k": keys, "v": values})


@pytest.mark.parametrize("form", ["joint", "interleaved"])
def test_one_tensor_of_two_halves_has_one_head_size(form):
    """A backend lays out both for itself; a host's pool of these axes has no room for values of another size."""
    backend = make_backend(kv_cache_form=form, head_size_v=16)
    views = split_kv(torch.zeros((2, 6, 4, 2, 8) if form == "joint" else (6, 2, 4, 2, 8)), form, "NHD", 8)

    assert backend.make_cache(6).v.shape == (6, 4, 2, 16)
    with refused(CacheError, problem="(6, 4, 2, 8)", expected="(num_blocks, 4, 2, 16)"):
        backend.bind_cache(views)
    with refused(CacheError, problem="head_size=8", expected="num_blocks"):
        split_kv(torch.zeros(2, 6, 4, 2, 16), "joint", "NHD", 8)


def test_strides_of_single_elements_do_not_matter():
    backend = make_backend(num_kv_heads=1, num_q_heads=1, block_size=1)
    odd = torch.zeros(2, BLOCKS * 8).as_strided((2, BLOCKS, 1, 1, 8), (BLOCKS * 8, 8, 999, 77, 1))

    cache = backend.bind_cache({"k": odd[0], "v": odd[1]})

    assert cache.k.stride() == (8, 8, 8, 1)


@given(st.sampled_from(ALL), st.sampled_from(LAYOUTS), st.sampled_from([4, 8, 24]), st.integers(2, 5))
def test_fresh_caches_are_of_the_agreed_form(form, layout, size_v, blocks):
    backend = make_backend(kv_cache_form=form, kv_layout=layout, head_size_v=size_v)
    cache = backend.make_cache(blocks)

    for number, tensor in enumerate(cache.tensors.values(), 1):
        assert not tensor.any()
        tensor.copy_(number * 1000 + torch.arange(tensor.numel()).view(tensor.shape))
    values = torch.cat([tensor.flatten() for tensor in cache.tensors.values()])
    assert values.unique().numel() == values.numel()  # no two elements share a place
    assert backend.bind_cache(cache.tensors).num_blocks == blocks
    assert backend.bytes_per_block == 4 * 2 * (8 + size_v) * 4
    assert len(cache.storages) == (2 if form in ("split", "independent") else 1)


@pytest.mark.parametrize(("form", "layout"), [("split", "NHD"), ("jointly", "NHD"), ("joint", "HDN")])
def test_a_pool_of_one_tensor_has_three_forms(form, layout):
    with refused(CacheError, problem=repr(form), expected="joint, interleaved, packed", fix="agreement"):
        split_kv(POOL, form, layout, 8)


@pytest.mark.parametrize(
    ("form", "shape"),
    [("joint", (3, 4, 4, 2, 8)), ("joint", (2, 4, 4, 8)), ("interleaved", (4, 3, 4, 2, 8)), ("packed", (4, 4, 2, 8))],
)
def test_a_pool_has_the_axes_of_its_form(form, shape):
    with refused(CacheError, problem=str(shape), expected="num_blocks", fix="order of memory"):
        split_kv(torch.zeros(shape), form, "NHD", 8)


@pytest.mark.parametrize(("source", "target"), list(product(ALL, ALL)))
def test_blocks_move_between_forms(source, target):
    src, dst = (make_backend(kv_cache_form=form, kv_layout=lay) for form, lay in ((source, "NHD"), (target, "HND")))
    here, there = random_cache(src, 6), random_cache(dst, 5)
    kept = copy_of(dst, there)

    src.swap_blocks(here, there, [(5, 1), (2, 4)])

    for role in "kv":
        assert torch.equal(there[role][[1, 4]], here[role][[5, 2]])
        assert torch.equal(there[role][[0, 2, 3]], kept[role][[0, 2, 3]])
    with refused(CacheError, problem="the destination", expected="(2, 4, 2, 8)"):
        src.swap_blocks(here, make_backend(block_size=8).make_cache(4), [(1, 1)])


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ({"k": (2, 4, 2, 8), "v": (2, 2, 4, 8)}, "'v' is (num_blocks, 4, 2, size)"),
        ({"k": (2, 4, 2, 8)}, "the roles 'k' and 'v'"),
    ],
)
def test_a_plugin_describes_keys_and_values(specs, said):
    described = {role: CacheTensor(shape, torch.float32, 0) for role, shape in specs.items()}
    backend = make_backend(type("B", (ToyBackend,), {"cache_tensors": lambda *_: described}))
    with refused(PluginContractError, expected=said):
        backend.make_cache(4)


@pytest.mark.parametrize("form", ["interleaved", "packed"])
def test_one_tensor_has_one_dtype(form):
    described = {role: CacheTensor((2, 4, 2, 8), dtype, 0) for role, dtype in (("k", torch.int8), ("v", torch.half))}
    cls = type("B", (ToyBackend,), {"cache_tensors": lambda *_: described})
    with refused(PluginContractError, expected="one dtype", fix="kv_cache_form"):
        make_backend(cls, kv_cache_form=form).make_cache(4)
    assert make_backend(cls, kv_cache_form="split").bind_cache(
        {"k": torch.zeros(4, 4, 2, 8, dtype=torch.int8), "v": torch.zeros(4, 4, 2, 8).half()}
    )


# --- graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on the way to its compilers
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_writes_every_form(form, compiler):
    """Two layers of one pool: each graph input is a memory, not keys and values that alias."""
    backend = make_backend(kv_cache_form=form)
    impls = [make_layer(backend, name=f"layers.{i}", cache_write=w) for i, w in enumerate(("host", "forward"))]
    metadata = make_builder(backend, *impls).build(make_batch([1, 4], [6, 4]))
    pool, last = pool_of(form, "NHD", layers=2)
    part = pool[:, :, 0] if form in ("joint", "split") else pool[:, 0]
    first = split_kv(part, "joint" if form == "split" else form, "NHD", 8)
    caches = [backend.bind_cache(views) for views in (first, last)]
    assert caches[0].storages[0] is caches[1].storages[0]
    query, key, value, output = make_qkv(backend, 5)
    expected, copies = output.clone(), [copy_of(backend, cache) for cache in caches]

    def model(query, key, value, caches, output):
        for impl, cache in zip(impls, caches, strict=True):
            if impl.host_writes:
                impl.write_kv_op(key, value, cache)
            impl.forward_op(query + 1, key, value, cache, output)
            query = query + output.view(query.shape)
        return query * 2

    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    with forward_context({"layers.0": metadata, "layers.1": metadata}), torch.no_grad():
        wanted = model(query, key, value, copies, expected)
        found = compiled(query, key, value, caches, output)

    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(output, expected)
    assert all(same(cache, copy) for cache, copy in zip(caches, copies, strict=True))


def test_an_op_writes_the_memory_that_it_was_given():
    """Functionalization hands over clones, and copies them back: what is written elsewhere would be lost."""
    backend = make_backend(kv_cache_form="packed")
    impl = make_layer(backend)
    metadata = make_builder(backend, impl).build(make_batch([2], [2]))
    cache = backend.make_cache(8)
    query, key, value, output = make_qkv(backend, 2)
    clones = [memory.clone() for memory in cache.storages]

    with forward_context({"layers.0": metadata}):
        torch.ops.attnplug.forward(query, key, value, clones, cache.handle, output, None, impl._number)

    assert not cache.storages[0].any()
    assert torch.equal(cache.over(clones).k[1, :2], key)
    assert torch.equal(cache.over(clones).v[1, :2], value)


def test_a_cache_that_was_collected_is_named():
    backend = make_backend()
    impl = make_layer(backend)
    metadata = make_builder(backend, impl).build(make_batch([2], [2]))
    query, key, value, output = make_qkv(backend, 2)
    cache = backend.make_cache(8)
    handle, memory = cache.handle, list(cache.storages)
    del cache
    gc.collect()
    with (
        forward_context({"layers.0": metadata}),
        refused(CacheError, problem=f"KV cache number {handle}", expected="garbage-collected"),
    ):
        torch.ops.attnplug.forward(query, key, value, memory, handle, output, None, impl._number)


def test_an_op_takes_bound_memory_only():
    impl = make_layer(make_backend())
    query, key, value, output = make_qkv(impl.backend, 2)
    with refused(CacheError, problem="type Tensor", fix="bind_cache"):
        impl.forward_op(query, key, value, POOL, output)


def test_a_cache_reads_like_what_it_is():
    cache = make_backend(kv_cache_form="packed", kv_layout="HND").make_cache(3)
    assert isinstance(cache, KVCache)
    assert repr(cache) == "KVCache(3 blocks, packed HND, k, v on cpu)"


class Aligned(ToyBackend):
    cache_alignment = 16


class Gapless(ToyBackend):
    def cache_tensors(self, num_blocks):
        return {role: evolve(spec, contiguous_blocks=True) for role, spec in super().cache_tensors(num_blocks).items()}


@pytest.mark.parametrize(("offset", "padding"), [(1, 0), (0, 1), (2, 0), (0, 6)])
def test_places_that_kernels_cannot_load_are_refused(offset, padding):
    """Kernels that load 16 bytes at a time need addresses and strides that are multiples of 16."""
    backend = make_backend(cls=Aligned)
    size = BLOCKS * (4 * 2 * 8 + padding)
    pool = torch.zeros(offset + 2 * size)[offset:].view(2, BLOCKS, -1)[..., : 4 * 2 * 8].unflatten(-1, (4, 2, 8))

    with refused(CacheError, expected="multiples of 16 bytes"):
        backend.bind_cache(split_kv(pool, "joint", "NHD", 8))
    assert make_backend().bind_cache(split_kv(pool, "joint", "NHD", 8)).num_blocks == BLOCKS


@pytest.mark.parametrize(("form", "layout"), list(product(ALL, LAYOUTS)))
def test_what_core_allocates_is_aligned(form, layout):
    cache = make_backend(cls=Aligned, kv_cache_form=form, kv_layout=layout).make_cache(BLOCKS)

    assert cache.num_blocks == BLOCKS


@pytest.mark.parametrize("form", ["joint", "split"])
def test_kernels_without_block_strides_refuse_gaps(form):
    backend = make_backend(cls=Gapless, kv_cache_form=form)
    _, padded = pool_of(form, "NHD", layers=2)

    with refused(CacheError, expected="of blocks one after another"):
        backend.bind_cache(padded)
    assert backend.bind_cache(pool_of(form, "NHD")[1]).num_blocks == BLOCKS
    assert backend.make_cache(BLOCKS).num_blocks == BLOCKS
