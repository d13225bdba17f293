"""Slots masked in one launch, against the operation: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug_flashmla.selection import Places, mask_indices, run_kernel
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@given(
    tokens=st.integers(0, 3),
    topk=st.sampled_from([1, 5, 64, 128, 1500, 2048]),
    multiple=st.sampled_from([64, 128]),
    places=st.sampled_from([Places(300, 64, 64, 1), Places(300, 64, 200, 1), Places(300, 1, 9, 9)]),
    has_lens=st.booleans(),
    spare=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
def test_is_the_operation(tokens, topk, multiple, places, has_lens, spare, seed) -> None:
    from attnplug_flashmla.triton_selection import mask_kernel  # noqa: PLC0415 - there is Triton where this runs

    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-5, 310, (tokens, topk + spare), generator=generator, dtype=torch.int32)
    wide[:, ::7] = 2**31 - 1
    indices = wide.to(DEVICE)[:, :topk]
    lens = torch.randint(-1, topk + 2, (tokens,), generator=generator, dtype=torch.int32) if has_lens else None
    wanted = mask_indices(wide[:, :topk], lens, places, multiple)
    out = torch.full(wanted.shape, 7, dtype=torch.int32, device=DEVICE)

    run_kernel(mask_kernel, indices, None if lens is None else lens.to(DEVICE), places, out)

    assert torch.equal(out.cpu(), wanted)
