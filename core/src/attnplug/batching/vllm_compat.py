"""
Batch utilities with the names and results of vLLM's.

Decodes are the requests at the front, chunked-local attention becomes plain causal attention over virtual requests, and
a plan for all layers requires that they share the values it is made for.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.contract.inputs.exact import AS_GIVEN, exact_batch
from attnplug.contract.inputs.phase import count_decodes
from attnplug.contract.inputs.upload import upload
from attnplug.errors import BatchError, LayerError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, MutableSequence, Sequence

    from attnplug.contract.attention import Attention
    from attnplug.contract.inputs.batch import Batch


class Split(NamedTuple):
    """
    Requests and query tokens on either side of the split.

    Attributes:
        num_decodes: Requests at the front.
        num_prefills: The requests after them, short queries and padded ones included.
        num_decode_tokens: Query tokens of the decodes: the first rows.
        num_prefill_tokens: Query tokens of the prefills: the rows after them.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(batch: Batch, decode_threshold: int = 1, *, require_uniform: bool = False) -> Split:
    """
    Split a batch of any order as `StepBuilder.build` does. Only CPU tensors are read.

    Short queries behind the first longer one are prefills. A padded request (query length 0) counts as the request
    before it does; those that `Batch.num_padded_reqs` counts are left out.

    Args:
        batch: The batch.
        decode_threshold: The longest query that counts as a decode.
        require_uniform: Count only the requests at the front with the query length of the first one as decodes, for
            kernels and graphs that take one query length. Padding ends them, unless nothing else is behind it.

    Raises:
        BatchError: `query_start_loc_cpu` is missing, the number of padded requests is invalid, or the threshold is
            below 1.
    """
    if decode_threshold < 1:
        raise BatchError(
            f"decode_threshold={decode_threshold} was given",
            "a decode has at least one query token",
            "pass the agreed decode_query_len",
        )
    lengths = _query_lens(exact_batch(batch, AS_GIVEN)[0])
    num_decodes = _count(lengths, decode_threshold, require_uniform=require_uniform)
    tokens = sum(lengths[:num_decodes])
    return Split(num_decodes, len(lengths) - num_decodes, tokens, sum(lengths) - tokens)


def _query_lens(batch: Batch) -> list[int]:
    if batch.query_start_loc_cpu is None:
        raise BatchError(
            "the batch has no query_start_loc_cpu",
            "the split is made from CPU lengths, so that no build waits for the device",
            "pass query_start_loc_cpu, or make the batch with Batch.from_lengths",
        )
    starts = batch.query_start_loc_cpu.tolist()
    return [end - start for start, end in pairwise(starts)]


def _count(lengths: Sequence[int], threshold: int, *, require_uniform: bool) -> int:
    if not lengths:
        return 0
    # A uniform batch that was padded for a graph has decodes alone, as in vLLM.
    is_padded = require_uniform and lengths[0] <= threshold and set(lengths) <= {lengths[0], 0}
    return len(lengths) if is_padded else count_decodes(lengths, threshold, uniform=require_uniform)


_R = TypeVar("_R", bound="Hashable")
_T = TypeVar("_T")


@frozen
class Reordering(Generic[_R]):
    """
    A new order of a batch's requests.

    Attributes:
        order: The requests, decodes first.
        swaps: Pairs of positions to exchange in the old order. No position is in two pairs.
    """

    order: tuple[_R, ...]
    swaps: tuple[tuple[int, int], ...]

    @property
    def changed(self) -> bool:
        """Whether the new order differs from the old one."""
        return bool(self.swaps)

    def apply(self, state: MutableSequence[_T]) -> None:
        """Permute a host's per-request state in place, as the requests were."""
        for front, back in self.swaps:
            state[front], state[back] = state[back], state[front]


