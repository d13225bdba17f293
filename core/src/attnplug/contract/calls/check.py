"""Whether what a plugin's classes construct is whole."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from attnplug.contract._final import check_made, clashes
from attnplug.contract.backend import Backend
from attnplug.contract.builder import MetadataBuilder
from attnplug.contract.guards.cache import CHOICES, by_phase
from attnplug.contract.impl import AttentionImpl
from attnplug.contract.metadata import Metadata
from attnplug.contract.state import State
from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_PARTS = {"builder_class": MetadataBuilder, "metadata_class": Metadata, "state_class": State}
_CALLED: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    (
        "",
        Backend,
        ("__init__", "cache_tensors", "workspace_bytes", "dummy_batch", "swap_blocks", "copy_blocks", "warmup"),
    ),
    ("impl_class", AttentionImpl, ("__init__", "run", "run_profile", "update_kv_cache", "init_cache")),
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
    findings = [*_parts(cls), *_impl(cls), *_clashes(cls), *_signatures(cls)]
    if findings:
        raise PluginContractError(
            f"the backend class {cls.__module__}.{cls.__qualname__} of {plugin_id} has faults: {'; '.join(findings)}",
            "a backend class has every part of the contract (attnplug.contract)",
            f"mend the plugin of {plugin_id}, or block it: ATTNPLUG_BLOCK={plugin_id.partition('/')[0]}",
        )
    return cls


def check_backend(backend: Backend) -> Backend:
    """
    Return a backend that a plugin's class has constructed, if it is whole.

    Raises:
        PluginContractError: The contract's constructor did not run, or what it set was replaced.
    """
    check_made(backend, Backend)
    return backend


def _parts(cls: type[Backend]) -> Iterator[str]:
    for name, base in _PARTS.items():
        part = getattr(cls, name)
        if not (isinstance(part, type) and issubclass(part, base)):
            yield f"{name} is {part!r}, no subclass of {base.__name__}"
    yield from _abstract("the class", cls)
    yield from _undecorated(cls.metadata_class)


def _undecorated(metadata: object) -> Iterator[str]:
    """A field that attrs does not know would be missing in metadata, and in what is compared for graphs."""
    if isinstance(metadata, type) and issubclass(metadata, Metadata):
        known = {field.name for field in attrs.fields(metadata)}
        own = [name for name in inspect.get_annotations(metadata) if name not in known]
        if own:
            yield f"metadata_class annotates {', '.join(own)} and is not decorated with attrs.frozen"


def _impl(cls: type[Backend]) -> Iterator[str]:
    impl = getattr(cls, "impl_class", None)
    if not (isinstance(impl, type) and issubclass(impl, AttentionImpl)):
        yield "impl_class is not set" if impl is None else f"impl_class is {impl!r}, no subclass of AttentionImpl"
        return
    yield from _abstract("impl_class", impl)
    yield from _cache_write(impl)
    if impl.query_quantization not in ("impl", "host"):
        yield f"query_quantization is {impl.query_quantization!r}, neither 'impl' nor 'host'"
    if not isinstance(impl.static_scales, (set, frozenset)) or not impl.static_scales <= {"q", "k", "v"}:
        yield f"static_scales is {impl.static_scales!r}, no set of 'q', 'k' and 'v'"


def _cache_write(impl: type[AttentionImpl]) -> Iterator[str]:
    declared = getattr(impl, "cache_write", None)
    if declared is None:
        yield "impl_class does not declare cache_write"
        return
    phases = by_phase(declared)
    if set(phases) != {"prefill", "decode"} or not set(phases.values()) <= set(CHOICES):
        known = f"{', '.join(map(repr, CHOICES))}, or a mapping of 'prefill' and 'decode' to these"
        yield f"cache_write is {dict(declared) if isinstance(declared, Mapping) else declared!r}, not {known}"
    elif set(phases.values()) != {"forward"} and impl.update_kv_cache is AttentionImpl.update_kv_cache:
        yield "cache_write lets the host write the cache, and update_kv_cache is not overridden"


def _abstract(what: str, cls: type) -> Iterator[str]:
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        yield f"{what} does not implement {', '.join(missing)}"


def _clashes(cls: type[Backend]) -> Iterator[str]:
    yield from clashes(cls, Backend)
    for part, base in (("impl_class", AttentionImpl), *_PARTS.items()):
        owner = getattr(cls, part, None)
        if isinstance(owner, type) and issubclass(owner, base):
            yield from clashes(owner, base)


def _signatures(cls: type[Backend]) -> Iterator[str]:
    for part, base, names in _CALLED:
        owner = getattr(cls, part, None) if part else cls
        if isinstance(owner, type) and issubclass(owner, base):
            yield from _misfits(owner, base, names)


_BY_NAME: Final = (inspect.Parameter.KEYWORD_ONLY,)


_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _misfits(cls: type, base: type, names: Iterable[str]) -> Iterator[str]:
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
