"""Detects that a model's weights changed, so that KV caches of the old ones are not shared."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

_VERSION: Final = attrgetter("_version")
"""Count of in-place changes: `tensor_version` without its checks, fast enough for hundreds of tensors."""


class Weights:
    """
    The parameters of a model, compared at each `have_changed`; 300 of them take some 25 microseconds.

    Writes into a parameter's `data` do not count, as in autograd, nor do those into inference tensors.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.store()

    def have_changed(self, num_graphs: int = 0) -> bool:
        """
        Return whether a parameter was written or replaced since `store`.

        Args:
            num_graphs: Captured steps, which read the parameters of their capture.

        Raises:
            NotNegotiatedError: A parameter was replaced, and there are captured steps.
        """
        places, tensors, versioned, version = self._stored
        if all(map(is_, [parameters.get(name) for parameters, name in places], tensors)):
            return _total_version(versioned) != version
        if num_graphs:
            raise NotNegotiatedError(
                f"parameters of {type(self._model).__name__} were replaced",
                "the captured steps of this engine read the old ones",
                "make a new engine, or write into the parameters in place",
            )
        return True

    def store(self) -> None:
        """Store what `have_changed` compares with, in one assignment: an interrupt leaves the old or the new state."""
        places = [
            (module._parameters, name)  # noqa: SLF001 - named_parameters() is too slow for each request
            for module in self._model.modules()
            for name in module._parameters  # noqa: SLF001 - likewise
        ]
        tensors = [parameters[name] for parameters, name in places]
        versioned = [one for one in tensors if one is not None and not one.is_inference()]
        self._stored = (places, tensors, versioned, _total_version(versioned))


def _total_version(tensors: list[Tensor]) -> int:
    return sum(map(_VERSION, tensors))
