"""Prefill with multi-head latent attention (MLA) over a cached prefix, in bounded memory."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug.contract import upload
from attnplug.dense.functions import attention_varlen
from attnplug.errors import BatchError, LimitsError, TensorError
from attnplug.ops import dequantize, dequantize_latents, gather_slots, merge_into
from attnplug.request.domains import FP8_DS_MLA_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from attnplug.contract import Batch
    from attnplug.request import BackendNames, Options

_MAX_ROWS: Final = 65_536
"""As in vLLM 0.33, `mla_attention.py`: 72 MiB of latents, and 3 GiB expanded to 128 heads of 192 and 128."""


_OF_RECORD: Final = 576
"""Elements of a latent in a record of fp8_ds_mla."""


@frozen
class PrefixChunk:
    """
    Cached tokens that are expanded together, of consecutive requests that all have some.

    Attributes:
        first: The number of the first request.
        starts: Of each request, its first cached token in the chunk: 0 of all but the first.
        lengths: Of each request, its cached tokens in the chunk, at least one.
    """

    first: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


def prefix_chunks(context_lens: Sequence[int], max_rows: int) -> Iterator[PrefixChunk]:
    """
    Yield the chunks of all cached tokens, each of at most `max_rows`, in the order of the requests.

    A request without cached tokens ends a chunk: kernels differ in what they return of rows without keys.

    Args:
        context_lens: Cached tokens of each request.
        max_rows: Most tokens of a chunk, at least one.
    """
    pieces: list[tuple[int, int]] = []
    room = max_rows
    for number, length in enumerate(context_lens):
        start = 0
        while start < length:
            taken = min(room, length - start)
            pieces.append((start, taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield _chunk(number, pieces)
                pieces, room = [], max_rows
        if pieces and (number + 1 == len(context_lens) or context_lens[number + 1] == 0):
            yield _chunk(number, pieces)
            pieces, room = [], max_rows


def _chunk(last: int, pieces: list[tuple[int, int]]) -> PrefixChunk:
    starts, lengths = zip(*pieces, strict=True)
    return PrefixChunk(last + 1 - len(pieces), starts, lengths)


def latent_prefill(  # noqa: PLR0913 - as for `attention_varlen`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    batch: Batch,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    scale: float,
    k_scale: Tensor | None = None,
    max_rows: int = _MAX_ROWS,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Attend from new tokens to each other, and to the cached tokens before them, with keys and values per head.

    New tokens attend causally. Cached latents are gathered and expanded in chunks of at most `max_rows`, new tokens
    attend to each chunk, and the partial outputs are merged by their LSEs: memory does not depend on the prefix.
    Nothing waits for the device. Chunks are planned once for a batch, and shared by the layers of its step.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the chunks are those of vLLM's `mla_attention.py`.

    Args:
        query: ``(tokens, num_q_heads, nope + rope)``.
        key: As `query`, of the new tokens.
        value: ``(tokens, num_q_heads, head_size_v)``, of the new tokens.
        pages: ``(num_blocks, block_size, 1, kv_lora_rank + rope)`` KV cache of latents, of any strides; or
            records of fp8_ds_mla, ``(num_blocks, block_size, 1, 656)`` uint8.
        batch: The step: block table, and exact lengths on the CPU. Its new tokens may be in the KV cache already.
        expand: Returns keys ``(rows, num_q_heads, nope + rope)`` and values ``(rows, num_q_heads, head_size_v)`` of
            latents ``(rows, kv_lora_rank + rope)``, which are overwritten after the call.
        scale: Factor of the scores: ``(nope + rope) ** -0.5`` in most models.
        k_scale: ``(1,)`` float32 scale of latents in an FP8 KV cache; None is 1.
        max_rows: Most cached tokens that are expanded at once.
        backend: As for `select`, of both kinds of calls.
        options: As for `select`.

    Returns:
        ``(tokens, num_q_heads, head_size_v)``, and natural log-sum-exp ``(tokens, num_q_heads)`` float32.

    Raises:
        BatchError: The batch has no block table, or no lengths on the CPU.
        LimitsError: `max_rows` is not a positive whole number.
        TensorError: The KV cache is not one of latents, or tensors do not fit together.
        NoBackendError: Nothing can serve the dense calls.
    """
    _check(pages, max_rows)
    # Of the batch, not of the layer: the layers of a step share them.
    sizes = (pages.shape[1], max_rows)
    chunks = batch.cached(("latent_prefill", *sizes), lambda: tuple(_gathered_chunks(batch, *sizes)))
    how: dict[str, Any] = {"scale": scale, "return_lse": True, "backend": backend, "options": options}
    locations, cpu = batch.query_start_loc, batch.query_start_loc_cpu
    out, lse = attention_varlen(query, key, value, locations, query_start_loc_cpu=cpu, causal=True, **how)
    workspace = pages.new_empty(max((len(one.slots) for one in chunks), default=0), *pages.shape[2:])
    for chunk in chunks:
        narrow = gather_slots(pages, chunk.slots, out=workspace[: len(chunk.slots)])
        keys, values = expand(_widen(narrow, query.dtype, k_scale).flatten(1))
        part, part_lse = attention_varlen(
            query[chunk.rows],
            keys,
            values,
            chunk.query_start_loc,
            chunk.key_start_loc,
            query_start_loc_cpu=chunk.query_start_loc_cpu,
            key_start_loc_cpu=chunk.key_start_loc_cpu,
            **how,
        )
        merge_into(out[chunk.rows], lse[chunk.rows], part, part_lse)
    return out, lse


