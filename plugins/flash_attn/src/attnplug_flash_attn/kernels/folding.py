"""How FlashAttention 2's kernels take calls of one row per request, and what is done where that is not wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug_flash_attn.kernels.interface import Call, Terms


def bound_of_rows(call: Call, rows: int, *, unfolded: bool) -> int:
    """
    Return ``max_seqlen_q`` for a call.

    Where it is 1 the query heads of a key head are folded into rows, and keys are split: as the library likes, and in
    some releases with an LSE in another order than its shape says. Requests without a row cannot be folded: every one
    is taken to have its row. A bound of 2 changes nothing else.

    Args:
        call: The call.
        rows: Query rows of the call.
        unfolded: Whether the call must not be folded.
    """
    if call.max_seqlen_q != 1:
        return call.max_seqlen_q
    return 2 if unfolded or rows != call.cu_seqlens_q.shape[0] - 1 else 1


def window_of(call: Call, terms: Terms, *, return_lse: bool) -> tuple[int, int]:
    """
    Return ``window_size`` for a call.

    With ALiBi and nothing but a causal mask the kernels leave out what is the same for all keys of a row: outputs do
    not notice, an LSE does. They take a window that holds all keys for none. One that holds all but the first makes
    them count distances, and the only row that could see that many keys sees one more, its own.
    """
    left, right = terms.window
    is_causal_alone = (call.causal or right == 0) and not 0 <= left < call.max_seqlen_k
    if return_lse and terms.alibi_slopes is not None and is_causal_alone:
        return max(call.max_seqlen_k - 1, 0), 0
    return left, right
