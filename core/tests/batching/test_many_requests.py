"""Requests that are added at once make the batch of requests that are added one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import BatchAssembler, num_freeable_blocks, positions_of, request_rows
from attnplug.errors import BatchError
from core.tests.contract.world import at_most, calls_of, operations_of

TENSORS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "num_computed_tokens_cpu")
NUMBERS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")


@pytest.fixture(params=[0, 8], scope="module", autouse=True)
def few_requests(request):
    """From how many requests on arrays are read by tensor operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_rows, "FEW_REQUESTS", request.param)
        yield


def fields_of(batch):
    """All fields of a batch, for comparison; dtypes are part of them."""
    tensors = {name: getattr(batch, name) for name in TENSORS} | {"positions": positions_of(batch)}
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert {type(getattr(batch, name)) for name in NUMBERS} == {int}
    found = {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}
    return found | {name: getattr(batch, name) for name in NUMBERS}


@st.composite
def steps(draw):
    """Steps of requests: query length, cached tokens, blocks, position to write from."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    window = {name: draw(st.none() | st.integers(1, 20)) for name in ("sliding_window", "attention_chunk")}
    found = []
    for _ in range(draw(st.integers(1, 4))):
        requests = []
        for _ in range(draw(st.integers(1, 5) | st.integers(9, 20))):
            query, cached = draw(st.sampled_from([1, 1, 1, 2, 7])), draw(st.integers(0, 40))
            count = -(-(query + cached) // block_size) + draw(st.sampled_from([0, 0, 2]))
            blocks = draw(st.lists(st.integers(1, 999), min_size=count, max_size=count))
            freed = num_freeable_blocks(cached, block_size, **window)
            for column in range(draw(st.sampled_from([0, 0, freed]))):
                blocks[column] = 0
            requests.append((query, cached, blocks, draw(st.sampled_from([0, 0, 0, cached + 1, cached + 9]))))
        found.append(requests)
    return block_size, window, found


def table_of(draw, rows, kind):
    """The rows of a host's block table, in a wider one, with anything behind the blocks of a request."""
    columns = max(map(len, rows)) + draw(st.integers(0, 2))
    junk = draw(st.sampled_from([0, -1, 7, 2**31 - 1]))
    table = [row + [junk] * (columns + 1 - len(row)) for row in rows]
    dtype = draw(st.sampled_from(["int32", "int64"]))
    array = np.array(table, dtype=dtype)[:, :columns]
    if kind == "numpy":
        array.flags.writeable = draw(st.booleans())
        return array
    return torch.tensor(table, dtype=getattr(torch, dtype))[:, :columns]


def vector_of(numbers, kind):
    return {"list": list, "tuple": tuple, "numpy": np.array, "torch": torch.tensor}[kind](numbers)


