"""Everything that doctor finds, as data: the state of an environment, and what is broken in it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import evolve, frozen

from attnplug.cli.device_report import DeviceReport, report_device
from attnplug.cli.doctor.engines import EngineState, examine_engines
from attnplug.cli.doctor.loading import LoadResult, in_one_line, load_ready
from attnplug.cli.list import describe, device_objections
from attnplug.commands import environment
from attnplug.discovery.registry import Registry
from attnplug.discovery.scan import Diagnostic
from attnplug.errors import AttnplugError, DeviceError, SettingsError
from attnplug.evidence.store import EvidenceStore
from attnplug.negotiation.ranking import AUTO, Policy, is_named
from attnplug.negotiation.reason import Fix
from attnplug.request.device import Device
from attnplug.request.settings import Settings, names_of_pair
from attnplug.selection.options import check_owner, profile_error, profile_notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attnplug.manifest.schema import Manifest
    from attnplug.negotiation.candidate import Candidate

_SETTINGS: Final = ("backend", "allow", "block", "strict", "profile", "evidence", "kv_layout")


@frozen
class Problem:
    """
    Something broken.

    Attributes:
        subject: What it is about: the settings, the device, a backend.
        what: What is wrong.
        fix: The fix.
    """

    subject: str
    what: str
    fix: str

    @classmethod
    def of(cls, subject: str, error: AttnplugError) -> Problem:
        """Return an error as a problem."""
        return cls(subject, in_one_line(error), error.fix)

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON values."""
        return attrs.asdict(self)


@frozen
class Report:
    """
    The state of an environment.

    Attributes:
        environment: Interpreter, platform and versions.
        device: The device, and how it was found.
        settings: What the environment and the configuration file say.
        registry: Everything that is installed.
        store: The evidence of it.
        candidates: Everything that is installed or known.
        notes: What is odd about the installation and does no harm.
        warnings: Settings that have no effect.
        loading: What came of loading, where that was requested.
        problems: What is broken.
        engines: What the distributions of host engines say of these.
    """

    environment: Mapping[str, Any]
    device: DeviceReport
    settings: Settings
    registry: Registry
    store: EvidenceStore
    candidates: tuple[Candidate, ...]
    notes: tuple[Diagnostic, ...]
    warnings: tuple[str, ...]
    loading: tuple[LoadResult, ...]
    problems: tuple[Problem, ...]
    engines: tuple[EngineState, ...] = ()

    def setting_rows(self) -> list[tuple[str, Any, str]]:
        """Return each setting with its value as JSON can carry it, and where it comes from."""
        rows = [(name, _plain(getattr(self.settings, name))) for name in _SETTINGS]
        rows += [
            (f"options.{backend}.{name}", v) for backend, o in self.settings.options.items() for name, v in o.items()
        ]
        return [(name, value, self.settings.sources.get(name, "default")) for name, value in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            **self.environment,
            "device": {**self.device.device.to_dict(), "found": self.device.how},
            "settings": [
                {"name": name, "value": value, "source": source} for name, value, source in self.setting_rows()
            ],
            "backends": describe(self.candidates, self.registry, self.store, self.device.device),
            "notes": [attrs.asdict(note) for note in self.notes],
            "warnings": list(self.warnings),
            "loading": [result.to_dict() for result in self.loading],
            "engines": [engine.to_dict() for engine in self.engines],
            "problems": [problem.to_dict() for problem in self.problems],
        }


def examine(*, load: bool) -> Report:
    """
    Examine the environment. What is wrong becomes a problem of the report, and is not raised.

    Args:
        load: Also import the plugins of all ready candidates, and load each for a simple request.
    """
    problems: list[Problem] = []
    with collected_warnings() as warnings:
        settings = _settings(problems)
        device = _device(problems)
        registry = Registry.scan(attrs.evolve(settings, strict=False))
        candidates = registry.candidates(attrs.evolve(settings, strict=False))
        problems += _problems_of_candidates(candidates)
        problems += _problems_of_settings(registry, candidates, settings, device.device)
        unused = tuple(_unused_of_list(candidates, settings, device.device))
        loading = tuple(load_ready(candidates, device.device)) if load else ()
    problems += [Problem(result.id, result.text, result.fix) for result in loading if result.status == "failed"]
    engines = examine_engines(load=load)
    problems += _problems_of_engines(engines)
    store = EvidenceStore(registry.plugins, settings.evidence)
    unused_times = profile_notes(settings, device.device, registry.version_of)
    return Report(
        environment=environment(),
        device=device,
        settings=settings,
        registry=registry,
        store=store,
        candidates=candidates,
        notes=(
            *registry.notes,
            *store.notes(),
            *(Diagnostic(_source(settings, "profile"), "profile", note) for note in unused_times),
        ),
        warnings=(*warnings, *unused, *(text for engine in engines for text in engine.diagnosis.warnings)),
        loading=loading,
        problems=tuple(problems),
        engines=engines,
    )


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.found[record.getMessage()] = None


