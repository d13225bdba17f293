"""Whether the classes of a plugin keep to the contract: constructors, signatures, and names that core reserves."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnplug.contract.builder import MetadataBuilder


_KEPT: Final = "_attributes_of_core"

_INSTEAD: Final = {
    "forward": "run",
    "write_kv": "update_kv_cache",
    "build": "plan_batch",
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


def check_supports_graphs(builder: MetadataBuilder) -> None:
    """
    Check that a builder supports graphs where they were negotiated.

    Raises:
        PluginContractError: It does not.
    """
    agreement, name = builder.agreement, type(builder).__name__
    level = agreement.requirements.cudagraph
    if level != "never" and not builder.supports_graphs:
        raise PluginContractError(
            f"cudagraph={level!r} was negotiated with {agreement.id}, and {name} supports no graphs",
            "a manifest declares cudagraph for what its builder builds for graphs",
            f"set {name}.supports_graphs = True, and keep what a replay reads in the graph's buffers; "
            "or declare no cudagraph",
        )


_BY_NAME: Final = (inspect.Parameter.KEYWORD_ONLY,)


_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def misfits(cls: type, base: type, names: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with those of these methods of `base` that `cls` overrides."""
    for name in names:
        own = inspect.getattr_static(cls, name, None)
        if own is inspect.getattr_static(base, name):
            continue
        found = getattr(cls, name, None)
        if not callable(found):
            yield f"{cls.__name__}.{name} is {found!r}, no method"
        elif inspect.isfunction(own) and not _fits(inspect.signature(own), _called(base, name)):
            wanted = ", ".join(_text(parameter) for parameter in _called(base, name))
            yield f"{cls.__name__}.{name}{_bare(inspect.signature(own))} is called with ({wanted})"


def _called(base: type, name: str) -> list[inspect.Parameter]:
    """The arguments of a call: those of the contract's own method, without what it takes in any number."""
    parameters = list(inspect.signature(getattr(base, name)).parameters.values())
    return [parameter for parameter in parameters[1:] if parameter.kind in (*_BY_PLACE, *_BY_NAME)]


def _fits(signature: inspect.Signature, called: list[inspect.Parameter]) -> bool:
    placed = [None for parameter in called if parameter.kind in _BY_PLACE]
    named: dict[str, Any] = {parameter.name: None for parameter in called if parameter.kind in _BY_NAME}
    try:
        signature.bind(None, *placed, **named)
    except TypeError:
        return False
    return True


def _text(parameter: inspect.Parameter) -> str:
    return f"{parameter.name}=..." if parameter.kind in _BY_NAME else parameter.name


def _bare(signature: inspect.Signature) -> str:
    """The signature without its types, which are long."""
    empty = inspect.Parameter.empty
    parameters = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
