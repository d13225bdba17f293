"""The short cut through the guard of batches: it takes the ordinary decode step, and nothing that the guard refuses."""

from __future__ import annotations

import pytest
import torch
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import Batch
from attnplug.contract.guards import few
from attnplug.contract.guards.batch import BatchGuard
from attnplug.contract.guards.few import FewDecodes
from core.tests.contract.world import limits, make_backend

SIZE, NUM_BLOCKS = 4, 32
TENSORS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "num_computed_tokens_cpu")
COUNTS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len")


def make_guard(*, short_cut=True, **asked):
    backend = make_backend(block_size=SIZE, **asked)
    guard = BatchGuard(backend.agreement, limits(num_blocks=NUM_BLOCKS), torch.device("cpu"))
    if not short_cut:
        guard._few = None
    return guard


def decodes(lengths, columns=6, **fields):
    """Return decodes of so many keys, each in blocks of its own."""
    blocks = iter(range(1, NUM_BLOCKS))
    table = torch.zeros(len(lengths), columns, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for column in range(-(-length // SIZE)):
            table[row, column] = next(blocks)
    slots = [int(table[row, (n - 1) // SIZE]) * SIZE + (n - 1) % SIZE for row, n in enumerate(lengths)]
    computed = torch.tensor([length - 1 for length in lengths], dtype=torch.int32)
    return Batch.from_lengths(
        [1] * len(lengths),
        lengths,
        block_table=table,
        slot_mapping=torch.tensor(slots),
        num_computed_tokens_cpu=computed,
        **fields,
    )


def numbers(split):
    return {name: value for name, value in asdict(split, recurse=False).items() if name != "batch"}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_ordinary_decodes_are_recognised(lengths):
    batch = decodes(lengths)

    assert make_guard()._few.highest_block(batch) == sum(-(-length // SIZE) for length in lengths)
    assert numbers(make_guard().check(batch)) == numbers(make_guard(short_cut=False).check(batch))


@st.composite
def altered(draw):
    """Return decodes with one thing changed, for better or worse."""
    batch = decodes(draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)))
    value = draw(st.integers(-2, 8) | st.sampled_from([NUM_BLOCKS, NUM_BLOCKS * SIZE, 10**9]))
    if draw(st.booleans()):
        return evolve(batch, **{draw(st.sampled_from(COUNTS)): draw(st.sampled_from([value, float(value), True]))})
    name = draw(st.sampled_from(TENSORS))
    tensor = getattr(batch, name).clone()
    tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value
    tensor = draw(
        st.sampled_from([tensor, tensor[:-1], tensor.double(), tensor.unsqueeze(0), torch.cat([tensor, tensor])])
    )
    host = name if name.endswith("_cpu") else f"{name}_cpu"
    fields = {name: tensor, host: tensor} if draw(st.booleans()) else {host: tensor}
    return evolve(batch, **fields)


@given(altered(), st.sampled_from([{}, {"sliding_window": 6}]))
def test_what_the_short_cut_takes_the_guard_takes(batch, asked):
    found = make_guard(**asked)._few.highest_block(batch)
    if found is None:
        return

    facts = make_guard(short_cut=False, **asked).check(batch)
    assert (facts.num_decodes, facts.num_prefills) == (batch.num_reqs, 0)
    assert (facts.num_decode_tokens, facts.num_prefill_tokens) == (batch.num_reqs, 0)
    assert facts.num_key_rows == batch.num_reqs
    assert found <= facts.highest_block


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False},
        {"extra": {"feature": 1}},
        {"dummy": True},
        {"key_start_loc": torch.zeros(3, dtype=torch.int32)},
        {"custom_mask": torch.ones(9, dtype=torch.bool)},
        {"encoder_seq_lens": torch.ones(2, dtype=torch.int32)},
        {"max_encoder_seq_len": 3},
        {"dcp_local_seq_lens": torch.ones(2, dtype=torch.int32)},
        {"block_table": None},
        {"block_table_cpu": None},
        {"slot_mapping_cpu": None},
        {"seq_lens_cpu": None},
        {"max_seq_len": 10**6},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_extraordinary_goes_to_the_whole_guard(fields):
    assert make_guard()._few.highest_block(evolve(decodes([5, 4]), **fields)) is None


def test_many_requests_and_wide_tables_go_to_the_whole_guard(monkeypatch):
    assert make_guard()._few.highest_block(decodes([5, 4], columns=few._MOST_ENTRIES)) is None
    monkeypatch.setattr(few, "_MOST_REQUESTS", 1)
    assert make_guard()._few.highest_block(decodes([5, 4])) is None
    assert make_guard()._few.highest_block(decodes([5])) == 2


@pytest.mark.parametrize(
    "asked",
    [{"seq_lens_cpu_kind": "upper_bound"}, {"phases": ("prefill",)}, {"custom_mask": True}, {"paged": False}],
    ids=str,
)
def test_agreements_without_ordinary_decodes_have_no_short_cut(asked):
    backend = make_backend(**asked)

    assert not FewDecodes.suits(backend.agreement, limits(num_blocks=NUM_BLOCKS))
    assert not FewDecodes.suits(make_backend().agreement, limits(num_blocks=None))
