"""Batches built request by request, against loops over requests and tokens, and through the builder's guards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import BatchDraft, positions_of
from attnplug.contract import PAD_SLOT_ID
from attnplug.errors import BatchError

requests = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=6)


def ordered(lens):
    """Decodes first, as every host orders them."""
    return sorted(lens, key=lambda request: request[0] > 1)


def allocate(lens, block_size):
    """Blocks of its own for each request, counted from 1, with some to spare."""
    fresh = iter(range(1, 10_000))
    return [
        [next(fresh) for _ in range(-(-(query + computed) // block_size) + spare)] for query, computed, spare in lens
    ]


@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from([1, 3, 16]), st.integers(0, 3), st.integers(0, 9))
def test_agrees_with_a_loop_over_tokens_step_after_step(steps, block_size, more_reqs, more_rows):
    draft = BatchDraft(block_size)
    finished = []
    for lens in map(ordered, steps):
        tables = allocate(lens, block_size)
        rows = [draft.add(q, c, blocks) for (q, c, _), blocks in zip(lens, tables, strict=True)]
        assert rows == list(range(len(lens)))
        tokens = sum(q for q, _, _ in lens)
        assert (draft.num_reqs, draft.num_tokens) == (len(lens), tokens)
        batch = draft.finish(len(lens) + more_reqs, tokens + more_rows)
        finished.append((lens, tables, batch))
    for lens, tables, batch in finished:  # a later step has not changed an earlier one
        places = [(r, p) for r, (q, c, _) in enumerate(lens) for p in range(c, c + q)]
        assert (
            batch.slot_mapping.tolist()
            == [tables[r][p // block_size] * block_size + p % block_size for r, p in places] + [PAD_SLOT_ID] * more_rows
        )
        assert positions_of(batch).tolist() == [p for _, p in places] + [0] * more_rows
        width = max(map(len, tables))
        assert batch.block_table.tolist() == [
            *(blocks + [0] * (width - len(blocks)) for blocks in tables),
            *([[0] * width] * more_reqs),
        ]
        starts = [sum(q for q, _, _ in lens[:r]) for r in range(len(lens) + 1)]
        assert batch.query_start_loc.tolist() == starts + starts[-1:] * more_reqs
        assert batch.seq_lens.tolist() == [q + c for q, c, _ in lens] + [0] * more_reqs
        assert batch.num_computed_tokens_cpu.tolist() == [c for _, c, _ in lens] + [0] * more_reqs
        assert (batch.num_reqs, batch.num_actual_tokens) == (len(lens) + more_reqs, starts[-1])
        assert (batch.max_query_len, batch.max_seq_len) == (max(q for q, *_ in lens), max(q + c for q, c, _ in lens))
        assert {t.dtype for t in (batch.query_start_loc, batch.seq_lens, batch.block_table)} == {torch.int32}
