"""The batch after a step: every request decodes the token that was sampled for it, and the host does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract.guards._format import describe
from attnplug.contract.inputs.batch import PAD_SLOT_ID, with_fields
from attnplug.contract.inputs.upload import upload
from attnplug.errors import BatchError, NotNegotiatedError, TensorError

if TYPE_CHECKING:
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.exact import Lengths
    from attnplug.negotiation.agreement import Agreement


@frozen(eq=False)
class DecodeInputs:
    """
    The inputs of a model that decodes several steps in a row, on the device.

    Attributes:
        sampled: ``(requests,)`` integers: the token of each request that goes on.
        input_ids: ``(rows,)`` integers; the first rows are overwritten with `sampled`.
        positions: ``(rows,)`` integers; the first rows are overwritten with the tokens' positions.
    """

    sampled: Tensor
    input_ids: Tensor
    positions: Tensor

    def check(self, count: int) -> None:
        """
        Check that the tensors hold so many requests.

        Raises:
            TensorError: One does not.
        """
        for name in ("sampled", "input_ids", "positions"):
            tensor = getattr(self, name)
            if tensor.ndim != 1 or tensor.shape[0] < count or tensor.dtype not in (torch.int32, torch.int64):
                raise TensorError(
                    f"{name} of {describe(tensor)} was given to advance_step",
                    f"{count} requests go on, with an integer each",
                    "pass one-dimensional integer tensors of at least that many rows",
                )

    def advance(self, positions: Tensor) -> None:
        """Overwrite the inputs: the sampled tokens, at these positions."""
        count = positions.shape[0]
        self.input_ids[:count].copy_(self.sampled[:count])
        self.positions[:count].copy_(positions)


def next_decode_batch(
    before: Batch, lengths: Lengths, agreement: Agreement, num_queries: int | None, *, prefills_to_decodes: bool
) -> Batch:
    """
    Return the batch of the next step; `before` is left alone.

    The first `num_queries` requests have one query token more in their sequence, at the slot that follows from the
    block table; all others are padding. Nothing is read from the device.

    Args:
        before: The exact batch of the step before.
        lengths: Its lengths.
        agreement: What was negotiated.
        num_queries: Requests that go on; None is all that have a query.
        prefills_to_decodes: Whether requests may have had several query tokens.

    Raises:
        BatchError: There are prefills, or a request has no room for another token.
        NotNegotiatedError: The batch has no pages, a custom mask, values of an open feature, or a cache
            that is spread over ranks.
    """
    _check_kind(before, agreement)
    count = _check_queries(lengths, num_queries, prefills_to_decodes=prefills_to_decodes)
    reqs, device = before.num_reqs, before.seq_lens.device
    starts = torch.arange(reqs + 1, dtype=torch.int32).clamp_(max=count)
    longest, lens_cpu = _longest(before, lengths, count)
    _check_room(before, agreement, longest)
    slots = _next_slots(before, agreement, count)
    host = before.block_table_cpu if device.type == "cpu" else None
    return with_fields(
        before,
        query_start_loc=upload(starts, device),
        query_start_loc_cpu=starts,
        seq_lens=_grown(before, before.seq_lens, count),
        seq_lens_cpu=lens_cpu,
        num_computed_tokens_cpu=None,
        slot_mapping=slots,
        slot_mapping_cpu=None if host is None else slots,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=longest,
        mm_prefix_range=None,  # sampled tokens are in no span
        mm_prefix_range_cpu=None,
    )


def _check_kind(before: Batch, agreement: Agreement) -> None:
    requested = agreement.requirements
    for found, what in (
        (before.block_table is None, "a batch without pages"),
        (before.custom_mask is not None, "a batch with a custom mask"),
        (bool(before.extra), f"a batch with extra {', '.join(map(repr, before.extra))}"),
        (requested.dcp_size > 1, f"a cache spread over dcp_size={requested.dcp_size} ranks"),
    ):
        if found:
            raise NotNegotiatedError(
                f"advance_step was called for {what}",
                "it advances decodes whose pages are all here, from block table and lengths alone",
                "assemble the next batch on the host, and build it",
            )


def _check_queries(lengths: Lengths, num_queries: int | None, *, prefills_to_decodes: bool) -> int:
    assert lengths.query_lens is not None  # noqa: S101 - the guard has seen it
    lens: list[int] = lengths.query_lens.tolist()
    running = len(lens) - lens.count(0)
    if 0 in lens[:running]:
        raise BatchError(
            f"a batch whose request {lens.index(0)} is padding, before others, was given to advance_step",
            "padded requests come last: the first requests are those that go on",
            "put padding at the end (attnplug.batching.pad_batch does)",
        )
    count = running if num_queries is None else num_queries
    if type(count) is not int or not 1 <= count <= running:
        raise BatchError(
            f"num_queries={num_queries!r} was given to advance_step",
            f"the step before had {running} requests with a query",
            f"pass a whole number from 1 to {running}, or leave it out",
        )
    if max(lens[:count]) > 1 and not prefills_to_decodes:
        raise BatchError(
            f"a batch with a query of {max(lens[:count])} tokens was given to advance_step",
            "a request that decodes has one query token in each step",
            "pass prefills_to_decodes=True once the prompts are complete",
        )
    return count


def _longest(before: Batch, lengths: Lengths, count: int) -> tuple[int, Tensor | None]:
    """Return the longest sequence of the next step, and the host's lengths, as exact as they were."""
    bound = before.max_seq_len + (0 if before.dummy else 1)
    if before.seq_lens_cpu is None or lengths.seq_range is None:
        return bound, None
    lens = _grown(before, before.seq_lens_cpu, count)
    if lengths.seq_range[1] < before.max_seq_len:
        return bound, lens
    return int(lens.amax()), lens


def _grown(before: Batch, lens: Tensor, count: int) -> Tensor:
    """Return the lengths of the next step. Those of a dummy batch do not grow: it has the null block alone."""
    more = torch.zeros_like(lens)
    torch.add(lens[:count], 0 if before.dummy else 1, out=more[:count])
    return more


def _check_room(before: Batch, agreement: Agreement, longest: int) -> None:
    size, table = agreement.block_size or 1, before.block_table
    if table is not None and agreement.requirements.attn_type != "encoder_decoder" and longest > table.shape[1] * size:
        raise BatchError(
            f"advance_step was called for a sequence of {longest} tokens",
            f"the block table has {table.shape[1]} columns of {size} slots",
            "allocate blocks for all steps before the first, or assemble the next batch on the host",
        )


def _next_slots(before: Batch, agreement: Agreement, count: int) -> Tensor | None:
    """Return the slots of the next step's tokens; None where the step before has none, since nothing is written."""
    if before.slot_mapping is None:
        return None
    cross = agreement.requirements.attn_type == "encoder_decoder"
    slots = torch.full((0 if cross else count,), PAD_SLOT_ID, dtype=torch.int64, device=before.seq_lens.device)
    if not before.dummy and not cross:
        _put_slots(slots, before.block_table, before.seq_lens[:count], agreement.block_size or 1)
    return slots


def _put_slots(slots: Tensor, table: Tensor | None, positions: Tensor, size: int) -> None:
    assert table is not None  # noqa: S101 - `_check_kind` has seen it
    places = positions.long()
    columns = torch.div(places, size, rounding_mode="floor").clamp_(max=table.shape[1] - 1)
    blocks = table[: places.shape[0]].gather(1, columns.unsqueeze(1)).squeeze(1)
    slots.copy_(blocks.long() * size + places % size)