def add_at_once(draw, assembler, requests, block_size):
    """Add requests in one of the forms; return their blocks as `add` takes them."""
    queries, cached, blocks, starts = (list(one) for one in zip(*requests, strict=True))
    kind = draw(st.sampled_from(["list", "tuple", "numpy", "torch"]))
    options = {"write_from": vector_of(starts, kind)} if any(starts) or draw(st.booleans()) else {}
    given_blocks = blocks
    if kind in ("numpy", "torch"):
        if draw(st.booleans()):
            options["num_blocks"] = vector_of([len(row) for row in blocks], kind)
        else:
            blocks = [row[: -(-(q + c) // block_size)] for q, c, row in zip(queries, cached, blocks, strict=True)]
        given_blocks = table_of(draw, blocks, kind)
        kind = draw(st.sampled_from(["list", kind]))
    first = assembler.num_reqs
    rows = assembler.add_many(vector_of(queries, kind), vector_of(cached, kind), given_blocks, **options)
    assert rows == range(first, first + len(requests))
    return blocks


@given(st.data(), steps())
def test_one_batch_whether_added_at_once_or_one_by_one(data, given_steps):
    block_size, window, found = given_steps
    singly, at_once = (BatchAssembler(block_size, **window) for _ in range(2))
    finished = []
    for requests in found:
        ends = sorted(data.draw(st.lists(st.integers(0, len(requests)), max_size=2)))
        for start, end in zip([0, *ends], [*ends, len(requests)], strict=True):
            part = requests[start:end]
            if part and data.draw(st.integers(0, 3)):
                blocks = add_at_once(data.draw, at_once, part, block_size)
            else:
                blocks = [request[2] for request in part]
                for query, cached, row, position in part:
                    at_once.add(query, cached, row, write_from=position)
            for (query, cached, _, position), row in zip(part, blocks, strict=True):
                singly.add(query, cached, row, write_from=position)
        assert (at_once.num_reqs, at_once.num_tokens) == (singly.num_reqs, singly.num_tokens)
        sizes = (singly.num_reqs + data.draw(st.integers(0, 2)), singly.num_tokens + data.draw(st.integers(0, 2)))
        finished.append((fields_of(singly.finish(*sizes)), at_once.finish(*sizes)))
    for expected, batch in finished:  # a later step has not changed an earlier one
        assert fields_of(batch) == expected


WRONG = [
    (([1, 0], [5, 5], [[1, 2], [3, 4]]), {}, "query_len=0"),
    (([1, 1], [5, -1], [[1, 2], [3, 4]]), {}, "num_computed_tokens=-1"),
    (([1, 1], [5, 8], [[1, 2], [3, 4]]), {}, "request 2 was given with 2 blocks for 9 tokens"),
    (([1, 1], [5, 2**31 - 2], [[1, 2], [3, 4]]), {}, "blocks for 2147483647 tokens"),
    (([1, 1], [5, 2**40], [[1, 2], [3, 4]]), {}, "blocks for 1099511627777 tokens"),
    (([1, 1], [5, 5], [[1, 2], [3, 0]]), {}, "request 2 was given with 1 blocks for 6 tokens"),
    (([1, 1], [5, 5], [[1, 2], [0, 4]]), {}, "request 2 was given without a block that its step attends to"),
    (([1, 1], [5, 5], [[1, 2], [3, -4]]), {}, "request 2 was given with the block -4"),
    (([1, 1], [5, 5], [[1, 2], [3, 2**31]]), {}, "request 2 was given with the block 2147483648"),
    (([1, 1], [5, 5], [[1, 2], [3, 4]]), {"write_from": [0, -1]}, "write_from=-1"),
    (([1, 1], [5, 5, 5], [[1, 2], [3, 4]]), {}, "2 query_lens, 3 num_computed_tokens, 2 blocks were given"),
    (([1, 1], [5, 5], [[1, 2], [3, 4]]), {"write_from": [0]}, "2 blocks, 1 write_from were given"),
]


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize(("arguments", "options", "said"), WRONG)
def test_one_wrong_request_refuses_all_without_effect(kind, arguments, options, said):
    assembler = BatchAssembler(4)
    assembler.add(1, 6, [8, 9])

    with pytest.raises(BatchError, match=said):
        assembler.add_many(
            *(vector_of(one, kind) for one in arguments), **{n: vector_of(one, kind) for n, one in options.items()}
        )

    assert (assembler.num_reqs, assembler.num_tokens) == (1, 1)
    assembler.add(1, 5, [3, 4])
    batch = assembler.finish()
    assert batch.block_table.tolist() == [[8, 9], [3, 4]]
    assert batch.slot_mapping.tolist() == [38, 17]


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
def test_a_refused_call_leaves_nothing_unwritten(kind):
    assembler = BatchAssembler(4)
    with pytest.raises(BatchError, match="query_len=0"):
        assembler.add_many([2, 0], [0, 0], vector_of([[1], [2]], kind), write_from=[1, 0])

    assembler.add(1, 1, [5])
    assembler.add_many([1], [2], vector_of([[6]], kind))

    assert assembler.finish().slot_mapping.tolist() == [21, 26]


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((None, [5], [[1, 2]]), {}, "query_lens=None"),
        (([1], 5, [[1, 2]]), {}, "num_computed_tokens=5"),
        (([1], [5], None), {}, "blocks=None"),
        (([1], [5], [None]), {}, "request 0 was given with blocks=None"),
        (([1.0], [5], [[1, 2]]), {}, "query_len=1.0"),
        (([1.0], [5], torch.tensor([[1, 2]])), {}, "query_len=1.0"),
        (([1], ["5"], torch.tensor([[1, 2]])), {}, "num_computed_tokens='5'"),
        (([1], [2**70], torch.tensor([[1, 2]])), {}, "with 2 blocks for 1180591620717411303425 tokens"),
        ((torch.tensor([1.0]), [5], [[1, 2]]), {}, r"query_lens=\(1,\) float32 on cpu"),
        ((np.array([1.0]), [5], [[1, 2]]), {}, r"query_lens=\(1,\) float64 on cpu"),
        ((np.array([None]), [5], [[1, 2]]), {}, r"query_lens=array\(\[None\]"),
        ((torch.tensor(1), [5], [[1, 2]]), {}, r"query_lens=\(\) int64 on cpu"),
        ((torch.ones(1, dtype=torch.int32, device="meta"), [5], [[1, 2]]), {}, "int32 on meta"),
        (([1], [5], torch.tensor([1, 2])), {}, r"blocks=\(2,\) int64"),
        (([1], [5], np.array([[1.0, 2.0]])), {}, r"blocks=\(1, 2\) float64"),
        (([1], [5], torch.ones(1, 2, dtype=torch.int32, device="meta")), {}, "int32 on meta"),
        (([1], [5], [[1, 2]]), {"num_blocks": [2]}, "num_blocks was given with a list of blocks"),
        (([1], [5], torch.tensor([[1, 2]])), {"num_blocks": [3]}, "request 0 was given with num_blocks=3"),
        (([1], [5], torch.tensor([[1, 2]])), {"num_blocks": [-1]}, "request 0 was given with num_blocks=-1"),
        (([1], [5], torch.tensor([[1, 2]])), {"num_blocks": [1]}, "request 0 was given with 1 blocks for 6 tokens"),
        (([1], [5], torch.tensor([[1, 2]])), {"num_blocks": [2.0]}, "num_blocks=2.0"),
        (([1], [5], torch.tensor([[1, 2]])), {"write_from": [0.5]}, "write_from=0.5"),
    ],
)
def test_other_forms_are_refused_by_name(arguments, options, said):
    assembler = BatchAssembler(4)

    with pytest.raises(BatchError, match=said):
        assembler.add_many(*arguments, **options)

    assert assembler.num_reqs == 0


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("count", [1, 40])
def test_a_hosts_arrays_are_not_kept(kind, count):
    arrays = [torch.tensor(one, dtype=torch.int32) for one in ([1] * count, [5] * count, [[1, 2]] * count)]
    if kind == "numpy":
        arrays = [array.numpy() for array in arrays]
    assembler = BatchAssembler(4)
    assembler.add_many(*arrays)
    for array in arrays:
        array[:] = 99

    batch = assembler.finish()
    batch.block_table.fill_(7)

    assert batch.seq_lens.tolist() == [6] * count
    assert batch.slot_mapping.tolist() == [9] * count
    assert {int(array.reshape(-1)[0]) for array in arrays} == {99}


@pytest.mark.parametrize("count", [3, 40])
def test_rows_of_a_table_are_not_taken_for_lists_of_blocks(count):
    assembler = BatchAssembler(4)
    assembler.add_many([1] * count, [5] * count, torch.tensor([[1, 2]] * count))
    assembler.add(1, 5, [3, 4])
    assembler.finish()

    with pytest.raises(BatchError, match="0 blocks for 6 tokens"):
        assembler.add(1, 5, [])
    assembler.add(1, 1, [9])
    assembler.add_many([1] * count, [2] * count, [[6]] * count)

    assert assembler.finish().block_table.tolist() == [[9]] + [[6]] * count


def test_a_request_of_the_step_before_comes_after_rows_of_a_table():
    assembler, blocks = BatchAssembler(4), [1, 2]
    assembler.add(1, 5, blocks)
    assembler.finish()

    assembler.add_many([1], [4], torch.tensor([[3, 4]]))
    assert assembler.add(1, 6, blocks) == 1

    batch = assembler.finish()
    assert (batch.seq_lens.tolist(), batch.block_table.tolist()) == ([5, 7], [[3, 4], [1, 2]])


def test_rows_of_a_table_leave_nothing_of_longer_ones_before():
    assembler = BatchAssembler(4)
    for blocks in ([9, 9, 9, 9], [1, 2, 3, 4]):
        assembler.add(1, 15, blocks)
    assembler.finish()

    assembler.add_many([1], [0], torch.tensor([[5]]))
    assembler.add(1, 15, [1, 2, 3, 4])

    assert assembler.finish().block_table.tolist() == [[5, 0, 0, 0], [1, 2, 3, 4]]


def test_a_finish_that_fails_leaves_requests_that_were_added_at_once():
    assembler = BatchAssembler(4)
    assembler.add_many([1, 3], [5, 0], torch.tensor([[1, 2], [3, 0]]))

    for sizes, said in (({"num_reqs": 1}, "2 requests"), ({"num_tokens": 3}, "4 tokens"), ({"num_blocks": 1}, "1 col")):
        with pytest.raises(BatchError, match=said):
            assembler.finish(**sizes)

    assert assembler.finish(num_blocks=3).block_table.tolist() == [[1, 2, 0], [3, 0, 0]]
    with pytest.raises(BatchError, match="no requests"):
        assembler.finish()


@pytest.mark.parametrize("blocks", [[], torch.empty(0, 3, dtype=torch.int32)])
def test_no_requests_add_nothing(blocks):
    assembler = BatchAssembler(4)

    assert assembler.add_many([], [], blocks) == range(0)
    assembler.add(1, 0, [1])
    assert assembler.add_many([], [], blocks) == range(1, 1)


def test_clear_removes_requests_that_were_added_at_once():
    assembler = BatchAssembler(4)
    assembler.add_many([3], [0], torch.tensor([[1]]))
    assembler.clear()

    assert assembler.num_reqs == assembler.num_tokens == 0
    assert assembler.add(1, 0, [1]) == 0


def test_batches_are_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assembler = BatchAssembler(4)
        table = np.array([[1, 2], [3, 0]])
        assembler.add_many(np.array([1, 2]), np.array([5, 0]), table, num_blocks=[2, 1], write_from=[6, 0])
        batch = assembler.finish(num_reqs=3, num_tokens=8)

    assert {tensor.device.type for tensor in (batch.block_table, batch.slot_mapping, positions_of(batch))} == {"cpu"}


# --- what a step costs --------------------------------------------------------------------------------------------


def in_arrays(make, count):
    """Return decodes of different lengths in arrays, which need from 1 block on."""
    table = np.arange(1, 1 + count * 8, dtype=np.int32).reshape(count, 8)
    lengths = np.arange(count, dtype=np.int32) * 100 // count
    return [make(one) for one in (np.ones(count, dtype=np.int32), lengths, table)]


@pytest.mark.parametrize(
    ("make", "most"), [(torch.from_numpy, (34, 30, 29)), (np.array, (52, 49, 32))], ids=["torch", "numpy"]
)
def test_a_step_of_arrays_costs_as_much_for_many_requests_as_for_few(make, most):
    steps = {count: (BatchAssembler(16), in_arrays(make, count)) for count in (64, 256)}

    def run(count):
        assembler, arrays = steps[count]
        assembler.add_many(*arrays)
        assembler.finish()

    for count in steps:
        run(count)  # which makes what is kept between steps
        python, foreign = calls_of(lambda count=count: run(count))
        at_most(python, most[0])
        at_most(foreign, most[1])
        at_most(operations_of(lambda count=count: run(count)), most[2])


def test_a_step_of_requests_one_by_one_costs_three_calls_each():
    count, assembler = 64, BatchAssembler(16)
    blocks = [[3 * row + 1, 3 * row + 2, 3 * row + 3] for row in range(count)]

    def run():
        for one in blocks:
            assembler.add(1, 40, one)
        assembler.finish()

    run()
    python, foreign = calls_of(run)

    at_most(python, count + 20)
    at_most(foreign, 3 * count + 18)
    at_most(operations_of(run), 13)
