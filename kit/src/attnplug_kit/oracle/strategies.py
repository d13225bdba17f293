"""The cases as hypothesis strategies: `from attnplug_kit.oracle.strategies import cases`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen
from hypothesis import strategies as st

from attnplug_kit.oracle.cases import Case, draw_case

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_T = TypeVar("_T")


@frozen
class _Drawn:
    draw: st.DrawFn

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def among(self, values: Sequence[_T]) -> _T:
        return self.draw(st.sampled_from(values))


def cases(*, features: Collection[str] = (), **fixed: Any) -> st.SearchStrategy[Case]:
    """
    Return a strategy of cases; failing ones shrink to few requests, short lengths and no features.

    Args:
        features: The names out of `attnplug_kit.oracle.cases.FEATURES` that may be asked for.
        fixed: Fields of the case, by name, that are as given.
    """
    return _cases(tuple(features), fixed)


@st.composite
def _cases(draw: st.DrawFn, features: tuple[str, ...], fixed: dict[str, Any]) -> Case:
    return draw_case(_Drawn(draw), features=features, **fixed)
