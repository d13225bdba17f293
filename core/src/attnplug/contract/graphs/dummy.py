"""Batches that stand in for real ones: for warm-up, and while a graph is captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.inputs.batch import PAD_SLOT_ID, Batch

if TYPE_CHECKING:
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.negotiation.agreement import Agreement


def dummy_batch(agreement: Agreement, key: GraphShape, device: torch.device) -> Batch:
    """
    Return a valid batch of this shape, full, that writes nothing into a cache.

    With pages, every request has a token of context (or none, where the longest sequence is its query), all of them in
    the null block: requests that are under way are not touched, whatever a kernel writes for padding. Where sequences
    are spread over ranks, it has the largest share that any rank holds where tokens are dealt out one by one.

    Args:
        agreement: What was negotiated.
        key: The shape.
        device: Where the batch goes.
    """
    asked, lens = agreement.requirements, query_lens_of(key)
    if not asked.paged:
        return Batch.from_lengths(lens, device=device, causal=bool(asked.causal))
    most = max(lens)
    longest = most if key.max_seq_len == most else most + 1
    cross = asked.attn_type == "encoder_decoder"
    seq_lens = [min(length + 1, longest) for length in lens]
    rest = {"encoder_seq_lens": torch.ones(len(lens), dtype=torch.int32)} if cross else {}
    if asked.dcp_size > 1:
        rest["dcp_local_seq_lens"] = torch.tensor([-(-n // asked.dcp_size) for n in seq_lens], dtype=torch.int32)
    return Batch.from_lengths(
        lens,
        seq_lens,
        block_table=torch.zeros(len(lens), -(-longest // (agreement.block_size or 1)), dtype=torch.int32),
        slot_mapping=torch.full((0 if cross else sum(lens),), PAD_SLOT_ID, dtype=torch.int64),
        device=device,
        causal=bool(asked.causal),
        dummy=True,
        **{name: tensor.to(device) for name, tensor in rest.items()},
        **{f"{name}_cpu": tensor for name, tensor in rest.items()},
    )


def query_lens_of(key: GraphShape) -> list[int]:
    """Return query lengths of this shape, short ones first: they differ by a token at most."""
    even, longer = divmod(key.num_tokens, key.num_reqs)
    return [even] * (key.num_reqs - longer) + [even + 1] * longer
