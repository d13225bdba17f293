"""Caches and workspaces of more elements than 32 bits count: what is behind them is read and written all the same."""

from __future__ import annotations

import pytest
import torch

from attnplug_int8_ixformer.pages import Pages
from attnplug_int8_ixformer.triton_provider import TritonProvider
from plugins.int8_ixformer.tests.dense import Requests, check, with_byte_weights
from plugins.int8_ixformer.tests.running import run_decode, run_prefill
from tests.backends.triton_on_cpu import DEVICE, MARKS

pytestmark = MARKS

WAYS = pytest.mark.parametrize(("level", "page"), [(1, 64), (2, 16), (1, 16), (2, 64)])


def blocks_of(page):
    """How many blocks of two KV heads of 64 that takes."""
    return 2**31 // (2 * 64 * page) + 64


def at_the_end(case, *, written):
    """A large cache whose last blocks are those of the requests; the others are never touched, and take no memory."""
    small, count = case.cache(written=written), blocks_of(case.page)
    shift = count - case.num_blocks
    object.__setattr__(case, "table", case.table + shift)

    def grown(part):
        heads_first = part if part.ndim == 3 else part.transpose(1, 2)
        large = torch.empty(count, *heads_first.shape[1:], dtype=part.dtype, device=DEVICE)
        large[shift:] = heads_first
        return large if part.ndim == 3 else large.transpose(1, 2)

    assert small.keys[0].numel() * (count - 1) >= 2**31
    return Pages(grown(small.keys), grown(small.values), grown(small.key_scales), small.value_scales)


@WAYS
def test_decodes_read_and_write_the_last_blocks(level, page):
    case = Requests([1, 2], [90, 40], level=level, page=page)
    block, slot = divmod(int(case.new_slots()[0]), page)
    wanted = case.cache(written=True).keys[block, slot]
    pages = at_the_end(case, written=False)

    out, _ = run_decode(case, splits=2, cache=pages)

    check(out, case.expected())
    assert torch.equal(pages.keys[block + blocks_of(page) - case.num_blocks, slot], wanted)


@WAYS
def test_prompts_read_the_last_blocks(level, page):
    case = Requests([20, 70], [90, 70], level=level, page=page)
    pages = at_the_end(case, written=False)
    TritonProvider.write(None, *case.new(), pages, case.new_slots())
    columns = 2**24 + 1024  # a row for each channel of each KV head: 2**31 bytes and more

    scratch = torch.empty(columns * 2 * 64, dtype=torch.uint8, device=DEVICE)
    out = run_prefill(case, cache=pages, scratch=scratch)

    check(out, with_byte_weights(case, 32) if level == 1 else case.expected())
