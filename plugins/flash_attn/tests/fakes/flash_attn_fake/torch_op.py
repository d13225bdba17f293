"""A fake of the FlashAttention 2 that torch has for GPUs: the op itself, with a kernel for CPUs."""

from __future__ import annotations

import torch

from flash_attn_fake import generation2
from flash_attn_fake.exact import ScoreParams
from flash_attn_fake.journal import journal
from flash_attn_fake.keys import Keys
from flash_attn_fake.refusal import check, require

OP = "_flash_attention_forward"
BUILD = generation2.Build(page_multiple=None, folded_lse="right")


def register() -> torch.library.Library:
    """Give the op a kernel; it is there as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(OP, forward, "CPU")
    return library


def forward(  # noqa: PLR0917 - the library's own
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    """FlashAttention 2, for packed keys."""
    given = dict(locals())
    keywords = [
        name for name in ("scale", "window_size_left", "window_size_right", "seqused_k") if given[name] is not None
    ]
    require(not dropout_p and not return_debug_mask, "the fake does not support dropout")
    require(block_table is None and num_splits is None, "torch 2.11 has no pages, and no number of parts")
    check(alibi_slopes is None, "This flash attention build does not support alibi.")
    check(cum_seq_q is not None and cum_seq_k is not None, "cum_seq_q and cum_seq_k must be both set")
    params = ScoreParams(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        left=-1 if window_size_left is None else window_size_left,
        right=-1 if window_size_right is None else window_size_right,
    )
    rows = generation2.Rows(query=query, starts=cum_seq_q, longest=max_q, longest_keys=max_k)
    keys = Keys(key=key, value=value, starts=cum_seq_k, used=seqused_k)
    out, lse = generation2.varlen_fwd(BUILD, rows, keys, params, causal=is_causal)
    journal.record("torch", OP, 10, given, keywords)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0, dtype=torch.uint64), torch.empty(0)
