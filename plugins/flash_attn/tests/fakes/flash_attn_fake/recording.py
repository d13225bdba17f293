"""Writes the calls of a Python function into the journal, as they were written."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from flash_attn_fake.journal import journal

if TYPE_CHECKING:
    from collections.abc import Callable


def recorded(library: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for the functions of a library."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recording(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            journal.record(library, function.__name__, len(args), dict(given), kwargs)
            return result

        return recording

    return decorate
