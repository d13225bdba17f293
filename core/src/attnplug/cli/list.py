"""``attnplug list``: every backend that is installed or known, and what stands in the way of it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from attnplug.commands import OK, say, say_json
from attnplug.discovery.registry import Registry
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from attnplug.commands import Row
    from attnplug.discovery.plugin import Plugin
    from attnplug.manifest.schema import Variant
    from attnplug.negotiation.candidate import Candidate
    from attnplug.request.device import Device

_EPILOG: Final = """\
standings:
  ready             everything that it requires is installed
  missing dependency  the plugin is here, and something that it requires is not
  absent            a plugin that is known by name and not installed
  refused           the settings keep it out, or it speaks another version of the contract
  broken            it cannot be used: its manifest is malformed, or two distributions claim its name

examples:
  attnplug list
  attnplug list --json | jq -r '.backends[].variants[] | select(.availability == "ready") | .id'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "List every backend that is installed or known, and what stands in the way of it."
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List what there is. It is no wrong answer that something is missing."""
    settings = Settings.read()
    registry = Registry.scan(settings)
    candidates = registry.candidates(settings)
    if arguments.json:
        notes = [{"subject": note.subject, "stage": note.stage, "message": note.message} for note in registry.notes]
        say_json({"backends": describe(candidates, registry), "notes": notes})
    else:
        _show(candidates, registry)
    return OK


def describe(candidates: Iterable[Candidate], registry: Registry) -> list[dict[str, Any]]:
    """Return backends with their variants as plain JSON values."""
    plugins = {(plugin.name, plugin.label): plugin for plugin in registry.plugins}
    groups = groupby(candidates, key=lambda c: (c.backend, c.distribution))
    return [_backend(tuple(group), plugins.get(key), registry) for key, group in groups]


def verified_on(candidate: Candidate, registry: Registry) -> tuple[Device, ...]:
    """Return the devices on which the conformance kit has passed with this candidate, in the installed version."""
    found = (e for e in registry.evidence(candidate) if e.passed and e.distribution == candidate.distribution)
    return tuple(sorted({evidence.device for evidence in found}, key=str))


def _backend(candidates: tuple[Candidate, ...], plugin: Plugin | None, registry: Registry) -> dict[str, Any]:
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
        "variants": [_variant(candidate, registry) for candidate in candidates],
    }


def _variant(candidate: Candidate, registry: Registry) -> dict[str, Any]:
    return {
        "id": candidate.id,
        "availability": candidate.availability,
        **(_declared(candidate.variant) if candidate.variant else {}),
        "verified_on": [device.to_dict() for device in verified_on(candidate, registry)],
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


def _show(candidates: Iterable[Candidate], registry: Registry) -> None:
    from attnplug.commands import say_rows, wrapped  # noqa: PLC0415 - JSON does without

    say_rows([_row(candidate, registry) for candidate in candidates], "what it is, and what is missing")
    notes = len(registry.notes)
    if notes:
        text = f"{notes} note{'s' * (notes > 1)} about this environment: see `attnplug doctor`"
        say("\n".join(["", *wrapped(text)]))


def _row(candidate: Candidate, registry: Registry) -> Row:
    from attnplug.commands import Row  # noqa: PLC0415 - as above

    return Row(candidate.id, candidate.availability, tuple(_lines(candidate, registry)), candidate.distribution)


def _lines(candidate: Candidate, registry: Registry) -> Iterator[str]:
    from attnplug.negotiation.verdict import Fix  # noqa: PLC0415 - as above

    variant, manifest = candidate.variant, candidate.manifest
    if variant is not None and manifest is not None:
        yield variant.summary or manifest.summary
        if variant.requires:
            yield f"requires {', '.join(variant.requires)}"
        devices = dict.fromkeys(map(str, verified_on(candidate, registry)))
        yield f"verified on {', '.join(devices) or 'no device'}"
    for reason in candidate.reasons:
        yield f"- {reason}"
    if candidate.availability != "ready":
        nowhere = candidate.availability == "absent" and not candidate.install
        yield ("" if nowhere else "fix: ") + str(Fix(install=candidate.install, action=candidate.fix))
