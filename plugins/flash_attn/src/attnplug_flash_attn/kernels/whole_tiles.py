"""Pages that FlashAttention 3 would load tile by tile, whatever of a tile is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnplug import Agreement

_LEAST_TILE: Final = 64


def may_be_whole_tiles(agreement: Agreement) -> bool:
    """
    Return whether pages of the agreed size may be loaded by whole tiles, unless a call has `Call.leftpad_k`.

    TMA copies all slots of a tile, those behind the last key of a request too. What an earlier request has left there
    has the weight 0, and 0 * NaN is NaN. Pages are copied so where they are multiples of a tile and a call has rows
    enough, but never with a padding to the left, be it of 0 slots: each key is then loaded by itself, and none behind
    the last. Tiles have 64 to 224 keys, by head size, mask, dtype and release: no smaller page is concerned.

    Sources: ``get_pagedkv_tma`` in hopper/flash_api.cpp and hopper/tile_size.h, of Dao-AILab/flash-attention and of
    vllm-project/flash-attention.
    """
    return (agreement.block_size or 0) >= _LEAST_TILE
