"""The names that core reserves in the classes of the contract: final methods, its attributes, and what was replaced."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_T = TypeVar("_T")

# typing.final marks methods at run time only from Python 3.11 on.
if TYPE_CHECKING:
    from typing import final
else:

    def final(method: _T) -> _T:
        """Mark a method, or the getter of a property, as one that no subclass replaces."""
        method.__final__ = True
        return method


__all__ = ["check_made", "clashes", "final", "keep_attributes"]

_KEPT: Final = "_attributes_of_core"

_INSTEAD: Final = {
    "forward": "run",
    "write_kv": "update_kv_cache",
    "update_scales": "parameters_changed",
    "build": "plan_batch",
    "prepare": "prepare_in_graph",
    "can_run_in_cudagraph": "can_capture",
    "update_block_table": "replan_block_table",
    "advance_step": "plan_next_step",
    "make_cache": "cache_tensors",
}
"""What a plugin overrides in place of a final method."""


def clashes(cls: type, base: type) -> Iterator[str]:
    """
    Yield the names of a plugin's class that belong to core: final members, what core sets on instances, private names.

    Args:
        cls: The plugin's class.
        base: The class of the contract that it extends.
    """
    reserved = _reserved(base)
    for part in cls.__mro__[: cls.__mro__.index(base)]:
        yield from (_clash(f"{part.__name__}.{name}", base, name) for name in vars(part) if name in reserved)


def keep_attributes(made: object) -> None:
    """Remember what a constructor of the contract has set, for `check_made`. The last thing that it does."""
    vars(made)[_KEPT] = dict(vars(made))


def check_made(made: object, base: type) -> None:
    """
    Check that the constructor of the contract ran, and that nothing which it set was replaced by a plugin's own one.

    Args:
        made: What was constructed.
        base: The class of the contract.

    Raises:
        PluginContractError: It did not run, or the instance has an attribute of a reserved name.
    """
    found, name = vars(made), type(made).__name__
    kept: Mapping[str, Any] | None = found.pop(_KEPT, None)
    if kept is None:
        given = ", ".join([*inspect.signature(base).parameters])
        raise PluginContractError(
            f"{name} was constructed, and holds nothing of what {base.__name__} keeps",
            f"whoever overrides {base.__name__}.__init__ calls it",
            f"call super().__init__({given}) first in {name}.__init__",
        )
    wrong = [each for each, value in kept.items() if each not in found or not _is_kept(each, value, found[each])]
    wrong += [each for each in found if each in _reserved(base) and each not in kept]
    if wrong:
        raise PluginContractError(
            "; ".join(_clash(f"{name}.__init__ sets {each}, which", base, each) for each in wrong),
            f"core sets the attributes of {base.__name__} and reads them",
            f"rename {', '.join(wrong)} in {name}",
        )


def _is_kept(name: str, value: object, found: object) -> bool:
    if found is value or (name.startswith("_") and value is None):  # what is made at first use, a workspace say
        return True
    return type(found) is type(value) and bool(found == value)


def _clash(what: str, base: type, name: str) -> str:
    instead = f"override {_INSTEAD[name]}" if name in _INSTEAD else "rename it"
    return f"{what} hides {base.__name__}.{name} of the contract: {instead}"


@cache
def _reserved(base: type) -> frozenset[str]:
    """The names of a class of the contract that no plugin may reuse; constructors and the like are no names."""
    annotated = {name for name, text in inspect.get_annotations(base).items() if not str(text).startswith("ClassVar")}
    own = {name for name, member in vars(base).items() if name.startswith("_") or _is_final(member)}
    # ABC keeps its registry in each class under a name of this kind.
    return frozenset(name for name in annotated | own if not name.startswith(("__", "_abc_")))


def _is_final(member: object) -> bool:
    return getattr(getattr(member, "fget", member), "__final__", False)
