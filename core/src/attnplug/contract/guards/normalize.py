"""Batches as plugins see them: no padded requests, dummy ones without pages, and lengths read where that was agreed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract.guards._format import extremes
from attnplug.contract.guards.pages import refuse_slots_beyond
from attnplug.contract.inputs.batch import PAD_SLOT_ID, with_fields
from attnplug.contract.inputs.phase import uniform_query_lens
from attnplug.errors import BatchError, CacheError, TensorError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.negotiation.agreement import Agreement

_STARTS: Final = ("query_start_loc", "key_start_loc")
_PER_REQUEST: Final = ("seq_lens", "block_table", "encoder_seq_lens", "dcp_local_seq_lens")
_DEVICE_LENGTHS: Final = ("seq_lens", "encoder_seq_lens", "dcp_local_seq_lens", "key_start_loc")
_SIZES: Final[Hashable] = "sizes as given"
_READ: Final[Hashable] = "lengths read"


def without_padding(batch: Batch) -> Batch:
    """
    Return a batch without its padded requests, which are the last ones, whatever they hold. Tensors are views.

    Their query rows are then rows beyond the actual tokens, which nothing touches.

    Raises:
        BatchError: All requests are padding, or the number is invalid.
        TensorError: A tensor has not one entry for each request.
    """
    padding = batch.num_padded_reqs
    if type(padding) is not int or not 0 <= padding < batch.num_reqs:
        raise BatchError(
            f"num_padded_reqs={padding!r} of {batch.num_reqs} requests was given",
            "it counts the last requests, and at least one request is no padding",
            "pass 0 where there is none, and skip the step when nothing is scheduled",
        )
    return batch.cached("without padding", lambda: _cut(batch, batch.num_reqs - padding))


def _cut(batch: Batch, reqs: int) -> Batch:
    fields: dict[str, Any] = {"num_reqs": reqs, "num_padded_reqs": 0}
    for name in _STARTS:
        for each in (name, f"{name}_cpu"):
            fields[each] = _first(batch, each, reqs + 1, batch.num_reqs + 1)
    for name in (*_PER_REQUEST, "num_computed_tokens"):
        for each in (f"{name}_cpu",) if name == "num_computed_tokens" else (name, f"{name}_cpu"):
            fields[each] = _first(batch, each, reqs, batch.num_reqs)
    starts, encoders = fields["query_start_loc_cpu"], fields["encoder_seq_lens_cpu"]
    if starts is not None and starts.is_cpu:  # of another form, which the guard refuses
        tokens = int(starts[-1])
        fields["num_actual_tokens"] = min(tokens, batch.num_actual_tokens)
        if encoders is None:  # the slots of cross attention are those of encoder tokens
            fields |= slots_of(batch, tokens)
        if batch.custom_mask is not None and (lens := fields["seq_lens_cpu"]) is not None:
            size = int((starts.diff().long() * lens).sum())  # as large or larger where the lengths are bounds
            fields["custom_mask"] = batch.custom_mask[:size]
        if batch.attn_bias is not None and batch.attn_bias.ndim and (lens := fields["seq_lens_cpu"]) is not None:
            fields["attn_bias"] = batch.attn_bias[..., : int((starts.diff().long() * lens).sum())]
    if encoders is not None and encoders.is_cpu:
        fields["max_encoder_seq_len"] = int(encoders.amax())
    return with_fields(batch, **fields)


def _first(batch: Batch, name: str, count: int, expected: int) -> Tensor | None:
    """Return the first entries of a tensor that has one for each request, padded ones included."""
    tensor: Tensor | None = getattr(batch, name)
    if tensor is None:
        return None
    if tensor.ndim == 0 or tensor.shape[0] != expected:
        raise TensorError(
            f"{name} of {tuple(tensor.shape)} was given",
            f"its first axis has {expected} entries: num_reqs={batch.num_reqs} counts padded requests too",
            "pass an entry for each padded request",
        )
    return tensor[:count]


def with_exact_counts(batch: Batch) -> Batch:
    """
    Return a batch as plugins see it before it is checked: its counts exact, as far as its starts are in order.

    Raises:
        BatchError: The number of padded requests is invalid, or a row behind the last token has a slot.
        TensorError: A tensor has not one entry for each request.
    """
    if batch.num_padded_reqs:
        batch = without_padding(batch)
    starts, counts = batch.query_start_loc_cpu, (batch.num_reqs, batch.max_query_len, batch.num_actual_tokens)
    if starts is None or not starts.is_cpu or starts.ndim != 1 or any(type(count) is not int for count in counts):
        return batch
    if starts.shape[0] < 2 or uniform_query_lens(batch) is not None:
        return batch
    tokens, longest = int(starts[-1]), int(starts.diff().amax())
    if 0 < tokens <= batch.num_actual_tokens and 0 < longest <= batch.max_query_len:
        return with_exact_queries(batch, tokens, longest)
    return batch


def with_exact_longest(batch: Batch, longest: int) -> Batch:
    """Return a batch with its longest sequence in place of an upper bound."""
    if longest == batch.max_seq_len:
        return batch
    return batch.cached(("exact lengths", longest), lambda: with_fields(batch, max_seq_len=longest))


def longest_of(batch: Batch) -> int:
    """Return the longest sequence of a batch with exact CPU lengths that was not checked; its bound where invalid."""
    lens, bound = batch.seq_lens_cpu, batch.max_seq_len
    if type(bound) is not int or lens is None or not lens.is_cpu or lens.dtype != torch.int32 or not lens.numel():
        return bound
    return min(extremes(lens)[1], bound)


def with_exact_queries(batch: Batch, tokens: int, longest: int) -> Batch:
    """
    Return a batch with exact numbers for bounds of them. Slots of rows behind the last token are cut off.

    Raises:
        BatchError: Such a row has a slot, by the CPU copy.
    """
    if (tokens, longest) == (batch.num_actual_tokens, batch.max_query_len):
        return batch
    return batch.cached(("exact queries", tokens, longest), lambda: _with_exact_queries(batch, tokens, longest))


def _with_exact_queries(batch: Batch, tokens: int, longest: int) -> Batch:
    slots, fields = batch.slot_mapping_cpu, dict[str, Any]()
    if tokens != batch.num_actual_tokens and batch.encoder_seq_lens is None:  # those of an encoder are others
        if slots is not None and slots.is_cpu and bool((slots[tokens:] != PAD_SLOT_ID).any()):
            refuse_slots_beyond(tokens)
        fields = slots_of(batch, tokens)
    return with_fields(batch, **fields, num_actual_tokens=tokens, max_query_len=longest)


def slots_of(batch: Batch, tokens: int) -> dict[str, Tensor]:
    """Return the slots of the first tokens, by field: K/V of the rows behind them are not written."""
    names = ("slot_mapping", "slot_mapping_cpu")
    slots = ((name, getattr(batch, name)) for name in names)
    return {name: tensor[:tokens] for name, tensor in slots if tensor is not None and tensor.ndim == 1}


def note_sizes(batch: Batch, given: Batch) -> None:
    """Keep the sizes of the host's tensors with a batch that was made of them, for `cut_alike`."""
    pages = ((name, getattr(given, name)) for name in ("block_table", "slot_mapping"))
    batch.derived[_SIZES] = {name: tensor.shape[0] for name, tensor in pages if tensor is not None and tensor.ndim}


