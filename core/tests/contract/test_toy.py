"""A backend of some thirty lines is a whole backend: its paged calls equal dense attention."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnplug.contract import Batch, check_backend_class
from core.tests.contract import toy
from core.tests.contract.world import NUM_BLOCKS, make_backend, make_batch, make_builder, make_layer, make_qkv


def test_the_toy_is_small_and_complete():
    code = [line for line in inspect.getsource(toy).splitlines() if line.strip() and '"""' not in line]

    assert len(code) < 50
    assert check_backend_class(toy.ToyBackend, "toy/plain") is toy.ToyBackend


def dense(query, key, value, causal=True):
    """Return torch's own attention of one sequence, queries at the end of the keys."""
    mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query)) if causal else None
    q, k, v = (x.transpose(0, 1).double() for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1).flatten(1).float()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cache_write", ["forward", "host"])
def test_chunks_and_decodes_equal_one_dense_pass(layout, cache_write):
    backend = make_backend(kv_layout=layout)
    impl = make_layer(backend, cache_write=cache_write)
    builder = make_builder(backend, impl)
    cache = backend.make_cache(NUM_BLOCKS)
    query, key, value, output = make_qkv(backend, 11)

    done = 0
    for step in (4, 5, 1, 1):
        rows = slice(done, done + step)
        done += step
        metadata = builder.build(make_batch([step], [done], width=3))
        if impl.host_writes:
            impl.write_kv(key[rows], value[rows], cache, metadata.batch.slot_mapping)
        impl.forward(query[rows], key[rows], value[rows], cache, metadata, output[rows])

    torch.testing.assert_close(output, dense(query, key, value))


def test_dense_calls_attend_the_given_keys():
    backend = make_backend(paged=False, attn_type="encoder_only")
    impl = make_layer(backend)
    builder = make_builder(backend, impl)
    query, key, value, output = make_qkv(backend, 5)

    impl.forward(query, key, value, None, builder.build(Batch.from_lengths([2, 3], causal=False)), output)

    parts = [dense(query[rows], key[rows], value[rows], causal=False) for rows in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(output, torch.cat(parts))
