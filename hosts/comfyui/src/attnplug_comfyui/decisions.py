"""Which backend serves a kind of call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.dense import DecisionCache, device_of, requirements_like_sdpa, shared_backend
from attnplug.errors import NoBackendError, NotNegotiatedError, RequirementsError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attnplug import Requirements
    from attnplug.contract import LoadedBackend
    from attnplug_comfyui.arguments import AttentionCall

REFUSALS: Final = (NoBackendError, RequirementsError, NotNegotiatedError)
"""Errors of a call that no backend serves. Others are mistakes: tensors that do not fit, a damaged plugin."""


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
        self._kept: DecisionCache[LoadedBackend] = DecisionCache(refusals=REFUSALS)

    def backend_of(self, call: AttentionCall) -> LoadedBackend:
        """
        Return the backend for a call, loaded.

        Raises:
            NoBackendError: Nothing can serve, or the backend that was named cannot.
            RequirementsError: A value is outside its domain.
            PluginError: As for `attnplug.load`.
        """
        return self._kept.get(_kind(call), call.query.device, lambda: self._decide(call))

    def _decide(self, call: AttentionCall) -> LoadedBackend:
        where = device_of(call.query.device)
        return shared_backend(_requirements(call), where, backend=self.backend, options=self.options)


def _requirements(call: AttentionCall) -> Requirements:
    return requirements_like_sdpa(
        call.query, call.key, call.value, call.mask, tokens_first=True, return_lse=_records_gradients(call)
    )


def _kind(call: AttentionCall) -> Hashable:
    """Return what the requirements follow from."""
    query, key = call.query, call.key
    mask = None if call.mask is None else (call.mask.dtype, call.mask.ndim > 2 and call.mask.shape[-3] != 1)
    is_cross = query.shape[1] != key.shape[1]
    return *query.shape[2:], key.shape[2], call.value.shape[3], query.dtype, is_cross, mask, _records_gradients(call)


def _records_gradients(call: AttentionCall) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in (call.query, call.key, call.value))
