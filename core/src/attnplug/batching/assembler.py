"""Builds a step's batch request by request."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.batching.block_table import BlockTable, padded_table
from attnplug.batching.refusals import (
    check_agreement,
    invalid_blocks,
    invalid_numbers,
    padded_count,
    refuse_blocks,
)
from attnplug.batching.request_rows import GivenRequests, RowReader, as_list, whole
from attnplug.batching.slots import POSITIONS
from attnplug.batching.staging import upload_together
from attnplug.batching.step_tensors import StepTensors, as_int32
from attnplug.batching.window import num_freeable_blocks
from attnplug.contract.inputs.batch import PAD_SLOT_ID, Batch
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from attnplug.batching.request_rows import RequestRows
    from attnplug.negotiation.agreement import Agreement


_NOTHING_ELSE: Final = dict.fromkeys(
    (
        *("encoder_seq_lens_cpu", "max_encoder_seq_len", "dcp_local_seq_lens_cpu", "key_start_loc_cpu"),
        "mm_prefix_range_cpu",
    )
)
"""What a batch has none of without further fields: it does not derive them one by one."""


class BatchAssembler:
    """
    Assembles a step's batch: a host adds requests, one by one or many at once, and `finish` derives all tensors.

    One assembler serves a cache group (layers that share a block table), step after step; finished batches keep their
    tensors. Requests may be added in any order, which is that of the batch. A decode behind a prefill counts as a
    prefill: the result is the same, and prefill kernels take longer for it.
    `reorder_batch_to_split_decodes_and_prefills` moves decodes to the front.

    It is fastest for a host that has arrays, and passes them to `add_many`. Lists are fastest where a request has
    the same one in each step, changed in place: blocks that were there in the step before are compared, not converted,
    also where the request is in an earlier row now.

        assembler = BatchAssembler(block_size=16)
        assembler.add(1, 40, blocks=[3, 4, 7])     # a decode: 40 tokens are cached, 1 is new
        assembler.add(20, 32, blocks=[3, 4, 8, 9]) # a prefill with 32 tokens in the prefix cache
        batch = assembler.finish()

    Args:
        block_size: Slots per block, as agreed.
        device: Where the batch's tensors go.
        sliding_window: The group's window in tokens, a token itself included; blocks left of it may be freed.
        attention_chunk: The group's tokens per chunk; blocks before the current chunk may be freed.
        upload: Returns the device copy of a CPU tensor, given the name of the batch's field (or ``"positions"``), for
            hosts that manage their memory; the CPU tensor is not changed afterwards. None copies all tensors at once,
            through pinned memory.

    Raises:
        BatchError: A number is not positive.
    """

    def __init__(
        self,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        sliding_window: int | None = None,
        attention_chunk: int | None = None,
        upload: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self._window = {"sliding_window": sliding_window, "attention_chunk": attention_chunk}
        for name, value in {"block_size": block_size, **self._window}.items():
            if value is not None and value < 1:
                raise BatchError(
                    f"{name}={value} was given", f"{name} is an integer from 1 on", "pass the agreed value"
                )
        self._block_size = block_size
        self._device = torch.device(device)
        self._frees = sliding_window is not None or attention_chunk is not None
        self._upload = upload
        self._table = BlockTable(block_size, **self._window)
        self._known = self._table.rows
        self._tensors = StepTensors(block_size)
        self._reader = RowReader(block_size, **self._window)
        self.clear()

    @classmethod
    def of(
        cls,
        agreement: Agreement,
        device: torch.device | str = "cpu",
        upload: Callable[[str, Tensor], Tensor] | None = None,
    ) -> BatchAssembler:
        """
        Return an assembler with the block size and the window of an agreement.

        Args:
            agreement: The agreement of the group's layers.
            device: As for the constructor, usually `LoadedBackend.device`.
            upload: As for the constructor.

        Raises:
            BatchError: It is not an agreement, or has no paged KV cache, uses DCP, or is for cross attention.
        """
        check_agreement(agreement)
        requested = agreement.requirements
        if agreement.block_size is None or requested.dcp_size > 1 or requested.attn_type == "encoder_decoder":
            raise BatchError(
                f"BatchAssembler.of was given attn_type={requested.attn_type!r}, paged={requested.paged} and "
                f"dcp_size={requested.dcp_size}",
                "each query token has a slot in the paged KV cache of one rank",
                "make other batches with Batch.from_lengths",
            )
        return cls(
            agreement.block_size,
            device=device,
            sliding_window=requested.sliding_window,
            attention_chunk=requested.attention_chunk,
            upload=upload,
        )

    @property
    def num_reqs(self) -> int:
        """Requests that were added."""
        return len(self._query_lens) if self._rows is None else self._rows.query_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens that were added."""
        return sum(self._query_lens) if self._rows is None else self._rows.num_tokens

    def clear(self) -> None:
        """Remove the requests of this step; `finish` does so too."""
        self._query_lens: list[int] = []
        self._computed: list[int] = []
        self._write_from: list[tuple[int, int]] = []
        self._rows: RequestRows | None = None

    def add(
        self, query_len: int, num_computed_tokens: int, blocks: Sequence[int | None], *, write_from: int = 0
    ) -> int:
        """
        Add the next request.

        Args:
            query_len: Its new tokens in this step: 1 for a decode, a part of the prompt for a chunked prefill.
            num_computed_tokens: Its tokens with cached K/V, prefix-cache hits included.
            blocks: Its physical blocks from its first token on, with room for the new tokens; more are kept. None or 0
                is a freed block, which may only be left of the window or chunk.
            write_from: Position from which K/V are written; new tokens before it get PAD_SLOT_ID. For a prompt that is
                completely in the prefix cache: its last token is computed again, and its block is shared.

        Returns:
            Its row in the batch.

        Raises:
            BatchError: A number is negative or not an integer, the query is empty, there are too few blocks, or a block
                that is attended to is freed. The assembler is not changed.
        """
        query_lens = self._query_lens
        row = len(query_lens)
        given, least, most = self._known[row]
        # The common case, for which engines wait before each step: a request with the blocks of the step before, and
        # tokens that these blocks admit.
        if not (
            type(query_len) is type(num_computed_tokens) is type(write_from) is int
            and query_len > 0
            and least <= num_computed_tokens <= most - query_len
            and type(blocks) is list
            and given == blocks
            and write_from == 0
            and self._rows is None
        ):
            if self._rows is not None:
                self._write_rows()
                row = len(query_lens)
            query_len, num_computed_tokens = self._add_other(row, query_len, num_computed_tokens, blocks, write_from)
        query_lens.append(query_len)
        self._computed.append(num_computed_tokens)
        return row

    def add_many(
        self,
        query_lens: Any,
        num_computed_tokens: Any,
        blocks: Any,
        *,
        num_blocks: Any = None,
        write_from: Any = None,
    ) -> range:
        """
        Add requests, all of them or none. The batch is as if `add` had added one after another.

        It is fastest with a host's arrays, of numpy or torch on the CPU, which are read and not kept: rows of the block
        table, and a vector for each number. Lists are accepted too.

        Args:
            query_lens: ``(requests,)``, as for `add`.
            num_computed_tokens: ``(requests,)``, likewise.
            blocks: ``(requests, columns)`` int32 or int64, rows of a block table: columns behind a request's blocks may
                hold anything. Or a list of blocks for each request.
            num_blocks: ``(requests,)`` blocks in each row of a block table; None for those that its tokens need.
            write_from: ``(requests,)``, as for `add`; None for 0.

        Returns:
            Their rows in the batch.

        Raises:
            BatchError: As for `add`; or there are not as many of each, or an array has another form. The assembler is
                not changed.
        """
        given = GivenRequests.of(query_lens, num_computed_tokens, blocks, num_blocks, write_from)
        if self._rows is not None:
            self._write_rows()
        first = len(self._query_lens)
        rows = self._reader.read(given)
        if rows is None:
            self._add_each(given)
        else:
            self._rows = rows
            self._write_from += [(first + row, position) for row, position in rows.write_from]
            if first:
                self._write_rows()
        return range(first, self.num_reqs)

    def finish(
        self, num_reqs: int | None = None, num_tokens: int | None = None, num_blocks: int | None = None, **fields: Any
    ) -> Batch:
        """
        Return the batch of the requests that were added, and start the next one.

        `positions_of` returns the positions of its tokens, which are computed here.

        Args:
            num_reqs: Requests after padding, for a captured graph; padded ones have no tokens, no keys and the null
                block.
            num_tokens: Rows of the slot mapping and of the positions after padding.
            num_blocks: Columns of the block table; None is the blocks of the longest request.
            fields: Further fields of `Batch`, by name: `causal`, `common_prefix_len`, ...

        Raises:
            BatchError: Nothing was added, or more than the padded sizes hold. The assembler is not changed.
        """
        given, count, tokens = self._rows, self.num_reqs, self.num_tokens
        reqs = padded_count("requests", count, num_reqs)
        rows = padded_count("tokens", tokens, num_tokens)
        if given is None:
            host = {"block_table": self._table.to_tensor(count, num_blocks, reqs)}
            longest_query = 1 if tokens == count else max(self._query_lens)
        else:
            host = {"block_table": padded_table(given.blocks, num_blocks, reqs)}
            longest_query = given.max_query_len
        lengths, longest = self._lengths(tokens)
        computed = self._tensors.fill(host, lengths, tokens, rows)
        if self._write_from:
            self._skip_unwritten(host, computed)
        derived: dict[str, Any] = self._to_device(host)
        positions = derived.pop(POSITIONS)
        del host[POSITIONS]
        derived |= {f"{name}_cpu": tensor for name, tensor in host.items()}
        batch = Batch(
            **derived,
            num_computed_tokens_cpu=computed,
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=longest_query,
            max_seq_len=longest,
            **(fields or _NOTHING_ELSE),
        )
        batch.derived[POSITIONS] = positions
        self.clear()
        return batch

    def _lengths(self, tokens: int) -> tuple[tuple[Tensor | None, Tensor, Tensor], int]:
        """Return what `StepTensors.fill` takes, and the longest sequence."""
        rows = self._rows
        if rows is not None:
            return (rows.query_lens, rows.computed, rows.seq_lens), rows.max_seq_len
        computed = as_int32(self._computed)
        query_lens = None if tokens == len(self._query_lens) else as_int32(self._query_lens)
        seq_lens = computed + (1 if query_lens is None else query_lens)
        return (query_lens, computed, seq_lens), int(seq_lens.amax())

    def _skip_unwritten(self, host: dict[str, Tensor], computed: Tensor) -> None:
        starts = host["query_start_loc"]
        for row, position in self._write_from:
            start, end = int(starts[row]), int(starts[row + 1])
            host["slot_mapping"][start : min(end, start + position - int(computed[row]))] = PAD_SLOT_ID

    def _to_device(self, host: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._upload is None:
            return upload_together(host, self._device)
        return {name: self._upload(name, tensor) for name, tensor in host.items()}

    def _add_other(
        self, row: int, query_len: int, num_computed_tokens: int, blocks: Sequence[int | None], write_from: int
    ) -> tuple[int, int]:
        """Check a request and write its row of the block table; return its numbers as Python's."""
        computed = num_computed_tokens
        if not type(query_len) is type(computed) is type(write_from) is int:
            query_len, computed = whole("query_len", query_len), whole("num_computed_tokens", computed)
            write_from = whole("write_from", write_from)
        if query_len < 1 or computed < 0 or write_from < 0:
            raise invalid_numbers(query_len, computed, write_from)
        try:
            count, _ = self._table.set_row(row, blocks)
        except TypeError:
            raise invalid_blocks(row, blocks) from None
        needed = -(-(computed + query_len) // self._block_size)
        if count < needed:
            refuse_blocks(row, computed + query_len, count, self._block_size)
        if computed < self._table.rows[row][1]:
            self._check_freed(row, computed, needed)
        if write_from > computed:
            self._write_from.append((row, write_from))
        return query_len, computed

    def _write_rows(self) -> None:
        """Write requests that were checked together where single ones are added."""
        rows, self._rows = self._rows, None
        if rows is None:
            return
        count, width = rows.blocks.shape
        counts: list[int] = [width] * count if rows.counts is None else rows.counts.tolist()
        self._table.set_rows(len(self._query_lens), rows.blocks, counts)
        self._query_lens += rows.query_lens.tolist()
        self._computed += rows.computed.tolist()

    def _add_each(self, given: GivenRequests) -> None:
        """Add requests one by one; if one is refused, remove those before it."""
        first, skipped = len(self._query_lens), len(self._write_from)
        try:
            if given.write_from is None:
                self._add_usual(*given.one_by_one(self._block_size))
            else:
                numbers = zip(*given.one_by_one(self._block_size), as_list(given.write_from), strict=True)
                for query_len, computed, blocks, start in numbers:
                    self.add(query_len, computed, blocks, write_from=start)
        except BaseException:
            del self._query_lens[first:], self._computed[first:], self._write_from[skipped:]
            raise

    def _add_usual(self, query_lens: list[Any], computed: list[Any], blocks: list[Any]) -> None:
        """Add each request as `add` does, without the cost of a call for the common case."""
        added, cached, rows = self._query_lens, self._computed, self._table.rows
        # The list of rows grows while it is read.
        for query_len, start, one, (kept, least, most) in zip(
            query_lens, computed, blocks, islice(rows, len(added), None), strict=False
        ):
            if (
                type(query_len) is type(start) is int
                and query_len > 0
                and least <= start <= most - query_len
                and type(one) is list
                and kept == one
            ):
                added.append(query_len)
                cached.append(start)
            else:
                numbers = self._add_other(len(added), query_len, start, one, 0)
                added.append(numbers[0])
                cached.append(numbers[1])

    def _check_freed(self, row: int, computed: int, needed: int) -> None:
        """Check that no freed block is attended to by a query of the step."""
        freed = num_freeable_blocks(computed, self._block_size, **self._window) if self._frees else 0
        if not self._table.has_freed(row, freed, needed):
            return
        raise BatchError(
            f"request {row} was given without a block that its step attends to",
            f"with {computed} cached tokens, its first {freed} blocks may be freed"
            if self._frees
            else "without a sliding window or chunks, every block up to a request's length is attended to",
            "pass its blocks from num_freeable_blocks on, or make the assembler with the layer's sliding_window",
        )
