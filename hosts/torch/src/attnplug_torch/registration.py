"""
The names under which torch's registry has attnplug: `activate_flash_attention_impl` activates what is registered here.

This is imported at the end of every ``import torch``: it imports nothing else until a name is activated.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug_torch.activation import Handle

NAME: Final = "attnplug"
"""The name that is always registered."""

VARIABLE: Final = "TORCH_ATTNPLUG_IMPLS"
"""
Environment variable: further names, separated by commas, which torch knows as attnplug when it is imported.

It is for programs that activate a name of their own choice, as torchtitan does: ``FA3`` or ``FA4``.
"""

_replaced: Final[dict[str, Callable[..., Any] | None]] = {}
"""Registered name -> what torch had for it before, or None."""


def autoload() -> None:
    """
    Register the names: the function behind the entry point in torch's group ``torch.backends``.

    It raises nothing: an error here would be one of ``import torch``. A torch without the registry is left as it is.
    """
    try:
        names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
        register(*filter(None, names))
    except Exception as error:  # noqa: BLE001 - see above
        sys.stderr.write(f"attnplug-torch registered nothing with torch: {error}\n")


def register(*names: str) -> tuple[str, ...]:
    """
    Register attnplug with `torch.nn.attention`, under `NAME` and under further names. Nothing is activated.

    A further name may be one of torch's own, ``"FA3"`` for example: activating it then activates attnplug, until
    `unregister` puts back what torch had. A second call with the same names changes nothing.

    Returns:
        All names that are registered now, sorted; none where torch has no registry (before 2.11).
    """
    table = _table()
    if table is None:
        return ()
    from torch.nn.attention import register_flash_attention_impl  # noqa: PLC0415 - only torch 2.11 has it

    for name in (NAME, *names):
        if name not in _replaced:
            _replaced[name] = table.get(name)
        register_flash_attention_impl(name, register_fn=_activate)
    return tuple(sorted(_replaced))


def unregister(*names: str) -> None:
    """
    Put back what torch had for names that `register` took; without names, for all but `NAME`.

    What is active stays so until `torch.nn.attention.restore_flash_attention_impl` is called.
    """
    table = _table()
    for name in names or [one for one in _replaced if one != NAME]:
        if name not in _replaced or table is None:
            continue
        before = _replaced.pop(name)
        if before is None:
            table.pop(name, None)
        else:
            table[name] = before


def _activate() -> Handle:
    """Replace torch's operators; torch removes the handle when it restores its own."""
    from attnplug_torch.activation import activate  # noqa: PLC0415 - loads attnplug, and torch is loaded by now

    return activate()


def _table() -> dict[str, Callable[..., Any]] | None:
    """Return torch's table of names, or None where it has none. In public it lists them without what they activate."""
    try:
        from torch.nn.attention import _registry  # noqa: PLC0415 - has no public name
    except ImportError:
        return None
    table: dict[str, Callable[..., Any]] = _registry._FLASH_ATTENTION_IMPLS  # noqa: SLF001 - likewise
    return table
