"""What the settings ask for and this installation cannot give: every selection fails on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.cli.doctor.problem import Problem
from attnplug.errors import AttnplugError, SettingsError
from attnplug.negotiation.ranking import AUTO, Policy
from attnplug.negotiation.verdict import Fix
from attnplug.selection.options import check_owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.discovery.registry import Registry
    from attnplug.manifest.schema import Manifest
    from attnplug.negotiation.candidate import Candidate
    from attnplug.request.settings import Settings


def problems_of_settings(registry: Registry, candidates: Iterable[Candidate], settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the listed backends, the layout of the cache, and the options of backends."""
    candidates = tuple(candidates)
    wrong = tuple(_unresolved(registry, settings))
    yield from wrong
    if settings.backend and not wrong:
        yield from _nothing_permitted(candidates, settings)
    yield from _nobodys_layout(candidates, settings)
    yield from _wrong_options(registry, settings)


def _unresolved(registry: Registry, settings: Settings) -> Iterator[Problem]:
    for name in settings.backend:
        try:
            registry.resolve(name)
        except AttnplugError as error:
            yield Problem.of(_source(settings, "backend"), error)


def _nothing_permitted(candidates: Sequence[Candidate], settings: Settings) -> Iterator[Problem]:
    """Where nothing at all is ready, that is told as a problem of its own."""
    policy = Policy(settings.backend)
    permitted = [candidate for candidate in candidates if policy.admits(candidate)]
    ready = [candidate for candidate in candidates if candidate.availability == "ready"]
    if not ready or any(candidate in permitted for candidate in ready):
        return
    why = "; ".join(f"{c.id}: {', '.join(map(str, c.reasons)) or c.availability}" for c in permitted)
    listed = ", ".join(map(repr, settings.backend))
    yield Problem(
        _source(settings, "backend"), f"{listed} and nothing else is permitted; {why}", _way_in(permitted, settings)
    )


def _nobodys_layout(candidates: Sequence[Candidate], settings: Settings) -> Iterator[Problem]:
    """Told where some ready backend has paged caches, and none of them in this layout."""
    asked = (("paged", True),)
    policy = Policy(settings.backend)
    paged = [c for c in candidates if c.availability == "ready" and policy.admits(c) and not c.objections(asked)]
    layout = settings.kv_layout
    if layout is None or not paged or any(not c.objections((("kv_layout", layout),)) for c in paged):
        return
    why = "; ".join(f"{c.id}: {c.supports('kv_layout') or 'declares no layout'}" for c in paged)
    yield Problem(
        _source(settings, "kv_layout"),
        f"kv_layout={layout!r} is asked of every paged cache, and no backend that is ready serves it; {why}",
        "set one of these layouts, or unset it",
    )


def _way_in(permitted: Iterable[Candidate], settings: Settings) -> str:
    able = sorted((c for c in permitted if c.install or c.fix), key=lambda c: bool(c.fix))
    ways = [f"{c.id}: {Fix(install=c.install, action=c.fix)}" for c in able]
    return "; or ".join([*ways, f"permit others: {','.join((*settings.backend, AUTO))}"])


def _wrong_options(registry: Registry, settings: Settings) -> Iterator[Problem]:
    manifests = [plugin.manifest for plugin in registry.plugins if plugin.manifest is not None]
    for backend, values in settings.options.items():
        owners = [manifest for manifest in manifests if backend in (manifest.name, *manifest.aliases)]
        if not owners:
            source = _source(settings, f"options.{backend}.{next(iter(values), '')}")
            yield from _unresolved_owner(registry, backend, source)
        for manifest in owners:
            for option, value in values.items():
                yield from _wrong_option(manifest, option, value, _source(settings, f"options.{backend}.{option}"))


def _unresolved_owner(registry: Registry, backend: str, source: str) -> Iterator[Problem]:
    """Options of a known backend that is not installed wait for it; nobody will ever read those of an unknown one."""
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
