"""
Answers that candidates and conditions remember, since requests repeat the same few values.

A field such as a window takes values without end, and every candidate has an answer for each of them. So the number of
answers is bounded for the whole process: where there are too many, all are forgotten, which takes less time than
keeping the order in which each was last used.
"""

from __future__ import annotations

import os
from threading import RLock
from typing import Any, Final, TypeVar
from weakref import WeakSet

K = TypeVar("K")
V = TypeVar("V")

MOST: Final = 3072
"""Answers that are remembered at once. With the decisions of a process they are 4,096 at most."""


class Memo(dict[K, V]):
    """The remembered answers of one object: read with `get`, added with `remember`."""

    __slots__ = ("__weakref__",)

    def __hash__(self) -> int:  # type: ignore[override]  # a memo is itself, whatever it holds
        return id(self)

    def remember(self, key: K, answer: V) -> V:
        """Keep an answer, unless there is one; return the one that is kept."""
        global _count  # noqa: PLW0603 - one number for all memos
        with _lock:
            kept = self.get(key)
            if kept is not None:
                return kept
            if _count >= MOST:
                forget_all()
            _memos.add(self)
            _count += 1
            self[key] = answer
            return answer


def forget_all() -> None:
    """Forget all answers."""
    global _count  # noqa: PLW0603 - likewise
    with _lock:
        for memo in _memos:
            memo.clear()
        _memos.clear()
        _count = 0


_lock = RLock()
_memos: Final[WeakSet[Memo[Any, Any]]] = WeakSet()
_count = 0  # answers that were added since all were forgotten; those of objects that are gone count until then


def _unlock_in_child() -> None:
    """Make a new lock in a forked child: the copied one may be held by a thread that the child does not have."""
    global _lock  # noqa: PLW0603 - see above
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)
