"""
diffusers 0.42 on attnplug, as a host would write it: `attention` registered as one more attention backend.

diffusers has a closed enumeration of names and a private registry; a member and a function are added to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers.models import attention_dispatch as dispatch

from attnplug import attention

if TYPE_CHECKING:
    from torch import Tensor

NAME = "attnplug"


def register() -> dispatch.AttentionBackendName:
    """Register the attention function; a second call changes nothing."""
    names = dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        member._sort_order_ = len(names.__members__)
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME.upper())
        dispatch._AttentionBackendRegistry.register(member)(attend)
    return names(NAME)


def attend(  # noqa: PLR0917 - the signature of diffusers' functions
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Attend: ``(batch, tokens, heads, size)``, as diffusers' functions do."""
    if dropout_p or _parallel_config is not None:
        raise NotImplementedError("dropout and context parallelism are not part of this adapter")
    if attn_mask is not None and attn_mask.ndim == 2:  # padding: (batch, keys)
        attn_mask = attn_mask[:, None, None, :]
    if is_causal:  # the first query is at the first key, as in torch
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
    return attention(query, key, value, causal=is_causal, scale=scale, attn_mask=attn_mask, return_lse=return_lse)
