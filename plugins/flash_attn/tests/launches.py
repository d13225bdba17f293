"""Counts what a layer launches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        if not (is_view or "empty" in func.name() or "_unsafe_view" in func.name()):
            self.found[func.name().partition("::")[2].partition(".")[0]] += 1
        return func(*args, **kwargs or {})

    def one(self, name: str, result: Any = None) -> Callable[..., Any]:
        """Return a function that counts as one launch, and returns the result."""

        def launch(*given: Any, **named: Any) -> Any:
            self.found[name] += 1
            return result

        return launch
