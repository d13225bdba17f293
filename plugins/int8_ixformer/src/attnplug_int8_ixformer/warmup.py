"""Runs one tiny step of each kind, so that what compiles at its first use is compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, Batch, Layer, Limits, torch_dtype

if TYPE_CHECKING:
    from attnplug_int8_ixformer.backend import Int8Backend

LAYER: Final = "attnplug_int8_ixformer.warmup"
"""The layer of a warm-up. It is none of the model's: a calibration has no scales of it, and it needs none."""

_SPLIT: Final = (1024, 8192)
"""Tokens of a sequence that is split into a few parts, and into many: one kernel each merges them."""


def run_each_kernel(backend: Int8Backend) -> None:
    """Run a decode in one part, in a few and in many, and prompts; all keys are in the null block."""
    asked, device = backend.agreement.requirements, backend.device
    slopes = None if asked.alibi is None else torch.zeros(asked.num_q_heads, device=device)
    source = "earlier" if asked.kv_sharing else None
    impl = backend.make_impl(Layer(name=LAYER, alibi_slopes=slopes, kv_sharing_target=source))
    cache = backend.make_cache(2)
    if not isinstance(cache, torch.Tensor) and "v_scale" in cache:
        cache["v_scale"].fill_(1.0)
    for query_len, seq_len in _lengths(backend):
        limits = Limits(max_num_reqs=1, max_num_tokens=query_len, max_seq_len=seq_len)
        builder = backend.make_builder([impl], backend.make_state(limits))
        shape, kind = (query_len, asked.num_kv_heads, asked.head_size), torch_dtype(asked.dtype)
        query = torch.zeros(query_len, asked.num_q_heads, asked.head_size, dtype=kind, device=device)
        key = None if asked.kv_sharing else torch.zeros(shape, dtype=kind, device=device)
        value = None if key is None else key.clone()
        batch = Batch.from_lengths(
            [query_len],
            [seq_len],
            block_table=torch.zeros(1, -(-seq_len // (backend.agreement.block_size or 1)), dtype=torch.int32),
            slot_mapping=torch.full((query_len,), PAD_SLOT_ID, dtype=torch.int64),
            device=device,
            causal=True,
        )
        built = builder.build(evolve(batch, dummy=True))
        impl.forward(query, key, value, cache, built, torch.empty_like(query.flatten(1)))


def _lengths(backend: Int8Backend) -> list[tuple[int, int]]:
    """New tokens and tokens of each step."""
    asked = backend.agreement.requirements
    found = []
    if "decode" in asked.phases:
        found += [(1, length) for length in (1, *_SPLIT)]
    if "prefill" in asked.phases:
        least = asked.decode_query_len + 1  # fewer are a decode
        found += [(length, length) for length in sorted({max(rows, least) for rows in backend.provider.prompt_lens})]
    return found
