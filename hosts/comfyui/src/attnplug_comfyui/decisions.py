"""Which backend serves a kind of call: decided once, and kept for the calls that follow."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import torch

import attnplug
from attnplug.dense import device_of, shared_backend
from attnplug.errors import AttnplugError, NoBackendError, NotNegotiatedError, RequirementsError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attnplug.contract import Backend
    from attnplug_comfyui.arguments import AttentionCall

REFUSALS: Final = (NoBackendError, RequirementsError, NotNegotiatedError)
"""Errors of a call that no backend serves. Others are mistakes: tensors that do not fit, a damaged plugin."""

_MOST: Final = 256
"""Decisions that are kept, each with its backend."""


class Decisions:
    """
    The decisions of one override.

    Args:
        backend: The backend that has to serve, ``backend`` or ``backend/variant``; None for any.
        options: Options by backend, as for `attnplug.select`.
    """

    def __init__(self, backend: str | None = None, options: dict[str, dict[str, Any]] | None = None) -> None:
        self.backend = backend
        self.options = options
        self._kept: dict[Hashable, Backend | AttnplugError] = {}
        self._lock = threading.Lock()

    def backend_of(self, call: AttentionCall) -> Backend:
        """
        Return the backend for a call, loaded.

        Raises:
            NoBackendError: Nothing can serve, or the backend that was named cannot.
            RequirementsError: A value is outside its domain.
            PluginError: As for `attnplug.load`.
        """
        where = (_kind(call), call.query.device, attnplug.scope_key())
        found = self._kept.get(where)
        if found is None:
            found = self._decide(call)
            with self._lock:
                self._kept[where] = found
                while len(self._kept) > _MOST:
                    self._kept.pop(next(iter(self._kept)))
        if isinstance(found, AttnplugError):
            raise found.with_traceback(None)  # it is kept, and raised again
        return found

    def _decide(self, call: AttentionCall) -> Backend | AttnplugError:
        try:
            return shared_backend(
                requirements_of(call), device_of(call.query.device), backend=self.backend, options=self.options
            )
        except REFUSALS as error:
            return error


def requirements_of(call: AttentionCall) -> attnplug.Requirements:
    """
    Return what a call requires of a backend.

    Raises:
        RequirementsError: A value is outside its domain.
    """
    heads, size, kv_heads, size_v, dtype, is_cross, mask, learns = _kind(call)
    return attnplug.Requirements(
        head_size=size,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        dtype=dtype,
        head_size_v=size_v,
        attn_type="encoder_decoder" if is_cross else "encoder_only",
        custom_mask=mask == "boolean",
        attn_bias=mask == "additive",
        paged=False,
        phases=("prefill",),
        return_lse=learns,
    )


def _kind(call: AttentionCall) -> tuple[int, int, int, int, torch.dtype, bool, str | None, bool]:
    """Return what the requirements follow from."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    is_cross = query.shape[1] != key.shape[1]
    heads, size = query.shape[2:]
    return heads, size, key.shape[2], value.shape[3], query.dtype, is_cross, _mask_kind(mask), learns


def _mask_kind(mask: torch.Tensor | None) -> str | None:
    """Return how backends see a mask: a boolean one with separate heads is added to the scores."""
    if mask is None:
        return None
    is_common = mask.ndim < 4 or mask.shape[1] == 1
    return "boolean" if mask.dtype == torch.bool and is_common else "additive"
