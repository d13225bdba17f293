"""Makes the tensors of a case by its seed: tokens, masks, sinks and slopes, and blocks in a shuffled order."""

from __future__ import annotations

import random
from itertools import accumulate
from math import copysign, log, log2
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract import torch_dtype
from attnplug_kit.oracle.rounding import fp8_rounding, int8_rounding, representable
from attnplug_kit.oracle.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnplug_kit.oracle.case import Case

_MANY_BLOCKS: Final = 256


def materialize(case: Case) -> Scene:
    """Return the tensors of a case; the same case gives the same tensors."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = torch_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size_v = case.head_size_v or case.head_size
    shift = _shift_of(case)
    queries = (_shifted(case.gain * normal(n, case.num_q_heads, case.head_size), shift) for n in case.query_lens)
    keys = (_shifted(normal(n, case.num_kv_heads, case.head_size), abs(shift)) for n in case.key_lens)
    values = (normal(n, case.num_kv_heads, size_v) for n in case.key_lens)
    slopes: dict[str, Any] = {"start": -1.0, "end": -4.0, "steps": case.num_q_heads}
    block_table, num_blocks = _shuffled_blocks(case)
    own_values = _shared(case, (rows.to(dtype) for rows in values))
    return Scene(
        case=case,
        queries=tuple(representable(case, rows).to(dtype) for rows in queries),
        keys=_shared(case, (rows.to(dtype) for rows in keys)),
        values=own_values,
        sinks=_sinks(case, normal(case.num_q_heads)) if case.sinks else None,
        alibi_slopes=torch.logspace(base=2.0, **slopes) if case.alibi else None,
        masks=_masks(case) if case.custom_mask else _selections(case) if case.topk else None,
        biases=_biases(case) if case.attn_bias else None,
        spans=_spans(case) if case.mm_prefix else None,
        block_table=block_table,
        num_blocks=num_blocks,
        scale=_scale_of(case),
        rounding=fp8_rounding(case),
        int8_rounding=int8_rounding(case.kv_cache_dtype, own_values),
    )


def _sinks(case: Case, normal: Tensor) -> Tensor:
    """Return sinks: every second one has about the weight of all keys of a request, the others that of one key."""
    # Beside many keys the weight of one is within a tolerance. All are numbers of bfloat16, in which models keep sinks.
    keys = sum(case.key_lens) / len(case.key_lens)
    cuts = [cut for cut in (case.sliding_window, case.attention_chunk) if cut is not None]
    normal[::2] += log(max(1.0, min([keys, *cuts])))
    return normal.bfloat16().float()


def _scale_of(case: Case) -> float:
    return case.head_size**-0.5 if case.scale is None else case.scale


def _shift_of(case: Case) -> float:
    """Return what the last number of a query is, and, but for its sign, that of a key: a power of two."""
    if not case.score_shift:
        return 0.0
    return copysign(2.0 ** round(log2(abs(case.score_shift) / _scale_of(case)) / 2), case.score_shift)


def _shifted(rows: Tensor, number: float) -> Tensor:
    """Replace the last number of each row: kernels add it last, so that the sum of the others is as exact as ever."""
    if number:
        rows[..., -1] = number
    return rows


def _masks(case: Case) -> tuple[Tensor, ...]:
    """Return masks that hide about half of the keys, and all of them in some rows."""
    generator = torch.Generator().manual_seed(case.seed)

    def mask(rows: int, keys: int) -> Tensor:
        share = torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (rows, 1), generator=generator)]
        return torch.rand(rows, keys, generator=generator) < share

    return tuple(mask(rows, keys) for rows, keys in zip(case.query_lens, case.key_lens, strict=True))


def _selections(case: Case) -> tuple[Tensor, ...]:
    """Return masks that show some tokens of a request, as many as may be, or none, wherever they are."""
    generator, most = torch.Generator().manual_seed(case.seed), case.topk or 0

    def mask(rows: int, keys: int) -> Tensor:
        some = torch.randint(0, min(most, keys) + 1, (rows, 1), generator=generator)
        kind = torch.randint(0, 6, (rows, 1), generator=generator)
        count = some.masked_fill(kind == 0, 0).masked_fill(kind > 3, min(most, keys))
        return torch.rand(rows, keys, generator=generator).argsort(1).argsort(1) < count

    return tuple(mask(rows, keys) for rows, keys in zip(case.query_lens, case.key_lens, strict=True))


def _spans(case: Case) -> tuple[Tensor, ...]:
    """Return the span of each query of a request: spans and tokens in none take turns, beyond the sequence too."""
    generator = torch.Generator().manual_seed(case.seed)

    def of(rows: int, keys: int) -> Tensor:
        spans = torch.full((max(0, keys) + 40, 2), -1, dtype=torch.int32)
        start = 0
        while start < len(spans):
            gap, length = torch.randint(0, 12, (2,), generator=generator).tolist()
            end = min(len(spans), start + gap + 2 * length)
            spans[start + gap : end] = torch.tensor([start + gap, end - 1], dtype=torch.int32)
            start = end
        return spans[torch.arange(keys - rows, keys).clamp(min=0)]

    return tuple(of(rows, keys) for rows, keys in zip(case.query_lens, case.key_lens, strict=True))


def _biases(case: Case) -> tuple[Tensor, ...]:
    """Return additive masks, of each head or of all, by the case's seed."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = case.num_q_heads if case.seed % 2 else 1
    shapes = ((heads, rows, keys) for rows, keys in zip(case.query_lens, case.key_lens, strict=True))
    return tuple(torch.randn(shape, generator=generator).to(torch_dtype(case.dtype)) for shape in shapes)


def _shared(case: Case, rows: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Replace the rows of a shared prefix by those of the first request that has it."""
    mine, (sharing, length) = list(rows), case.shared_prefix
    for request in sharing:
        mine[request][:length] = mine[sharing[0]][:length]
    return tuple(mine)


def _shuffled_blocks(case: Case) -> tuple[Tensor, int]:
    """Return the block table ``(num_reqs, max_blocks)`` int32, and the number of blocks of the cache."""
    # No request gets block 0, or a block of another request, except those of a shared prefix. Unused entries name
    # blocks that do not exist.
    counts = [-(-max(length, 0) // case.block_size) for length in case.key_lens]
    num_blocks = max(2, 1 + sum(counts) + case.num_spare_blocks)
    blocks = list(range(1, num_blocks))
    if case.num_spare_blocks > _MANY_BLOCKS:
        blocks = blocks[-max(1, sum(counts)) :]  # the largest numbers
    random.Random(case.seed).shuffle(blocks)
    table = torch.full((len(counts), max(counts, default=0)), num_blocks + 10**6, dtype=torch.int32)
    for row, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        table[row, :count] = torch.tensor(blocks[end - count : end], dtype=torch.int32)
    rows, length = case.shared_prefix
    sharing, shared = list(rows), length // case.block_size
    table[sharing, :shared] = table[sharing[:1], :shared]
    return table, num_blocks
