"""
Chunked-local attention as plain causal attention over virtual requests: one per chunk that a request's queries touch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.contract.inputs.upload import upload
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from attnplug.contract.inputs.batch import Batch


@frozen(eq=False)
class LocalChunks:
    """
    The virtual requests of a batch, in the order of its tokens.

    Attributes:
        query_lens: ``(num_virtual,)`` int32 on the CPU, each at least 1.
        query_start_loc: ``(num_virtual + 1,)`` int32 on the CPU, cumulative from 0.
        seq_lens: ``(num_virtual,)`` int32 on the CPU: keys from the chunk's start to its last query, at most a chunk.
        block_table: ``(num_virtual, attn_chunk_size // block_size)`` int32 where the given one is: each one's own
            chunk. Entries beyond `seq_lens` are not read; they repeat a block of the request.
    """

    query_lens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


@frozen(eq=False)
class _Cut:
    """Which chunk of which request each virtual request is, and its lengths: ``(num_virtual,)`` int64 each."""

    requests: Tensor
    chunks: Tensor
    query_lens: Tensor
    seq_lens: Tensor


def make_local_attention_virtual_batches(
    attn_chunk_size: int, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int
) -> LocalChunks:
    """
    Return the virtual requests that attend, causally, what chunked-local attention attends.

    With chunks of 4, query lengths 4, 10, 5 and sequence lengths 6, 17, 9 become query lengths 2, 2, 1, 4, 4, 1, 4, 1
    and sequence lengths 4, 2, 4, 4, 4, 1, 4, 1. The tokens keep their order, so that queries, outputs and slots are
    used as they are. A chunk's last piece may be one token behind longer ones: virtual requests are not ordered decodes
    first.

    Args:
        attn_chunk_size: Tokens per chunk, a multiple of `block_size`.
        query_start_loc: ``(num_reqs + 1,)`` integers on the CPU.
        seq_lens: ``(num_reqs,)`` integers on the CPU, exact; they decide the sizes.
        block_table: ``(num_reqs, max_blocks)`` integers on any device; nothing waits for it.
        block_size: Slots per block.

    Raises:
        BatchError: The chunk is no multiple of the block, the lengths are not on the CPU or contradict each other, or
            the block table is too short.
    """
    cut = _cut(attn_chunk_size, query_start_loc, seq_lens, block_size)
    return LocalChunks(
        cut.query_lens.int(),
        torch.cat([cut.query_lens.new_zeros(1), cut.query_lens.cumsum(0)]).int(),
        cut.seq_lens.int(),
        _chunk_blocks(cut, attn_chunk_size // block_size, seq_lens, block_table, block_size),
    )


def local_chunk_batch(batch: Batch, attn_chunk_size: int, block_size: int) -> Batch:
    """
    Return a batch of virtual requests, through which a backend for plain causal attention serves chunked-local layers.

    Select that backend with ``attention_chunk=None`` and ``phases=("prefill",)``: virtual requests are not ordered
    decodes first. Query, output, cache and slot mapping stay as they are; `max_local_chunks` bounds the requests for
    `Limits`. Padded requests have no queries, and so no virtual ones; `pad_batch` adds others.

    Args:
        batch: A causal paged batch with exact host lengths; not changed.
        attn_chunk_size: Tokens per chunk, a multiple of `block_size`.
        block_size: Slots per block.

    Raises:
        BatchError: As for `make_local_attention_virtual_batches`, or the batch is not such a batch.
    """
    _refuse_others(batch)
    starts, lengths, table = batch.query_start_loc_cpu, batch.seq_lens_cpu, batch.block_table
    if starts is None or lengths is None or table is None:
        raise BatchError(
            "a batch without query_start_loc_cpu, seq_lens_cpu or block_table was given",
            "virtual requests are counted from exact host lengths, and get their blocks from the block table",
            "give the three, or use a backend that serves attention_chunk itself",
        )
    virtual = make_local_attention_virtual_batches(attn_chunk_size, starts, lengths, table, block_size)
    table_cpu = virtual.block_table if table.device.type == "cpu" else None
    if table_cpu is None and batch.block_table_cpu is not None:
        table_cpu = make_local_attention_virtual_batches(
            attn_chunk_size, starts, lengths, batch.block_table_cpu, block_size
        ).block_table
    changed: dict[str, Any] = {
        "query_start_loc": upload(virtual.query_start_loc, batch.query_start_loc.device),
        "query_start_loc_cpu": virtual.query_start_loc,
        "seq_lens": upload(virtual.seq_lens, batch.seq_lens.device),
        "seq_lens_cpu": virtual.seq_lens,
        "block_table": virtual.block_table,
        "block_table_cpu": table_cpu,
        "num_computed_tokens_cpu": virtual.seq_lens - virtual.query_lens,
        "num_reqs": virtual.query_lens.shape[0],
        "max_query_len": _longest(virtual.query_lens),
        "max_seq_len": _longest(virtual.seq_lens),
        "common_prefix_len": 0,  # chunks of several requests share no start
    }
    return evolve(batch, **changed)


def max_local_chunks(num_reqs: int, num_tokens: int, attn_chunk_size: int) -> int:
    """
    Return the most virtual requests that a batch of so many requests and query tokens can become.

    A request of ``q`` tokens touches at most ``(q - 2) // attn_chunk_size + 2`` chunks, and each has a token.
    """
    if num_tokens <= num_reqs:
        return num_tokens
    return min(num_tokens, num_reqs + (num_tokens + num_reqs * (attn_chunk_size - 2)) // attn_chunk_size)


def _cut(chunk: int, query_start_loc: Tensor, seq_lens: Tensor, block_size: int) -> _Cut:
    _check_chunk(chunk, block_size)
    _check_host(query_start_loc, seq_lens)
    starts, ends = query_start_loc.long(), seq_lens.long()
    computed = ends - starts.diff()
    _check_lengths(computed, ends)
    first, behind = computed // chunk, (ends + chunk - 1) // chunk
    counts = torch.where(ends > computed, behind - first, 0)
    requests = torch.repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    chunks = torch.arange(requests.shape[0]) + (first - before)[requests]
    last = torch.minimum(ends[requests], (chunks + 1) * chunk)
    return _Cut(requests, chunks, last - torch.maximum(computed[requests], chunks * chunk), last - chunks * chunk)


def _chunk_blocks(cut: _Cut, width: int, seq_lens: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    columns = block_table.shape[1]
    longest = _longest(seq_lens)
    if columns * block_size < longest:
        raise BatchError(
            f"a block table of {columns} columns of {block_size} slots was given",
            f"the longest sequence has {longest} tokens",
            "allocate the request's blocks before its step",
        )
    # One flat index, so that one copy goes to the device; a last chunk may reach beyond the table.
    inside = (cut.chunks.unsqueeze(1) * width + torch.arange(width)).clamp_(max=columns - 1)
    entries = upload(inside + cut.requests.unsqueeze(1) * columns, block_table.device)
    return block_table.reshape(-1)[entries].int()


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _check_chunk(chunk: int, block_size: int) -> None:
    if block_size < 1 or chunk < 1 or chunk % block_size:
        raise BatchError(
            f"attn_chunk_size={chunk} and block_size={block_size} were given",
            "a chunk starts with a block of its own: attn_chunk_size is a positive multiple of block_size",
            "agree on a block size that divides the chunk, by block_size=... in the requirements",
        )


def _check_host(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens)):
        if tensor.device.type != "cpu":
            raise BatchError(
                f"{name} on {tensor.device} was given",
                "the number of virtual requests is counted on the host, so that nothing waits for the device",
                f"pass the batch's {name}_cpu",
            )
    if query_start_loc.shape != (seq_lens.shape[0] + 1,):
        raise BatchError(
            f"query_start_loc has {tuple(query_start_loc.shape)} and seq_lens {tuple(seq_lens.shape)} entries",
            "query_start_loc has one entry more than there are requests",
            "pass [0, *itertools.accumulate(query_lens)]",
        )


def _check_lengths(computed: Tensor, ends: Tensor) -> None:
    wrong = (computed < 0) | (computed > ends)
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise BatchError(
            f"request {request} has a sequence of {int(ends[request])} tokens and a query of "
            f"{int(ends[request] - computed[request])}",
            "a sequence counts its query too: seq_len >= query_len, and no length is negative",
            "pass seq_len = computed tokens + query tokens",
        )


def _refuse_others(batch: Batch) -> None:
    brought = [
        text
        for text, present in (
            ("causal=False", not batch.causal),
            ("a custom mask", batch.custom_mask is not None),
            ("encoder lengths", batch.encoder_seq_lens is not None),
            ("DCP-local lengths", batch.dcp_local_seq_lens is not None),
            ("key_start_loc", batch.key_start_loc is not None),
            ("extra", bool(batch.extra)),
        )
        if present
    ]
    if brought:
        raise BatchError(
            f"a batch with {' and '.join(brought)} was to be cut into chunks",
            "a token of chunked-local attention attends, causally, its own chunk of one rank's paged cache",
            "use a backend that serves attention_chunk together with it",
        )
