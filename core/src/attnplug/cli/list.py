"""``attnplug list``: every backend that is installed or known, and what is missing for the others to be ready."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict

from attnplug.cli.device_report import report_device
from attnplug.commands import OK, Row, say, say_json, say_rows, wrapped
from attnplug.discovery.registry import Registry
from attnplug.discovery.scan import Diagnostic
from attnplug.evidence.store import EvidenceStore
from attnplug.negotiation.ranking import is_named
from attnplug.negotiation.reason import Fix
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.discovery.plugin import Plugin
    from attnplug.manifest.schema import Variant
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.reason import Reason
    from attnplug.request.device import Device

_EPILOG: Final = """\
status:
  ready               it can run here: everything that it requires is installed, and it supports this machine's device
  other device        it does not support this machine's device; what a device could run: attnplug explain --device
  missing dependency  the plugin is installed, and something that it requires is not
  absent              a plugin that is known by name and not installed
  refused             the settings exclude it, or it is written for another version of the contract
  broken              it cannot be used: its manifest is malformed, or two distributions claim its name

examples:
  attnplug list
  attnplug list --all
  attnplug list --json | jq -r '.backends[].variants[] | select(.availability == "ready") | .id'
"""

USABLE: Final = ("ready", "missing_dependency")
"""The states of candidates that another device could run."""
_ELSEWHERE: Final = "other_device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "List every backend that is installed or known, which of them can run on this machine, and what is missing for "
        "the others."
    )
    parser.epilog = _EPILOG
    parser.add_argument("name", nargs="?", metavar="NAME", help="a backend, backend/variant or alias: these alone")
    parser.add_argument("--all", action="store_true", help="print also what backends for other devices are and require")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List the backends. Something that is missing is no failure: the exit code is 0."""
    settings = Settings.read()
    registry = Registry.scan(settings)
    candidates = registry.candidates(settings)
    if arguments.name is not None:
        registry.check_name(arguments.name)
        candidates = tuple(each for each in candidates if is_named(each, arguments.name))
    store = EvidenceStore(registry.plugins, settings.evidence)
    notes = (*registry.notes, *store.notes(), *_note_of_profile(settings))
    device = report_device().device
    if arguments.json:
        say_json(
            {
                "device": device.to_dict(),
                "backends": describe(candidates, registry, store, device),
                "notes": [asdict(note) for note in notes],
            }
        )
    else:
        _show(candidates, store, device, notes=len(notes), whole=arguments.all or arguments.name is not None)
    return OK


def _note_of_profile(settings: Settings) -> Iterator[Diagnostic]:
    """Yield what is wrong with the profile, on which every selection fails: `attnplug doctor` has it as a problem."""
    if settings.profile is None:
        return
    from attnplug.selection.options import profile_error  # noqa: PLC0415 - few set one, and `list --json` has a budget

    error = profile_error(settings)
    if error is not None:
        text = "; ".join(filter(None, (error.problem, error.expected, f"fix: {error.fix}")))
        yield Diagnostic(settings.sources["profile"], "settings", text)


def describe(
    candidates: Iterable[Candidate], registry: Registry, store: EvidenceStore, device: Device
) -> list[dict[str, Any]]:
    """Return backends with their variants as plain JSON values, and whether these can run on a device."""
    plugins = {(plugin.name, plugin.label): plugin for plugin in registry.plugins}
    groups = groupby(candidates, key=lambda c: (c.backend, c.distribution))
    return [_backend(tuple(group), plugins.get(key), store, device) for key, group in groups]


def _backend(
    candidates: tuple[Candidate, ...], plugin: Plugin | None, store: EvidenceStore, device: Device
) -> dict[str, Any]:
    first = candidates[0]
    manifest = first.manifest
    return {
        "name": first.backend,
        "aliases": list(first.aliases),
        "summary": manifest.summary if manifest else "",
        "distribution": first.distribution,
        "module": plugin.module if plugin else "",
        "built_in": first.built_in,
        "api": ".".join(map(str, manifest.api)) if manifest else "",
        "manifest": manifest.path if manifest else "",
        "variants": [_variant(candidate, store, device) for candidate in candidates],
    }


