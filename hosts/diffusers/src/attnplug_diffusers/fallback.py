"""
Which calls diffusers' native attention runs: those that it was measured to run faster, and for a model that is bound
with a fallback those that no backend serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

import attnplug
from attnplug.dense import DecisionCache, device_of, requirements_like_sdpa, shared_backend
from attnplug.errors import NoBackendError, NotNegotiatedError, RequirementsError
from attnplug_diffusers.masks import has_more_digits
from attnplug_diffusers.measured import FASTER_NATIVELY

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.request import BackendNames, Options


class Fallback:
    """
    The decision for each kind of call with one combination of settings.

    Args:
        backend: As for `attnplug.select`.
        options: As for `attnplug.select`.
        serves_rest: Whether native attention runs what no backend serves.
    """

    def __init__(self, backend: BackendNames | None, options: Options | None, *, serves_rest: bool) -> None:
        self.serves_rest = serves_rest
        self._backend = backend
        self._options = options
        self._decisions: DecisionCache[str] = DecisionCache()
        self._index = len(_FALLBACKS)
        _FALLBACKS.append(self)
        self.reasons: set[str] = set()

    def reason(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        *,
        dropout_p: float,
        is_causal: bool,
        tokens_first: bool,
        by_key: bool,
    ) -> str:
        """
        Return why native attention runs a call; nothing where a backend does.

        `by_key` says that the mask leaves out keys, and is no mask for a backend (`attnplug_diffusers.packed`).

        In ``torch.compile`` this is decided when the graph is traced, and is part of the graph.
        """
        if not (self.serves_rest or query.is_cuda):
            return ""
        heads, tokens = (2, 1) if tokens_first else (1, 2)
        learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        # No row has a mask or gradients, and a backend that is named runs.
        may_be_faster = query.is_cuda and attn_mask is None and self._backend is None and not (learns or dropout_p)
        short = FASTER_NATIVELY.keys_of(key.shape[tokens]) if may_be_faster and query.ndim == 4 else 0
        if not (short or self.serves_rest):
            return ""
        refused = _refused(query, attn_mask, dropout_p, is_captured=self.serves_rest and _is_captured(query))
        if refused:
            return _noted(self._index, refused)
        return _decided(
            self._index,
            query.dtype,
            query.device,
            (query.shape[heads], key.shape[heads], query.shape[3], value.shape[3]),
            "" if by_key else _mask_kind(attn_mask),
            is_causal,
            by_key or query.shape[tokens] != key.shape[tokens],
            learns,
            short,
        )

    def note(self, reason: str) -> None:
        """Record why diffusers' own attention runs a call that was decided elsewhere."""
        _noted(self._index, reason)

    def decide(self, dtype: torch.dtype, device: torch.device, *call: Any) -> str:
        """Return the reason for a kind of call, see `_decided`."""
        found = self._decisions.get((dtype, call), device, lambda: self._decide(dtype, device, *call))
        if found:
            self.reasons.add(found)
        return found

    def _decide(
        self,
        dtype: torch.dtype,
        device: torch.device,
        sizes: tuple[int, int, int, int],
        mask: str,
        is_causal: bool,  # noqa: FBT001 - a call of it is a key of the decisions
        is_cross: bool,  # noqa: FBT001 - likewise
        learns: bool,  # noqa: FBT001 - likewise
        short: int,
    ) -> str:
        heads, kv_heads, size, size_v = sizes
        queries, keys = 1, 2 if is_cross and not is_causal else 1
        query, key, value = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape in ((1, heads, queries, size), (1, kv_heads, keys, size), (1, kv_heads, keys, size_v))
        )
        kind = torch.bool if mask == "boolean" else dtype
        given = torch.empty(queries, keys, dtype=kind, device="meta") if mask else None
        try:
            requirements = requirements_like_sdpa(query, key, value, given, is_causal=is_causal, return_lse=learns)
            where = device_of(device)
            chosen = shared_backend(requirements, where, backend=self._backend, options=self._options).id
        except (NoBackendError, RequirementsError, NotNegotiatedError) as error:
            return error.summary if self.serves_rest else ""  # the call itself is refused
        reason = FASTER_NATIVELY.reason(chosen, where, short) if short else ""
        return reason if reason and not attnplug.explain(requirements, where).listed else ""


def _refused(query: Tensor, attn_mask: Tensor | None, dropout_p: float, *, is_captured: bool) -> str:
    """Return why no backend serves a call, whatever is requested of it; or nothing."""
    if query.ndim != 4:
        return f"a query of {query.ndim} axes"
    if dropout_p:
        return f"dropout_p={dropout_p:g}"
    if attn_mask is not None and attn_mask.requires_grad:
        return "a mask that requires a gradient"
    if attn_mask is not None and has_more_digits(attn_mask, query):
        return f"an added mask of {attn_mask.dtype} for a call in {query.dtype}"
    return "a CUDA graph is captured" if is_captured else ""


def _is_captured(query: Tensor) -> bool:
    return not torch.compiler.is_compiling() and query.is_cuda and torch.cuda.is_current_stream_capturing()


_FALLBACKS: Final[list[Fallback]] = []
"""By number, which a compiled graph can hold."""


def _decide_constant(index: int, dtype: torch.dtype, device: torch.device, *call: Any) -> str:
    return _FALLBACKS[index].decide(dtype, device, *call)


def _note_constant(index: int, reason: str) -> str:
    _FALLBACKS[index].reasons.add(reason)
    return reason


# Graphs have the results as constants.
_decided: Final[Callable[..., str]] = torch.compiler.assume_constant_result(_decide_constant)  # type: ignore[no-untyped-call] # of torch
_noted: Final[Callable[[int, str], str]] = torch.compiler.assume_constant_result(_note_constant)  # type: ignore[no-untyped-call] # of torch


def _mask_kind(attn_mask: Tensor | None) -> str:
    """Return what a mask is for a backend: nothing, boolean for all heads, or added."""
    if attn_mask is None:
        return ""
    shared = attn_mask.ndim < 3 or attn_mask.shape[-3] == 1
    return "boolean" if attn_mask.dtype == torch.bool and shared else "added"
