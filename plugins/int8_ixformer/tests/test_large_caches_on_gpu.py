"""KV caches and workspaces beyond 2**31 elements: kernels use 64-bit offsets."""

from __future__ import annotations

import pytest
import torch

from attnplug_int8_ixformer.pages import Pages
from attnplug_int8_ixformer.triton_launch import write_rows
from plugins.int8_ixformer.tests.requests import Requests, check, run_decode, run_prefill, with_int8_probs
from tests.backends.triton_on_cpu import DEVICE, MARKS

pytestmark = MARKS

LEVELS = pytest.mark.parametrize(("level", "page"), [(1, 64), (2, 16), (1, 16), (2, 64)])


def blocks_of(page):
    """Return the blocks of two KV heads of 64 that exceed 2**31 elements."""
    return 2**31 // (2 * 64 * page) + 64


def large_cache(case, *, written):
    """Return a cache whose last blocks are those of the requests; the others are never touched."""
    small, count = case.cache(written=written), blocks_of(case.page)
    shift = count - case.num_blocks
    case.put("table", case.table + shift)

    def enlarge(part):
        heads_first = part if part.ndim == 3 else part.transpose(1, 2)
        large = torch.empty(count, *heads_first.shape[1:], dtype=part.dtype, device=DEVICE)
        large[shift:] = heads_first
        return large if part.ndim == 3 else large.transpose(1, 2)

    assert small.keys[0].numel() * (count - 1) >= 2**31
    return Pages(enlarge(small.keys), enlarge(small.values), enlarge(small.key_scales), small.value_scales)


@LEVELS
def test_decode_uses_the_last_blocks(level, page):
    case = Requests([1, 2], [90, 40], level=level, page=page)
    block, slot = divmod(int(case.new_slots()[0]), page)
    expected = case.cache(written=True).keys[block, slot]
    pages = large_cache(case, written=False)

    out, _ = run_decode(case, splits=2, cache=pages)

    check(out, case.expected())
    assert torch.equal(pages.keys[block + blocks_of(page) - case.num_blocks, slot], expected)


@LEVELS
def test_prefill_uses_the_last_blocks(level, page):
    case = Requests([20, 70], [90, 70], level=level, page=page)
    pages = large_cache(case, written=False)
    write_rows(*case.new(), pages, case.new_slots())
    columns = 2**24 + 1024  # one row per channel and KV head: more than 2**31 bytes

    scratch = torch.empty(columns * 2 * 64, dtype=torch.uint8, device=DEVICE)
    out = run_prefill(case, cache=pages, scratch=scratch)

    check(out, with_int8_probs(case, 32) if level == 1 else case.expected())