def _variant(candidate: Candidate, store: EvidenceStore, device: Device) -> dict[str, Any]:
    elsewhere = device_objections(candidate, device)
    return {
        "id": candidate.id,
        "availability": candidate.availability,
        "runs_here": candidate.availability == "ready" and not elsewhere,
        "device_reasons": [reason.to_dict() for reason in elsewhere],
        **(_declared(candidate.variant) if candidate.variant else {}),
        "verified_on": [device.to_dict() for device in store.verified_on(candidate)],
        "reasons": [reason.to_dict() for reason in candidate.reasons],
        "install": list(candidate.install),
        "action": candidate.fix,
    }


def _declared(variant: Variant) -> dict[str, Any]:
    return {
        "summary": variant.summary,
        "requires": list(variant.requires),
        "jit": variant.jit,
        "supports": {name: str(constraint) for name, constraint in variant.supports.items()},
        "features": list(variant.features),
        "emulates": dict(variant.emulates),
    }


def _show(candidates: Sequence[Candidate], store: EvidenceStore, device: Device, *, notes: int, whole: bool) -> None:
    rows = [_row(candidate, store, device) for candidate in candidates]
    shown = [row for row in rows if whole or row.status != _ELSEWHERE]
    if shown:
        say_rows(shown, "what it is, and what is missing")
    here = [each.id for each in candidates if each.availability == "ready" and not device_objections(each, device)]
    text = f"{len(here)} of {len(candidates)} can run on this machine ({device}): {', '.join(here) or 'none'}"
    say("\n".join(["", *wrapped(text)]))
    elsewhere = [row.id for row in rows if row not in shown]
    if elsewhere:
        text = f"{len(elsewhere)} for other devices (details: attnplug list --all): {', '.join(elsewhere)}"
        say("\n".join(wrapped(text)))
    if notes:
        text = f"{notes} note{'s' * (notes > 1)} about this environment: see `attnplug doctor`"
        say("\n".join(wrapped(text)))


def _row(candidate: Candidate, store: EvidenceStore, device: Device) -> Row:
    elsewhere = device_objections(candidate, device)
    # What is missing does not matter where the device cannot run it.
    status = _ELSEWHERE if elsewhere and candidate.availability in USABLE else candidate.availability
    lines = tuple(_lines(candidate, store, elsewhere if status == _ELSEWHERE else ()))
    return Row(candidate.id, status, lines, candidate.distribution)


def device_objections(candidate: Candidate, device: Device) -> list[Reason]:
    """Return why a candidate does not support a device, by the fields that its manifest declares."""
    if candidate.variant is None:
        return []
    return candidate.objections((name, value) for name, value in device.facts().items() if value is not None)


def _lines(candidate: Candidate, store: EvidenceStore, elsewhere: Sequence[Reason]) -> Iterator[str]:
    variant, manifest = candidate.variant, candidate.manifest
    if variant is not None and manifest is not None:
        yield variant.summary or manifest.summary
        if variant.requires:
            yield f"requires {', '.join(variant.requires)}"
        devices = dict.fromkeys(map(str, store.verified_on(candidate)))
        on = f"on {', '.join(devices)}" if devices else "on any device"
        yield f"{'' if devices else 'not '}verified by the conformance kit {on}"
    if elsewhere:
        yield from (f"- {reason}" for reason in elsewhere)
        return
    for reason in candidate.reasons:
        yield f"- {reason}"
    if candidate.availability != "ready":
        steps = Fix(install=candidate.install, action=candidate.fix).steps()
        yield from (f"{'then' if index else 'fix:'} {step}" for index, step in enumerate(steps))
