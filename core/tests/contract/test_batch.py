from __future__ import annotations

import pickle

import attrs
import pytest
import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, Batch
from attnplug.contract.inputs import batch as made
from attnplug.contract.inputs.batch import with_fields
from attnplug.errors import BatchError, TensorError
from core.tests.contract.world import limits, make_backend, make_batch, make_builder, make_layer, refused
from tests.backends.harness import no_synchronization


def test_lengths_are_all_that_a_dense_batch_needs():
    batch = Batch.from_lengths([2, 1, 3])

    assert batch.query_start_loc.tolist() == [0, 2, 3, 6]
    assert batch.seq_lens.tolist() == [2, 1, 3]
    assert batch.key_start_loc.tolist() == [0, 2, 3, 6]
    assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (3, 6, 3, 3)
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == torch.int32
    assert (batch.block_table, batch.slot_mapping, batch.causal) == (None, None, True)


def test_a_paged_batch_has_no_key_starts():
    batch = make_batch([1, 2], [9, 4])

    assert batch.key_start_loc is None
    assert batch.max_seq_len == 9
    assert batch.slot_mapping.tolist() == [3 * 4, 4 * 4 + 2, 4 * 4 + 3]


@pytest.mark.gpu
def test_making_a_batch_waits_for_nothing_on_a_gpu():
    table, slots = torch.zeros(2, 3, dtype=torch.int32, device="cuda"), torch.arange(3, device="cuda")
    with no_synchronization():
        batch = Batch.from_lengths([1, 2], [9, 4], block_table=table, slot_mapping=slots)
        on_cpu = Batch.from_lengths([1, 2], [9, 4], block_table=torch.zeros(2, 3, dtype=torch.int32), device="cuda")

    assert batch.query_start_loc.tolist() == on_cpu.query_start_loc.tolist() == [0, 1, 3]
    assert batch.seq_lens.tolist() == on_cpu.seq_lens.tolist() == [9, 4]
    assert on_cpu.block_table.device.type == "cuda"


def test_lengths_go_to_a_gpu_without_waiting(monkeypatch):
    """On a machine without one: torch waits for each copy to a GPU that is neither pinned nor said not to block."""
    uploaded = []
    monkeypatch.setattr(made, "upload", lambda tensor, device: uploaded.append(device.type) or tensor)

    Batch.from_lengths([1, 2], [9, 4], block_table=torch.zeros(2, 3, dtype=torch.int32), device="cuda")

    assert uploaded == ["cuda"] * 3


def test_a_batch_is_made_of_its_tensors():
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)

    batch = Batch(
        query_start_loc=starts, seq_lens=lengths, num_reqs=1, num_actual_tokens=2, max_query_len=2, max_seq_len=2
    )

    assert batch.query_start_loc_cpu is starts
    assert batch.seq_lens_cpu is lengths
    assert batch.common_prefix_len == 0


def test_a_tensor_on_the_cpu_is_its_own_host_copy():
    batch = make_batch([1], [3])

    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(batch, f"{name}_cpu") is getattr(batch, name)
    assert batch.encoder_seq_lens_cpu is None


def test_a_batch_for_a_device_keeps_the_host_copies():
    batch = make_batch([1], [3], device="meta")

    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(batch, name).device.type == "meta"
        assert getattr(batch, f"{name}_cpu").device.type == "cpu"


def test_a_batch_follows_its_block_table():
    table = torch.ones(1, 1, dtype=torch.int32, device="meta")

    batch = Batch.from_lengths([1], [3], block_table=table, slot_mapping=torch.tensor([6]))

    assert batch.seq_lens.device.type == batch.slot_mapping.device.type == "meta"
    assert batch.block_table_cpu is None


def test_given_fields_win_over_derived_ones():
    batch = Batch.from_lengths([1], [3], causal=False, max_seq_len=100)

    assert (batch.causal, batch.max_seq_len) == (False, 100)


def test_what_is_derived_once_is_shared_and_not_copied_to_another_batch():
    batch = make_batch([1], [3])
    calls = []

    values = [batch.cached("pages", lambda: calls.append(1) or len(calls)) for _ in range(2)]

    assert values == [1, 1]
    assert evolve(batch, causal=True).cached("pages", lambda: 7) == 7


