"""Attention as one op: what `torch.compile(fullgraph=True)` makes of it, eagerly and with metadata of other steps."""

from __future__ import annotations

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from attnplug.contract import CacheTensor, Layer, forward_context
from attnplug.errors import BatchError, CacheError, LayerError
from core.tests.contract.toy import ToyBackend, ToyImpl
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


class Model(nn.Module):
    """A layer between two operations, as in a model."""

    def __init__(self, impl, pages, *, lse=False):
        super().__init__()
        self.impl = impl
        self.pages = pages
        self.lse = lse

    def forward(self, query, key, value):
        output = torch.zeros(query.shape[0], self.impl.output_width)
        lse = torch.zeros(query.shape[0], query.shape[1]) if self.lse else None
        self.impl.forward_op(query * 2, key, value, self.pages, output, lse=lse)
        return output + 1 if lse is None else (output + 1, lse)


STEPS = [([1, 6], [3, 6]), ([1, 1], [3, 5]), ([1], [9]), ([1, 4], [6, 4]), ([3], [3])]


COMPILES = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="on the CPU inductor compiles with g++"),
    pytest.mark.slow,
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on the way to its compilers
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=COMPILES)])
def test_a_compiled_model_serves_every_step(compiler):
    """One graph without a break; other metadata does not compile again, and writes into the cache are seen."""
    backend = make_backend(return_lse=True)
    impl = make_layer(backend)
    builder = make_builder(backend, impl)
    pages = random_cache(backend, 32)
    model = Model(impl, pages, lse=True)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        compile_graph = torch._dynamo.backends.registry.lookup_backend(compiler)
        return compile_graph(graph, inputs)

    compiled = torch.compile(model, backend=counting, fullgraph=True, dynamic=True)
    for query_lens, seq_lens in STEPS:
        metadata = builder.build(make_batch(query_lens, seq_lens))
        query, key, value, output = make_qkv(backend, sum(query_lens))
        expected, lse, cache = output.clone(), torch.zeros(query.shape[:2]), copy_of(backend, pages)
        impl.forward(query * 2, key, value, cache, metadata, expected, lse=lse)
        with forward_context({"layers.0": metadata}), torch.no_grad():
            found, found_lse = compiled(query, key, value)
        torch.testing.assert_close(found, expected + 1)
        torch.testing.assert_close(found_lse, lse)
        assert same(pages, cache)
    assert len(graphs) == 2  # a single row is compiled by itself


def test_the_schema_names_what_is_written():
    backend = make_backend()
    impl = make_layer(backend)
    query, key, value, output = make_qkv(backend, 2)
    pages = backend.make_cache(8)
    metadata = make_builder(backend, impl).build(make_batch([2], [2]))
    with forward_context({"layers.0": metadata}):
        torch.library.opcheck(
            torch.ops.attnplug.forward,
            (query, key, value, list(pages.storages), pages.handle, output, None, impl._number),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_caches_of_several_roles_and_none():
    class RolesBackend(ToyBackend):
        def cache_tensors(self, num_blocks):
            scales = CacheTensor((num_blocks, 4), torch.float32, 0)
            return {"k_scale": scales, **super().cache_tensors(num_blocks)}

    backend = make_backend(RolesBackend)
    impl = make_layer(backend, cache_write="host")
    metadata = make_builder(backend, impl).build(make_batch([1], [5]))
    query, key, value, output = make_qkv(backend, 1)
    cache = random_cache(backend, 8)
    assert len(cache.storages) == 2  # that of keys and values, and that of the scales
    expected = output.clone()
    impl.forward(query, key, value, cache, metadata, expected)
    with forward_context({"layers.0": metadata}):
        impl.forward_op(query, key, value, cache, output)
    assert torch.equal(output, expected)

    dense = make_backend(paged=False)
    layer = make_layer(dense)
    with forward_context({"layers.0": None}):
        layer.forward_op(query, key, value, None, output)  # a profiling run


def test_no_metadata_is_an_error_that_says_so():
    backend = make_backend()
    impl = make_layer(backend)
    query, key, value, output = make_qkv(backend, 1)
    call = (query, key, value, backend.make_cache(4), output)
    with refused(BatchError, problem="'layers.0'", expected="no forward_context", fix="forward_context("):
        impl.forward_op(*call)
    with forward_context({"layers.7": None}), refused(BatchError, expected="'layers.7'"):
        impl.forward_op(*call)
    with forward_context({"layers.0": None}):
        impl.forward_op(*call)
        with ThreadPoolExecutor() as pool, refused(BatchError, expected="no forward_context"):
            pool.submit(impl.forward_op, *call).result()


def test_refusals_pass_through():
    backend = make_backend()
    impl = make_layer(backend)
    query, key, value, output = make_qkv(backend, 1)
    metadata = make_builder(backend, impl).build(make_batch([1], [5]))
    with forward_context({"layers.0": metadata}), refused(CacheError, problem="no cache"):
        impl.forward_op(query, key, value, None, output)


def test_a_layer_that_was_collected_is_named():
    backend = make_backend()
    impl = make_layer(backend)
    handle = impl._number
    query, key, value, output = make_qkv(backend, 1)
    del impl
    gc.collect()
    with refused(LayerError, problem=f"layer number {handle}", expected="garbage-collected"):
        torch.ops.attnplug.forward(query, key, value, [], 0, output, None, handle)
    assert isinstance(backend.make_impl(Layer(name="new")).wrapped, ToyImpl)


@pytest.mark.parametrize(
    "phases", ["host", {"prefill": "host", "decode": "forward"}, {"prefill": "forward", "decode": "host"}]
)
def test_the_write_is_an_op_too(phases):
    """Two calls of a compiled model, each row written once."""

    class Split(ToyImpl):
        cache_write = phases

        def run(self, query, key, value, kv_cache, metadata, output, lse):
            for name, phase in (("decode", metadata.decodes), ("prefill", metadata.prefills)):
                if phase is not None and name in self.forward_writes:
                    rows = phase.rows
                    self.update_kv_cache(key[rows], value[rows], kv_cache, metadata.batch.slot_mapping[rows])
            self.forward_writes, kept = frozenset(), self.forward_writes
            super().run(query, key, value, kv_cache, metadata, output, lse)
            self.forward_writes = kept

    backend = make_backend(type("B", (ToyBackend,), {"impl_class": Split}))
    impl = make_layer(backend)
    plain = make_layer(make_backend())
    metadata = make_builder(backend, impl).build(make_batch([1, 4], [6, 4]))
    reference = make_builder(plain.backend, plain).build(make_batch([1, 4], [6, 4]))
    query, key, value, output = make_qkv(backend, 5)
    pages = random_cache(backend, 8)
    expected, written = output.clone(), copy_of(backend, pages)
    plain.forward(query, key, value, written, reference, expected)

    def call(query, key, value):
        impl.write_kv_op(key, value, pages)
        impl.forward_op(query, key, value, pages, output)
        return output + 1

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with forward_context({"layers.0": metadata}), torch.no_grad():
        found = compiled(query, key, value)
    torch.testing.assert_close(found, expected + 1)
    assert same(pages, written)
    with forward_context({"layers.0": None}):
        impl.write_kv_op(key, value, pages)  # a profiling run
    assert same(pages, written)
