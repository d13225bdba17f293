"""
Calls with a boolean mask by key, as models with padded text make them: the keys that it hides are left out.

What remains is attention of sequences of different lengths. FlashAttention and FlashInfer serve that, and have no such
masks. Each call reads the mask, which waits for the device: nothing else shows that its values have changed.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug import attention, attention_varlen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.request import BackendNames, Options


@frozen(eq=False)
class KeptKeys:
    """
    The keys that a mask shows.

    Attributes:
        index: ``(kept,)`` int64, their places among the keys of all sequences; None where it shows all keys.
        starts: ``(batch + 1,)`` int32, exclusive cumulative sum of how many each sequence has.
        starts_cpu: CPU copy.
        hidden: ``(batch, 1, 1, 1)`` bool, sequences without any key, which have their first here; None for none.
    """

    index: Tensor | None
    starts: Tensor
    starts_cpu: Tensor
    hidden: Tensor | None


def is_by_key(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *, heads: int, tokens: int, enable_gqa: bool
) -> bool:
    """
    Whether a call has a boolean mask ``(batch or 1, 1, 1, keys)``, and tensors that fit it.

    Args:
        query: Four axes.
        key: Four axes.
        value: Four axes.
        attn_mask: The mask.
        heads: The axis of the heads.
        tokens: The axis of the tokens.
        enable_gqa: Whether heads may be grouped.
    """
    return (
        attn_mask.dtype == torch.bool
        and query.ndim == key.ndim == attn_mask.ndim == 4
        and attn_mask.shape[1] == attn_mask.shape[2] == 1
        and attn_mask.shape[3] == key.shape[tokens] > 0
        and query.shape[tokens] > 0
        and attn_mask.shape[0] in (1, query.shape[0])
        and query.shape[0] == key.shape[0]
        and key.shape[:-1] == value.shape[:-1]
        and query.dtype == key.dtype == value.dtype
        and (enable_gqa or query.shape[heads] == key.shape[heads])
    )


def can_leave_out(query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool) -> bool:
    """
    Whether keys can be left out now: not while a CUDA graph is captured, since the mask is read.

    In ``torch.compile`` it is one op, without LSE and gradients.
    """
    if torch.compiler.is_compiling():
        learns = query.requires_grad or key.requires_grad or value.requires_grad
        return not return_lse and not (learns and torch.is_grad_enabled())
    return not query.is_cuda or not torch.cuda.is_current_stream_capturing()


def attend_by_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    *,
    scale: float | None,
    return_lse: bool,
    backend: BackendNames | None,
    options: Options | None,
) -> tuple[Tensor, Tensor | None]:
    """
    Attend to the keys that a mask shows.

    Args:
        query: ``(batch, queries, heads, size)``.
        key: ``(batch, keys, kv_heads, size)``.
        value: ``(batch, keys, kv_heads, size_v)``.
        attn_mask: ``(batch or 1, 1, 1, keys)`` bool.
        scale: As for `attnplug.attention`.
        return_lse: Whether the log-sum-exp is returned.
        backend: As for `attnplug.select`.
        options: As for `attnplug.select`.

    Returns:
        ``(batch, queries, heads, size_v)``, 0 where a sequence has no key; and the LSE ``(batch, queries, heads)``
        float32 or None.

    Raises:
        AttnplugError: As for `attnplug.attention_varlen`.
    """
    if torch.compiler.is_compiling():  # the keys are counted when the graph runs
        given = (query, key, value, attn_mask, scale, *_constant(backend, options))
        return torch.ops.attnplug_diffusers.attend_by_key(*given), None
    kept = kept_keys(attn_mask, query.shape[0])
    settings: dict[str, Any] = {"scale": scale, "backend": backend, "options": options}
    if kept.index is None:
        found = attention(query, key, value, return_lse=return_lse, **settings)
        return found if return_lse else (found, None)
    starts, starts_cpu = _query_starts(query.shape[0], query.shape[1], query.device)
    settings |= {"query_start_loc_cpu": starts_cpu, "key_start_loc_cpu": kept.starts_cpu, "return_lse": return_lse}
    key, value = (one.flatten(0, 1).index_select(0, kept.index) for one in (key, value))
    found = attention_varlen(query.flatten(0, 1), key, value, starts, kept.starts, **settings)
    output, lse = found if return_lse else (found, None)
    output = output.view(*query.shape[:3], value.shape[-1])
    lse = None if lse is None else lse.view(query.shape[:3])
    if kept.hidden is not None:
        output = output.masked_fill(kept.hidden, 0)
        lse = None if lse is None else lse.masked_fill(kept.hidden[..., 0], -torch.inf)
    return output, lse


def _constant_settings(backend: BackendNames | None, options: Options | None) -> tuple[tuple[str, ...], str]:
    return (backend,) if isinstance(backend, str) else tuple(backend or ()), json.dumps(options or {}, sort_keys=True)


# Graphs have the result as a constant.
_constant: Final[Callable[..., tuple[tuple[str, ...], str]]] = torch.compiler.assume_constant_result(_constant_settings)  # type: ignore[no-untyped-call] # of torch


def _run_op(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None, backend: list[str], options: str
) -> Tensor:
    given: dict[str, Any] = {"backend": backend or None, "options": json.loads(options) or None}
    return attend_by_key(query, key, value, attn_mask, scale=scale, return_lse=False, **given)[0]


def _fake_op(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    del key, rest
    return query.new_empty((*query.shape[:3], value.shape[3]))


_library: Final[Any] = torch.library.Library("attnplug_diffusers", "FRAGMENT")  # type: ignore[no-untyped-call]
_tensors: Final = "Tensor query, Tensor key, Tensor value, Tensor attn_mask"
_library.define(
    f"attend_by_key({_tensors}, float? scale, str[] backend, str options) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # it reads lengths, and metadata that is not kept for a graph
)
_library.impl("attend_by_key", _run_op, "CompositeExplicitAutograd")
torch.library.register_fake("attnplug_diffusers::attend_by_key", _fake_op, lib=_library)


def kept_keys(attn_mask: Tensor, batch: int) -> KeptKeys:
    """
    Return the keys that a mask shows. It waits for the device.

    Args:
        attn_mask: ``(batch or 1, 1, 1, keys)`` bool.
        batch: How many sequences there are.
    """
    mask, device, hidden = attn_mask[:, 0, 0].cpu().expand(batch, -1), attn_mask.device, None
    if bool(mask.all()):
        return KeptKeys(None, torch.empty(0), torch.empty(0), None)
    empty = ~mask.any(1)
    if bool(empty.any()):
        mask, hidden = mask.clone(), empty.view(-1, 1, 1, 1).to(device)
        mask[empty, 0] = True
    starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return KeptKeys(mask.reshape(-1).nonzero().squeeze(1).to(device), starts.to(device), starts, hidden)


@lru_cache(maxsize=64)
def _query_starts(batch: int, queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cumulative lengths of the queries, and their CPU copy; the same tensors for the same sizes."""
    with torch.inference_mode(mode=False):
        starts = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32)
        return starts.to(device), starts
