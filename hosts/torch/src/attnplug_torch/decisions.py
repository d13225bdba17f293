"""Which backend serves a kind of call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

import attnplug
from attnplug.dense import DecisionCache, device_of, shared_backend
from attnplug.errors import AttnplugError, NoBackendError, NotNegotiatedError, RequirementsError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import Tensor

    from attnplug.contract import LoadedBackend
    from attnplug.dense import NativeRows


class RefusedError(Exception):
    """
    No backend serves a call; torch's own operator does, where there is one.

    Attributes:
        reason: Why, in a sentence.
        error: The error of attnplug behind it, or None.
    """

    def __init__(self, reason: str, error: AttnplugError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error

    def without_own(self, operator: str, device: str) -> AttnplugError:
        """Return the error where torch has no operator of its own, either."""
        if self.error is not None:
            return self.error.with_traceback(None)  # it may be kept, and raised again
        return NotNegotiatedError(
            f"{operator} was called on {device}: {self.reason}",
            f"torch has no operator of its own for this on {device}",
            "leave this out of the call, or make the call with attnplug.attention_varlen",
        )


def refused(error: AttnplugError) -> RefusedError:
    """
    Return why a call is left to torch.

    Raises:
        NoBackendError: A setting or a scope names the backend that has to serve: torch's own operator is another.
    """
    if not isinstance(error, NoBackendError):
        return RefusedError(f"{error.problem}; {error.expected}" if error.expected else error.problem, error)
    if getattr(error.explanation, "listed", None):
        raise error
    return RefusedError(error.summary, error)


REFUSALS: Final = (NoBackendError, RequirementsError, NotNegotiatedError)
"""Errors of a call that no backend serves. Others are mistakes: a damaged plugin, a page outside of its pool."""


_decisions: Final[DecisionCache[LoadedBackend]] = DecisionCache(refusals=(RefusedError,))


_UNFUSED: Final = "torch/sdpa"
"""What serves nearly everything. On CUDA it computes scores by matrix products where a log-sum-exp is requested."""


def decide(
    kind: Hashable,
    device: torch.device,
    make: Callable[[], attnplug.Requirements],
    *,
    has_flash: Callable[[], bool],
    keys: int,
    rows: NativeRows,
) -> LoadedBackend:
    """
    Return the backend for a kind of call, loaded.

    Args:
        kind: What the requirements follow from, hashable: as long as it is equal, so are they.
        device: The device of the tensors.
        make: Returns the requirements; called where this has not been decided before in this scope.
        has_flash: Returns whether torch's own operator serves the call by a fused kernel on CUDA. It is then taken in
            place of the built-in backend, and of one that was measured to be slower, unless a backend was named. Called
            as `make` is.
        keys: Keys of the longest sequence.
        rows: The calls of this form for which torch's own operator was measured to be faster.

    Raises:
        RefusedError: No backend can serve, or none was named and torch's own operator is faster.
        NoBackendError: The backend that was named cannot serve.
        PluginError: As for `attnplug.load`.
    """
    short = rows.keys_of(keys) if device.type == "cuda" else 0
    return _decisions.get((kind, short), device, lambda: _decide(device, make, short, rows, has_flash=has_flash))


def _decide(
    device: torch.device,
    make: Callable[[], attnplug.Requirements],
    short: int,
    rows: NativeRows,
    *,
    has_flash: Callable[[], bool],
) -> LoadedBackend:
    try:
        requirements, where = make(), device_of(device)
        backend = shared_backend(requirements, where)
        reason = rows.reason(backend.id, where, short) if short else ""
        if backend.id == _UNFUSED:
            reason = f"only {_UNFUSED} serves it, which has no fused kernel here that returns log-sum-exps"
        if reason and has_flash() and not attnplug.explain(requirements, where).listed:
            raise RefusedError(reason)
    except REFUSALS as error:
        raise refused(error) from error
    return backend


def unknown_arguments(given: dict[str, object]) -> None:
    """
    Refuse arguments that a newer torch has, where they are used.

    Raises:
        RefusedError: One has a value.
    """
    names = given and sorted(name for name, value in given.items() if value is not None)
    if names:
        raise RefusedError(f"the argument {names[0]!r} of a newer torch is used")


def common_reasons(query: Tensor, dropout_p: float) -> Iterator[str]:
    """Yield why no backend serves a call, of what dense and packed calls have in common."""
    if dropout_p:
        yield f"dropout_p={dropout_p:g}: backends of attnplug apply no dropout"
    if query.dtype is torch.float64:
        yield "float64: the log-sum-exp of a backend is float32, and torch's backward would read it in float64"
    if is_captured(query):
        yield "a CUDA graph is captured, and would read metadata that is not kept for it"


def is_captured(query: Tensor) -> bool:
    """Return whether a call is captured in a CUDA graph."""
    return query.is_cuda and torch.cuda.is_current_stream_capturing()
