"""Makes a batch exact: lengths read where that was agreed, padding cut, counts and longest lengths for their bounds."""

from __future__ import annotations

from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from attrs import frozen

from attnplug.contract.inputs.batch import PAD_SLOT_ID, Batch, with_fields
from attnplug.errors import BatchError, TensorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug.negotiation.agreement import Agreement

_STARTS: Final = ("query_start_loc", "query_start_loc_cpu", "key_start_loc", "key_start_loc_cpu")
_DEVICE_LENGTHS: Final = ("seq_lens", "encoder_seq_lens", "dcp_local_seq_lens", "key_start_loc")
_PER_REQUEST: Final = (
    *("seq_lens", "seq_lens_cpu", "block_table", "block_table_cpu", "encoder_seq_lens", "encoder_seq_lens_cpu"),
    *("dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "num_computed_tokens_cpu"),
)
_Queries = tuple["Tensor | None", "int | None", bool, int, int]

_NO_ROWS: Final[Mapping[str, int]] = MappingProxyType({})
_KEPT_SHAPES: Final = 512  # whose tensors are kept, of four bytes per request each


@frozen(eq=False)
class LengthTerms:
    """
    What an agreement says about a batch's lengths. Equal terms are one object: batches keep what follows by it.

    Attributes:
        read: Whether lengths are read from the device.
        read_queries: Whether `query_start_loc` is read with them, where its CPU copy is absent.
        exact: Whether the sequence lengths on the CPU are exact then.
    """

    read: bool = False
    read_queries: bool = False
    exact: bool = False


_terms: Final = cache(LengthTerms)

AS_GIVEN: Final = _terms(read=False, read_queries=False, exact=False)
"""Without an agreement: nothing is read, and sequence lengths are bounds."""


def length_terms(agreement: Agreement) -> LengthTerms:
    """Return what an agreement says about lengths."""
    requested = agreement.requirements
    return _terms(
        read=agreement.reads_lengths,
        read_queries=agreement.reads_lengths and requested.query_lens_cpu_kind == "absent",
        exact=agreement.reads_lengths or requested.seq_lens_cpu_kind == "exact",
    )


class Lengths(NamedTuple):
    """
    The lengths of an exact batch, from its CPU copies.

    Attributes:
        query_lens: ``(num_reqs,)`` int32, read only; None where the starts fall, or contradict the batch's counts.
        query_len: The query length of all requests that have a query; None where they differ, or nothing is known.
        is_packed: Whether all queries have one length, and requests without a query come last.
        seq_range: The shortest and the longest sequence, or its bound; None where the CPU has neither.
        given_rows: The rows of the host's block table and slot mapping, where some were cut off.
    """

    query_lens: Tensor | None
    query_len: int | None
    is_packed: bool
    seq_range: tuple[int, int] | None
    given_rows: Mapping[str, int]

    def cut_alike(self, batch: Batch, name: str, tensor: Tensor | None) -> Tensor | None:
        """Return another block table or slot mapping of the host, without the rows that were cut off this batch's."""
        mine: Tensor | None = getattr(batch, name)
        if tensor is None or mine is None or not tensor.ndim or tensor.shape[0] != self.given_rows.get(name):
            return tensor
        return tensor[: mine.shape[0]]


def exact_batch(batch: Batch, terms: LengthTerms, *, is_read: bool = False) -> tuple[Batch, Lengths]:
    """
    Return a batch as plugins see it, and its lengths: made once for each batch, which is itself if nothing differs.

    Counts and the longest query are exact, and the longest sequence is where the CPU lengths are. There are no padded
    requests, and no slots of rows behind the last token. What contradicts itself stays as it is: the guards refuse it.

    Args:
        batch: The batch, which was not checked.
        terms: What the agreement says about lengths.
        is_read: Whether the CPU lengths are those that were read, for a batch that was made of an exact one.

    Raises:
        BatchError: All requests are padding, their number is invalid, or a length is larger than the host's bound.
        TensorError: A tensor has not one entry for each request.
    """
    if terms in batch.derived:
        kept, lengths = batch.derived[terms]
        return batch if kept is None else kept, lengths
    exact, lengths = _make_exact(with_lengths(batch, terms) if terms.read and not is_read else batch, terms)
    exact.derived[terms] = None, lengths  # it is exact itself
    if exact is not batch:
        batch.derived[terms] = exact, lengths
    return exact, lengths


def _make_exact(given: Batch, terms: LengthTerms) -> tuple[Batch, Lengths]:
    batch = given
    has_padding = type(given.num_padded_reqs) is not int or given.num_padded_reqs
    if has_padding and type(given.num_reqs) is int:
        batch = _without_padding(given)
    query_lens, query_len, is_packed, tokens, longest = _read_queries(batch)
    fields: dict[str, Any] = {}
    if query_lens is not None:
        if tokens != batch.num_actual_tokens:
            fields = {**_first_slots(batch, tokens), "num_actual_tokens": tokens}
        if longest != batch.max_query_len:
            fields["max_query_len"] = longest
    seq_range, lens = None, batch.seq_lens_cpu
    if lens is not None and lens.is_cpu and lens.dtype is torch.int32 and lens.ndim == 1 and lens.shape[0]:
        seq_range = extremes(lens)
        if terms.exact and type(batch.max_seq_len) is int and seq_range[1] < batch.max_seq_len:
            fields["max_seq_len"] = seq_range[1]
    if fields:
        batch = with_fields(batch, **fields)
    rows = _NO_ROWS
    if batch is not given:
        pages = {"block_table": given.block_table, "slot_mapping": given.slot_mapping}
        rows = {name: tensor.shape[0] for name, tensor in pages.items() if tensor is not None and tensor.ndim}
    return batch, Lengths(query_lens, query_len, is_packed, seq_range, rows)


def _read_queries(batch: Batch) -> _Queries:
    """Return the first three of `Lengths`, the query tokens, and the longest query."""
    starts = batch.query_start_loc_cpu
    if starts is None or not starts.is_cpu or starts.dtype is not torch.int32 or starts.ndim != 1:
        return None, None, False, 0, 0
    reqs, count, longest = batch.num_reqs, batch.num_actual_tokens, batch.max_query_len
    is_counted = type(reqs) is type(count) is type(longest) is type(batch.max_seq_len) is int
    if not is_counted or not reqs == starts.shape[0] - 1 > 0:
        return _differing_queries(starts, starts.tolist(), 0, 0)
    if longest > 0 and reqs * longest == count:  # decodes, as nearly always
        lens = _lens_if_packed(starts, reqs, longest, reqs)
        if lens is not None:
            return lens, longest, True, count, longest
    values: list[int] = starts.tolist()
    tokens = values[-1]
    running = tokens // longest if longest > 0 else 0
    if 0 < running <= reqs and running * longest == tokens <= count:
        lens = _lens_if_packed(starts, reqs, longest, running)
        if lens is not None:
            return lens, longest, True, tokens, longest
    return _differing_queries(starts, values, count, longest)


def _differing_queries(starts: Tensor, values: list[int], most_tokens: int, most: int) -> _Queries:
    """Return the same, query by query: lengths where these start at 0, never fall, and keep to their bounds."""
    if len(values) < 2:
        return None, None, False, 0, 0
    lens = starts.diff()
    low, longest = extremes(lens)
    query_len, is_packed = longest if low == longest else None, low == longest
    if low == 0 < longest:
        counts: list[int] = lens.tolist()
        running = [length for length in counts if length]
        query_len = longest if min(running) == longest else None
        is_packed = query_len is not None and 0 not in counts[: len(running)]
    is_bounded = values[0] == 0 <= low and 0 < values[-1] <= most_tokens and longest <= most
    return lens if is_bounded else None, query_len, is_packed, values[-1], longest


def _first_slots(batch: Batch, tokens: int) -> dict[str, Tensor]:
    """Return the slots of the first tokens, by field: K/V of the rows behind them are not written."""
    if batch.encoder_seq_lens is not None:  # the slots of cross attention are those of encoder tokens
        return {}
    slots = {"slot_mapping": batch.slot_mapping, "slot_mapping_cpu": batch.slot_mapping_cpu}
    return {name: tensor[:tokens] for name, tensor in slots.items() if tensor is not None and tensor.ndim == 1}


def _without_padding(batch: Batch) -> Batch:
    """Return a batch without its last requests, whatever they hold. Their query rows are behind the last token then."""
    padding, reqs = batch.num_padded_reqs, batch.num_reqs
    if type(padding) is not int or not 0 <= padding < reqs:
        raise BatchError(
            f"num_padded_reqs={padding!r} of {reqs} requests was given",
            "it counts the last requests, and at least one request is no padding",
            "pass 0 where there is none, and skip the step when nothing is scheduled",
        )
    fields: dict[str, Any] = {"num_reqs": reqs - padding, "num_padded_reqs": 0}
    for names, more in ((_STARTS, 1), (_PER_REQUEST, 0)):
        for name in names:
            tensor: Tensor | None = getattr(batch, name)
            if tensor is not None:
                _check_rows(name, tensor, reqs, reqs + more)
                fields[name] = tensor[: reqs - padding + more]
    starts, lens = fields.get("query_start_loc_cpu"), fields.get("seq_lens_cpu")
    if starts is not None and starts.is_cpu:  # of another form, which the guard refuses
        fields |= _first_slots(batch, int(starts[-1]))
        if lens is not None and (batch.custom_mask is not None or batch.attn_bias is not None):
            size = int((starts.diff().long() * lens).sum())  # as large or larger where the lengths are bounds
            if batch.custom_mask is not None:
                fields["custom_mask"] = batch.custom_mask[:size]
            if batch.attn_bias is not None and batch.attn_bias.ndim:
                fields["attn_bias"] = batch.attn_bias[..., :size]
    encoders = fields.get("encoder_seq_lens_cpu")
    if encoders is not None and encoders.is_cpu:
        fields["max_encoder_seq_len"] = int(encoders.amax())
    return with_fields(batch, **fields)


def _check_rows(name: str, tensor: Tensor, reqs: int, expected: int) -> None:
    if tensor.ndim == 0 or tensor.shape[0] != expected:
        raise TensorError(
            f"{name} of {tuple(tensor.shape)} was given",
            f"its first axis has {expected} entries: num_reqs={reqs} counts padded requests too",
            "pass an entry for each padded request",
        )


def with_lengths(batch: Batch, terms: LengthTerms) -> Batch:
    """
    Return a batch with exact lengths on the CPU where the terms say so, read in one copy that is waited for.

    Args:
        batch: The batch, its padding included.
        terms: What the agreement says about lengths.

    Raises:
        BatchError: The host gave bounds, and a length is larger.
    """
    if not terms.read:
        return batch
    reads_queries = terms.read_queries and batch.query_start_loc_cpu is None
    return batch.cached(("lengths read", reads_queries), lambda: _read(batch, reads_queries=reads_queries))


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
    return with_fields(batch, **fields, num_computed_tokens_cpu=None)


def with_null_pages(batch: Batch, terms: LengthTerms, lengths: Lengths, block_size: int) -> Batch:
    """
    Return an exact dummy batch that touches nothing but the null block: other pages and slots are replaced.

    Args:
        batch: An exact batch with `Batch.dummy`.
        terms: What the agreement says about lengths.
        lengths: The batch's lengths.
        block_size: Slots per block.
    """
    table, slots = batch.block_table, batch.slot_mapping
    if table is None or table.ndim != 2 or _is_null(batch):
        return batch
    made = batch.cached(("dummy", block_size), lambda: _with_null_pages(batch, table, slots, block_size))
    made.derived[terms] = None, lengths
    return made


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


# --- machinery ---


def _lens_if_packed(starts: Tensor, num_reqs: int, query_len: int, running: int) -> Tensor | None:
    """Return the query lengths if the first requests have one of this length each, and all others none."""
    packed, lens = _packed(num_reqs, query_len, running)
    if type(packed) is not torch.Tensor:  # in a mode that fakes tensors: no later batch is compared with those
        _packed.cache_clear()
        return None
    try:
        return lens if torch.equal(starts, packed) else None
    except RuntimeError:  # in such a mode, with tensors from before it: no value is known there
        return None


@lru_cache(_KEPT_SHAPES)
def _packed(num_reqs: int, query_len: int, running: int) -> tuple[Tensor, Tensor]:
    """Return where the queries of requests start of which the first are running, and their lengths."""
    lens = torch.full((num_reqs,), query_len, dtype=torch.int32, device="cpu")
    lens[running:] = 0
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device="cpu")
    starts[1:] = lens.cumsum(0)
    return starts, lens


def extremes(tensor: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest element of an integer tensor on the CPU that is not empty."""
    if tensor.numel() <= 16 and tensor.ndim == 1:  # before torch has launched an operation, Python is done
        values = tensor.tolist()
        return min(values), max(values)
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
