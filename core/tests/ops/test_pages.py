"""The halves of a cache, whatever its order in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract.inputs.kv_cache import CacheTensor
from attnplug.errors import CacheError
from attnplug.ops import key_and_value_pages

orders = st.permutations([2, 3]).flatmap(
    lambda inner: st.sampled_from([(0, 1, *inner, 4), (1, 0, *inner, 4), (1, inner[0], 0, inner[1], 4)])
)


@given(orders, st.integers(2, 5), st.sampled_from([1, 4]))
def test_halves_are_views_in_any_order_of_memory(order: tuple[int, ...], blocks: int, block_size: int) -> None:
    cache = CacheTensor((2, blocks, block_size, 3, 8), torch.float32, 1, order).allocate("cpu")

    halves = key_and_value_pages(cache)
    for number, pages in enumerate(halves, 1):
        pages.fill_(number)

    assert [pages.shape for pages in halves] == [(blocks, block_size, 3, 8)] * 2
    assert [bool((cache[half] == half + 1).all()) for half in (0, 1)] == [True, True]


def test_roles_are_halves_themselves() -> None:
    roles = {"v": torch.zeros(4, 16, 2, 24), "k_scale": torch.ones(1), "k": torch.zeros(4, 16, 2, 8)}

    keys, values = key_and_value_pages(roles)

    assert keys is roles["k"]
    assert values is roles["v"]


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (torch.zeros(7, 2, 16, 2, 8), r"of shape \(7, 2, 16, 2, 8\)"),
        (torch.zeros(2, 16, 2, 8), r"of shape \(2, 16, 2, 8\)"),
        ({"latent": torch.zeros(4, 16, 8)}, "with the roles 'latent'"),
        ({}, "with the roles none"),
    ],
)
def test_another_form_is_refused_with_the_two_that_there_are(cache: object, said: str) -> None:
    with pytest.raises(CacheError, match=f"(?s){said}.*'k' and 'v'.*stride_order"):
        key_and_value_pages(cache)


def test_a_role_may_hold_both_halves() -> None:
    both = torch.zeros(2, 4, 16, 2, 8)

    keys, values = key_and_value_pages({"kv": both, "k_scale": torch.ones(1)})

    assert keys.data_ptr() == both[0].data_ptr()
    assert values.data_ptr() == both[1].data_ptr()
