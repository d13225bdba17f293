"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # as in `attnplug`
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Return what a package assigns to ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package: The package's ``__name__``.
        modules: The public names of each module, separated by blanks, by the module's dotted name.

    Raises:
        ImportError: Raised by ``__getattr__`` where a name needs torch, which is not installed.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    names = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        try:
            value = getattr(import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"{package}.{name} needs torch, which is not installed\n  fix: pip install 'attnplug[torch]'"
            raise ImportError(message, name="torch") from error
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: names, names
