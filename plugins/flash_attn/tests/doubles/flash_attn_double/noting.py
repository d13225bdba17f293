"""Writes the calls of a Python function into the journal, as they were written."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from flash_attn_double.journal import journal

if TYPE_CHECKING:
    from collections.abc import Callable


def noted(library: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for the functions of a library."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            journal.note(library, function.__name__, len(args), dict(given), kwargs)
            return result

        return noting

    return decorate
