from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.torch_backend.masks import CustomMask
from attnplug.torch_backend.plan import spans_of

lens = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), min_size=1, max_size=4)


@given(lens, st.sampled_from([-1, 0, 3]), st.sampled_from([None, 4]), st.integers(0, 2**16))
def test_each_span_gets_its_part_of_the_mask(
    lens: list[tuple[int, int]], left: int, chunk: int | None, seed: int
) -> None:
    query_lens, seq_lens = [n for n, _ in lens], [n + m for n, m in lens]
    generator = torch.Generator().manual_seed(seed)
    shapes = list(zip(query_lens, seq_lens, strict=True))
    masks = [torch.rand(shape, generator=generator) < 0.5 for shape in shapes]
    spans, _ = spans_of(query_lens, seq_lens, (left, 0), causal=True, chunk=chunk)
    if not spans:
        return
    rows, keys = max(span.rows for span in spans), max(span.keys for span in spans)
    num_rows, num_keys = [span.rows for span in spans], [span.keys for span in spans]
    custom = CustomMask(torch.cat([mask.flatten() for mask in masks]), query_lens, seq_lens, torch.tensor)

    part = custom.of(spans, torch.tensor([num_rows, num_keys]), rows, keys)

    for member, span in enumerate(spans):
        first_row = span.first_row - sum(query_lens[: span.request])
        row = first_row + torch.arange(rows).clamp(max=span.rows - 1)
        key = span.first_key + torch.arange(keys).clamp(max=span.keys - 1)
        assert torch.equal(part[member], masks[span.request][row][:, key])
