"""Steps of a host with requests that advance, end, share prefixes and free blocks, compared field by field."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import BatchAssembler, num_freeable_blocks, positions_of
from attnplug.batching.staging import parts_of, upload_together
from attnplug.batching.window import fewest_computed_tokens
from attnplug.contract import PAD_SLOT_ID
from attnplug.errors import BatchError


class Request:
    """A request of the host: its list of blocks is one object, which the host changes in place."""

    def __init__(self, blocks, cached, query):
        self.blocks, self.cached, self.query, self.write_from = blocks, cached, query, 0


class Host:
    """Changes its requests at random between steps, and knows which blocks each of them has."""

    def __init__(self, draw, block_size, window, chunk):
        self.draw, self.block_size, self.window, self.chunk = draw, block_size, window, chunk
        self.requests = []
        self.last_block = 0

    def first_attended(self, position):
        """The first key of a query, by trying all: the definitions of a window and of a chunk."""
        return next(
            key
            for key in range(position + 1)
            if (self.window is None or position - key < self.window)
            and (self.chunk is None or key // self.chunk == position // self.chunk)
        )

    def start(self):
        """Admit a request, with cached tokens and perhaps in the blocks of another one."""
        blocks, cached = [], self.draw(st.integers(0, 40))
        if self.requests and self.draw(st.booleans()):
            other = self.draw(st.sampled_from(self.requests))
            shared = min(len(other.blocks), cached // self.block_size)
            blocks = other.blocks[:shared] if all(other.blocks[:shared]) else []
        request = Request(blocks, cached, self.draw(st.integers(1, 9)))
        request.write_from = self.draw(st.sampled_from([0, 0, cached + 1, cached + 20]))
        self.requests.append(request)

    def advance(self):
        """What a step leaves: its tokens are cached, and a prefill is a decode from then on, mostly."""
        for request in self.requests:
            request.cached += request.query
            request.query = 1 if self.draw(st.integers(0, 5)) else self.draw(st.integers(1, 9))
            request.write_from = 0

    def change(self):
        """End requests, swap two, replace a list by an equal one, free and allocate."""
        for _ in range(self.draw(st.integers(0, 2))):
            if self.requests:
                del self.requests[self.draw(st.integers(0, len(self.requests) - 1))]
        for _ in range(self.draw(st.integers(0, 3)) or not self.requests):
            self.start()
        if self.draw(st.booleans()):
            one, other = (self.draw(st.integers(0, len(self.requests) - 1)) for _ in range(2))
            self.requests[one], self.requests[other] = self.requests[other], self.requests[one]
        if self.draw(st.booleans()):
            request = self.draw(st.sampled_from(self.requests))
            request.blocks = list(request.blocks)
        for request in self.requests:
            self.allocate(request)

    def allocate(self, request):
        """Free blocks that no query attends to, or not yet, and add those that are missing, or more."""
        spare = self.draw(st.sampled_from([0, 0, 0, 2]))
        needed = -(-(request.cached + request.query) // self.block_size) + spare
        while len(request.blocks) < needed:
            self.last_block += 1
            request.blocks.append(self.last_block)
        freeable = self.first_attended(request.cached) // self.block_size
        for column in range(self.draw(st.sampled_from([0, freeable // 2, freeable, freeable]))):
            request.blocks[column] = self.draw(st.sampled_from([None, None, 0]))

    def expected(self, more_reqs, more_rows, columns):
        """All fields of the batch, token by token."""
        fields = {"query_start_loc": [0], "seq_lens": [], "block_table": [], "slot_mapping": [], "positions": []}
        for request in self.requests:
            for position in range(request.cached, request.cached + request.query):
                block, offset = request.blocks[position // self.block_size], position % self.block_size
                written = position >= request.write_from
                fields["slot_mapping"].append(block * self.block_size + offset if written else PAD_SLOT_ID)
                fields["positions"].append(position)
            fields["query_start_loc"].append(len(fields["positions"]))
            fields["seq_lens"].append(request.cached + request.query)
            row = [block or 0 for block in request.blocks]
            fields["block_table"].append(row + [0] * (columns - len(row)))
        fields["num_computed_tokens_cpu"] = [request.cached for request in self.requests] + [0] * more_reqs
        fields["num_actual_tokens"] = len(fields["positions"])
        fields["num_reqs"] = len(self.requests) + more_reqs
        fields["max_query_len"] = max(request.query for request in self.requests)
        fields["max_seq_len"] = max(fields["seq_lens"])
        fields["query_start_loc"] += fields["query_start_loc"][-1:] * more_reqs
        fields["seq_lens"] += [0] * more_reqs
        fields["block_table"] += [[0] * columns] * more_reqs
        fields["slot_mapping"] += [PAD_SLOT_ID] * more_rows
        fields["positions"] += [0] * more_rows
        return fields


def found_fields(batch):
    """The same fields of an assembled batch, checked for their dtypes."""
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "num_computed_tokens_cpu")
    tensors = {name: getattr(batch, name) for name in names} | {"positions": positions_of(batch)}
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.int64 if name in ("slot_mapping", "positions") else torch.int32)
        assert tensor.is_contiguous()
    numbers = ("num_actual_tokens", "num_reqs", "max_query_len", "max_seq_len")
    return {name: tensor.tolist() for name, tensor in tensors.items()} | {
        name: getattr(batch, name) for name in numbers
    }


def refuse_some(assembler, draw):
    """Add a request that is refused, which has no effect on the batch."""
    number = assembler.num_reqs
    with pytest.raises(BatchError):
        assembler.add(
            *draw(st.sampled_from([(1, 1, [-1]), (0, 1, [1]), (1, 500, [1, 2]), (1, 0, ["a"]), (1, 2, None)]))
        )
    assert assembler.num_reqs == number


@given(st.data(), st.sampled_from([1, 3, 4, 16]), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_batches_agree_with_the_host_step_after_step(data, block_size, window, chunk):
    host = Host(data.draw, block_size, window, chunk)
    assembler = BatchAssembler(block_size, sliding_window=window, attention_chunk=chunk)
    finished = []
    for _ in range(data.draw(st.integers(1, 6))):
        host.change()
        refused = data.draw(st.integers(0, 20))
        for row, request in enumerate(host.requests):
            if row == refused:
                refuse_some(assembler, data.draw)
            assembler.add(request.query, request.cached, request.blocks, write_from=request.write_from)
        more_reqs, more_rows = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        widest = max(len(request.blocks) for request in host.requests)
        columns = data.draw(st.sampled_from([None, widest, widest + 3]))
        if data.draw(st.integers(0, 9)) == 0:
            with pytest.raises(BatchError, match="are to be padded"):
                assembler.finish(num_tokens=0)
        batch = assembler.finish(len(host.requests) + more_reqs, assembler.num_tokens + more_rows, columns)
        finished.append((batch, host.expected(more_reqs, more_rows, columns or widest)))
        host.advance()
    for batch, expected in finished:  # a later step has not changed an earlier one
        assert found_fields(batch) == expected


def decodes(assembler, lists, computed):
    for blocks, position in zip(lists, computed, strict=True):
        assembler.add(1, position, blocks)
    return assembler.finish()


@pytest.mark.parametrize("count", [3, 40])
def test_rows_follow_requests_when_one_ends(count):
    lists = [[10 * row + column + 1 for column in range(5)] for row in range(count)]
    assembler = BatchAssembler(4)
    decodes(assembler, lists, [12] * count)

    del lists[1]
    lists[0].append(999)
    lists.append([7, 8, 9, 10])
    batch = decodes(assembler, lists, [20] + [13] * (count - 1))

    assert batch.block_table.tolist() == [blocks + [0] * (6 - len(blocks)) for blocks in lists]
    assert batch.slot_mapping.tolist() == [999 * 4, *(blocks[3] * 4 + 1 for blocks in lists[1:])]


def test_one_list_may_be_that_of_several_requests():
    shared, assembler = [1, 2], BatchAssembler(4)

    for _ in range(2):
        batch = decodes(assembler, [shared, [3, 4], shared], [5, 6, 7])
        assert batch.block_table.tolist() == [[1, 2], [3, 4], [1, 2]]
    shared.append(5)

    assert decodes(assembler, [[3, 4], shared, shared], [5, 8, 9]).block_table.tolist() == [
        [3, 4, 0],
        [1, 2, 5],
        [1, 2, 5],
    ]


@pytest.mark.parametrize("kind", [tuple, torch.tensor])
def test_blocks_may_be_another_sequence(kind):
    assembler = BatchAssembler(4)

    for _ in range(2):
        assert decodes(assembler, [kind([3, 4, 5])], [9]).block_table.tolist() == [[3, 4, 5]]


def test_a_refused_change_leaves_the_row_of_the_next_step():
    assembler, blocks = BatchAssembler(4), [1, 2, 3]
    decodes(assembler, [blocks], [9])

    for wrong in ([1, 2, 3, -4], [1, 2, 3, 1.5], [None, 2, 3, 4], [1, 2, 3, None, 4], [1, -2, 3, 7], [1, 9, 3, "a"]):
        with pytest.raises(BatchError):
            assembler.add(1, 12, wrong)

    assert decodes(assembler, [blocks], [10]).block_table.tolist() == [[1, 2, 3]]


def test_a_refused_change_adds_no_block():
    assembler = BatchAssembler(4)
    decodes(assembler, [[1, 2, 3]], [9])

    with pytest.raises(BatchError, match="the block -2"):
        assembler.add(1, 12, [1, -2, 3, 7])

    assert decodes(assembler, [[1, 2, 3, 7]], [12]).block_table.tolist() == [[1, 2, 3, 7]]


def test_a_refused_change_frees_no_block():
    assembler = BatchAssembler(4, sliding_window=4)
    decodes(assembler, [[1, 2, 3, 4]], [15])

    with pytest.raises(BatchError, match="the block -3"):
        assembler.add(1, 15, [None, 2, -3, 4])

    assert decodes(assembler, [[None, 2, 3, 4]], [15]).block_table.tolist() == [[0, 2, 3, 4]]


@pytest.mark.parametrize(
    ("request_", "options", "said"),
    [
        ((1, 10), {}, "without a block that its step attends to"),
        ((2, 15), {}, "4 blocks for 17 tokens"),
        ((1, 16), {}, "4 blocks for 17 tokens"),
        ((1, -1), {}, "num_computed_tokens=-1"),
        ((0, 13), {}, "query_len=0"),
        ((1, 13), {"write_from": -1}, "write_from=-1"),
    ],
)
def test_a_known_row_is_checked_against_the_request(request_, options, said):
    assembler, blocks = BatchAssembler(4, sliding_window=4), [None, None, 3, 4]
    decodes(assembler, [blocks], [14])

    with pytest.raises(BatchError, match=said):
        assembler.add(*request_, blocks, **options)

    assert decodes(assembler, [blocks], [15]).seq_lens.tolist() == [16]


def test_a_known_row_is_a_decode_or_a_prefill():
    assembler = BatchAssembler(4)
    decodes(assembler, [[1], [2], [3]], [0, 0, 0])

    for row, query_len in enumerate((2, 1, 3)):
        assert assembler.add(query_len, 0, [row + 1]) == row

    assert assembler.finish().slot_mapping.tolist() == [4, 5, 8, 12, 13, 14]


def test_write_from_counts_for_a_known_row():
    assembler = BatchAssembler(4)
    decodes(assembler, [[1]], [1])
    assembler.add(1, 2, [1], write_from=3)

    assert assembler.finish().slot_mapping.tolist() == [PAD_SLOT_ID]


@pytest.mark.parametrize("prefill", [1, 30])
def test_many_requests_are_padded(prefill):
    host, assembler = Host(None, 4, None, None), BatchAssembler(4)
    for row in range(40):
        request = Request([100 * row + column + 1 for column in range(9)], row // 8, prefill if row == 39 else 1)
        host.requests.append(request)
        assembler.add(request.query, request.cached, request.blocks)

    assert found_fields(assembler.finish(48, 99)) == host.expected(8, 99 - 39 - prefill, 9)


@pytest.mark.parametrize("number", [1.0, 0.0, None, "0"])
def test_only_integers_are_accepted_for_a_known_row(number):
    assembler = BatchAssembler(4)
    decodes(assembler, [[1, 2]], [5])

    for request, options in (((1, number), {}), ((number, 5), {}), ((1, 5), {"write_from": number})):
        with pytest.raises(BatchError, match=f"{number!r} was given"):
            assembler.add(*request, [1, 2], **options)

    assert assembler.num_reqs == 0


@pytest.mark.parametrize("count", [1, 40])
def test_batches_are_on_the_cpu_whatever_the_default_device(count):
    with torch.device("meta"):
        assembler = BatchAssembler(4)
        for row in range(count):
            assembler.add(1 + row // 30, 5, [1, 2])
        batch = assembler.finish(num_reqs=count + 1, num_tokens=64)

    assert {tensor.device.type for tensor in (batch.block_table, batch.slot_mapping, positions_of(batch))} == {"cpu"}


@given(st.integers(0, 30), st.sampled_from([1, 3, 16]), st.none() | st.integers(1, 40), st.none() | st.integers(1, 40))
def test_the_fewest_computed_tokens_with_freed_blocks(num_blocks, block_size, window, chunk):
    sizes = {"sliding_window": window, "attention_chunk": chunk}
    allowed = [n for n in range(700) if num_freeable_blocks(n, block_size, **sizes) >= num_blocks]

    assert fewest_computed_tokens(num_blocks, block_size, **sizes) == (allowed[0] if allowed else None)


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=2), st.booleans()), min_size=1, max_size=5))
def test_parts_of_one_allocation_are_aligned_and_apart(sizes):
    tensors = {
        str(number): torch.full(shape, number, dtype=torch.int64 if wide else torch.int32)
        for number, (shape, wide) in enumerate(sizes)
    }
    parts = parts_of(torch.zeros(1000, dtype=torch.int64), tensors)
    for name, part in parts.items():
        part.copy_(tensors[name])

    for name, part in parts.items():
        assert torch.equal(part, tensors[name])
        assert (part.dtype, part.stride()) == (tensors[name].dtype, tensors[name].stride())
        assert part.storage_offset() * part.element_size() % 128 == 0


def test_a_device_gets_all_tensors_by_one_copy(monkeypatch):
    pinned, empty = [], torch.empty

    def without_pinning(*sizes, pin_memory, **options):
        pinned.append(pin_memory)
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", without_pinning)
    host = {"lengths": torch.ones(3, dtype=torch.int32), "table": torch.ones(3, 5, dtype=torch.int32)}
    host["slots"] = torch.ones(7, dtype=torch.int64)

    found = upload_together(host, torch.device("meta"))

    assert pinned == [True]
    assert [(name, one.shape, one.dtype) for name, one in found.items()] == [
        (name, one.shape, one.dtype) for name, one in host.items()
    ]
    assert {one.device.type for one in found.values()} == {"meta"}
    assert len({one.untyped_storage()._cdata for one in found.values()}) == 1
