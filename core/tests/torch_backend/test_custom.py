from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.torch_backend.masks import CustomMask
from attnplug.torch_backend.plan import segments_of

lens = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), min_size=1, max_size=4)


@given(lens, st.sampled_from([-1, 0, 3]), st.sampled_from([None, 4]), st.integers(0, 2**16))
def test_each_span_gets_its_part_of_the_mask(
    lens: list[tuple[int, int]], left: int, chunk: int | None, seed: int
) -> None:
    query_lens, seq_lens = [n for n, _ in lens], [n + m for n, m in lens]
    generator = torch.Generator().manual_seed(seed)
    shapes = list(zip(query_lens, seq_lens, strict=True))
    masks = [torch.rand(shape, generator=generator) < 0.5 for shape in shapes]
    segments, _ = segments_of(query_lens, seq_lens, (left, 0), causal=True, chunk=chunk)
    if not segments:
        return
    rows, keys = max(segment.rows for segment in segments), max(segment.keys for segment in segments)
    num_rows, num_keys = [segment.rows for segment in segments], [segment.keys for segment in segments]
    custom = CustomMask(torch.cat([mask.flatten() for mask in masks]), query_lens, seq_lens, torch.tensor)

    part = custom.of(segments, torch.tensor([num_rows, num_keys]), rows, keys)

    for member, segment in enumerate(segments):
        first_row = segment.first_row - sum(query_lens[: segment.request])
        row = first_row + torch.arange(rows).clamp(max=segment.rows - 1)
        key = segment.first_key + torch.arange(keys).clamp(max=segment.keys - 1)
        assert torch.equal(part[member], masks[segment.request][row][:, key])