@contextmanager
def collected_warnings() -> Iterator[dict[str, None]]:
    """Collect the warnings of this project inside the ``with`` block, each once, instead of letting them be printed."""
    log, collector = logging.getLogger("attnplug"), _Collector()
    log.addHandler(collector)
    propagate, log.propagate = log.propagate, False
    try:
        yield collector.found
    finally:
        log.propagate = propagate
        log.removeHandler(collector)


def _settings(problems: list[Problem]) -> Settings:
    try:
        return Settings.read()
    except SettingsError as error:
        problems.append(Problem.of("settings", error))
        return Settings()


def _device(problems: list[Problem]) -> DeviceReport:
    try:
        found = report_device()
    except DeviceError as error:
        problems.append(Problem.of("device", error))
        return DeviceReport(Device.cpu(), "the device could not be read")
    if found.overlooked:
        problems.append(Problem("device", found.overlooked, found.fix))
    return found


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value


# What is installed


def _problems_of_candidates(candidates: Sequence[Candidate]) -> Iterator[Problem]:
    """Yield broken plugins, and that nothing is ready."""
    # What the settings exclude on purpose is no problem, and a missing dependency is none as long as something is
    # ready.
    for candidate in candidates:
        codes = {reason.code for reason in candidate.reasons}
        if (candidate.availability == "broken" or "api" in codes) and "blocked" not in codes:
            yield Problem(candidate.id, "; ".join(map(str, candidate.reasons)), candidate.fix)
    if not any(candidate.availability == "ready" for candidate in candidates):
        yield Problem("selection", "no backend is ready, so that nothing can be selected", _first_fix(candidates))


def _problems_of_engines(engines: Iterable[EngineState]) -> Iterator[Problem]:
    for engine in engines:
        if engine.failure is not None:
            yield Problem.of(f"engine {engine.name}", engine.failure)
        yield from (Problem(f"engine {engine.name}", what, fix) for what, fix in engine.diagnosis.problems)


def _first_fix(candidates: Sequence[Candidate]) -> str:
    """Return how to make a backend ready: the built-in one, where an installation is enough for that."""
    lacking = [c for c in candidates if c.availability == "missing_dependency"]
    first = next(iter(sorted(lacking, key=lambda c: not c.built_in)), None)
    if first is None:
        return "install a backend, or allow one: see `attnplug list`"
    return f"{first.id}: {Fix(install=first.install, action=first.fix)}"


# What the settings request and this installation cannot serve: every selection fails on it


def _problems_of_settings(
    registry: Registry, candidates: Sequence[Candidate], settings: Settings, device: Device
) -> Iterator[Problem]:
    """Yield what is wrong with the listed backends, the KV-cache layout, the options of backends, and the profile."""
    unknown = tuple(_unknown_backends(registry, settings))
    yield from unknown
    if settings.backend and not unknown:
        pair = names_of_pair(settings.backend[0]) if len(settings.backend) == 1 else None
        for name in pair or ("",):  # both of a pair that is alone have to run here
            yield from _nothing_permitted(candidates, settings, device, name)
    settings = _without_pairs(settings)
    yield from _layout_of_none(candidates, settings)
    yield from _wrong_options(registry, settings)
    error = profile_error(settings)
    if error is not None:
        yield Problem.of(_source(settings, "profile"), error)


def _without_pairs(settings: Settings) -> Settings:
    """Return the settings with both backends in place of each routed pair: what is said of one is said of it."""
    names = (one for name in settings.backend for one in names_of_pair(name) or (name,))
    return evolve(settings, backend=tuple(dict.fromkeys(names)))


def _unknown_backends(registry: Registry, settings: Settings) -> Iterator[Problem]:
    for name in settings.backend:
        try:
            registry.check_name(name)
        except AttnplugError as error:
            yield Problem.of(_source(settings, "backend"), error)


