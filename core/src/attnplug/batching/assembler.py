"""Builds a step's batch request by request."""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate
from operator import add, index
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.batching.block_table import BlockTable
from attnplug.batching.slots import POSITIONS, slots_at
from attnplug.batching.staging import upload_together
from attnplug.batching.window import num_freeable_blocks
from attnplug.contract.inputs.batch import PAD_SLOT_ID, Batch
from attnplug.errors import BatchError
from attnplug.negotiation.agreement import Agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


_FEW: Final = 16
"""Up to so many tokens, loops are faster than tensor operations, each of which takes microseconds."""


class BatchAssembler:
    """
    Assembles a step's batch: a host adds requests one by one, and `finish` derives all tensors.

    One assembler serves a cache group (layers that share a block table), step after step; finished batches keep their
    tensors. A decode after a prefill is refused and not reordered: the host's token ids, positions and samplers follow
    the order in which it adds requests, and a batch in another order would be wrong without an error.
    `reorder_batch_to_split_decodes_and_prefills` returns the order to add them in.

    It is fastest for a host that passes the same list of a request in each step, and changes it in place: blocks that
    were there in the step before are compared, not converted, also where the request is in an earlier row now.

        assembler = BatchAssembler(block_size=16)
        assembler.add(1, 40, blocks=[3, 4, 7])     # a decode: 40 tokens are cached, 1 is new
        assembler.add(20, 32, blocks=[3, 4, 8, 9]) # a prefill with 32 tokens in the prefix cache
        batch = assembler.finish()

    Args:
        block_size: Slots per block, as agreed.
        device: Where the batch's tensors go.
        decode_query_len: The longest query that counts as a decode; 0 for a backend that is selected for prefills only.
        sliding_window: The group's window in tokens, a token itself included; blocks left of it may be freed.
        attention_chunk: The group's tokens per chunk; blocks before the current chunk may be freed.
        upload: Returns the device copy of a CPU tensor, given the name of the batch's field (or ``"positions"``), for
            hosts that manage their memory; the CPU tensor is not changed afterwards. None copies all tensors at once,
            through pinned memory.

    Raises:
        BatchError: The block size is not positive, or another number is negative.
    """

    def __init__(
        self,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        decode_query_len: int = 1,
        sliding_window: int | None = None,
        attention_chunk: int | None = None,
        upload: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("decode_query_len", decode_query_len, 0),
            ("sliding_window", sliding_window, 1),
            ("attention_chunk", attention_chunk, 1),
        ):
            if value is not None and value < least:
                raise BatchError(
                    f"{name}={value} was given", f"{name} is an integer from {least} on", "pass the agreed value"
                )
        self._block_size = block_size
        self._device = torch.device(device)
        self._decode_query_len = decode_query_len
        self._window = {"sliding_window": sliding_window, "attention_chunk": attention_chunk}
        self._frees = sliding_window is not None or attention_chunk is not None
        self._upload = upload
        self._table = BlockTable(block_size, **self._window)
        self.clear()

    @classmethod
    def of(
        cls,
        agreement: Agreement,
        device: torch.device | str = "cpu",
        upload: Callable[[str, Tensor], Tensor] | None = None,
    ) -> BatchAssembler:
        """
        Return an assembler with the block size, decodes and window of an agreement.

        Args:
            agreement: The agreement of the group's layers.
            device: As for the constructor, usually `Backend.device`.
            upload: As for the constructor.

        Raises:
            BatchError: It is not an agreement, or has no paged KV cache, uses DCP, or is for cross attention.
        """
        _check_agreement(agreement)
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
            decode_query_len=requested.decode_query_len if "decode" in requested.phases else 0,
            sliding_window=requested.sliding_window,
            attention_chunk=requested.attention_chunk,
            upload=upload,
        )

    @property
    def num_reqs(self) -> int:
        """Requests that were added."""
        return len(self._query_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens that were added."""
        return sum(self._query_lens)

    def clear(self) -> None:
        """Remove the requests of this step; `finish` does so too."""
        self._query_lens: list[int] = []
        self._computed: list[int] = []
        self._shortest, self._longest = 1, self._decode_query_len
        self._write_from: list[tuple[int, int]] = []

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
            BatchError: A number is negative or not an integer, the query is empty, there are too few blocks, a block
                that is attended to is freed, or a decode follows a prefill. The assembler is not changed.
        """
        query_lens = self._query_lens
        row = len(query_lens)
        given, least, most = self._table.rows[row]
        # The common case, for which engines wait before each step: a decode, or a prefill after the first, with the
        # blocks of the step before and tokens that these blocks admit.
        if not (
            type(query_len) is type(num_computed_tokens) is type(write_from) is int
            and self._shortest <= query_len <= self._longest
            and least <= num_computed_tokens <= most - query_len
            and type(blocks) is list
            and given == blocks
            and write_from == 0
        ):
            query_len, num_computed_tokens = self._add_other(row, query_len, num_computed_tokens, blocks, write_from)
        query_lens.append(query_len)
        self._computed.append(num_computed_tokens)
        return row

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
        num_tokens_added = sum(self._query_lens)
        reqs = self._padded("requests", self.num_reqs, num_reqs)
        rows = self._padded("tokens", num_tokens_added, num_tokens)
        host = {"block_table": self._table.to_tensor(self.num_reqs, num_blocks, reqs)}
        fill = self._fill_few if num_tokens_added <= _FEW else self._fill_many
        computed, longest = fill(host, reqs, num_tokens_added, rows)
        self._skip_unwritten(host["slot_mapping"], host["query_start_loc"])
        derived: dict[str, Any] = self._to_device(host)
        positions = derived.pop(POSITIONS)
        del host[POSITIONS]
        derived |= {f"{name}_cpu": tensor for name, tensor in host.items()}
        batch = Batch(
            **derived,
            num_computed_tokens_cpu=computed,
            num_reqs=reqs,
            num_actual_tokens=num_tokens_added,
            max_query_len=max(self._query_lens),
            max_seq_len=longest,
            **fields,
        )
        batch.cached(POSITIONS, lambda: positions)
        self.clear()
        return batch

    def _fill_few(self, host: dict[str, Tensor], reqs: int, tokens: int, rows: int) -> tuple[Tensor, int]:
        """Add lengths, positions and slots, padding included, by loops; return cached tokens and the longest."""
        added, padding = [0] * (reqs - self.num_reqs), [0] * (rows - tokens)
        positions: list[int] = []
        slots: list[int] = []
        for row, (start, count) in enumerate(zip(self._computed, self._query_lens, strict=True)):
            new = range(start, start + count)
            positions += new
            slots += self._table.slots(row, new)
        host["query_start_loc"] = _int32([0, *accumulate(self._query_lens), *(tokens for _ in added)])
        seq_lens = [*map(add, self._computed, self._query_lens), *added]
        host["seq_lens"] = _int32(seq_lens)
        host["slot_mapping"] = _int64(slots + [PAD_SLOT_ID for _ in padding])
        host[POSITIONS] = _int64(positions + padding)
        return _int32(self._computed + added), max(seq_lens)

    def _fill_many(self, host: dict[str, Tensor], reqs: int, tokens: int, rows: int) -> tuple[Tensor, int]:
        """Do the same by tensor operations."""
        count, added = self.num_reqs, [0] * (reqs - self.num_reqs)
        computed = _int32(self._computed + added)
        if tokens == count:  # one each
            starts, seq_lens = torch.arange(reqs + 1, dtype=torch.int32, device="cpu"), computed + 1
            requests, positions = torch.arange(count, device="cpu"), computed.long()
            if added:
                starts.clamp_(max=count)
                seq_lens[count:] = 0
                positions = positions[:count]
        else:
            query_lens = _int32(self._query_lens + added)
            starts, seq_lens = query_lens.new_zeros(reqs + 1), computed + query_lens
            torch.cumsum(query_lens, 0, dtype=torch.int32, out=starts[1:])
            requests = torch.repeat_interleave(query_lens.long(), output_size=tokens)
            shifts = computed - starts[:-1]
            positions = torch.arange(tokens, device="cpu").add_(shifts.index_select(0, requests))
        slots = slots_at(self._table.tensor, requests, positions, self._block_size)
        if rows > tokens:
            slots = torch.cat([slots, slots.new_full((rows - tokens,), PAD_SLOT_ID)])
            positions = torch.cat([positions, positions.new_zeros(rows - tokens)])
        host |= {"query_start_loc": starts, "seq_lens": seq_lens, "slot_mapping": slots, POSITIONS: positions}
        return computed, int(seq_lens.amax())

    def _skip_unwritten(self, slots: Tensor, starts: Tensor) -> None:
        for row, position in self._write_from:
            start, skipped = int(starts[row]), min(position - self._computed[row], self._query_lens[row])
            slots[start : start + skipped] = PAD_SLOT_ID

    def _to_device(self, host: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._upload is None:
            return upload_together(host, self._device)
        return {name: self._upload(name, tensor) for name, tensor in host.items()}

    def _padded(self, what: str, count: int, padded: int | None) -> int:
        if not self._query_lens:
            raise BatchError(
                "finish was called with no requests",
                "a batch has at least one request and one token",
                "skip the step when nothing is scheduled",
            )
        if padded is not None and padded < count:
            raise BatchError(
                f"{count} {what} are to be padded to {padded}",
                f"padding adds {what}",
                "pass a size from padded_size",
            )
        return count if padded is None else padded

    def _add_other(
        self, row: int, query_len: int, num_computed_tokens: int, blocks: Sequence[int | None], write_from: int
    ) -> tuple[int, int]:
        """Check a request and write its row of the block table; return its numbers as Python's."""
        computed = num_computed_tokens
        if not type(query_len) is type(computed) is type(write_from) is int:
            query_len, computed = _whole("query_len", query_len), _whole("num_computed_tokens", computed)
            write_from = _whole("write_from", write_from)
        if query_len < 1 or computed < 0 or write_from < 0:
            raise _invalid_numbers(query_len, computed, write_from)
        if query_len < self._shortest:
            self._refuse_order(row, query_len)
        try:
            count, _ = self._table.set_row(row, blocks)
        except TypeError:
            raise _invalid_blocks(row, blocks) from None
        needed = -(-(computed + query_len) // self._block_size)
        if count < needed:
            self._refuse_blocks(row, computed + query_len, count, needed)
        if computed < self._table.rows[row][1]:
            self._check_freed(row, computed, needed)
        if query_len > self._decode_query_len:
            self._shortest, self._longest = self._decode_query_len + 1, sys.maxsize
        if write_from > computed:
            self._write_from.append((row, write_from))
        return query_len, computed

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

    def _refuse_order(self, row: int, query_len: int) -> None:
        first = next(row for row, count in enumerate(self._query_lens) if count > self._decode_query_len)
        raise BatchError(
            f"request {row} has {query_len} query tokens and was added after request {first}, which has "
            f"{self._query_lens[first]}",
            f"requests of at most {self._decode_query_len} query tokens (decodes) come first in every batch, also the "
            "last chunk of a prompt if it is that short",
            "add requests in the order of reorder_batch_to_split_decodes_and_prefills",
        )

    def _refuse_blocks(self, row: int, seq_len: int, count: int, needed: int) -> None:
        raise BatchError(
            f"request {row} was given with {count} blocks for {seq_len} tokens",
            f"{seq_len} tokens need {needed} blocks of {self._block_size} slots",
            "allocate the request's blocks before its step",
        )


def _int32(values: list[int]) -> Tensor:
    """Return one or more numbers as a tensor, ten times as fast as `torch.tensor`."""
    return torch.frombuffer(array("i", values), dtype=torch.int32)


def _int64(values: list[int]) -> Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def _invalid_numbers(query_len: int, num_computed_tokens: int, write_from: int) -> BatchError:
    return BatchError(
        f"query_len={query_len}, num_computed_tokens={num_computed_tokens} and write_from={write_from} were given",
        "a request of a step has at least one new token, and no number is negative",
        "add only scheduled requests; recompute at least the last token of a prompt that is completely cached",
    )


def _check_agreement(agreement: object) -> None:
    if not isinstance(agreement, Agreement):
        raise BatchError(
            f"a {type(agreement).__name__} was given to BatchAssembler.of",
            "it takes the Agreement of the group's layers",
            "pass backend.agreement",
        )


def _invalid_blocks(row: int, blocks: object) -> BatchError:
    return BatchError(
        f"request {row} was given with blocks={blocks!r}",
        "its blocks are a list of block numbers, from its first token on",
        "pass block numbers of the KV cache",
    )


def _whole(name: str, number: Any) -> int:
    """Return an integer of numpy or torch as one of Python."""
    try:
        return int(index(number))
    except TypeError:
        raise BatchError(f"{name}={number!r} was given", f"{name} is an integer", "pass an int") from None