def cut_alike(batch: Batch, name: str, tensor: Tensor | None) -> Tensor | None:
    """Return another block table or slot mapping of a host, without the padding that was cut off the batch's."""
    mine: Tensor | None = getattr(batch, name)
    size = batch.derived.get(_SIZES, {}).get(name)
    if tensor is None or mine is None or not tensor.ndim or tensor.shape[0] != size:
        return tensor
    return tensor[: mine.shape[0]]


def as_dummy(batch: Batch, block_size: int) -> Batch:
    """
    Return a dummy batch that touches nothing but the null block: whatever its pages and slots are, they are replaced.

    Args:
        batch: A batch with `Batch.dummy`.
        block_size: Slots per block.
    """
    table, slots = batch.block_table, batch.slot_mapping
    if table is None or table.ndim != 2 or _is_null(batch):
        return batch
    return batch.cached(("dummy", block_size), lambda: _with_null_pages(batch, table, slots, block_size))


def _is_null(batch: Batch) -> bool:
    """Whether CPU copies say that the batch has the null block alone, and no slots."""
    table, slots = batch.block_table_cpu, batch.slot_mapping_cpu
    if table is None or (slots is None and batch.slot_mapping is not None):
        return False
    return not bool(table.any()) and (slots is None or bool((slots == PAD_SLOT_ID).all()))


