"""
An extension of griffe, which reads the sources for the API reference: the constructors of attrs classes.

attrs makes a constructor at run time, so that the sources have none. Its parameters are read from the fields here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from griffe import (
    Attribute,
    Class,
    ExprCall,
    ExprKeyword,
    Extension,
    Function,
    Module,
    Parameter,
    ParameterKind,
    Parameters,
)

if TYPE_CHECKING:
    from griffe import Decorator

_DECORATORS: Final = frozenset({"attrs.define", "attrs.frozen"})
_FIELDS: Final = frozenset({"attrs.field"})
_WITH_DEFAULT: Final = frozenset(  # the default is None where a call has none
    {
        f"attnplug.request.{name}"
        for name in ("field.with_default", "requirements.model", "requirements.engine", "device.fact")
    }
)
# By their values: the members are annotated as texts.
_ANYHOW: Final = ParameterKind("positional or keyword")
_BY_NAME: Final = ParameterKind("keyword-only")


class AttrsConstructors(Extension):
    """Gives each attrs class the `__init__` that attrs makes of its fields, those of its bases first."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Add the constructors of a package, whose classes are all known by now."""
        del kwargs
        _visit(pkg)


def _visit(parent: Module | Class) -> None:
    for member in list(parent.members.values()):
        if isinstance(member, Module | Class) and not member.is_alias:
            _visit(member)
            if isinstance(member, Class) and "__init__" not in member.members and _decorator(member) is not None:
                member.set_member("__init__", _constructor(member))


def _decorator(cls: Class) -> Decorator | None:
    return next((item for item in cls.decorators if item.callable_path in _DECORATORS), None)


def _constructor(cls: Class) -> Function:
    """Return the constructor of an attrs class."""
    found: dict[str, Parameter] = {}
    for owner in (*reversed(cls.mro()), cls):
        decorator = _decorator(owner)
        keyword_only = decorator is not None and _keywords(decorator.value).get("kw_only") == "True"
        for field in owner.members.values() if decorator is not None else ():
            if isinstance(field, Attribute) and _is_field(field):
                parameter = _parameter(field, keyword_only=keyword_only, computed=field.name in _computed(owner))
                found.pop(field.name, None)
                found |= {field.name: parameter} if parameter else {}
    parameters = sorted(found.values(), key=lambda parameter: parameter.kind == _BY_NAME)
    return Function("__init__", parameters=Parameters(Parameter("self", kind=_ANYHOW), *parameters))


def _computed(cls: Class) -> set[str]:
    """Return the fields whose default a method computes: ``@name.default``."""
    methods = [member for member in cls.members.values() if isinstance(member, Function)]
    marks = [str(decorator.value) for method in methods for decorator in method.decorators]
    return {mark.removesuffix(".default") for mark in marks if mark.endswith(".default")}


def _is_field(member: Attribute) -> bool:
    """Return whether attrs makes a public field of an attribute: no class variable, no property."""
    return "instance-attribute" in member.labels and "property" not in member.labels and not member.name.startswith("_")


def _parameter(field: Attribute, *, keyword_only: bool, computed: bool) -> Parameter | None:
    """Return the parameter that sets a field; None where the class itself does."""
    default: Any = field.value
    options: dict[str, str] = {}
    if isinstance(default, ExprCall) and default.canonical_path in _FIELDS:
        options = _keywords(default)
        default = (
            f"{options['factory']}()" if "factory" in options else options.get("default", "..." if computed else None)
        )
    elif isinstance(default, ExprCall) and default.canonical_path in _WITH_DEFAULT:
        default = _keywords(default).get("default", "None")
    if options.get("init") == "False":
        return None
    kind = _BY_NAME if keyword_only or options.get("kw_only") == "True" else _ANYHOW
    return Parameter(field.name, annotation=field.annotation, kind=kind, default=default)


def _keywords(call: object) -> dict[str, str]:
    """Return the keyword arguments of a call, as they are written; none for anything else."""
    arguments = call.arguments if isinstance(call, ExprCall) else []
    return {item.name: str(item.value) for item in arguments if isinstance(item, ExprKeyword)}
