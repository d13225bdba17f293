"""
`scaled_dot_product_attention` on a backend: the operators that torch calls where it has chosen flash attention.

Tensors are ``(batch, heads, tokens, size)``. The log-sum-exp that a backend returns is what torch's own backward reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.dense import attend_like_sdpa, requirements_like_sdpa, use_device
from attnplug.errors import TensorError
from attnplug_torch.decisions import (
    REFUSALS,
    RefusedError,
    common_reasons,
    decide,
    is_captured,
    refused,
    unknown_arguments,
)
from attnplug_torch.measured import FASTER_NATIVELY
from attnplug_torch.repeated import find, kind_of, leave, make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attnplug.contract import LoadedBackend


def on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the operator's signature
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    **unknown: object,
) -> tuple[str, tuple[Tensor, Tensor]]:
    """
    ``aten::_scaled_dot_product_flash_attention_for_cpu``.

    Returns:
        The candidate that ran; and the output with the strides of the query, and the LSE
        ``(batch, heads, queries)`` float32, whose heads are innermost as torch's are.

    Raises:
        RefusedError: Torch's own operator has to serve.
    """
    unknown_arguments(unknown)
    if attn_mask is None:
        # As in torch's function, the first causal query is at the first key.
        ran, output, lse = _attend(query, key, value, dropout_p, is_causal, scale, ends_together=False)
    elif is_causal:
        raise RefusedError("is_causal beside an attn_mask")
    else:
        ran, output, lse = _attend_masked(query, key, value, dropout_p, attn_mask, scale)
    return ran, (output, lse)


def on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the operator's signature
    return_debug_mask: bool = False,  # noqa: FBT001, FBT002 - likewise
    *,
    scale: float | None = None,
    **unknown: object,
) -> tuple[str, tuple[Any, ...]]:
    """
    ``aten::_scaled_dot_product_flash_attention``.

    Returns:
        The candidate that ran; and what the operator returns: the output, the LSE ``(batch, heads, queries)`` float32,
        no cumulative lengths, the longest query and key, the state of a random generator that nothing has used, and an
        empty mask.

    Raises:
        RefusedError: Torch's own operator has to serve.
    """
    unknown_arguments(unknown)
    if return_debug_mask:
        raise RefusedError("return_debug_mask: backends of attnplug return no weights")
    # Not as in torch's function, which gives this operator as many causal queries as keys: others come from
    # `torch.nn.attention.bias.causal_lower_right`, and the backward of torch reads the LSE likewise.
    ran, output, lse = _attend(query, key, value, dropout_p, is_causal, scale, ends_together=True)
    lengths = (None, None, query.shape[2], key.shape[2])
    return ran, (output, lse.contiguous(), *lengths, *random_state(query))


def random_state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what torch's operators return besides: seed and offset of a generator, and a mask, all without meaning."""
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return seed, offset, query.new_empty(0)


def backend_of(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, attn_mask: Tensor | None, dropout_p: float = 0.0
) -> LoadedBackend:
    """
    Return the backend for a call of `scaled_dot_product_attention` that reaches the flash operator.

    Raises:
        RefusedError: Torch's own operator has to serve it.
        NoBackendError: The backend that was named does not.
    """
    for reason in _reasons(query, key, value, dropout_p, is_causal, attn_mask):
        raise RefusedError(reason)
    sizes = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    is_cross = not is_causal and query.shape[2] != key.shape[2]
    kind = ("dense", query.dtype, sizes, is_causal, is_cross, attn_mask is not None)
    return decide(
        kind,
        query.device,
        lambda: requirements_like_sdpa(query, key, value, attn_mask, is_causal=is_causal, return_lse=True),
        has_flash=lambda: query.is_cuda,  # torch has chosen flash attention already
        keys=key.shape[2],
        rows=FASTER_NATIVELY,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001 - passed on from a signature of torch
    scale: float | None,
    *,
    ends_together: bool,
) -> tuple[str, Tensor, Tensor]:
    """
    Return the candidate that ran, its output with the query's strides, and its LSE.

    `ends_together` says where causal queries are: the last one at the last key, or else the first one at the first.
    """
    if query.is_cuda and query.device.index != torch.cuda.current_device():
        with use_device(query.device):
            return _attend(query, key, value, dropout_p, is_causal, scale, ends_together=ends_together)
    given = (query, key, value, scale)
    kind = kind_of(*given, is_causal=is_causal, ends_together=ends_together)
    depends = dropout_p or is_captured(query)  # on what is not of the kind
    call = None if depends else find(kind)
    if isinstance(call, str):
        raise RefusedError(call)
    try:
        if call is None:
            backend_of(query, key, value, is_causal=is_causal, attn_mask=None, dropout_p=dropout_p)
            call = make(kind, *given, is_causal=is_causal, ends_together=ends_together)
        return call.run(query, key, value)
    except RefusedError as refusal:
        if refusal.error is None and not depends:
            leave(kind, refusal.reason)
        raise
    except (*REFUSALS, TensorError) as error:
        raise refused(error) from error


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, attn_mask: Tensor, scale: float | None
) -> tuple[str, Tensor, Tensor]:
    """Return the candidate that ran, its output with the query's strides, and its LSE."""
    ran = backend_of(query, key, value, is_causal=False, attn_mask=attn_mask, dropout_p=dropout_p).id
    try:
        output, lse = attend_like_sdpa(query, key, value, attn_mask, scale=scale, enable_gqa=True, return_lse=True)
    except (*REFUSALS, TensorError) as error:
        raise refused(error) from error
    lse = lse.masked_fill(lse == -torch.inf, 0)  # as torch's, which its backward reads
    if output.stride() != query.stride():  # what torch's operators return, and compiled graphs expect
        output = torch.empty_like(query).copy_(output)
    return ran, output, lse


def _reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001 - passed on from a signature of torch
    attn_mask: Tensor | None,
) -> Iterator[str]:
    """Yield why torch's own operator has to serve a call, before any backend is asked."""
    yield from common_reasons(query, dropout_p)
    if not (query.ndim == key.ndim == value.ndim == 4 and query.shape[3] == value.shape[3]):
        yield "query, key and value are not all (batch, heads, tokens, size) with one size"
    elif is_causal and query.shape[2] > key.shape[2]:
        yield "is_causal with more queries than keys: a backend puts the last query at the last key"
    elif not key.shape[2]:
        yield "there are no keys"
    if attn_mask is None:
        return
    if is_causal:
        yield "is_causal beside an attn_mask"
    if attn_mask.dtype != query.dtype:
        # Added in the dtype of the call, it would lose digits.
        yield f"an attn_mask of {attn_mask.dtype} for a call in {query.dtype}"
