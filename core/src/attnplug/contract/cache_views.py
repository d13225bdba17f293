"""Views of a layer's cache, which is the same at nearly every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

from attnplug.contract.lasting import lasting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_V = TypeVar("_V")


class CacheViews(Generic[_V]):
    """
    Keeps what a layer derives from its cache tensor: each view takes a microsecond of the host, call after call.

    What is kept is made anew for another tensor, and for the same one where it lies elsewhere, or in another form. It
    keeps no memory: when the tensor goes, it goes too. Only where the memory of a tensor that stays is exchanged
    (`Tensor.set_`, ``tensor.data = ...``) is the old memory held, until the next call.

    Threads may call a layer at once, each with its own cache. A copy, or what was pickled, starts with nothing kept.

    Args:
        make: Returns views of a cache tensor, and holds on to nothing else of it. It gets an alias, not the tensor
            itself, which views would keep alive.
    """

    def __init__(self, make: Callable[[Tensor], _V]) -> None:
        self._make = make
        # One object, as another thread may come in between two: views of one cache are never found with another's form.
        self._kept: tuple[ref[Tensor], tuple[object, ...], _V] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Views that are copied deeply are memory of their own, which no layer of the cache would read."""
        return type(self), (self._make,)

    def of(self, kv_cache: Tensor) -> _V:
        """
        Return the views of a cache.

        Args:
            kv_cache: A tensor of `Backend.make_cache`, checked, as `AttentionImpl._forward` gets it.
        """
        form, kept = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()), self._kept
        if kept is not None and kept[0]() is kv_cache and form == kept[1]:
            return kept[2]
        with lasting():
            views = self._make(kv_cache.detach())
        self._kept = ref(kv_cache, self._forget), form, views
        return views

    def _forget(self, gone: ref[Tensor]) -> None:
        kept = self._kept
        if kept is not None and kept[0] is gone:
            self._kept = None
