"""``attnplug list``: every backend that is installed or known, and what is missing for the others to be ready."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict

from attnplug.commands import OK, Row, say, say_json, say_rows, wrapped
from attnplug.discovery.registry import Registry
from attnplug.discovery.scan import Diagnostic
from attnplug.evidence.store import EvidenceStore
from attnplug.negotiation.reason import Fix
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from attnplug.discovery.plugin import Plugin
    from attnplug.manifest.schema import Variant
    from attnplug.negotiation.candidate import Candidate

_EPILOG: Final = """\
status:
  ready               everything that it requires is installed
  missing dependency  the plugin is installed, and something that it requires is not
  absent              a plugin that is known by name and not installed
  refused             the settings exclude it, or it is written for another version of the contract
  broken              it cannot be used: its manifest is malformed, or two distributions claim its name

examples:
  attnplug list
  attnplug list --json | jq -r '.backends[].variants[] | select(.availability == "ready") | .id'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "List every backend that is installed or known, and what is missing for it to be ready."
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List the backends. Something that is missing is no failure: the exit code is 0."""
    settings = Settings.read()
    registry = Registry.scan(settings)
    candidates = registry.candidates(settings)
    store = EvidenceStore(registry.plugins, settings.evidence)
    notes = (*registry.notes, *store.notes(), *_note_of_profile(settings))
    if arguments.json:
        say_json({"backends": describe(candidates, registry, store), "notes": [asdict(note) for note in notes]})
    else:
        _show(candidates, store, len(notes))
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


def describe(candidates: Iterable[Candidate], registry: Registry, store: EvidenceStore) -> list[dict[str, Any]]:
    """Return backends with their variants as plain JSON values."""
    plugins = {(plugin.name, plugin.label): plugin for plugin in registry.plugins}
    groups = groupby(candidates, key=lambda c: (c.backend, c.distribution))
    return [_backend(tuple(group), plugins.get(key), store) for key, group in groups]


def _backend(candidates: tuple[Candidate, ...], plugin: Plugin | None, store: EvidenceStore) -> dict[str, Any]:
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
        "variants": [_variant(candidate, store) for candidate in candidates],
    }


def _variant(candidate: Candidate, store: EvidenceStore) -> dict[str, Any]:
    return {
        "id": candidate.id,
        "availability": candidate.availability,
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


def _show(candidates: Iterable[Candidate], store: EvidenceStore, notes: int) -> None:
    say_rows([_row(candidate, store) for candidate in candidates], "what it is, and what is missing")
    if notes:
        text = f"{notes} note{'s' * (notes > 1)} about this environment: see `attnplug doctor`"
        say("\n".join(["", *wrapped(text)]))


def _row(candidate: Candidate, store: EvidenceStore) -> Row:
    return Row(candidate.id, candidate.availability, tuple(_lines(candidate, store)), candidate.distribution)


def _lines(candidate: Candidate, store: EvidenceStore) -> Iterator[str]:
    variant, manifest = candidate.variant, candidate.manifest
    if variant is not None and manifest is not None:
        yield variant.summary or manifest.summary
        if variant.requires:
            yield f"requires {', '.join(variant.requires)}"
        devices = dict.fromkeys(map(str, store.verified_on(candidate)))
        yield f"verified on {', '.join(devices) or 'no device'}"
    for reason in candidate.reasons:
        yield f"- {reason}"
    if candidate.availability != "ready":
        yield f"fix: {Fix(install=candidate.install, action=candidate.fix)}"