def _nothing_permitted(
    candidates: Sequence[Candidate], settings: Settings, device: Device, of_pair: str = ""
) -> Iterator[Problem]:
    """
    Yield that no listed backend can run here, or of a pair not this one. Where nothing at all is ready, that is another
    problem.
    """
    policy = Policy((of_pair,) if of_pair else _without_pairs(settings).backend)
    permitted = [candidate for candidate in candidates if policy.admits(candidate)]
    ready = [candidate for candidate in candidates if candidate.availability == "ready"]
    if not ready or any(candidate in permitted and not device_objections(candidate, device) for candidate in ready):
        return
    why = "; ".join(f"{c.id}: {_why_unused(c, device)}" for c in permitted)
    listed = repr(of_pair) if of_pair else ", ".join(map(repr, settings.backend))
    fix = _fix_of_list(permitted, settings, device)
    yield Problem(_source(settings, "backend"), f"{listed} and nothing else is permitted; {why}", fix)


def _unused_of_list(candidates: Sequence[Candidate], settings: Settings, device: Device) -> Iterator[str]:
    """Yield each listed backend of which nothing can run here, where another permitted one can."""
    if next(iter(_nothing_permitted(candidates, settings, device)), None) is not None:
        return
    for name in _without_pairs(settings).backend:
        named = [candidate for candidate in candidates if name != AUTO and is_named(candidate, name)]
        if named and not any(c.availability == "ready" and not device_objections(c, device) for c in named):
            why = "; ".join(f"{c.id}: {_why_unused(c, device)}" for c in named)
            yield f"{name!r} in {_source(settings, 'backend')} is passed over: {why}"


def _why_unused(candidate: Candidate, device: Device) -> str:
    """Return why a candidate cannot run on a device: the device, else what is missing for it."""
    reasons = device_objections(candidate, device) or candidate.reasons
    return ", ".join(map(str, reasons)) or candidate.availability


def _fix_of_list(permitted: Iterable[Candidate], settings: Settings, device: Device) -> str:
    usable = (c for c in permitted if not device_objections(c, device))
    fixable = sorted((c for c in usable if c.install or c.fix), key=lambda c: bool(c.fix))
    fixes = [f"{c.id}: {Fix(install=c.install, action=c.fix)}" for c in fixable]
    return "; or ".join([*fixes, f"permit others: {','.join((*settings.backend, AUTO))}"])


def _layout_of_none(candidates: Sequence[Candidate], settings: Settings) -> Iterator[Problem]:
    """Yield that some ready backend has paged caches, and none of them in the layout that is set."""
    policy, layout = Policy(settings.backend), settings.kv_layout
    ready = [c for c in candidates if c.availability == "ready" and policy.admits(c)]
    paged = [c for c in ready if not c.objections((("paged", True),))]
    if layout is None or not paged or any(not c.objections((("kv_layout", layout),)) for c in paged):
        return
    supported = "; ".join(f"{c.id}: {c.supports('kv_layout') or 'declares no layout'}" for c in paged)
    yield Problem(
        _source(settings, "kv_layout"),
        f"kv_layout={layout!r} is requested of every paged KV cache, and no ready backend supports it; {supported}",
        "set one of these layouts, or unset it",
    )


def _wrong_options(registry: Registry, settings: Settings) -> Iterator[Problem]:
    manifests = [plugin.manifest for plugin in registry.plugins if plugin.manifest is not None]
    for backend, values in settings.options.items():
        owners = [manifest for manifest in manifests if backend in (manifest.name, *manifest.aliases)]
        if not owners:
            yield from _wrong_owner(registry, backend, _source(settings, f"options.{backend}.{next(iter(values), '')}"))
        for manifest in owners:
            for option, value in values.items():
                yield from _wrong_option(manifest, option, value, _source(settings, f"options.{backend}.{option}"))


def _wrong_owner(registry: Registry, backend: str, source: str) -> Iterator[Problem]:
    """Yield that nothing reads these options. Those of a known backend that is not installed wait for it."""
    try:
        check_owner(registry, backend)
    except AttnplugError as error:
        yield Problem.of(source, error)


def _wrong_option(manifest: Manifest, option: str, value: object, source: str) -> Iterator[Problem]:
    try:
        manifest.read_options({option: value}, {option: source})
    except SettingsError as error:
        yield Problem.of("settings", error)


def _source(settings: Settings, name: str) -> str:
    default = "the settings" if not name.startswith("options.") else "the configuration file"
    return settings.sources.get(name, default)