@frozen(eq=False)
class _GatheredChunk:
    """
    A chunk as the calls of each layer take it.

    Attributes:
        rows: The query tokens of its requests.
        slots: ``(cached tokens,)`` int64.
        query_start_loc: As for `attention_varlen`, and so are the others.
        key_start_loc: Likewise.
        query_start_loc_cpu: Likewise.
        key_start_loc_cpu: Likewise.
    """

    rows: slice
    slots: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor
    query_start_loc_cpu: Tensor
    key_start_loc_cpu: Tensor


def _gathered_chunks(batch: Batch, block_size: int, max_rows: int) -> Iterator[_GatheredChunk]:
    table, starts, context_lens = _lengths_of(batch)
    for chunk in prefix_chunks(context_lens, max_rows):
        last = chunk.first + len(chunk.lengths)
        first_row, keys = starts[chunk.first], _cumulative(chunk.lengths)
        yield _GatheredChunk(
            slice(first_row, starts[last]),
            _slots_of(chunk, table, block_size),
            batch.query_start_loc[chunk.first : last + 1] - first_row,
            upload(keys, table.device),
            _int32([one - first_row for one in starts[chunk.first : last + 1]]),
            keys,
        )


def _lengths_of(batch: Batch) -> tuple[Tensor, list[int], list[int]]:
    """Return the block table, the first token of each request and their end, and the cached tokens of each request."""
    table, lengths, locations = batch.block_table, batch.seq_lens_cpu, batch.query_start_loc_cpu
    if table is None or lengths is None or locations is None:
        raise BatchError(
            "a batch without block_table, seq_lens_cpu or query_start_loc_cpu was given",
            "the chunks of a cached prefix are planned from CPU lengths, so that nothing waits for the device",
            "pass the three, as BatchAssembler and Batch.from_lengths do",
        )
    query_lens = locations.diff()
    # Padded requests have no keys, and requests without queries need none.
    contexts = (lengths - query_lens).clamp(min=0).masked_fill(query_lens == 0, 0)
    return table, locations.tolist(), contexts.tolist()


def _check(pages: Tensor, max_rows: int) -> None:
    is_record = pages.dtype == torch.uint8
    if pages.ndim != 4 or pages.shape[2] != 1 or (is_record and pages.shape[3] != FP8_DS_MLA_BYTES):
        dtype = f" {pages.dtype}" if is_record else ""
        raise TensorError(
            f"a KV cache of shape {tuple(pages.shape)}{dtype} was given",
            "latents are (num_blocks, block_size, 1, kv_lora_rank + rope), and records of fp8_ds_mla have 656 bytes",
            "pass cache.k of a KV cache of the form 'latent'",
        )
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
        raise LimitsError(f"max_rows={max_rows!r} was given", "it is a positive whole number", "leave it out")


def _slots_of(chunk: PrefixChunk, table: Tensor, block_size: int) -> Tensor:
    """Return the slots of a chunk's tokens, ``(rows,)`` int64."""
    count, rows = len(chunk.lengths), sum(chunk.lengths)
    ends = list(accumulate(chunk.lengths))
    offsets = [start - end + length for start, end, length in zip(chunk.starts, ends, chunk.lengths, strict=True)]
    known = upload(torch.tensor([chunk.lengths, offsets]), table.device)
    requests = torch.arange(count, device=table.device).repeat_interleave(known[0], output_size=rows)
    positions = torch.arange(rows, device=table.device) + known[1][requests]
    blocks = table[requests + chunk.first, torch.div(positions, block_size, rounding_mode="floor")]
    return blocks.long() * block_size + positions % block_size


def _widen(narrow: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return latents in the dtype of the call."""
    if narrow.dtype == dtype:
        return narrow
    if narrow.dtype == torch.uint8:  # records
        return dequantize_latents(narrow, narrow.new_empty(*narrow.shape[:2], _OF_RECORD, dtype=dtype))
    wide = dequantize(narrow, torch.empty_like(narrow, dtype=dtype))
    return wide if scale is None else wide.mul_(scale)


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return _int32([0, *accumulate(lengths)])


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
