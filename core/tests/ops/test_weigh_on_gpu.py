"""A rank's output weighed for the exchange in one launch, against the operation: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.ops import ranks as operation
from tests.backends.triton_on_cpu import DEVICE, MARKS

pytestmark = MARKS


@given(
    tokens=st.integers(0, 5),
    ranks=st.sampled_from([2, 3, 4]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 8]),
    size=st.sampled_from([8, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_is_the_operation(tokens, ranks, kv_heads, group, size, dtype, seed, data) -> None:
    from attnplug.ops.triton_ranks import weigh  # noqa: PLC0415 - there is Triton where this runs

    rank = data.draw(st.integers(0, ranks - 1))
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    out = torch.randn(tokens, ranks * heads, size, generator=generator).to(dtype)
    lses = 5 * torch.randn(ranks, tokens, ranks * heads, generator=generator)
    for empty in data.draw(st.lists(st.integers(0, ranks - 1), unique=True)):  # ranks that have no keys of a token
        lses[empty, :1] = -torch.inf
    out[lses[rank] == -torch.inf] = torch.nan
    wanted = torch.empty(ranks, tokens, heads, size, dtype=dtype), torch.empty(tokens, heads)
    operation.weigh(out, lses, *wanted, rank, kv_heads)
    parts, total = (torch.full_like(each, torch.nan, device=DEVICE) for each in wanted)

    weigh(out.to(DEVICE), lses.to(DEVICE), parts, total, rank, kv_heads)

    close = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(parts.cpu(), wanted[0], rtol=close, atol=close)
    torch.testing.assert_close(total.cpu(), wanted[1], rtol=2e-6, atol=2e-6)
