"""Two results merged in one launch, against the operation: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.ops import merge_attention_states
from tests.backends.triton_on_cpu import DEVICE, MARKS

pytestmark = MARKS


@given(
    tokens=st.integers(0, 5),
    heads=st.sampled_from([1, 3, 8]),
    size=st.sampled_from([8, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spare=st.sampled_from([0, 8, 3]),
    by_heads=st.booleans(),
    empty=st.sampled_from(["none", "one", "other", "both"]),
    seed=st.integers(0, 99),
)
def test_is_the_operation_in_place(tokens, heads, size, dtype, spare, by_heads, empty, seed) -> None:
    from attnplug.ops.triton_merge import merge  # noqa: PLC0415 - there is Triton where this runs

    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, heads * size + spare, generator=generator).to(dtype).to(DEVICE)
    out = wide[:, : heads * size].unflatten(1, (heads, size))
    other = torch.randn(tokens, heads, size, generator=generator).to(dtype).to(DEVICE)
    lse, other_lse = (5 * torch.randn(tokens, heads, generator=generator).to(DEVICE) for _ in range(2))
    if by_heads:
        lse = lse.T.contiguous().T
    for name, sums, rows in (("one", lse, out), ("other", other_lse, other)):
        if empty in {name, "both"} and tokens:
            sums[0] = -torch.inf
            rows[0] = torch.nan
    wanted, total = merge_attention_states(out, lse, other, other_lse)
    rest = wide[:, heads * size :].clone()

    assert merge(out, lse, other, other_lse)
    close = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(out, wanted, rtol=close, atol=close)
    torch.testing.assert_close(lse, total, rtol=2e-6, atol=2e-6)
    assert torch.equal(wide[:, heads * size :], rest)


def test_what_lies_otherwise_is_left_to_the_operation() -> None:
    from attnplug.ops.triton_merge import merge  # noqa: PLC0415 - there is Triton where this runs

    out, lse = torch.ones(2, 4, 8, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    assert not merge(out.transpose(1, 2).contiguous().transpose(1, 2), lse, out.clone(), lse.clone())
    assert not merge(out, lse, torch.ones(2, 4, 16, device=DEVICE)[..., :8], lse.clone())
