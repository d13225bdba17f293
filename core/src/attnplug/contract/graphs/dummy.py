"""Dummy batches: for warm-up, and while a graph is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.contract.inputs.batch import PAD_SLOT_ID, Batch
from attnplug.contract.inputs.kv_cache import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.negotiation.agreement import Agreement


def dummy_batch(agreement: Agreement, key: GraphShape, device: torch.device) -> Batch:
    """
    Return a valid batch of this shape, full, that writes nothing into a cache.

    With pages, every request has a token of context (or none, where the longest sequence is its query), all of them in
    the null block: pages of running requests are not written, whatever a kernel writes for padding. Where sequences
    are spread over ranks, it has the largest share of a rank if tokens are distributed round-robin.

    Args:
        agreement: What was negotiated.
        key: The shape.
        device: Where the batch goes.
    """
    lens = query_lens_of(key)
    if not agreement.requirements.paged:
        return dummy_batch_of(agreement, device, lens)
    longest = max(lens) if key.max_seq_len == max(lens) else max(lens) + 1
    return dummy_batch_of(agreement, device, lens, [min(length + 1, longest) for length in lens])


def dummy_batch_of(
    agreement: Agreement,
    device: torch.device,
    query_lens: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    **fields: Any,
) -> Batch:
    """
    Return a valid batch of these lengths that writes no slot. With pages, all keys are in the null block.

    Cross attention gets encoders of one token, and DCP the largest share that any rank holds with an interleave of 1.
    A custom mask shows every key, and an additive one is zero.

    Args:
        agreement: What was negotiated.
        device: Where the batch's tensors go.
        query_lens: Query rows per request.
        seq_lens: Keys per request, its queries included; None is `query_lens`.
        fields: Further fields of `Batch`, by name.
    """
    requested, seq_lens = agreement.requirements, query_lens if seq_lens is None else seq_lens
    if requested.custom_mask or requested.attn_bias:
        size = sum(query * keys for query, keys in zip(query_lens, seq_lens, strict=True))
        if requested.custom_mask:
            fields = {"custom_mask": torch.ones(size, dtype=torch.bool, device=device), **fields}
        if requested.attn_bias:
            fields = {"attn_bias": torch.zeros(1, size, dtype=torch_dtype(requested.dtype), device=device), **fields}
    fields = {"device": device, "causal": bool(requested.causal), **fields}
    if not requested.paged:
        return Batch.from_lengths(query_lens, seq_lens, **fields)
    cross, reqs = requested.attn_type == "encoder_decoder", len(query_lens)
    rest = {"encoder_seq_lens": torch.ones(reqs, dtype=torch.int32)} if cross else {}
    if requested.dcp_size > 1:
        rest["dcp_local_seq_lens"] = torch.tensor([-(-n // requested.dcp_size) for n in seq_lens], dtype=torch.int32)
    for name, tensor in rest.items():
        fields |= {name: tensor.to(device), f"{name}_cpu": tensor}
    return Batch.from_lengths(
        query_lens,
        seq_lens,
        block_table=torch.zeros(reqs, -(-max(seq_lens) // (agreement.block_size or 1)), dtype=torch.int32),
        slot_mapping=torch.full((0 if cross else sum(query_lens),), PAD_SLOT_ID, dtype=torch.int64),
        dummy=True,
        **fields,
    )


def query_lens_of(key: GraphShape) -> list[int]:
    """Return query lengths of this shape, short ones first: they differ by a token at most."""
    even, longer = divmod(key.num_tokens, key.num_reqs)
    return [even] * (key.num_reqs - longer) + [even + 1] * longer
