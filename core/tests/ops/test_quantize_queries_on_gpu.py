"""Queries and latents rounded in one launch, against the operation to the bit: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import PAD_SLOT_ID
from attnplug.ops import quantize, quantize_latents
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]


@given(
    tokens=st.integers(0, 4),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 4, 7]),
    size=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spare=st.sampled_from([0, 8, 3]),
    per_head=st.booleans(),
    seed=st.integers(0, 99),
)
def test_is_the_operation_to_the_bit(tokens, kv_heads, group, size, dtype, spare, per_head, seed) -> None:
    from attnplug.ops.triton_quantize import quantize as launch  # noqa: PLC0415 - there is Triton where this runs

    generator, heads = torch.Generator().manual_seed(seed), kv_heads * group
    wide = torch.randn(tokens, heads * size + spare, generator=generator)
    wide *= torch.logspace(-5, 4, wide.shape[1])  # from what rounds to nothing to what is too large
    wide[:, 5::31] = torch.nan
    query = wide.to(dtype).to(DEVICE)[:, : heads * size].unflatten(1, (heads, size))
    scale = 0.5 + torch.rand(kv_heads if per_head else 1, generator=generator).to(DEVICE)
    out = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    wanted = quantize(query.reshape(tokens, scale.numel(), heads // scale.numel() * size), out.dtype, scale)

    assert launch(query, scale, out)
    assert torch.equal(out.float().nan_to_num(1e6), wanted.view(query.shape).float().nan_to_num(1e6))


def test_what_lies_otherwise_is_left_to_the_operation() -> None:
    from attnplug.ops.triton_quantize import quantize as launch  # noqa: PLC0415 - there is Triton where this runs

    rows = torch.ones(2, 8, 4, device=DEVICE).transpose(1, 2)
    assert not launch(rows, torch.ones(1, device=DEVICE), torch.empty_like(rows, dtype=torch.float8_e4m3fn))


@given(slots=st.lists(st.integers(4, 27), max_size=5, unique=True), padded=st.booleans(), seed=st.integers(0, 99))
def test_records_are_the_operation_to_the_bit(slots, padded, seed) -> None:
    from attnplug.ops.triton_quantize import write_latents as launch  # noqa: PLC0415 - there is Triton where this runs

    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(len(slots) + 1, 1, 600, generator=generator) * torch.logspace(-30, 20, 600)
    rows = wide.bfloat16().to(DEVICE)[..., :576]
    rows[:1, :, 128:256] = 0
    pool = torch.full((7, 3, 4, 656), 99, dtype=torch.uint8, device=DEVICE)
    pages, expected = pool[:, 1].unsqueeze(2), pool.clone()
    numbers = torch.tensor([*slots, *[PAD_SLOT_ID] * padded], dtype=torch.int64, device=DEVICE)
    for row, slot in enumerate(slots):
        expected[slot // 4, 1, slot % 4] = quantize_latents(rows[row : row + 1])[0, 0]

    assert launch(rows, pages, numbers)
    assert torch.equal(pool, expected)


def test_records_that_lie_otherwise_are_left_to_the_operation() -> None:
    from attnplug.ops.triton_quantize import write_latents as launch  # noqa: PLC0415 - there is Triton where this runs

    rows, slots = torch.ones(2, 1, 576, dtype=torch.bfloat16, device=DEVICE), torch.arange(2, device=DEVICE)
    pages = torch.zeros(2, 4, 1, 700, dtype=torch.uint8, device=DEVICE)
    assert not launch(rows, pages[..., :656], slots)
    assert not launch(rows.float(), pages[..., :656].contiguous(), slots)
