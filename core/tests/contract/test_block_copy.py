from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import CacheTensor
from attnplug.errors import CacheError
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import make_backend, refused

BLOCKS = 6


def numbered(backend, num_blocks=BLOCKS, start=0):
    """Return a cache whose block b is filled with the number start + b."""
    cache = backend.make_cache(num_blocks)
    for role, spec in backend.cache_tensors(num_blocks).items():
        tensor = cache[role]
        if spec.block_axis is not None:
            for block in range(num_blocks):
                tensor.select(spec.block_axis, block).fill_(start + block)
    return cache


def numbers(cache):
    """Return the number that fills each block, after checking that one number does, in every role."""
    roles = [tensor.float().flatten(1) for tensor in cache.tensors.values() if len(tensor) == cache.num_blocks]
    rows = torch.cat(roles, 1)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].int().tolist()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_blocks_swap_between_caches(layout, dtype):
    backend = make_backend(kv_layout=layout, kv_cache_dtype=dtype)
    src, dst = numbered(backend), numbered(backend, 4, start=8)

    backend.swap_blocks(src, dst, [(5, 0), (2, 3), (2, 1)])

    assert numbers(dst) == [5, 2, 10, 2]
    assert numbers(src) == [0, 1, 2, 3, 4, 5]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=8, unique_by=lambda pair: pair[1]))
def test_copies_are_simultaneous(pairs):
    backend = make_backend()
    caches = [numbered(backend), numbered(backend, start=10)]
    expected = list(range(BLOCKS))
    for source, destination in pairs:
        expected[destination] = source

    backend.copy_blocks(caches, torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2))

    assert numbers(caches[0]) == expected
    assert numbers(caches[1]) == [10 + number for number in expected]


def test_two_blocks_change_places():
    backend = make_backend()
    cache = numbered(backend)

    backend.swap_blocks(cache, cache, [(1, 2), (2, 1)])

    assert numbers(cache) == [0, 2, 1, 3, 4, 5]


def test_one_source_has_several_destinations():
    backend = make_backend()
    cache = numbered(backend)

    backend.copy_blocks([cache], {1: [3, 4], 5: [2]})

    assert numbers(cache) == [0, 1, 5, 1, 1, 5]


class ScaledBackend(ToyBackend):
    def cache_tensors(self, num_blocks):
        return {
            **super().cache_tensors(num_blocks),
            "k_scale": CacheTensor((num_blocks, 4), torch.float32, 0),
            "v_scale": CacheTensor((2, 8), torch.float32, None, fill=0.5),
        }


def test_every_role_with_blocks_moves():
    backend = make_backend(ScaledBackend)
    cache = numbered(backend)

    backend.copy_blocks([cache], [(1, 4)])

    assert numbers(cache) == [0, 1, 2, 3, 1, 5]
    assert cache["k_scale"][:, 0].tolist() == [0, 1, 2, 3, 1, 5]
    assert cache["v_scale"].eq(0.5).all()


@pytest.mark.parametrize("pairs", [[], {}, torch.empty(0, 2, dtype=torch.int64)])
def test_nothing_to_move_moves_nothing(pairs):
    backend = make_backend()
    cache = numbered(backend)

    backend.copy_blocks([cache], pairs)

    assert numbers(cache) == list(range(BLOCKS))


@pytest.mark.parametrize(
    ("pairs", "given", "allowed"),
    [
        ([(6, 1)], "source block 6", "0 to 5"),
        ([(-1, 1)], "source block -1", "0 to 5"),
        ([(1, 4)], "destination block 4", "0 to 3"),
        ([(1, 2), (3, 2)], "block 2 was given as the destination", "one block's values"),
        (torch.tensor([[1.0, 2.0]]), "block pairs of (1, 2) float32", "(n, 2) int64"),
        (torch.tensor([1, 2, 3]), "block pairs of (3,)", "(n, 2) int64"),
        ([(1, 2, 3), (4, 5, 6)], "the block pairs [(1, 2, 3), (4, 5, 6)]", "(n, 2) int64"),
        ([1, 2, 3, 4], "the block pairs [1, 2, 3, 4]", "(n, 2) int64"),
        ([1, 2, 3], "the block pairs [1, 2, 3]", "(n, 2) int64"),
        ([(1.5, 2)], "the block pairs [(1.5, 2)]", "(n, 2) int64"),
        ([("1", "2")], "the block pairs [('1', '2')]", "(n, 2) int64"),
        ([(2**70, 2)], "the block pairs", "(n, 2) int64"),
        ({"a": [1]}, "the block pairs {'a': [1]}", "(n, 2) int64"),
        ({1: 2}, "the block pairs {1: 2}", "(n, 2) int64"),
        ({1: [2.0]}, "the block pairs {1: [2.0]}", "(n, 2) int64"),
        (None, "the block pairs None", "(n, 2) int64"),
    ],
)
def test_a_swap_that_does_not_fit_moves_nothing(pairs, given, allowed):
    backend = make_backend()
    src, dst = numbered(backend), numbered(backend, 4)

    with refused(CacheError, problem=given, expected=allowed):
        backend.swap_blocks(src, dst, pairs)

    assert (numbers(src), numbers(dst)) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3])


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_the_null_block_is_not_copied(pair):
    backend = make_backend()

    with refused(CacheError, problem="block 0", expected="null block"):
        backend.copy_blocks([numbered(backend)], [pair])


def test_one_cache_that_does_not_fit_stops_them_all():
    backend = make_backend()
    caches = [numbered(backend), torch.zeros(3)]

    with refused(CacheError, fix="bind_cache"):
        backend.copy_blocks(caches, [(1, 2)])

    assert numbers(caches[0]) == list(range(BLOCKS))


@pytest.mark.parametrize("cache", [torch.zeros(2), {}])
def test_a_dense_agreement_has_nothing_to_swap(cache):
    with refused(CacheError):
        make_backend(paged=False).swap_blocks(cache, cache, [(1, 2)])
