"""Attention to selected tokens: their latents are gathered for a few query tokens at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from attnplug.ops.gather import gather_slots
from attnplug.torch_backend.sdpa import UNFUSED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attnplug.torch_backend.codec import Codec
    from attnplug.torch_backend.sdpa import ScoreParams


def attend_selected(
    query: Tensor,
    pages: Tensor,
    indices: Tensor,
    index_lens: Tensor | None,
    params: ScoreParams,
    size_of_latents: int,
    most_bytes: int,
    codec: Codec | None = None,
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """
    Yield the results of consecutive query tokens: the first one, the one after the last, output, LSE, and which of them
    attend to nothing.

    Shapes follow from those of the arguments alone, and nothing waits for the device: a graph may record it. An entry
    that is no slot of the pages is not read, whatever it is.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        pages: ``(num_blocks, block_size, 1, head_size)``, of any strides.
        indices: ``(tokens, topk)`` int32 slots.
        index_lens: ``(tokens,)`` int32, or None.
        params: What the layer does to scores.
        size_of_latents: Elements of a value: the first ones of a key.
        most_bytes: The most bytes of float32 keys that are held at once, unless one token has more.
        codec: The codec of an FP8 KV cache; None for others.

    Yields:
        Output ``(tokens, num_q_heads, size_of_latents)`` and LSE ``(tokens, num_q_heads)`` in float32, and
        ``(tokens,)`` bool.
    """
    slots, topk = pages.shape[0] * pages.shape[1], indices.shape[1]
    stored = pages if codec is None else pages.view(torch.uint8)  # not every device can gather FP8
    columns = torch.arange(topk, device=indices.device)
    step = max(1, most_bytes // (4 * topk * pages.shape[3]))
    for first in range(0, query.shape[0], step):
        rows = slice(first, min(first + step, query.shape[0]))
        chosen = indices[rows]
        unused = (chosen < 0) | (chosen >= slots)
        if index_lens is not None:
            unused |= columns >= index_lens[rows].unsqueeze(1)
        found = gather_slots(stored, chosen.masked_fill(unused, 0).long().view(-1))
        keys = (found if codec is None else codec.rows(found)).view(*chosen.shape, -1).float()
        # The slot that is read in place of an unused one may hold NaN, which a weight of 0 does not hide.
        keys = keys.masked_fill_(unused.unsqueeze(2), 0).unsqueeze(1)
        nothing = unused.all(1)
        hidden = unused & ~nothing.unsqueeze(1)
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]
        values = keys[..., :size_of_latents]
        out, lse = UNFUSED.attend(query[rows].unsqueeze(1), keys, values, mask, params, causal=False)
        yield rows.start, rows.stop, out.squeeze(1), cast("Tensor", lse).squeeze(1), nothing
