"""Pools of vLLM whose blocks hold named tensors: where each is, what is refused, and what vLLM is told of the size."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import CacheTensor, LoadedBackend
from attnplug.errors import CacheError
from attnplug_vllm.pages import in_pages, page_bytes, page_views, paged_spec

BLOCKS, TOKENS, HEADS, SIZE = 4, 16, 2, 32


def backend_of(values=torch.int8, scales=torch.float32, size=SIZE):
    """Return a backend whose keys are int8, with a scale for each key, and static scales of values."""
    requirements = attnplug.Requirements(
        head_size=size, num_q_heads=4, num_kv_heads=HEADS, dtype="float32", block_size=TOKENS,
        kv_cache_form="split", kv_layout="HND",
    )  # fmt: skip
    plain = attnplug.load(requirements, attnplug.Device.cpu(), backend="torch/sdpa")

    class Quantized(type(plain.wrapped)):
        def cache_tensors(self, num_blocks):
            keys = CacheTensor((num_blocks, TOKENS, HEADS, size), torch.int8, 0, (0, 2, 1, 3))
            found = {"k": keys, "v": CacheTensor(keys.shape, values, 0, keys.stride_order)}
            if scales is not None:
                found["k_scale"] = CacheTensor((num_blocks, HEADS, TOKENS), scales, 0)
                found["v_scale"] = CacheTensor((HEADS, size), scales, None, fill=nan)
            return found

    return plain, LoadedBackend(Quantized(plain.agreement, plain.device_properties))


@dataclass
class Spec:
    """The fields of vLLM's description that a backend may change."""

    num_kv_heads: int
    dtype: torch.dtype
    num_head_slots: int | None = None
    state_content_bytes: int | None = None


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("values", [torch.int8, torch.bfloat16])
def test_a_pool_has_every_tensor_of_a_block(values, layers):
    _, backend = backend_of(values)
    pool = torch.zeros(BLOCKS, layers, page_bytes(backend), dtype=torch.int8)

    cache = backend.bind_cache(page_views(pool[:, -1], backend))

    assert set(cache.tensors) == {"k", "v", "k_scale", "v_scale"}
    assert cache.num_blocks == BLOCKS
    assert cache["v_scale"].isnan().all()
    for role, value in (("k", 1), ("v", 2), ("k_scale", 3)):
        cache[role][2].fill_(value)
    assert pool[:2].count_nonzero() == pool[3:].count_nonzero() == pool[2, :-1].count_nonzero() == 0
    assert (cache.k[2] == 1).all()
    assert (cache.v[2] == 2).all()
    assert (cache["k_scale"][2] == 3).all()


@given(
    size=st.sampled_from([16, 48, 80]),
    values=st.sampled_from([torch.int8, torch.bfloat16, torch.float32]),
    scales=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
@settings(max_examples=15, deadline=None)
def test_no_byte_belongs_to_two_tensors(size, values, scales):
    _, backend = backend_of(values, scales, size)
    pool = torch.zeros(3, page_bytes(backend), dtype=torch.int8)
    views = page_views(pool, backend)
    for role in ("k", "v", "k_scale"):
        view = views[role]
        view.fill_(0)
        raw = pool.clone()
        as_bytes = view[1].reshape(-1).view(torch.uint8)
        view[1].copy_(torch.full_like(as_bytes, 255).view(view.dtype).reshape(view[1].shape))
        assert (pool != raw).sum() == as_bytes.numel()  # each byte was zero before, so nobody else's
    used = sum(prod(view[1].shape) * view.element_size() for role, view in views.items() if role != "v_scale")
    assert pool[1].count_nonzero() == used


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        (lambda size: torch.zeros(BLOCKS, size - 4, dtype=torch.int8), "blocks of"),
        (lambda size: torch.zeros(size, BLOCKS, dtype=torch.int8).T, "strides"),
        (lambda size: torch.zeros(BLOCKS, size + 2, dtype=torch.int8)[:, :size], "begins at a multiple of 4 bytes"),
        (lambda size: torch.zeros(BLOCKS * size + 1, dtype=torch.int8)[1:].view(BLOCKS, size), "multiple of 4 bytes"),
    ],
    ids=["too small", "no run of memory", "odd steps", "odd start"],
)
def test_a_pool_that_does_not_fit_is_refused(pool, problem):
    _, backend = backend_of()
    with pytest.raises(CacheError, match=problem):
        page_views(pool(page_bytes(backend)), backend)


def test_a_pool_without_memory_is_checked_too():
    _, backend = backend_of()
    pool = torch.empty(2, 1, TOKENS, page_bytes(backend) // TOKENS, dtype=torch.int8, device="meta")
    assert backend.bind_cache(page_views(pool, backend)).num_blocks == 2


def test_only_formats_with_further_tensors_are_in_pages():
    requirements = backend_of()[0].agreement.requirements
    assert [in_pages(requirements.evolve(kv_cache_dtype=name)) for name in ("auto", "fp8_e4m3", "int8", "int8_k")] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(("values", "per_head"), [(torch.int8, 2 * SIZE + 4), (torch.bfloat16, 3 * SIZE + 4)])
def test_vllm_is_told_how_large_a_page_is(values, per_head):
    _, backend = backend_of(values)
    spec = paged_spec(Spec(HEADS, torch.bfloat16), backend)
    assert (spec.num_head_slots, spec.state_content_bytes, spec.dtype) == (HEADS, per_head, torch.int8)
    assert spec.num_head_slots * TOKENS * spec.state_content_bytes == page_bytes(backend) == backend.bytes_per_block
