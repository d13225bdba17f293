"""
What a call requests besides requirements and a device: the same keywords for `select`, `load`, `explain`, `plan` and
`using`.

`using` applies its keywords to the calls of this context only, which is a `contextvars.Context`: tasks that begin in it
see them, threads do not, unless they run in a copy of the context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from attnplug.errors import DeviceError, SettingsError, shown
from attnplug.request.device import Device, foreign_device
from attnplug.request.settings import BackendNames, layered, parse_layout
from attnplug.request.tables import is_plain, read_only
from attnplug.request.torch_values import is_torch_device
from attnplug.selection.process import PROCESS, current_state

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attnplug.request.settings import Options, Settings
    from attnplug.request.torch_values import DeviceLike


@frozen
class Overrides:
    """
    Keywords that were given, with where they came from.

    Attributes:
        backend: Backends in order of preference; empty means not given.
        device: The device, or None.
        options: Options by backend.
        kv_layout: The layout of paged KV caches whose requirements leave it open, or None.
        sources: Where each came from.
    """

    backend: tuple[str, ...] = ()
    device: Device | None = None
    options: tuple[tuple[str, str, Any], ...] = ()
    kv_layout: str | None = None
    sources: Mapping[str, str] = field(factory=dict, converter=read_only, eq=False)

    @cached_property
    def key(self) -> Hashable:
        """All of it, hashable: unlike the options themselves, it tells True from 1, and NaN equals NaN."""
        options = ((backend, name, type(value), repr(value)) for backend, name, value in self.options)
        return self.backend, self.device, self.kv_layout, tuple(options), tuple(self.sources.items())

    def over(self, below: Overrides | None) -> Overrides:
        """Return these keywords where given, and those of an outer scope elsewhere."""
        if below is None:
            return self
        # Options merge one by one; a list of backends replaces the outer one as a whole.
        merged = {(backend, name): value for backend, name, value in (*below.options, *self.options)}
        return Overrides(
            self.backend or below.backend,
            self.device or below.device,
            tuple((backend, name, value) for (backend, name), value in merged.items()),
            self.kv_layout or below.kv_layout,
            layered(below.sources, self.sources),
        )

    def over_settings(self, settings: Settings) -> Settings:
        """Return the settings as they are under these keywords."""
        if not self.backend and not self.options and self.kv_layout is None:
            return settings
        options = {backend: dict(values) for backend, values in settings.options.items()}
        for backend, name, value in self.options:
            options.setdefault(backend, {})[name] = value
        return evolve(
            settings,
            backend=self.backend or settings.backend,
            kv_layout=self.kv_layout or settings.kv_layout,
            options=options,
            sources=layered(settings.sources, self.sources),
        )


_SCOPE: Final[ContextVar[Overrides | None]] = ContextVar("attnplug_scope", default=None)

current_scope = _SCOPE.get


def scope_key() -> Hashable:
    """
    Return what decisions depend on now, besides requirements, device and keywords: for the keys of a host's cache.

    It is another one inside `using`, and after `refresh`, `register`, or a backend's failure to load; it is equal as
    long as nothing of that changed. A cache whose keys contain it never outlives what was decided. Keys of different
    processes cannot be compared.

    Raises:
        SettingsError: A setting is wrong.
    """
    # The path of every dense call: no function where nothing has changed.
    state = PROCESS.state
    if state is None or state.registry.generation != state.generation:
        state = current_state()
    scope = current_scope()
    return state.generation if scope is None else (state.generation, scope.key)


def kv_cache_layout() -> str:
    """
    Return the layout that is requested of paged KV caches in this scope: ``"NHD"`` or ``"HND"``.

    It is that of the innermost `using`, else that of ATTNPLUG_KV_LAYOUT, else that of the configuration file, which are
    read once a process, else NHD. Where nothing is set, a backend may prefer the other one: the layout of a cache that
    is made is its ``agreement.kv_layout``.

    Raises:
        SettingsError: A setting is wrong.
    """
    scope = current_scope()
    if scope is not None and scope.kv_layout is not None:
        return scope.kv_layout
    return current_state().settings.kv_layout or "NHD"


def overrides(
    source: str,
    backend: BackendNames | None,
    options: Options | None,
    device: DeviceLike | None,
    kv_layout: str | None = None,
) -> Overrides:
    """
    Check keywords as a user gave them.

    Raises:
        SettingsError: A list of backends is empty or holds something else than names, options are not
            tables by backend, or the layout is invalid.
    """
    names = _names(backend)
    if (backend is not None and not names) or not all(isinstance(name, str) and name for name in names):
        raise SettingsError(
            f"backend={shown(backend)} was given by {source}",
            "backend is a name, or a list of names in order, ending in 'auto' to permit others",
            "leave it out",
        )
    if options is not None and not _are_tables(options):
        raise SettingsError(
            f"options={shown(options)} was given by {source}",
            "options is a table of tables, by backend: of numbers, booleans and texts, by option",
            "write {'flashinfer': {...}}",
        )
    flat = tuple((name, option, value) for name, table in (options or {}).items() for option, value in table.items())
    sources = {"backend": source} if names else {}
    sources |= {f"options.{name}.{option}": source for name, option, _ in flat}
    layout = None if kv_layout is None else parse_layout(kv_layout, "kv_layout")
    given = {"device": device, "kv_layout": layout}
    sources |= {name: source for name, value in given.items() if value is not None}
    return Overrides(names, _device(device), flat, layout, sources)


def _are_tables(options: object) -> bool:
    if not isinstance(options, Mapping):
        return False
    names = (*options, *(name for table in options.values() if isinstance(table, Mapping) for name in table))
    values = (value for table in options.values() if isinstance(table, Mapping) for value in table.values())
    return (
        all(isinstance(table, Mapping) for table in options.values())
        and all(type(name) is str for name in names)
        and all(type(value) is float or is_plain(value) for value in values)
    )


def _names(backend: Any) -> tuple[Any, ...]:
    if backend is None or isinstance(backend, str):
        return () if backend is None else (backend,)
    return tuple(backend) if isinstance(backend, Sequence) else (backend,)


def _device(device: Any) -> Device | None:
    if device is None or isinstance(device, Device):
        return device
    if isinstance(device, str):
        return parse_device(device)
    if is_torch_device(device):
        return Device.parse(device)
    raise foreign_device(device)


def parse_device(text: str) -> Device:
    """
    Read a device as `Device.parse` does, or a device type that the manifest of an installed backend declares.

    Raises:
        DeviceError: The text is neither.
    """
    try:
        return Device.parse(text)
    except DeviceError:
        # Scanning what is installed costs milliseconds: only a text that is nothing else is compared with it.
        return Device.parse(text, types=current_state().registry.device_types())


@contextmanager
def using(
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
    device: DeviceLike | None = None,
    kv_layout: str | None = None,
    source: str = "using",
) -> Iterator[None]:
    """
    Select with these keywords inside the ``with`` block, in this context only. Blocks nest; a call's own keywords win.

    Tasks that begin in the block have them. A thread has them where it runs in a copy of the context:
    ``context = contextvars.copy_context()`` in the block, ``context.copy().run(function)`` in the thread.

    Args:
        backend: A name (that one or nothing), or names in order; ``"auto"`` among them permits any other.
        options: Options by backend, as for `select`.
        device: The device to select for, its text, or a `torch.device` of this process.
        kv_layout: ``"NHD"`` or ``"HND"``: the layout of paged KV caches whose requirements leave it open.
        source: Where the keywords come from, for messages, such as ``"--backend"``.

    Raises:
        SettingsError: A keyword is wrong.
        DeviceError: The device is invalid.
    """
    with overlaid(overrides(source, backend, options, device, kv_layout)):
        yield


@contextmanager
def overlaid(keywords: Overrides) -> Iterator[None]:
    """Do as `using` does, with keywords that were checked already and say where they come from."""
    token = _SCOPE.set(keywords.over(_SCOPE.get()))
    try:
        yield
    finally:
        _SCOPE.reset(token)
