"""Random examples in two tiers: some in every run, and more in a test that is marked slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable


def in_two_tiers(
    check: Callable[..., None], *strategies: st.SearchStrategy[Any], fast: int, full: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a test of `fast` examples of the arguments of `check`, and a slow one of `full` examples."""

    def of(examples: int) -> Callable[[], None]:
        def test(arguments: tuple[Any, ...]) -> None:
            check(*arguments)

        return settings(max_examples=examples)(given(arguments=st.tuples(*strategies))(test))

    return of(fast), pytest.mark.slow(of(full))