def _with_null_pages(batch: Batch, table: Tensor, slots: Tensor | None, block_size: int) -> Batch:
    columns = max(
        table.shape[1], -(-batch.max_seq_len // block_size), -(-(batch.max_encoder_seq_len or 0) // block_size)
    )
    pages = torch.zeros(table.shape[0], columns, dtype=torch.int32, device=table.device)
    fields: dict[str, Any] = {"block_table": pages, "block_table_cpu": pages if pages.is_cpu else None}
    if slots is not None:
        unwritten = torch.full_like(slots, PAD_SLOT_ID)
        fields |= {"slot_mapping": unwritten, "slot_mapping_cpu": unwritten if unwritten.is_cpu else None}
    return with_fields(batch, **fields)


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


def with_lengths(batch: Batch, *, reads_queries: bool = False) -> Batch:
    """
    Return a batch with exact lengths on the CPU, read from the device in one copy that is waited for.

    Args:
        batch: The batch.
        reads_queries: Whether `query_start_loc` is read too, where its CPU copy is absent.

    Raises:
        BatchError: The host gave bounds, and a length is larger.
    """
    reads_queries = reads_queries and batch.query_start_loc_cpu is None
    if batch.derived.get(_READ) and not reads_queries:
        return batch
    return batch.cached(("with lengths", reads_queries), lambda: _read(batch, reads_queries=reads_queries))


def keep_lengths(batch: Batch, agreement: Agreement) -> Batch:
    """Return a batch that was made from one with exact lengths: they need not be read again."""
    if agreement.reads_lengths:
        batch.derived[_READ] = True
    return batch


def _read(batch: Batch, *, reads_queries: bool) -> Batch:
    names = (*_DEVICE_LENGTHS, "query_start_loc") if reads_queries else _DEVICE_LENGTHS
    tensors: dict[str, Tensor] = {n: t for n in names if (t := getattr(batch, n)) is not None}
    if all(tensor.is_cpu for tensor in tensors.values()):
        found = dict(tensors)
    else:
        copied = torch.cat([tensor.flatten() for tensor in tensors.values()]).cpu()
        parts = torch.split(copied, [tensor.numel() for tensor in tensors.values()])
        pairs = zip(tensors.items(), parts, strict=True)  # of another dtype together; the guard refuses wrong ones
        found = {name: part.view(tensor.shape).to(tensor.dtype) for (name, tensor), part in pairs}
    for name, exact in found.items():
        given = getattr(batch, f"{name}_cpu")
        if given is not None and given.shape == exact.shape and given.is_cpu and bool((exact > given).any()):
            raise BatchError(
                f"{name}_cpu was given, and a value of {name} is larger",
                f"{name}_cpu is an upper bound of {name}",
                f"pass a bound that holds, or leave {name}_cpu out: build reads {name} here",
            )
    fields: dict[str, Any] = {f"{name}_cpu": exact for name, exact in found.items()}
    if batch.encoder_seq_lens is not None:
        fields["max_encoder_seq_len"] = int(found["encoder_seq_lens"].amax())
    # Computed tokens follow from exact lengths.
    read = with_fields(batch, **fields, num_computed_tokens_cpu=None)
    read.derived[_READ] = True
    return read
