"""
Answers that candidates and conditions remember, since requests repeat the same few values.

A field such as a window takes values without end, and every candidate has an answer for each of them. So the number of
answers is bounded for the whole process: where there are too many, all are forgotten, which takes less time than
keeping the order in which each was last used. An object reads its own dictionary, and adds to it with `remember`.
"""

from __future__ import annotations

import os
from threading import RLock
from typing import Any, Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST: Final = 3072
"""Answers that are remembered at once. With the decisions of a process they are 4,096 at most."""

_lock = RLock()
_memos: Final[list[dict[Any, Any]]] = []  # those that hold answers; of objects that are gone too, until all forget
_count = 0


def remember(memo: dict[K, V], key: K, answer: V) -> V:
    """Add an answer to an object's dictionary, and return it. Any dictionary may be emptied for that."""
    global _count  # noqa: PLW0603 - one number for all of them
    with _lock:
        if _count >= MOST:
            forget_all()
        if not memo:
            _memos.append(memo)
        memo[key] = answer
        _count += 1
    return answer


def forget_all() -> None:
    """Forget all answers."""
    global _count  # noqa: PLW0603 - likewise
    with _lock:
        for memo in _memos:
            memo.clear()
        _memos.clear()
        _count = 0


def _unlock_in_child() -> None:
    """Make a new lock in a forked child: the copied one may be held by a thread that the child does not have."""
    global _lock  # noqa: PLW0603 - see above
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)
