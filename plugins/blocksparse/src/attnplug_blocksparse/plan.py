"""The plan of a step, and the scales of a layer: the arguments of the kernels' launches beside the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.pattern import Pattern
    from attnplug_blocksparse.tiles import DecodeTiles, HopperTiles, PrefillTiles


@frozen(eq=False, kw_only=True)
class DecodePlan:
    """
    The decodes of a step: one launch, and one that merges splits.

    Attributes:
        pattern: The pattern.
        tiles: The tile sizes.
        query_starts: ``(num_reqs + 1,)`` int32: the row of each request; a request without a row is padding.
        seq_lens: ``(num_reqs,)`` int32 keys per request, the new one included.
        table: ``(num_reqs, max_blocks)`` int32 block table.
        num_splits: Splits of each sequence.
        scratch: ``(scratch_bytes,)`` uint8, uninitialized.
    """

    pattern: Pattern
    tiles: DecodeTiles
    query_starts: Tensor
    seq_lens: Tensor
    table: Tensor
    num_splits: int
    scratch: Tensor


@frozen(eq=False, kw_only=True)
class PrefillPlan:
    """
    The prefills of a step: one launch for all requests, or one for each.

    Attributes:
        pattern: The pattern.
        tiles: The tile sizes.
        query_starts: ``(num_reqs + 1,)`` int32, from 0.
        seq_lens: ``(num_reqs,)`` int32 keys per request.
        key_starts: As `query_starts`, for the rows of contiguous K/V; None for paged K/V.
        table: ``(num_reqs, max_blocks)`` int32 block table; None for contiguous K/V.
        max_query_len: Rows of the longest request.
        query_lens: Rows of each request where each has a launch; otherwise empty.
        key_lens: Keys of each such request with paged K/V.
        hopper: Tile sizes of the warp-specialized kernel, where the device supports it. Without it, requests with
            paged K/V have one launch together.
    """

    pattern: Pattern
    tiles: PrefillTiles
    query_starts: Tensor
    seq_lens: Tensor
    key_starts: Tensor | None = None
    table: Tensor | None = None
    max_query_len: int = 0
    query_lens: tuple[int, ...] = ()
    key_lens: tuple[int, ...] = ()
    hopper: HopperTiles | None = None


@frozen(eq=False, kw_only=True)
class StepPlan:
    """
    The launches of a step.

    Attributes:
        decode: The decodes, or None.
        prefill: The prefills, chunks included, or None.
        decode_rows: Query rows of the decodes.
        prefill_rows: Query rows of the prefills.
        contiguous_kv: Whether the prefills read the K/V of the call. Otherwise they read the KV cache.
    """

    decode: DecodePlan | None = None
    prefill: PrefillPlan | None = None
    decode_rows: slice = slice(0)
    prefill_rows: slice = slice(0)
    contiguous_kv: bool = False


@frozen(eq=False)
class Scales:
    """
    The scales of a layer.

    Attributes:
        softmax: The factor of the scores, greater than 0.
        key: ``(1,)`` float32 of an FP8 KV cache; None for 1.
        value: As `key`.
    """

    softmax: float
    key: Tensor | None = None
    value: Tensor | None = None
