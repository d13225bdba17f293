"""Views of a layer's cache, which is the same at nearly every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar
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
    keeps no memory: when the tensor goes, it goes too.

    Args:
        make: Returns views of a cache tensor, and holds on to nothing else of it. It gets an alias, not the tensor
            itself, which views would keep alive.
    """

    def __init__(self, make: Callable[[Tensor], _V]) -> None:
        self._make = make
        self._cache: ref[Tensor] | None = None
        self._form: tuple[object, ...] = ()
        self._views: _V | None = None

    def of(self, kv_cache: Tensor) -> _V:
        """
        Return the views of a cache.

        Args:
            kv_cache: A tensor of `Backend.make_cache`, checked, as `AttentionImpl._forward` gets it.
        """
        form = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        found, known = self._views, self._cache
        if found is not None and known is not None and known() is kv_cache and form == self._form:
            return found
        with lasting():
            found = self._make(kv_cache.detach())
        self._cache, self._form, self._views = ref(kv_cache, self._forget), form, found
        return found

    def _forget(self, gone: ref[Tensor]) -> None:
        if gone is self._cache:
            self._cache = self._views = None
