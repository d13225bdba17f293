"""What the libraries return, put where the plugin wants it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug_flash_attn.kernels.interface import Call, Terms

_UNSCALED: Final = MappingProxyType({"q_descale": None, "k_descale": None, "v_descale": None})


def keep_lse(lse: Tensor | None, found: Tensor) -> None:
    """
    Write a library's LSE where it was asked for.

    Args:
        lse: (tokens, q_heads), or None where nobody asked.
        found: (q_heads, tokens): all libraries lay it out by heads. Rows without keys have infinity of either sign.
    """
    if lse is not None:
        torch.nan_to_num(found.T, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=lse)


def descales_of(call: Call, terms: Terms, kv_heads: int) -> Mapping[str, Tensor | None]:
    """Return the keywords ``q_descale``, ``k_descale`` and ``v_descale``, each of shape (requests, kv_heads)."""
    if terms.q_descale is terms.k_descale is terms.v_descale is None:
        return _UNSCALED
    requests = call.cu_seqlens_q.shape[0] - 1
    return {
        f"{letter}_descale": None if scale is None else scale.expand(requests, kv_heads)
        for letter, scale in zip("qkv", (terms.q_descale, terms.k_descale, terms.v_descale), strict=True)
    }
