"""Agreements, batches and tensors for the contract's tests."""

from __future__ import annotations

import torch
from toy import ToyBackend

from attnplug.contract import Batch, Layer, Limits
from attnplug.negotiation.agreement import Agreement
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from attnplug.selection.selection import Selection

BLOCK_SIZE = 4
NUM_BLOCKS = 32


def agree(*, cudagraph="never", kv_layout="NHD", device="cpu", **asked):
    """Return the selection of the toy for these requirements, as if it had declared them all."""
    base = {"head_size": 8, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "float32"}
    requirements = Requirements(**{**base, **asked})
    paged = requirements.paged
    agreement = Agreement(
        backend="toy",
        variant="plain",
        requirements=requirements,
        block_size=(requirements.block_size or BLOCK_SIZE) if paged else None,
        kv_layout=(requirements.kv_layout or kv_layout) if paged else None,
        kv_cache_dtype=requirements.kv_cache_dtype,
        cudagraph=cudagraph,
    )
    return Selection(agreement=agreement, device=Device(device))


def make_backend(cls=ToyBackend, **asked):
    return cls(agree(**asked))


def limits(**changes):
    return Limits(**{"max_num_reqs": 16, "max_num_tokens": 64, "max_seq_len": 64, "num_blocks": NUM_BLOCKS, **changes})


def make_builder(backend, **changes):
    impl = backend.make_impl(Layer(name="layers.0"))
    return backend.make_builder([impl], backend.make_state(limits(**changes)))


def make_batch(query_lens, seq_lens, *, block_size=BLOCK_SIZE, width=None, device=None, **changes):
    """Return a paged batch whose requests own consecutive blocks from 1 on."""
    counts = [-(-length // block_size) for length in seq_lens]
    table = torch.zeros(len(seq_lens), width or max([*counts, 1]), dtype=torch.int32)
    free = iter(range(1, 100_000))
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(free) for _ in range(count)], dtype=torch.int32)
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, (query, length) in enumerate(zip(query_lens, seq_lens))
        for position in range(length - query, length)
    ]
    return Batch.from_lengths(
        query_lens,
        seq_lens,
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        device=device,
        **changes,
    )


def make_qkv(backend, tokens, keys=None, seed=0):
    """Return query, key, value and output of a call."""
    asked = backend.agreement.requirements
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, asked.dtype)
    rows = tokens if keys is None else keys
    shapes = (
        (tokens, asked.num_q_heads, asked.head_size),
        (rows, asked.num_kv_heads, asked.head_size),
        (rows, asked.num_kv_heads, asked.head_size_v),
    )
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value, torch.full((tokens, asked.num_q_heads * asked.head_size_v), 7.0, dtype=dtype)
