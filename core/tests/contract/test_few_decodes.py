"""Small decode batches are checked as Python numbers: with the same outcome as on tensors."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import Batch
from attnplug.contract.guards import pages
from attnplug.contract.guards.batch import BatchGuard
from attnplug.contract.guards.pages import PageGuard
from attnplug.errors import ContractError
from core.tests.contract.world import limits, make_backend

SIZE, NUM_BLOCKS = 4, 32
TENSORS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "num_computed_tokens_cpu")
COUNTS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len")


def make_guard(**requested):
    backend = make_backend(block_size=SIZE, **requested)
    return BatchGuard(backend.agreement, limits(num_blocks=NUM_BLOCKS), torch.device("cpu"))


def decodes(lengths, columns=6, **fields):
    """Return decodes of so many keys, each in separate blocks."""
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


def outcome(guard, batch):
    """Return the numbers of the split that a guard makes, or the class and the text of its refusal."""
    try:
        split = guard.check(batch)
    except ContractError as refusal:
        return type(refusal), str(refusal)
    return {
        name: value for name, value in asdict(split, recurse=False).items() if name not in {"batch", "highest_block"}
    }


@contextmanager
def tensors_alone():
    """Have every batch checked on tensors, however small it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_FEW_REQUESTS", 0)
        yield


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_ordinary_decodes_are_checked_as_python_numbers(lengths):
    batch, guard = decodes(lengths), make_guard()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageGuard, "_check_blocks", lambda *_, **__: pytest.fail("checked on tensors"))
        found = guard.check(batch)
    assert found.highest_block == sum(-(-length // SIZE) for length in lengths)
    with tensors_alone():
        assert outcome(guard, batch) == outcome(make_guard(), batch)


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
def test_small_batches_are_checked_as_large_ones_are(batch, requested):
    small = outcome(make_guard(**requested), batch)

    with tensors_alone():
        assert outcome(make_guard(**requested), batch) == small


@pytest.mark.parametrize(
    "fields",
    [
        {"block_table_cpu": None},
        {"slot_mapping_cpu": None},
        {"dummy": True},
        {"max_query_len": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_batch_without_all_copies_is_checked_as_a_large_one(fields):
    batch = evolve(decodes([5, 4]), **fields)
    small = outcome(make_guard(), batch)

    with tensors_alone():
        assert outcome(make_guard(), batch) == small


@pytest.mark.parametrize("bound", ["_FEW_REQUESTS", "_FEW_ENTRIES"])
def test_many_requests_and_wide_tables_are_checked_on_tensors(monkeypatch, bound):
    monkeypatch.setattr(pages, bound, 1)
    called, check_blocks = [], PageGuard._check_blocks
    monkeypatch.setattr(
        PageGuard, "_check_blocks", lambda *given, **more: called.append(1) or check_blocks(*given, **more)
    )

    assert make_guard().check(decodes([5, 4])).num_decodes == 2
    assert called
