"""FlashAttention 4: kernels in Python, compiled at their first call."""

from __future__ import annotations

from inspect import signature
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from flash_attn.cute import flash_attn_varlen_func, interface

from attnplug_flash_attn.kernels.interface import Kernels, write_lse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall

_KEYWORDS: Final = (
    "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table", "softmax_scale",
    "causal", "window_size_left", "window_size_right", "learnable_sink", "softcap", "num_splits", "return_lse",
)  # fmt: skip
"""The keywords that `Fa4.attend` passes."""

_ALIGNMENT: Final = 16
"""Bytes that the kernels write at once, a power of two. 4.0.0b36 asserts it for rows and heads; 4.0.0b11 does not."""

_COMPILING: Final = Lock()
"""Held during a call. Any call may compile, and compiling in two threads ends the process (seen with 4.0.0b36)."""


class Fa4(Kernels):
    """
    ``flash_attn.cute``: sinks, and pages of any size except that of a tile; no ALiBi.

    Its public function returns a new tensor, which has to be copied. The private function that it calls, and that
    engines call, writes into `out`. If the installed release lacks it, its signature differs, or the kernels cannot
    write `out`, the public function is called, and its output is copied.
    """

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._splits = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11)
        self.run = run()
        self.fills_output = self.run is not _copied

    def attend(  # noqa: D102
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        call: VarlenCall,
        params: LayerParams,
        lse: Tensor | None,
    ) -> None:
        left, right = params.window
        forward: Callable[..., Any] = self.run if _is_aligned(out) else _copied
        with _COMPILING:
            _, lse_by_head, *_ = forward(
                query,
                key,
                value,
                out=out,
                cu_seqlens_q=call.cu_seqlens_q,
                cu_seqlens_k=call.cu_seqlens_k,
                max_seqlen_q=call.max_seqlen_q,
                max_seqlen_k=call.max_seqlen_k,
                seqused_k=call.seqused_k,
                page_table=call.block_table,
                softmax_scale=params.softmax_scale,
                causal=call.causal,
                window_size_left=None if left < 0 else left,
                window_size_right=None if right < 0 else right,
                learnable_sink=params.sinks,
                softcap=params.softcap or None,
                num_splits=call.num_splits if self._splits else 1,  # without split-KV it refuses 0
                return_lse=lse is not None,  # it could write an LSE, but only one laid out by head
            )
        if lse is not None:
            write_lse(lse, lse_by_head)


def run() -> Callable[..., Any]:
    """Return the library's function that writes into `out`, or `_copied` if there is none."""
    found: Callable[..., Any] | None = getattr(interface, "_flash_attn_fwd", None)
    if found is None:
        return _copied
    try:
        signature(found).bind(None, None, None, **dict.fromkeys(_KEYWORDS))
    except (TypeError, ValueError):  # another signature, or an unreadable one
        return _copied
    return found


def _copied(
    *rows: Tensor,
    out: Tensor,
    window_size_left: int | None,
    window_size_right: int | None,
    softcap: float | None,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call the public function with the arguments of the private one."""
    window = (window_size_left, window_size_right)
    output, lse_by_head = flash_attn_varlen_func(*rows, window_size=window, softcap=softcap or 0.0, **named)
    return out.copy_(output), lse_by_head


def _is_aligned(out: Tensor) -> bool:
    """Whether each head of each row starts at an aligned address. Rows of a wider tensor may not."""
    token, head, element = out.stride()
    width = out.itemsize
    return element == 1 and token > 0 and head > 0 and not (out.data_ptr() | token * width | head * width) % _ALIGNMENT
