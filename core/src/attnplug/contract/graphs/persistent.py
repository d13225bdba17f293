"""The input tensors that captured graphs read: written before each replay, never moved."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from attnplug.contract.inputs.batch import PAD_SLOT_ID, with_fields
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from weakref import ref

    from torch import Tensor

    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement

_OPTIONAL = ("encoder_seq_lens", "dcp_local_seq_lens")
_READ = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", *_OPTIONAL)
_read_of = attrgetter(*_READ)
_LENGTHS = {name: f"{name}_cpu" for name in ("seq_lens", *_OPTIONAL)}


class PersistentInputs:
    """
    The index tensors of one builder's graphs. All of them read the same memory, each as much as its shape takes.

    A padded request has no keys and the null block; a padded token has no slot. Where all queries of the shape have one
    length, padded requests have a query of it too, so that kernels write their rows: 0, and the LSE -inf. What padding
    leaves in them reaches no other row, but hosts pass the whole tensor on. Elsewhere padded requests have no query.
    Writing is ordered with the stream, after whatever replay still reads.

    Args:
        agreement: What was negotiated.
        limits: How large batches become.
        max_num_reqs: Most requests of a captured batch.
        device: Where the tensors live.
    """

    def __init__(self, agreement: Agreement, limits: Limits, max_num_reqs: int, device: torch.device) -> None:
        columns = -(-limits.max_seq_len // (agreement.block_size or 1))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._device = device
        self._query_start_loc = zeros(max_num_reqs + 1)
        self._starts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._lens = {name: zeros(max_num_reqs) for name in _LENGTHS}
        self._block_table = zeros(max_num_reqs, columns)
        self._slot_mapping = torch.full((limits.max_num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device)
        self._views: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.latest: ref[Any] | None = None  # what reads the values that are in here now

    def write(self, batch: Batch, key: GraphShape, max_seq_len: int) -> Batch:
        """
        Take a batch over, and return it as the graph sees it: tensors that stay where they are, and frozen numbers.

        Args:
            batch: A checked batch that fits the key.
            key: The captured shape.
            max_seq_len: The longest sequence of a replay.
        """
        reqs, tokens, is_host = key.num_reqs, batch.num_actual_tokens, self._device.type == "cpu"
        # A graph writes no K/V of an encoder: those come at the first step of a request.
        rows, used = (key.num_tokens, tokens) if batch.encoder_seq_lens is None else (0, 0)
        views = self._views_of(reqs, rows)
        if key.query_len is None:
            running = batch.num_reqs
            starts = _put(views["query_start_loc"], batch.query_start_loc, tokens)
            starts_cpu = _extended(batch.query_start_loc_cpu, running + 1, reqs + 1, tokens)
        else:
            running = tokens // key.query_len  # the requests behind them have no query: what else they hold is stale
            starts, starts_cpu = self._uniform_starts(key.query_len, reqs)
        fields: dict[str, Any] = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts_cpu,
            "num_computed_tokens_cpu": _extended(batch.num_computed_tokens_cpu, running, reqs, 0),
        }
        for name, mirror in _LENGTHS.items():
            lens = getattr(batch, name)
            if lens is not None:
                fields[name] = _put(views[name], lens[:running], 0)
                fields[mirror] = _extended(getattr(batch, mirror), running, reqs, 0)
        table, slots = batch.block_table, batch.slot_mapping
        if table is not None:
            table = _put_table(views["block_table"], table[:running])
            fields |= {"block_table": table, "block_table_cpu": table if is_host else None}
            if slots is None:  # nothing is written: every slot is PAD_SLOT_ID
                slots = views["slot_mapping"].fill_(PAD_SLOT_ID)
            else:
                slots = _put(views["slot_mapping"], slots if slots.shape[0] == used else slots[:used], PAD_SLOT_ID)
            fields |= {"slot_mapping": slots, "slot_mapping_cpu": slots if is_host else None}
        return as_captured(batch, key, max_seq_len, **fields)

    def _uniform_starts(self, query_len: int, reqs: int) -> tuple[Tensor, Tensor]:
        """Return where queries of one length start, on the device and on the CPU: made once, never written again."""
        if (query_len, reqs) not in self._starts:
            with outside_inference_mode():
                starts = torch.arange(reqs + 1, dtype=torch.int32) * query_len
                self._starts[query_len, reqs] = starts.to(self._device), starts
        return self._starts[query_len, reqs]

    def _views_of(self, reqs: int, rows: int) -> dict[str, Tensor]:
        """Return what a shape takes of the memory, which never moves: made once."""
        found = self._views.get((reqs, rows))
        if found is None:
            found = {name: memory[:reqs] for name, memory in self._lens.items()}
            found |= {"query_start_loc": self._query_start_loc[: reqs + 1], "block_table": self._block_table[:reqs]}
            found["slot_mapping"] = self._slot_mapping[:rows]
            self._views[reqs, rows] = found
        return found


def as_captured(batch: Batch, key: GraphShape, max_seq_len: int, **fields: Any) -> Batch:
    """Return the batch, its tensors replaced by these, with the numbers that a graph of this shape is captured with."""
    return with_fields(
        batch,
        **fields,
        num_reqs=key.num_reqs,
        num_padded_reqs=0,
        num_actual_tokens=key.num_tokens,
        max_query_len=key.query_len or key.num_tokens,
        max_seq_len=max_seq_len,
        max_encoder_seq_len=None if batch.encoder_seq_lens is None else max_seq_len,
    )


def addresses(batch: Batch) -> list[int | None]:
    """Return where the tensors lie that a graph would read, None for absent ones."""
    return [None if tensor is None else tensor.data_ptr() for tensor in _read_of(batch)]


def check_unmoved(before: list[int | None], batch: Batch) -> None:
    """
    Check that a host which owns the graph's inputs passes them again.

    Raises:
        BatchError: A tensor has another address than at capture.
    """
    found = addresses(batch)
    if found == before:
        return
    places = zip(_READ, before, found, strict=True)
    moved = [name for name, former, place in places if place is not None and former != place]
    if moved:
        raise BatchError(
            f"a batch whose {', '.join(moved)} moved was given for a graph with host_owned_inputs=True",
            "the graph reads the tensors that it was captured with",
            "write this step's values into those, or make its buffers with host_owned_inputs=False",
        )


def _put(memory: Tensor, values: Tensor, fill: int) -> Tensor:
    count = values.shape[0]
    if count == memory.shape[0]:
        return memory.copy_(values, non_blocking=True)
    memory[:count].copy_(values, non_blocking=True)
    memory[count:].fill_(fill)
    return memory


def _put_table(memory: Tensor, table: Tensor) -> Tensor:
    """Columns beyond those that the limits allow for hold no key. What older batches left is never read."""
    if table.shape == memory.shape:
        return memory.copy_(table, non_blocking=True)
    reqs, columns = table.shape[0], min(table.shape[1], memory.shape[1])
    memory[:reqs, :columns].copy_(table[:, :columns], non_blocking=True)
    if reqs < memory.shape[0]:
        memory[reqs:].zero_()
    return memory


def _extended(host: Tensor | None, used: int, size: int, fill: int) -> Tensor | None:
    """Return the first values, and the fill behind them."""
    if host is None or used == host.shape[0] == size:
        return host
    longer = torch.full((size,), fill, dtype=host.dtype)
    longer[:used] = host[:used]
    return longer