@pytest.mark.parametrize("name", [None, *[each.name for each in attrs.fields(Batch) if each.init]])
def test_other_fields_are_those_of_evolve(name):
    batch = make_batch([1, 2], [9, 4])
    batch.cached("pages", lambda: 7)
    fields = {} if name is None else {name: object()}
    expected, found = evolve(batch, **fields), with_fields(batch, **fields)

    for each in attrs.fields(Batch):
        if each.init:
            assert getattr(found, each.name) is getattr(expected, each.name)
    assert found.derived == {}
    assert batch.cached("pages", lambda: 8) == 7


def test_a_batch_of_a_hosts_class_stays_one():
    @attrs.frozen(eq=False, kw_only=True)
    class Mine(Batch):
        tag: str = ""

    batch = with_fields(Mine(**make_batch([1], [3]).to_dict(), tag="a"), max_seq_len=4)

    assert (type(batch), batch.tag, batch.max_seq_len) == (Mine, "a", 4)


def test_a_batch_pickles():
    batch = pickle.loads(pickle.dumps(make_batch([1, 2], [9, 4])))

    assert batch.slot_mapping.tolist() == [12, 18, 19]


def test_padding_is_minus_one():
    assert PAD_SLOT_ID == -1


@pytest.mark.parametrize(
    ("lens", "problem", "expected"),
    [
        (([1, 2], [3]), "2 query_lens and 1 seq_lens", "the query too"),
        (([], [3]), "0 query_lens and 1 seq_lens", "the query too"),
        (([1.5], [3]), "query_lens=[1.5]", "whole number per request"),
        (([1], ["3"]), "seq_lens=['3']", "whole number per request"),
        ((None, [3]), "query_lens=None", "whole number per request"),
        ((3, 3), "query_lens=3", "whole number per request"),
    ],
)
def test_lengths_that_are_none_are_refused(lens, problem, expected):
    with refused(BatchError, problem, expected):
        Batch.from_lengths(*lens)


@pytest.mark.parametrize(
    ("queries", "lengths", "name"),
    [([2**31], None, "query_lens"), ([1], [2**40], "seq_lens"), ([2**30, 2**30], None, "query_lens")],
)
def test_lengths_that_are_no_int32_are_refused(queries, lengths, name):
    with pytest.raises(BatchError, match=rf"{name}=.*(?s:.)*is less than 2\*\*31"):
        Batch.from_lengths(queries, lengths)


def test_lengths_of_pages_are_int32_each():
    table = torch.zeros(2, 1, dtype=torch.int32)
    assert Batch.from_lengths([1, 1], [2**30, 2**30], block_table=table).seq_lens.tolist() == [2**30] * 2


def test_lengths_may_be_numbers_of_a_library():
    batch = Batch.from_lengths(torch.tensor([1, 2]), iter([4, 2]))

    assert (batch.num_actual_tokens, batch.max_seq_len) == (3, 4)
    assert type(batch.num_actual_tokens) is int


@pytest.mark.parametrize(
    ("name", "given", "dtype"),
    [("block_table", [[1]], "int32"), ("slot_mapping", [7], "int64"), ("seq_lens", [1], "int32")],
)
def test_lists_are_no_tensors(name, given, dtype):
    table = torch.ones(1, 1, dtype=torch.int32)

    with refused(TensorError, f"{name}={given}", f"{name} is a tensor", f"torch.tensor({name}, dtype=torch.{dtype})"):
        if name == "seq_lens":
            starts = torch.tensor([0, 1], dtype=torch.int32)
            Batch(
                query_start_loc=starts, seq_lens=given, num_reqs=1, num_actual_tokens=1, max_query_len=1, max_seq_len=1
            )
        else:
            Batch.from_lengths([1], [1], **{"block_table": table, name: given})


@pytest.mark.parametrize("given", [None, {"num_reqs": 1}, [3]])
def test_only_batches_are_built(given):
    builder = make_builder(make_backend())

    with refused(BatchError, f"{given!r} was given to build", "a Batch", "BatchAssembler.finish"):
        builder.build(given)
    with refused(BatchError, f"{given!r} was given to begin_forward", "a Batch"):
        builder.state.begin_forward({builder: given})


def test_a_step_has_a_batch_for_each_builder():
    backend = make_backend()
    state = backend.make_state(limits())
    builder, batch = backend.make_builder([make_layer(backend)], state), make_batch([1], [3])

    with refused(BatchError, "a Batch was given to begin_forward", "a batch for each builder", "{builder: batch}"):
        state.begin_forward(batch)
    assert state.begin_forward({builder: batch}).metadata[builder].num_decodes == 1
