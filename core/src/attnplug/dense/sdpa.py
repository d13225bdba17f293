"""Attention with the arguments and the meaning of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from attnplug.contract.guards._format import describe
from attnplug.dense.functions import attention
from attnplug.dense.params import NO_TENSORS, CallParams, CallTensors, check_plain, requirements_of
from attnplug.dense.prepared import find_repeated, repeat_as
from attnplug.errors import NotNegotiatedError, TensorError, shown

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.request.requirements import Requirements
    from attnplug.request.settings import BackendNames, Options


def attend_like_sdpa(  # noqa: PLR0913 - the arguments of torch's function, and those of `select`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    tokens_first: bool = False,
    return_lse: bool = False,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Any:
    """
    Attend as `torch.nn.functional.scaled_dot_product_attention` does, through `attention`.

    It is for hosts whose code calls torch's function. The differences between both are translated here: the order of
    the axes, where causal queries begin, boolean masks of separate heads, and queries that attend to nothing. It works
    in ``torch.compile(fullgraph=True)`` and with gradients, as `attention` does. Tensors are computed in their dtype:
    `autocast_like_sdpa` casts them as torch's function does in ``torch.autocast``.

    Args:
        query: ``(batch, heads, queries, size)``.
        key: ``(batch, kv_heads, keys, size)``.
        value: ``(batch, kv_heads, keys, size_v)``.
        attn_mask: Boolean, True where a query attends to a key, or floating and added to the scores in the dtype of the
            call: any shape that expands to ``(batch, heads, queries, keys)``. A query that attends to nothing, because
            the mask is False or -inf for all keys, has output 0.
        dropout_p: 0: no backend applies dropout.
        is_causal: Whether a query attends to no later key. The first query is at the first key, whether or not there
            are as many queries as keys.
        scale: Factor of the scores; None is ``size ** -0.5``.
        enable_gqa: Whether groups of query heads may share a key and value head. One head for all needs no permission.
        tokens_first: Whether query, key, value and the output are ``(batch, tokens, heads, size)``, as in
            FlashAttention. The mask has heads before queries all the same.
        return_lse: Whether the log-sum-exp of the scores is returned; it is -inf where a query attends to nothing.
        backend: As for `select`.
        options: As for `select`.

    Returns:
        ``(batch, heads, queries, size_v)``; with `return_lse` a pair of that and ``(batch, heads, queries)`` float32.
        With `tokens_first`, ``(batch, queries, heads, size_v)`` and ``(batch, queries, heads)``.

    Raises:
        TensorError: A tensor has the wrong shape, dtype or device. The message gives shapes with the tokens first.
        NotNegotiatedError: Dropout, or `is_causal` beside a mask; or as for `attention`.
        RequirementsError: A value is invalid.
        NoBackendError: Nothing can serve the call; it carries every verdict.
    """
    # With an additive mask, the call of `attention` is repeated, and the output is another one.
    form, tensors = None, NO_TENSORS if attn_mask is None else CallTensors(mask=attn_mask)
    if not (torch.compiler.is_compiling() or dropout_p or options or _is_added(attn_mask)):
        call = ("sdpa", is_causal, scale, enable_gqa, tokens_first, return_lse, backend)
        form, repeated = find_repeated(query, key, value, call, tensors)
        if repeated is not None and (found := repeated.run(query, key, value, tensors)) is not None:
            return found if return_lse else found[0]
    _check_call(query, key, value, attn_mask if is_causal else None, dropout_p, tokens_first=tokens_first)
    if not tokens_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if query.shape[2] != key.shape[2] and key.shape[2] != 1 and not enable_gqa:
        _refuse_groups(query, key)
    settings = {"scale": scale, "backend": backend, "options": options}
    if attn_mask is not None:
        output, lse = _masked(query, key, value, attn_mask, settings, return_lse=return_lse)
    elif is_causal:
        output, lse = _causal(query, key, value, settings, return_lse=return_lse)
    else:
        output, lse = _attend(query, key, value, settings, return_lse=return_lse)
    if form is not None and not _is_adapted(query, key, attn_mask, is_causal=is_causal):
        inner = (is_causal, scale, None, None, return_lse, backend)  # as `attention` has it
        repeat_as(form, find_repeated(query, key, value, inner, tensors)[1], heads_first=not tokens_first)
    if not tokens_first:
        output, lse = output.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    return (output, lse) if return_lse else output


def autocast_like_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """
    Return the tensors of a call as `torch.nn.functional.scaled_dot_product_attention` gets them in ``torch.autocast``.

    Autocast casts floating tensors to its dtype, float64 excepted, and boolean masks not. Outside of it nothing is
    cast.

    Args:
        query: A query, whose device says which autocast it is.
        key: A key.
        value: A value.
        attn_mask: A mask, or None.
    """
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return query, key, value, attn_mask
    dtype = torch.get_autocast_dtype(device)
    mask = None if attn_mask is None else _autocast(attn_mask, dtype)
    return _autocast(query, dtype), _autocast(key, dtype), _autocast(value, dtype), mask


def requirements_like_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    tokens_first: bool = False,
    return_lse: bool = False,
) -> Requirements:
    """
    Return what `attend_like_sdpa` requires for a call, without making it: for hosts that decide beforehand.

    Of causal queries after the last key, which are a further call without a mask, it says nothing.

    Args:
        query: As for `attend_like_sdpa`, and so are the others; tensors of the device ``meta`` do.
        key: Likewise.
        value: Likewise.
        attn_mask: Likewise.
        is_causal: Likewise.
        tokens_first: Likewise.
        return_lse: Likewise; True where gradients are recorded.

    Raises:
        RequirementsError: A value is outside its domain.
    """
    if not tokens_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    tensors = NO_TENSORS
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool and not _differs_by_head(attn_mask)
        tensors = CallTensors(mask=attn_mask) if is_boolean else CallTensors(bias=attn_mask)
    params = CallParams(causal=is_causal, return_lse=return_lse)
    return requirements_of(query, key, value, params, tensors, is_cross=query.shape[1] != key.shape[1])


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _attend(
    query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any], *, return_lse: bool, **features: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the output of `attention`, and its LSE or None."""
    found = attention(query, key, value, return_lse=return_lse, **features, **settings)
    return found if return_lse else (found, None)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any], *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with the first query at the first key, where `attention` has the last query at the last key."""
    # Keys after the last query are seen by none. Queries after the last key see all keys.
    queries, keys = query.shape[1], key.shape[1]
    if queries <= keys:
        # No query attends to keys after the last query.
        key, value = (key, value) if queries == keys else (key[:, :queries], value[:, :queries])
        return _attend(query, key, value, settings, causal=True, return_lse=return_lse)
    # Queries after the last key attend to all keys.
    parts = [_attend(query[:, keys:], key, value, settings, return_lse=return_lse)]
    if keys:
        parts.insert(0, _attend(query[:, :keys], key, value, settings, causal=True, return_lse=return_lse))
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs, 1), torch.cat(lses, 1) if return_lse else None


def _masked(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, settings: dict[str, Any], *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with a mask."""
    if attn_mask.dtype == torch.bool and _differs_by_head(attn_mask):
        # A boolean mask is that of all heads for backends; an added one may differ.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    output, lse = _attend(query, key, value, settings, attn_mask=attn_mask, return_lse=return_lse)
    if attn_mask.is_floating_point() and not _is_finite(attn_mask):
        # `attention` takes -inf as the lowest number, so that a query without keys attends to all of them alike.
        hidden = (attn_mask[(None,) * (4 - attn_mask.ndim)] == -torch.inf).all(-1).transpose(1, 2)
        output = output.masked_fill(hidden.unsqueeze(-1), 0)
        lse = None if lse is None else lse.masked_fill(hidden, -torch.inf)
    return output, lse


