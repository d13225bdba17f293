"""When attending a shared prefix once pays off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_PREFIX: Final = 256
"""Shorter prefixes are not worth a separate pass."""

LEAST_REQUESTS: Final = 8
"""With fewer requests, the prefix is read too few times."""

_TILE: Final = 128


def cascade_pays(  # noqa: PLR0913 - each is a fact that the rule weighs
    common_prefix_len: int,
    query_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    use_alibi: bool,
    use_sliding_window: bool,
    use_local_attention: bool,
    num_sms: int,
    dcp_world_size: int = 1,
) -> bool:
    """
    Whether cascade attention is expected to be faster than attending each request by itself.

    The rule is that of vLLM's FlashAttention backend. It compares how many waves of thread blocks the prefix takes, in
    tiles of 128, once as one dense pass of all queries and once split over the keys of every request, as flash-decoding
    does. Prefixes below 256 tokens and batches below 8 requests are never worth it.

    Args:
        common_prefix_len: Tokens that all requests share.
        query_lens: New tokens of each request.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        use_alibi: Whether the layer has ALiBi slopes, which a dense pass over the prefix cannot express.
        use_sliding_window: Whether the layer has a window, likewise.
        use_local_attention: Whether the layer attends chunks, likewise.
        num_sms: Streaming multiprocessors of the device.
        dcp_world_size: Ranks of decode context parallelism.
    """
    if common_prefix_len < LEAST_PREFIX or use_alibi or use_sliding_window or use_local_attention:
        return False
    num_reqs = sum(length > 0 for length in query_lens)
    if num_reqs < LEAST_REQUESTS or dcp_world_size > 1:
        return False
    ratio = num_q_heads // num_kv_heads
    if ratio == 1 or max(query_lens) > 1:
        return True  # flash-decoding would not run: each request reads the whole prefix by itself
    prefix_tiles = _tiles(common_prefix_len)
    cascade = -(-num_q_heads * _tiles(sum(query_lens)) // num_sms) * prefix_tiles
    flash_decoding = -(-num_reqs * num_kv_heads * _tiles(ratio) * prefix_tiles // num_sms)
    return cascade < flash_decoding


def _tiles(count: int) -> int:
    return -(-count // _TILE)