def reorder_batch_to_split_decodes_and_prefills(
    order: Sequence[_R], scheduled_tokens: Mapping[_R, int], decode_threshold: int = 1
) -> Reordering[_R]:
    """
    Move every request with at most `decode_threshold` scheduled tokens to the front, by the fewest swaps.

    Args:
        order: The requests in their order, each once.
        scheduled_tokens: New tokens of each request in this step.
        decode_threshold: The longest query that counts as a decode.

    Raises:
        BatchError: A request has no entry in `scheduled_tokens`.
    """
    missing = [request for request in order if request not in scheduled_tokens]
    if missing:
        raise BatchError(
            f"scheduled_tokens has no entry for {missing!r}",
            "every request of the order has a number of scheduled tokens",
            "add these requests to scheduled_tokens, with 0 for requests that are not scheduled",
        )
    is_decode = [scheduled_tokens[request] <= decode_threshold for request in order]
    num_decodes = sum(is_decode)
    in_front = [i for i in range(num_decodes) if not is_decode[i]]
    behind = [i for i in range(num_decodes, len(order)) if is_decode[i]]
    swaps = tuple(zip(in_front, behind, strict=True))
    result = list(order)
    Reordering((), swaps).apply(result)
    return Reordering(tuple(result), swaps)


class Hyperparameters(NamedTuple):
    """
    The values of a layer that a plan is made for.

    Attributes:
        window_left: Tokens attended to on the left of a token, itself not counted; -1 for all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``; None for no cap.
        sm_scale: Factor of the scores.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def per_layer_parameters(impls: Iterable[Attention]) -> dict[str, Hyperparameters]:
    """
    Return the values of each layer, by its name.

    Raises:
        LayerError: Two layers have one name.
    """
    found: dict[str, Hyperparameters] = {}
    for impl in impls:
        name = impl.layer.name
        if name in found:
            raise LayerError(
                f"two layers are called {name!r}",
                "layer names are unique in a model",
                "name layers by their index in the model: 'layers.0.attention', ...",
            )
        found[name] = Hyperparameters(impl.window[0], impl.logits_soft_cap, impl.scale)
    return found


def infer_global_hyperparameters(per_layer: Mapping[str, Hyperparameters]) -> Hyperparameters:
    """
    Return the values that all layers share, for a library that plans once for all layers.

    Args:
        per_layer: The result of `per_layer_parameters`, or plain tuples in that order.

    Raises:
        LayerError: There are no layers, or some differ; the error names them.
    """
    if not per_layer:
        raise LayerError(
            "no layers were given", "there is at least one layer", "pass the impls to per_layer_parameters"
        )
    (first, shared), *_ = per_layer.items()
    differing = {name: values for name, values in per_layer.items() if tuple(values) != tuple(shared)}
    if differing:
        listed = ", ".join(f"{name!r} has {_text(values)}" for name, values in differing.items())
        raise LayerError(
            f"{first!r} has {_text(shared)}; {listed}",
            "one plan for all layers requires one window, one soft cap and one scale",
            "plan per group of equal values: StepBuilder keeps one plan for each plan_key",
        )
    return Hyperparameters(*shared)


def _text(values: tuple[int, float | None, float]) -> str:
    return ", ".join(map("{}={}".format, Hyperparameters._fields, values))


@frozen(eq=False)
class LocalChunks:
    """
    The virtual requests of a batch, in the order of its tokens: one per chunk that a request's queries are in.

    Attributes:
        query_lens: ``(num_virtual,)`` int32 on the CPU, each at least 1.
        query_start_loc: ``(num_virtual + 1,)`` int32 on the CPU, cumulative from 0.
        seq_lens: ``(num_virtual,)`` int32 on the CPU: keys from the chunk's start to its last query, at most a chunk.
        block_table: ``(num_virtual, attn_chunk_size // block_size)`` int32 on the device of the given table: the blocks
            of each one's chunk. Entries beyond `seq_lens` are not read; they repeat a block of the request.
    """

    query_lens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


def make_local_attention_virtual_batches(
    attn_chunk_size: int, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int
) -> LocalChunks:
    """
    Return the virtual requests over which plain causal attention is chunked-local attention.

    With chunks of 4, query lengths 4, 10, 5 and sequence lengths 6, 17, 9 become query lengths 2, 2, 1, 4, 4, 1, 4, 1
    and sequence lengths 4, 2, 4, 4, 4, 1, 4, 1. The tokens keep their order, so that queries, outputs and slots are
    used unchanged. A virtual request of one token may come after longer ones, and is a prefill then.

    Args:
        attn_chunk_size: Tokens per chunk, a multiple of `block_size`.
        query_start_loc: ``(num_reqs + 1,)`` integers on the CPU.
        seq_lens: ``(num_reqs,)`` integers on the CPU, exact: the sizes follow from them.
        block_table: ``(num_reqs, max_blocks)`` integers on any device; nothing waits for it.
        block_size: Slots per block.

    Raises:
        BatchError: The chunk is not a multiple of the block, the lengths are not on the CPU or contradict each other,
            or the block table is too short.
    """
    _check_chunk(attn_chunk_size, block_size)
    requests, chunks, query_lens, key_lens = _split_by_chunk(attn_chunk_size, query_start_loc, seq_lens)
    columns, longest = block_table.shape[1], max(seq_lens.tolist(), default=0)
    if columns * block_size < longest:
        raise BatchError(
            f"a block table of {columns} columns of {block_size} slots was given",
            f"the longest sequence has {longest} tokens",
            "allocate the request's blocks before its step",
        )
    # One flat index, so that one tensor is uploaded; the last chunk may extend beyond the table.
    width = attn_chunk_size // block_size
    inside = (chunks.unsqueeze(1) * width + torch.arange(width)).clamp_(max=columns - 1)
    entries = upload(inside + requests.unsqueeze(1) * columns, block_table.device)
    return LocalChunks(
        query_lens.int(),
        torch.cat([query_lens.new_zeros(1), query_lens.cumsum(0)]).int(),
        key_lens.int(),
        block_table.reshape(-1)[entries].int(),
    )


def local_chunk_batch(batch: Batch, attn_chunk_size: int, block_size: int) -> Batch:
    """
    Return a batch of virtual requests, with which a backend for plain causal attention serves chunked-local layers.

    Select that backend with ``attention_chunk=None``. Query, output, KV cache and slot mapping stay unchanged;
    `max_local_chunks` bounds the requests for `Limits`. Padded requests have no virtual ones; `pad_batch` adds others.

    Args:
        batch: A causal paged batch with exact CPU sequence lengths; not changed.
        attn_chunk_size: Tokens per chunk, a multiple of `block_size`.
        block_size: Slots per block.

    Raises:
        BatchError: As for `make_local_attention_virtual_batches`, or the batch is not such a batch.
    """
    _check_chunkable(batch)
    if batch.num_padded_reqs:
        batch, _ = exact_batch(batch, AS_GIVEN)
    starts, lengths, table = batch.query_start_loc_cpu, batch.seq_lens_cpu, batch.block_table
    if starts is None or lengths is None or table is None:
        raise BatchError(
            "a batch without query_start_loc_cpu, seq_lens_cpu or block_table was given",
            "virtual requests are counted from exact CPU lengths, and their blocks are read from the block table",
            "pass the three, or use a backend that supports attention_chunk",
        )
    virtual = make_local_attention_virtual_batches(attn_chunk_size, starts, lengths, table, block_size)
    if table.is_cpu or batch.block_table_cpu is None:
        table_cpu = virtual.block_table if table.is_cpu else None
    else:
        sizes = (attn_chunk_size, starts, lengths)
        table_cpu = make_local_attention_virtual_batches(*sizes, batch.block_table_cpu, block_size).block_table
    changed: dict[str, Any] = {
        "query_start_loc": upload(virtual.query_start_loc, batch.query_start_loc.device),
        "query_start_loc_cpu": virtual.query_start_loc,
        "seq_lens": upload(virtual.seq_lens, batch.seq_lens.device),
        "seq_lens_cpu": virtual.seq_lens,
        "block_table": virtual.block_table,
        "block_table_cpu": table_cpu,
        "num_computed_tokens_cpu": virtual.seq_lens - virtual.query_lens,
        "num_reqs": virtual.query_lens.shape[0],
        "max_query_len": max(virtual.query_lens.tolist(), default=0),
        "max_seq_len": max(virtual.seq_lens.tolist(), default=0),
        "common_prefix_len": 0,  # virtual requests share no prefix
    }
    return evolve(batch, **changed)


def max_local_chunks(num_reqs: int, num_tokens: int, attn_chunk_size: int) -> int:
    """
    Return the most virtual requests that a batch of so many requests and query tokens can have.

    A request of ``q`` tokens is in at most ``(q - 2) // attn_chunk_size + 2`` chunks, with a token in each.
    """
    if num_tokens <= num_reqs:
        return num_tokens
    return min(num_tokens, num_reqs + (num_tokens + num_reqs * (attn_chunk_size - 2)) // attn_chunk_size)


def _split_by_chunk(chunk: int, query_start_loc: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the request, chunk, query length and sequence length of each virtual request, int64."""
    _check_on_cpu(query_start_loc, seq_lens)
    starts, ends = query_start_loc.long(), seq_lens.long()
    computed = ends - starts.diff()
    _check_lengths(computed, ends)
    first, behind = computed // chunk, (ends + chunk - 1) // chunk
    counts = torch.where(ends > computed, behind - first, 0)
    requests = torch.repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    chunks = torch.arange(requests.shape[0]) + (first - before)[requests]
    last = torch.minimum(ends[requests], (chunks + 1) * chunk)
    return requests, chunks, last - torch.maximum(computed[requests], chunks * chunk), last - chunks * chunk


def _check_chunk(chunk: int, block_size: int) -> None:
    if block_size < 1 or chunk < 1 or chunk % block_size:
        raise BatchError(
            f"attn_chunk_size={chunk} and block_size={block_size} were given",
            "chunks start at block boundaries: attn_chunk_size is a positive multiple of block_size",
            "request a block size that divides the chunk: block_size=... in the requirements",
        )


def _check_on_cpu(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens)):
        if tensor.device.type != "cpu":
            raise BatchError(
                f"{name} on {tensor.device} was given",
                "the number of virtual requests is counted on the CPU, so that nothing waits for the device",
                f"pass the batch's {name}_cpu",
            )
    if query_start_loc.shape != (seq_lens.shape[0] + 1,):
        raise BatchError(
            f"query_start_loc has {tuple(query_start_loc.shape)} and seq_lens {tuple(seq_lens.shape)} entries",
            "query_start_loc has one entry more than the requests",
            "pass [0, *itertools.accumulate(query_lens)]",
        )


def _check_lengths(computed: Tensor, ends: Tensor) -> None:
    wrong = (computed < 0) | (computed > ends)
    if bool(wrong.any()):
        request = int(wrong.int().argmax())
        raise BatchError(
            f"request {request} has a sequence of {int(ends[request])} tokens and a query of "
            f"{int(ends[request] - computed[request])}",
            "a sequence includes its query: seq_len >= query_len, and no length is negative",
            "pass seq_len = computed tokens + query tokens",
        )


def _check_chunkable(batch: Batch) -> None:
    present = {
        "causal=False": not batch.causal,
        "a custom mask": batch.custom_mask is not None,
        "spans": batch.mm_prefix_range is not None,
        "encoder lengths": batch.encoder_seq_lens is not None,
        "DCP-local lengths": batch.dcp_local_seq_lens is not None,
        "key_start_loc": batch.key_start_loc is not None,
        "extra": bool(batch.extra),
    }
    if found := [what for what, is_present in present.items() if is_present]:
        raise BatchError(
            f"a batch with {' and '.join(found)} cannot be split into chunks",
            "with chunked-local attention a token attends, causally, to its own chunk in one rank's paged KV cache",
            "use a backend that supports attention_chunk together with it",
        )