def _is_finite(attn_mask: Tensor) -> bool:
    """Whether an additive mask is known to hide no key. On a device that is not read, and in a graph not known."""
    is_plain = not torch.compiler.is_compiling() and type(attn_mask) is torch.Tensor and attn_mask.is_cpu
    return is_plain and attn_mask.numel() > 0 and bool(attn_mask.amin() > -torch.inf)


def _check_call(
    query: Tensor, key: Tensor, value: Tensor, causal_mask: Tensor | None, dropout_p: float, *, tokens_first: bool
) -> None:
    check_plain(query, key, value)
    if dropout_p:
        _refuse_dropout(dropout_p)
    if not query.ndim == key.ndim == value.ndim == 4:
        _refuse_axes(query, key, value, tokens_first=tokens_first)
    if causal_mask is not None:
        _refuse_causal_mask()


def _is_added(attn_mask: Tensor | None) -> bool:
    return attn_mask is not None and getattr(attn_mask, "dtype", None) is not torch.bool


def _is_adapted(query: Tensor, key: Tensor, attn_mask: Tensor | None, *, is_causal: bool) -> bool:
    """Whether `attention` was called with other tensors than these, tokens first, or has other results."""
    if attn_mask is not None:
        return attn_mask.dtype != torch.bool or _differs_by_head(attn_mask)
    return is_causal and query.shape[1] != key.shape[1]


def _differs_by_head(attn_mask: Tensor) -> bool:
    return attn_mask.ndim > 2 and attn_mask.shape[-3] != 1


def _refuse_dropout(dropout_p: object) -> NoReturn:
    raise NotNegotiatedError(
        f"dropout_p={shown(dropout_p)} was given",
        "dropout_p is 0: no backend of attnplug applies dropout to the weights",
        "call model.eval(), or leave this call to torch's scaled_dot_product_attention",
    )


def _refuse_causal_mask() -> NoReturn:
    raise NotNegotiatedError(
        "is_causal=True and an attn_mask were given",
        "torch's scaled_dot_product_attention takes one of them",
        "pass attn_mask & torch.ones(queries, keys, dtype=torch.bool).tril() alone",
    )


def _refuse_axes(query: Tensor, key: Tensor, value: Tensor, *, tokens_first: bool) -> NoReturn:
    found = ", ".join(f"{name} of {describe(one)}" for name, one in (("query", query), ("key", key), ("value", value)))
    raise TensorError(
        f"{found} were given",
        f"each is (batch, {'tokens, heads' if tokens_first else 'heads, tokens'}, size)",
        "add the missing axes with .unsqueeze, and remove them from the output",
    )


def _refuse_groups(query: Tensor, key: Tensor) -> NoReturn:
    raise TensorError(
        f"{query.shape[2]} query heads and {key.shape[2]} key and value heads were given without enable_gqa",
        "there are as many of each, or one key and value head, or enable_gqa=True",
        "pass enable_gqa=True where groups of query heads share a key and value head",
    )
