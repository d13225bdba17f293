"""Whether what a plugin's classes construct is whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import attrs

from attnplug.contract.guards.cache import CHOICES, by_phase
from attnplug.contract.vendor import AttentionImpl, Backend, Metadata, MetadataBuilder, State
from attnplug.errors import AttnplugError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_Fault: TypeAlias = "tuple[str, str]"
"""What is wrong with a class, and its fix."""

_PARTS = {"builder_class": MetadataBuilder, "metadata_class": Metadata, "state_class": State}
_CALLED: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    (
        "",
        Backend,
        ("__init__", "cache_tensors", "workspace_bytes", "dummy_batch", "move_blocks", "warmup"),
    ),
    ("impl_class", AttentionImpl, ("__init__", "run", "run_sparse", "run_profile", "update_kv_cache", "init_cache")),
    (
        "builder_class",
        MetadataBuilder,
        (
            "__init__",
            "plan_batch",
            "prepare_in_graph",
            "can_capture",
            "replan_block_table",
            "plan_next_step",
            "use_cascade_attention",
        ),
    ),
    ("state_class", State, ("__init__",)),
)
# What a host calls on the handle, and what a plugin writes for it.
_WRITTEN: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        "make_cache": "cache_tensors",
        "bind_cache": "cache_tensors",
        "make_impl": "impl_class",
        "make_builder": "builder_class",
        "make_state": "state_class",
        "swap_blocks": "move_blocks",
        "copy_blocks": "move_blocks",
    },
    "impl_class": {
        "forward": "run",
        "forward_op": "run",
        "write_kv": "update_kv_cache",
        "write_kv_op": "update_kv_cache",
        "update_scales": "parameters_changed",
    },
    "builder_class": {
        "build": "plan_batch",
        "prepare": "prepare_in_graph",
        "can_run_in_cudagraph": "can_capture",
        "update_block_table": "replan_block_table",
        "advance_step": "plan_next_step",
    },
    "state_class": dict.fromkeys(
        ("begin_forward", "find_graph", "begin_capture", "end_capture", "abort_capture", "release_graphs"),
        "it under another name",
    ),
}


class InProcess:
    """A handle: it holds kernels, plans and memory of its process, and is neither copied nor pickled."""

    def __reduce__(self) -> NoReturn:
        raise AttnplugError(
            f"{type(self).__name__} was copied or pickled",
            "it holds kernels, plans and memory of its process",
            "send the Selection or the Agreement, and load the backend there",
        )


def check_backend_class(cls: object, plugin_id: str) -> type[Backend]:
    """
    Return `cls`, which a plugin's `attnplug_backend` hook returned, if it is a backend class.

    Args:
        cls: What the hook returned.
        plugin_id: ``"backend/variant"``, for the message.

    Raises:
        PluginContractError: With every finding.
    """
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise PluginContractError(
            f"the hook attnplug_backend of {plugin_id} returned {cls!r}",
            "it returns a subclass of attnplug.contract.Backend, the class itself",
            "return the class from the hook",
        )
    faults = [*_parts(cls), *_impl(cls), *_never_called(cls), *_signatures(cls)]
    if faults:
        findings, fixes = ("; ".join(dict.fromkeys(texts)) for texts in zip(*faults, strict=True))
        raise PluginContractError(
            f"the backend class {cls.__module__}.{cls.__qualname__} of {plugin_id} has faults: {findings}",
            "a backend class has every part of the contract (attnplug.contract)",
            f"{fixes} (`python -m attnplug_kit.upgrade FILE` rewrites earlier versions); or block the plugin: "
            f"ATTNPLUG_BLOCK={plugin_id.partition('/')[0]}",
        )
    return cls


def check_made(made: object, base: type) -> None:
    """
    Check that the constructor of the contract ran: whoever overrides it may have left it out.

    Args:
        made: What a plugin's class constructed.
        base: The class of the contract.

    Raises:
        PluginContractError: It did not run.
    """
    if not isinstance(made, base) or any(not hasattr(made, name) for name in _set_by_constructor(base)):
        name, given = type(made).__name__, ", ".join([*inspect.signature(base).parameters])
        raise PluginContractError(
            f"{name} was constructed, and holds nothing of what {base.__name__} keeps",
            f"whoever overrides {base.__name__}.__init__ calls it",
            f"call super().__init__({given}) first in {name}.__init__",
        )


@cache
def _set_by_constructor(base: type) -> tuple[str, ...]:
    annotations = inspect.get_annotations(base)
    return tuple(name for name, text in annotations.items() if not str(text).startswith("ClassVar"))


def _parts(cls: type[Backend]) -> Iterator[_Fault]:
    for name, base in _PARTS.items():
        part = getattr(cls, name)
        if not (isinstance(part, type) and issubclass(part, base)):
            yield f"{name} is {part!r}, no subclass of {base.__name__}", f"set {name} to a subclass of {base.__name__}"
    yield from _abstract("the class", cls)
    yield from _undecorated(cls.metadata_class)


def _undecorated(metadata: object) -> Iterator[_Fault]:
    """A field that attrs does not know would be missing in metadata, and in what is compared for graphs."""
    if isinstance(metadata, type) and issubclass(metadata, Metadata):
        known = {field.name for field in attrs.fields(metadata)}
        own = [name for name in inspect.get_annotations(metadata) if name not in known]
        if own:
            found = f"metadata_class annotates {', '.join(own)} and is not decorated with attrs.frozen"
            yield found, f"decorate {metadata.__name__} with @attrs.frozen(eq=False, kw_only=True)"


def _impl(cls: type[Backend]) -> Iterator[_Fault]:
    impl = getattr(cls, "impl_class", None)
    if not (isinstance(impl, type) and issubclass(impl, AttentionImpl)):
        found = "impl_class is not set" if impl is None else f"impl_class is {impl!r}, no subclass of AttentionImpl"
        yield found, "set impl_class to a subclass of AttentionImpl"
        return
    yield from _abstract("impl_class", impl)
    yield from _cache_write(impl)
    if impl.query_quantization not in ("impl", "host"):
        found = f"query_quantization is {impl.query_quantization!r}, neither 'impl' nor 'host'"
        yield found, "declare query_quantization = 'impl', or 'host' where queries come quantized"
    if not isinstance(impl.static_scales, (set, frozenset)) or not impl.static_scales <= {"q", "k", "v"}:
        found = f"static_scales is {impl.static_scales!r}, no set of 'q', 'k' and 'v'"
        yield found, "declare static_scales = frozenset('kv'), or frozenset() without scales"


def _cache_write(impl: type[AttentionImpl]) -> Iterator[_Fault]:
    declared = getattr(impl, "cache_write", None)
    who = "declare who writes the cache: cache_write = 'forward', 'host' or 'either'"
    if declared is None:
        yield "impl_class does not declare cache_write", who
        return
    phases = by_phase(declared)
    if set(phases) != {"prefill", "decode"} or not set(phases.values()) <= set(CHOICES):
        known = f"{', '.join(map(repr, CHOICES))}, or a mapping of 'prefill' and 'decode' to these"
        yield f"cache_write is {dict(declared) if isinstance(declared, Mapping) else declared!r}, not {known}", who
    elif set(phases.values()) != {"forward"} and impl.update_kv_cache is AttentionImpl.update_kv_cache:
        found = "cache_write lets the host write the cache, and update_kv_cache is not overridden"
        yield found, "override update_kv_cache, or declare cache_write = 'forward'"


def _abstract(what: str, cls: type) -> Iterator[_Fault]:
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        yield f"{what} does not implement {', '.join(missing)}", f"write {', '.join(missing)} in {cls.__name__}"


def _never_called(cls: type[Backend]) -> Iterator[_Fault]:
    """What the engine calls on the handle never reaches a plugin's method of that name."""
    for part, instead in _WRITTEN.items():
        owner = getattr(cls, part, None) if part else cls
        if isinstance(owner, type):
            for name in [name for name in instead if hasattr(owner, name)]:
                found = f"{owner.__name__}.{name} is never called: the engine calls {name}, write {instead[name]}"
                yield found, f"rename {name} to {instead[name]}"


def _signatures(cls: type[Backend]) -> Iterator[_Fault]:
    for part, base, names in _CALLED:
        owner = getattr(cls, part, None) if part else cls
        if isinstance(owner, type) and issubclass(owner, base):
            yield from _misfits(owner, base, names)


_BY_NAME: Final = (inspect.Parameter.KEYWORD_ONLY,)


_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _misfits(cls: type, base: type, names: Iterable[str]) -> Iterator[_Fault]:
    """Yield what is wrong with those of these methods of `base` that `cls` overrides."""
    for name in names:
        own = inspect.getattr_static(cls, name, None)
        if own is inspect.getattr_static(base, name):
            continue
        found = getattr(cls, name, None)
        if not callable(found):
            yield f"{cls.__name__}.{name} is {found!r}, no method", f"write {name} as a method"
        elif inspect.isfunction(own) and not _fits(inspect.signature(own), _called(base, name)):
            wanted = ", ".join(_text(parameter) for parameter in _called(base, name))
            what = f"{cls.__name__}.{name}{_bare(inspect.signature(own))} is called with ({wanted})"
            yield what, f"write def {name}(self, {wanted})"


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
