"""Whether a model's weights are still those that its cached keys and values were computed with."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor


_VERSION: Final = attrgetter("_version")
"""Count of in-place changes; `version_of`, for tensors that are known to count, and fast enough for hundreds."""


class Weights:
    """
    The parameters of a model, looked at again and again; a look at 300 takes some 25 microseconds.

    Writes into a parameter's `data` do not count, as in autograd, nor do those into inference tensors.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._version = 0
        self._remember()

    def have_changed(self, num_graphs: int = 0) -> bool:
        """
        Whether a parameter was written or replaced since the last look.

        Args:
            num_graphs: Recorded steps, which read the parameters that there were.

        Raises:
            NotNegotiatedError: A parameter was replaced, and there are recorded steps.
        """
        if self._were_replaced():
            if num_graphs:
                raise NotNegotiatedError(
                    f"parameters of {type(self._model).__name__} were replaced",
                    "the recorded steps of this engine read the old ones",
                    "make a new engine, or write into the parameters in place",
                )
            self._remember()
            return True
        last, self._version = self._version, _written(self._counting)
        return last != self._version

    def _were_replaced(self) -> bool:
        now = [parameters.get(name) for parameters, name in self._places]
        return not all(map(is_, now, self._tensors))

    def _remember(self) -> None:
        self._places = [
            (module._parameters, name)  # noqa: SLF001 - walking through all modules is too slow for each request
            for module in self._model.modules()
            for name in module._parameters  # noqa: SLF001 - likewise
        ]
        self._tensors = [parameters[name] for parameters, name in self._places]
        self._counting = [one for one in self._tensors if one is not None and not one.is_inference()]
        self._version = _written(self._counting)


def _written(tensors: list[Tensor]) -> int:
    return sum(map(_VERSION, tensors))
