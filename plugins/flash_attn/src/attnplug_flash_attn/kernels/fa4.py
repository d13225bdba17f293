"""FlashAttention 4: kernels in Python, compiled when they are first called."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import torch
from flash_attn.cute import flash_attn_varlen_func, interface

from attnplug_flash_attn.kernels.interface import Kernels, keep_lse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug import Agreement
    from attnplug_flash_attn.kernels.interface import LayerParams, VarlenCall

_NAMED: Final = (
    "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table", "softmax_scale",
    "causal", "window_size_left", "window_size_right", "learnable_sink", "softcap", "num_splits", "return_lse",
)  # fmt: skip
"""What `Fa4.attend` passes by name."""

_STEP: Final = 16
"""Bytes that the kernels write at once: a power of two. 4.0.0b36 asserts it of rows and heads; 4.0.0b11 does not."""


class Fa4(Kernels):
    """
    ``flash_attn.cute``: pages, but those of a tile of keys, and sinks; no ALiBi.

    Its public function returns a new tensor, which would have to be copied. The private one behind it, which engines
    call, is told where to write. Where the installed release has none that takes what is passed here, or the output is
    not one that kernels may write, the public one is called, and its results are copied.
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
        forward: Callable[..., Any] = self.run if _is_in_steps(out) else _copied
        _, by_heads, *_ = forward(
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
            num_splits=call.num_splits if self._splits else 1,  # where it does not split it refuses to choose
            return_lse=lse is not None,  # it takes an LSE to write, by heads alone
        )
        if lse is not None:
            keep_lse(lse, by_heads)


def run() -> Callable[..., Any]:
    """Return the library's forward that writes where it is told, or what does the same where there is none."""
    found: Callable[..., Any] | None = getattr(interface, "_flash_attn_fwd", None)
    if found is None:
        return _copied
    try:
        signature(found).bind(None, None, None, **dict.fromkeys(_NAMED))
    except (TypeError, ValueError):  # other arguments, or none that can be read
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
    """Call the public function by the arguments of the private one."""
    window = (window_size_left, window_size_right)
    found, by_heads = flash_attn_varlen_func(*rows, window_size=window, softcap=softcap or 0.0, **named)
    return out.copy_(found), by_heads


def _is_in_steps(out: Tensor) -> bool:
    """Whether each head of each row begins where kernels may write. Rows of a wider tensor need not."""
    token, head, element = out.stride()
    width = out.itemsize
    return element == 1 and token > 0 and head > 0 and not (out.data_ptr() | token * width | head * width) % _STEP
