"""Whether the classes of a plugin are whole: constructors that ran, members that take what core passes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.contract.builder import MetadataBuilder


def check_constructed(made: object, base: type, last: str) -> None:
    """
    Check that the constructor of the contract ran, whatever a plugin's own one does besides.

    Args:
        made: What was constructed.
        base: The class of the contract.
        last: An attribute that the constructor of `base` sets.

    Raises:
        PluginContractError: It did not run.
    """
    if not hasattr(made, last):
        name, given = type(made).__name__, ", ".join([*inspect.signature(base).parameters])
        raise PluginContractError(
            f"{name} was constructed, and holds nothing of what {base.__name__} keeps",
            f"whoever overrides {base.__name__}.__init__ calls it",
            f"call super().__init__({given}) first in {name}.__init__",
        )


def check_supports_graphs(builder: MetadataBuilder) -> None:
    """
    Check that a builder takes slots where graphs were negotiated.

    Raises:
        PluginContractError: It takes none.
    """
    agreement, name = builder.agreement, type(builder).__name__
    level = agreement.requirements.cudagraph
    if level != "never" and not builder.supports_graphs:
        raise PluginContractError(
            f"cudagraph={level!r} was negotiated with {agreement.id}, and {name} takes no slots",
            "a manifest declares cudagraph for what its builder builds into graph slots",
            f"set {name}.supports_graphs = True, and keep what a replay reads in the slot; or declare no cudagraph",
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
