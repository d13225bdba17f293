"""Compares a table of what a host uses of its engine with the engine that is installed."""

from __future__ import annotations

import inspect
from enum import Enum
from importlib import import_module

from attrs import field, frozen
from packaging.specifiers import SpecifierSet


class Use(Enum):
    """How a member is used, and so what a change of it would break."""

    READ = "read"  # the name exists
    CALLED = "called"  # by us, with these parameters: each exists, and no other is required
    OVERRIDDEN = "overridden"  # the engine calls ours: the parameters are these, in this order


@frozen
class Member:
    """
    One thing that is used of an engine.

    Attributes:
        path: The module, a colon, and the name in it: ``"sglang.srt.server_args:ServerArgs.page_size"``.
        use: How it is used.
        parameters: Names of parameters, without `self` and `cls`.
        versions: The versions where it is used.
    """

    path: str
    use: Use = Use.READ
    parameters: tuple[str, ...] = ()
    versions: SpecifierSet = field(factory=SpecifierSet)


def read(path, *names, versions=""):
    """Return the member of a path, or those below it, that are read."""
    return tuple(Member(each, versions=SpecifierSet(versions)) for each in ([f"{path}.{n}" for n in names] or [path]))


def called(path, *parameters, versions=""):
    """Return a function that is called."""
    return (Member(path, Use.CALLED, parameters, SpecifierSet(versions)),)


def overridden(path, *parameters, versions=""):
    """Return a method that is overridden."""
    return (Member(path, Use.OVERRIDDEN, parameters, SpecifierSet(versions)),)


def drift(member):
    """Return what is wrong with one member of a table in this engine, by name; None where it is as the table says."""
    module, _, name = member.path.partition(":")
    *owners, last = name.split(".")
    try:
        owner = import_module(module)
        for each in owners:
            owner = getattr(owner, each)
    except (ImportError, AttributeError) as error:
        return f"{member.path} is missing: {error}"
    if member.use is Use.READ:
        return None if _has(owner, last) else f"{member.path} is missing"
    if not hasattr(owner, last):
        return f"{member.path} is missing"
    parameters = _parameters(owner, last)
    return _override_drift(member, parameters) if member.use is Use.OVERRIDDEN else _call_drift(member, parameters)


def _parameters(owner, name):
    """Return the parameters of a function, without what a method gets by itself."""
    function = getattr(owner, name)
    own = inspect.isclass(owner) and not inspect.ismethod(function)
    static = own and isinstance(inspect.getattr_static(owner, name), staticmethod)
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if own and not static else found


def _override_drift(member, parameters):
    names = tuple(each.name for each in parameters)
    if names == member.parameters:
        return None
    return f"{member.path} takes ({', '.join(names)}), and attnplug overrides it with ({', '.join(member.parameters)})"


def _call_drift(member, parameters):
    fixed = {each.name: each for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}
    any_name = any(each.kind is each.VAR_KEYWORD for each in parameters)
    unknown = [name for name in member.parameters if name not in fixed and not any_name]
    required = [name for name, each in fixed.items() if each.default is each.empty and name not in member.parameters]
    if unknown:
        return f"{member.path} has no parameter {', '.join(unknown)}"
    return f"{member.path} requires {', '.join(required)} too" if required else None


def _has(owner, name):
    """Whether an object has an attribute. Fields without a default, and what a constructor sets, count too."""
    if hasattr(owner, name):
        return True
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    return any(name in vars(each).get("__annotations__", {}) or f"self.{name}" in _source(each) for each in classes)


def _source(each):
    try:
        return inspect.getsource(each)
    except (OSError, TypeError):
        return ""
