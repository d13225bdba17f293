"""Checks the paged side of a batch: block table, slots, and how many keys its pages hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import torch

from attnplug.contract.guards._format import (
    check_index,
    check_mirror,
    duplicate_of,
    refuse_slot_of_two,
    refuse_unrequested,
)
from attnplug.contract.inputs.batch import PAD_SLOT_ID
from attnplug.contract.inputs.exact import extremes
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.errors import BatchError, CacheError, NotNegotiatedError, TensorError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.negotiation.agreement import Agreement


# Torch takes about a microsecond per operation, whatever the size: smaller batches than these are read as Python lists.
_FEW_REQUESTS: Final = 8
_FEW_ENTRIES: Final = 256


class PageGuard:
    """Checks the paged side of one builder's batches."""

    def __init__(self, agreement: Agreement, num_blocks: int | None, device_type: str) -> None:
        requested = agreement.requirements
        self._requested = requested
        self._size = agreement.block_size or 1  # settled wherever there are pages
        self._num_blocks = num_blocks
        self._highest = -1 if num_blocks is None else num_blocks - 1
        self._device_type = device_type
        self._is_cross = requested.attn_type == "encoder_decoder"
        # Keys to the left of a query that no query of its request attends to: hosts may free their blocks.
        self._window = requested.sliding_window if not self._is_cross and requested.dcp_size == 1 else None
        self._chunk = requested.attention_chunk if not self._is_cross and requested.dcp_size == 1 else None
        self._places = not self._is_cross and requested.dcp_size == 1
        # Kept between steps: a number in an operation, or a tensor that is made for it, takes as long as the operation.
        self._block = torch.tensor(self._size, device="cpu")
        is_power = self._size & (self._size - 1) == 0  # as nearly all are: shifts take half as long as divisions
        self._exponent = torch.tensor(self._size.bit_length() - 1, device="cpu") if is_power else None
        self._column_starts = torch.empty(0, dtype=torch.int32)
        self._column_ordinals = torch.empty(0, dtype=torch.int32)
        self._row_ends = torch.empty(0, dtype=torch.int64)
        self._table_width = 0
        self._owner = torch.empty(0, dtype=torch.int32)
        self._tokens = torch.empty(0, dtype=torch.int32)

    def check(self, batch: Batch, query_lens: Tensor, seq_lens: Tensor | None, *, is_usual: bool) -> tuple[int, int]:
        """
        Return the K/V rows of a call, and an upper bound of the blocks in use.

        Args:
            batch: The exact batch.
            query_lens: ``(num_reqs,)`` int32 on the CPU.
            seq_lens: ``(num_reqs,)`` int32 on the CPU, exact; None where the host does not know them.
            is_usual: Whether the forms of its index tensors were checked, and no CPU copy has to be compared.

        Raises:
            BatchError: The block table is too short, or the tables are absent or contradict each other.
            CacheError: A block or slot is outside the cache, the null block, or given twice.
            TensorError: A tensor has the wrong shape, dtype or device.
        """
        table, slots = batch.block_table, batch.slot_mapping
        if table is None or not is_usual:
            table, slots = self._check_form(batch)
        keys = seq_lens  # of each request in this rank's pages, where the host knows them
        if keys is not None and not self._places:
            keys = batch.encoder_seq_lens_cpu if self._is_cross else batch.dcp_local_seq_lens_cpu
        width = -(-batch.max_seq_len // self._size)
        if not self._places or table.shape[1] < width:
            width = self._check_width(table, batch.max_seq_len, keys)
        if batch.dummy:
            return self._check_dummy(batch)
        host_table, host_slots = batch.block_table_cpu, batch.slot_mapping_cpu
        if not is_usual:
            _check_copies(table, host_table, slots, host_slots)
        rows = self._num_key_rows(slots, host_slots) if self._is_cross or slots is None else slots.shape[0]
        highest = self._highest
        are_decodes = batch.max_query_len == 1 and batch.num_actual_tokens == batch.num_reqs
        if host_table is not None and keys is not None and width:
            used = host_table if host_table.shape[1] == width else host_table[:, :width]
            if are_decodes and host_slots is not None and batch.num_reqs <= _FEW_REQUESTS:
                found = self._highest_of_decodes(used, host_slots, keys)
                if found is not None:
                    return rows, found
            # Without slots nothing is written, and a host without a null block may have keys in block 0.
            highest = self._check_blocks(used, keys, query_lens, lowest=int(slots is not None))
        if host_slots is not None and host_slots.shape[0]:
            written = self._check_slots(batch, host_slots, None if are_decodes else query_lens, keys)
            highest = max(highest, written)
        return rows, highest

    def _highest_of_decodes(self, used: Tensor, host_slots: Tensor, keys: Tensor) -> int | None:
        """Return the highest block of a few decodes whose blocks and slots are all as they should be."""
        # None says nothing: the checks on tensors then decide, and word the error. Blocks that a window leaves out may
        # be the null block, which only those checks know.
        if self._num_blocks is None or not self._places or used.numel() > _FEW_ENTRIES:
            return None
        table, slots, lens = used.tolist(), host_slots.tolist(), keys.tolist()
        size, highest = self._size, 0
        if len(slots) != len(lens) or len(set(slots)) < len(slots):
            return None
        for length, slot, row in zip(lens, slots, table, strict=True):
            last = (length - 1) // size
            blocks = row[: last + 1]
            if min(blocks) < 1 or slot != row[last] * size + (length - 1) % size:
                return None
            highest = max(highest, *blocks)
        return highest if highest < self._num_blocks else None

    def _num_key_rows(self, slots: Tensor | None, host: Tensor | None) -> int:
        """Return the K/V rows of a call. For cross attention none where the encoder's are cached already."""
        if slots is None:
            return 0
        if not self._is_cross or host is None:
            return slots.shape[0]
        written = (host != PAD_SLOT_ID).nonzero()
        return int(written[-1]) + 1 if written.numel() else 0

    def _check_dummy(self, batch: Batch) -> tuple[int, int]:
        """Check the CPU copies. Pages of all but graphs that read the host's tensors are replaced before."""
        table, slots = batch.block_table_cpu, batch.slot_mapping_cpu
        if (table is not None and bool(table.any())) or (slots is not None and bool((slots != PAD_SLOT_ID).any())):
            raise BatchError(
                "a batch with dummy=True and real pages or slots was given for a graph with host_owned_inputs=True",
                f"there the host's tensors have the null block alone, and {PAD_SLOT_ID} for every slot",
                "write those into them, or make the buffers with host_owned_inputs=False",
            )
        return self._num_key_rows(batch.slot_mapping, slots), 0

    def _check_form(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if batch.key_start_loc is not None:
            raise NotNegotiatedError(
                "a batch with a key_start_loc was given",
                "paged=True was negotiated: keys are found through the block table",
                "select again with paged=False, or leave key_start_loc out of the batch",
            )
        table, slots = batch.block_table, batch.slot_mapping
        if table is None or (slots is None and not self._requested.kv_in_cache):
            raise BatchError(
                f"a batch without {'block_table' if table is None else 'slot_mapping'} was given",
                "paged=True was negotiated, and a paged cache needs both",
                "pass both, or select again with paged=False"
                + ("" if table is None else ", or with kv_in_cache=True where all K/V are in the cache already"),
            )
        shape = (batch.num_reqs, table.shape[1]) if table.ndim == 2 else (batch.num_reqs, *table.shape[-1:])
        check_index("block_table", table, shape, torch.int32, self._device_type)
        if shape[1] > 1 and table.stride(1) != 1:
            raise TensorError(
                f"a block_table with strides {table.stride()} was given",
                "the blocks of a request lie side by side",
                "pass .contiguous()",
            )
        if slots is None:
            if batch.slot_mapping_cpu is not None:
                refuse_unrequested("a batch with slot_mapping_cpu alone", "slot_mapping is absent", "no slots")
            return table, None
        check_index("slot_mapping", slots, (slots.numel(),), torch.int64, self._device_type)
        if slots.shape[0] < batch.num_actual_tokens and not self._is_cross:
            raise BatchError(
                f"a slot_mapping of {slots.shape[0]} slots was given",
                f"each of the {batch.num_actual_tokens} tokens has a slot",
                f"pass {PAD_SLOT_ID} for tokens that are not written",
            )
        return table, slots

    def _check_width(self, table: Tensor, max_seq_len: int, keys: Tensor | None) -> int:
        """Return the columns that the longest request needs."""
        if self._places:
            longest = max_seq_len
        elif keys is not None:
            longest = int(keys.amax())
        else:
            longest = 0 if self._is_cross else max_seq_len // self._requested.dcp_size
        width = -(-longest // self._size)
        if table.shape[1] < width:
            raise BatchError(
                f"a block_table of {table.shape[1]} blocks per request was given",
                f"the longest sequence of {longest} tokens needs {width} blocks of {self._size}",
                f"pass a table of at least {width} columns",
            )
        return width

    def _first_keys(self, keys: Tensor, query_lens: Tensor) -> Tensor | None:
        """``(num_reqs,)`` the first key that a query attends to, or None where that is 0."""
        if self._window is None and self._chunk is None:
            return None
        contexts = keys - query_lens
        first = torch.zeros_like(contexts) if self._window is None else (contexts - (self._window - 1)).clamp_(min=0)
        if self._chunk is not None:
            first = torch.maximum(first, contexts - contexts % self._chunk)
        return first

    def _check_blocks(self, table: Tensor, keys: Tensor, query_lens: Tensor, lowest: int) -> int:
        """Return an upper bound of the used block numbers. Columns that a request does not use may hold anything."""
        most, low, high = self._num_blocks, -1, 0
        if most is not None:
            low, high = extremes(table)
            if lowest <= low and high < most:
                return high
        first_keys = self._first_keys(keys, query_lens)
        if most is not None and low == 0 and high < most and self._zeros_are_unused(table, keys, first_keys):
            return high
        used = self._used(table.shape[1], keys, first_keys)
        entries = table * used
        low, high = extremes(entries)
        if low < 0 or (lowest and int((entries - used).amin()) < 0) or (most is not None and high >= most):
            self._refuse_block(table, used, lowest)
        return high

    def _zeros_are_unused(self, table: Tensor, keys: Tensor, first_keys: Tensor | None) -> bool:
        """Whether each used entry is above 0: the usual table ends in zeros, and three operations clear it."""
        # Raises an unused entry (start >= keys) to at least 1, and leaves a used one as it is or below 1.
        raised = self._ordinals(table.shape[1]) - keys.unsqueeze(1)
        torch.maximum(table, raised, out=raised)
        if first_keys is not None:
            starts = self._starts(table.shape[1])
            torch.maximum(raised, first_keys.unsqueeze(1) + (1 - self._size) - starts, out=raised)
        return int(raised.amin()) >= 1

    def _used(self, width: int, keys: Tensor, first_keys: Tensor | None) -> Tensor:
        """``(num_reqs, width)`` int32, 1 where a column is read and 0 elsewhere: arithmetic costs a fifth of masks."""
        starts = self._starts(width)
        used = (keys.unsqueeze(1) - starts).clamp_(0, 1)
        if first_keys is not None:
            used *= (starts + self._size - first_keys.unsqueeze(1)).clamp_(0, 1)
        return used

    def _starts(self, width: int) -> Tensor:
        """``(width,)`` int32, the first key of each column, kept between steps."""
        if self._column_starts.shape[0] != width:
            self._column_starts = torch.arange(0, width * self._size, self._size, dtype=torch.int32, device="cpu")
        return self._column_starts

    def _ordinals(self, width: int) -> Tensor:
        """The same counted from 1, as the first of something is."""
        if self._column_ordinals.shape[0] != width:
            self._column_ordinals = self._starts(width) + 1
        return self._column_ordinals

    def _refuse_block(self, table: Tensor, used: Tensor, lowest: int) -> NoReturn:
        wrong = table < lowest if self._num_blocks is None else (table < lowest) | (table >= self._num_blocks)
        request, column = (int(place) for place in (wrong & used.bool()).nonzero()[0])
        last = "on" if self._num_blocks is None else f"to {self._num_blocks - 1}"
        raise CacheError(
            f"request {request} has block {int(table[request, column])} at column {column} of its block table",
            f"requests get blocks from {lowest} {last}"
            + ("; block 0 is a null block, which padding may write" if lowest else ""),
            "allocate a block of the cache for every used column, and pass its num_blocks in Limits",
        )

    def _check_slots(self, batch: Batch, slots: Tensor, query_lens: Tensor | None, keys: Tensor | None) -> int:
        """Return the highest block that is written, -1 where nothing is, or blocks that are checked are."""
        table, places = batch.block_table_cpu, None
        if self._places and table is not None and keys is not None:
            places = self._places_of(table, keys, query_lens, batch.num_actual_tokens)
            if torch.equal(places, slots):
                self._check_unique(slots)
                return -1
        low, high = extremes(slots)
        written = slots
        if low == PAD_SLOT_ID:
            written = slots[slots != PAD_SLOT_ID]
            low = int(written.amin()) if written.numel() else self._size
        if low < self._size or (self._num_blocks is not None and high >= self._num_blocks * self._size):
            self._refuse_slot(slots)
        count = batch.num_actual_tokens
        if slots.shape[0] > count:
            check_slots_beyond(batch, count)
        self._check_unique(written)
        if places is not None:
            self._check_places(places, slots[:count])
        return high // self._size

    def _check_unique(self, slots: Tensor) -> None:
        if self._num_blocks is None:
            twice = duplicate_of(slots)
            if twice is not None:
                refuse_slot_of_two(twice)
            return
        # Without sorting: each slot remembers the last token that names it, so all find themselves or not.
        if not self._owner.shape[0]:
            with outside_inference_mode():
                self._owner = torch.empty(self._num_blocks * self._size, dtype=torch.int32, device="cpu")
        tokens = self._tokens if self._tokens.shape == slots.shape else self._token_numbers(slots.shape[0])
        owners = self._owner.index_copy_(0, slots, tokens).index_select(0, slots)
        if not torch.equal(owners, tokens):
            refuse_slot_of_two(int(slots[int(owners.ne(tokens).int().argmax())]))

    def _ends(self, table: Tensor) -> Tensor:
        """``(num_reqs,)`` int64, the slots that the columns of the rows before have, less one, kept likewise."""
        requests, width = table.shape
        if self._row_ends.shape[0] != requests or self._table_width != width:
            self._row_ends = torch.arange(requests, device="cpu") * (width * self._size) - 1
            self._table_width = width
        return self._row_ends

    def _token_numbers(self, count: int) -> Tensor:
        """``(count,)`` int32 1, 2, 3, ..., kept between steps."""
        if self._tokens.shape[0] != count:
            self._tokens = torch.arange(1, count + 1, dtype=torch.int32)
        return self._tokens

    def _refuse_slot(self, slots: Tensor) -> NoReturn:
        wrong = (slots != PAD_SLOT_ID) & (slots < self._size)
        if self._num_blocks is not None:
            wrong |= slots >= self._num_blocks * self._size
        token = int(wrong.int().argmax())
        last = "" if self._num_blocks is None else f" to {self._num_blocks * self._size - 1}"
        raise CacheError(
            f"token {token} has slot {int(slots[token])}",
            f"slots are {self._size}{last}: block * {self._size} + offset, not in block 0; {PAD_SLOT_ID} is skipped",
            "compute slots from the block table (attnplug.batching)",
        )

    def _places_of(self, table: Tensor, keys: Tensor, query_lens: Tensor | None, count: int) -> Tensor:
        """
        ``(count,)`` int64, the slot where the block table says that each token's K/V are. Without `query_lens` each
        request has one token.
        """
        # Positions of the last tokens, counted as if each row of the table had the slots of its columns one by one.
        places = torch.add(self._ends(table), keys)
        if query_lens is not None:
            requests = torch.repeat_interleave(query_lens, output_size=count)
            places = places.sub_(query_lens.cumsum(0)).index_select(0, requests).add_(self._token_numbers(count))
        entries = (
            torch.floor_divide(places, self._block)
            if self._exponent is None
            else torch.bitwise_right_shift(places, self._exponent)
        )
        return places.add_(table.take(entries) - entries, alpha=self._size)

    def _check_places(self, places: Tensor, given: Tensor) -> None:
        """A slot is where attention reads the token's K/V, or none."""
        wrong = (places != given) & (given != PAD_SLOT_ID)
        if bool(wrong.any()):
            token = int(wrong.int().argmax())
            raise CacheError(
                f"token {token} has slot {int(given[token])}",
                f"the block table of its request puts it into slot {int(places[token])}, where attention reads it",
                "compute slots from the block table (attnplug.batching)",
            )


def _check_copies(table: Tensor, host_table: Tensor | None, slots: Tensor | None, host_slots: Tensor | None) -> None:
    if host_table is not None:
        check_mirror("block_table", table, host_table)
    if host_slots is not None and slots is not None:
        check_mirror("slot_mapping", slots, host_slots)


def check_null_padding(batch: Batch, block_size: int) -> None:
    """
    Check the padded requests of a graph that reads the host's own tensors, where CPU copies show them.

    Nobody but the host writes these tensors, and some kernels find the slot of a row from its length and block table.

    Raises:
        CacheError: A padded request has a block of a running one, or a row of it a slot.
    """
    first, starts = batch.num_reqs - batch.num_padded_reqs, batch.query_start_loc_cpu
    table, slots, lens = batch.block_table_cpu, batch.slot_mapping_cpu, batch.seq_lens_cpu
    wrong = False
    if table is not None and lens is not None:
        used = torch.arange(table.shape[1]) * block_size < lens[first:].unsqueeze(1)
        wrong = bool((table[first:].bool() & used).any())
    if slots is not None and starts is not None:
        wrong = wrong or bool((slots[int(starts[first]) :] >= block_size).any())
    if wrong:
        raise CacheError(
            f"the last {batch.num_padded_reqs} requests are padding, and have blocks or slots of running requests",
            "with host_owned_inputs=True the graph reads the host's tensors as they are: padding has the null block",
            f"pass block 0 and slot {PAD_SLOT_ID} for them, or make the buffers with host_owned_inputs=False",
        )


def check_slots_beyond(batch: Batch, tokens: int) -> None:
    """
    Check that rows behind the last token have no slot, by the CPU copy.

    Raises:
        BatchError: One has.
    """
    slots = batch.slot_mapping_cpu
    if slots is None or not slots.is_cpu or batch.encoder_seq_lens is not None:  # those of encoder tokens are others
        return
    if bool((slots[tokens:] != PAD_SLOT_ID).any()):
        raise BatchError(
            f"a slot_mapping with slots beyond its {tokens} actual tokens was given",
            "padding rows are never written",
            f"pass {PAD_SLOT_ID} for them",
        )
