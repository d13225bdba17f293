"""Evidence beside a manifest: declared values that none covers, in the version that is checked, and files of no use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.requirements import Requirement

from attnplug.evidence import FOLDER, hashable, read_folder
from attnplug.manifest import IsRequested, Range
from attnplug.request import FIELDS, Level, Names
from attnplug_kit.check.report import Finding
from attnplug_kit.unexercised import Unexercised, command_of, device_of, unexercised

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.evidence import Evidence
    from attnplug.manifest import Constraint, Manifest, Variant


def find_unexercised(manifest: Manifest, distribution: str | None) -> Iterator[Unexercised]:
    """
    Yield the declared values of each variant that no passed run has exercised.

    Args:
        manifest: The manifest.
        distribution: The distribution with its version, whose runs count; None if that is unknown, and all count.
    """
    known = [each for each in read_folder(Path(manifest.path).parent / FOLDER).evidence if each.verifies]
    for variant in manifest.variants:
        name = f"{manifest.name}/{variant.name}"
        ours = [evidence for evidence in known if evidence.id == name]
        runs = [evidence for evidence in ours if distribution in (None, evidence.distribution)]
        if runs:
            yield from _of_devices(name, variant, runs)
            yield from _of_values(name, variant, runs)
        else:
            others = ", ".join(sorted({evidence.distribution for evidence in ours}))
            because = f"the evidence is of {others}" if others else ""
            for device in _devices(variant):
                command = command_of(name, _needed_features(variant), str(device["device_type"]))
                yield Unexercised(name, "", None, device_of(device), command, because)


def check_evidence(manifest: Manifest) -> Iterator[Finding]:
    """
    Yield the files beside a manifest that verify nothing: not readable, of a failed run, or of another backend; and
    as notes those that lack what a reader needs, or name something of a machine.
    """
    found = read_folder(Path(manifest.path).parent / FOLDER)
    expected = "a file there records a run of the whole kit that passed"
    fix = "run the whole kit and move its file there, or remove this one"
    for note in found.notes:
        yield Finding(f"the evidence {note.message}", expected, fix, note.subject)
    variants = {f"{manifest.name}/{variant.name}": variant for variant in manifest.variants}
    for evidence in found.evidence:
        if evidence.id not in variants:
            problem = f"the evidence is about {evidence.id!r}, which is no variant of {manifest.name!r}"
            yield Finding(problem, f"the variants are {', '.join(variants)}", "remove it", evidence.origin)
        elif evidence.verifies:
            fix = f"write it anew on that device: attnplug check --evidence {evidence.id}"
            for problem, expected in _unfit(evidence, variants[evidence.id]):
                yield Finding(f"the evidence {problem}", expected, fix, evidence.origin, kind="note")


_WRITTEN: Final = {
    *("command", "format", "backend", "distribution", "device", "features", "versions", "passed", "kit_tests"),
    *("fraction", "served", "ranges", "missing", "unreached", "errors"),
}
"""The keys of a file that the kit writes."""

_PLACE: Final = re.compile(r"""(?:^|[\s"'=:])(?:~|[A-Za-z]:[\\/]|\\\\|/)|\w@\w|://""")
"""A path, a user at a host, or an address."""


def _unfit(evidence: Evidence, variant: Variant) -> Iterator[tuple[str, str]]:
    """Yield what keeps a file from being published, and what is expected."""
    data = json.loads(Path(evidence.origin).read_text("utf-8"))
    versions, required = data.get("versions"), ("python", "platform", "attnplug", "torch")
    names = [*required, *(Requirement(text).name for text in variant.requires)]
    missing = [name for name in names if not (isinstance(versions, dict) and versions.get(name))]
    if missing:
        yield f"has no version of {', '.join(missing)}", "it has the versions that results depend on"
    device = evidence.device
    if device.type != "cpu" and not (device.name and (device.type != "cuda" or device.compute_capability)):
        yield "does not name its device", "a device other than a CPU has its product's name, on CUDA its capability too"
    if not evidence.part and not (data.get("kit_tests") or {}).get("of"):
        yield "has no number of tests", "it says how many tests of the kit ran"
    if not str(data.get("command", "")).startswith("pytest "):
        yield "has no command", "it has the command of its run"
    for key in sorted(data.keys() - _WRITTEN):
        yield f"has {key!r}", "it has the keys that the kit writes, and nothing of the machine but its device"
    for text in sorted({text for text in _texts(data) if _PLACE.search(text)}):
        yield f"names a place: {text!r}", "it names nothing of the machine but its device"


def _texts(data: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, (list, dict)):
        for item in (*data, *data.values()) if isinstance(data, dict) else data:
            yield from _texts(item)


def _devices(variant: Variant) -> Iterator[Mapping[str, Any]]:
    """Yield the devices that a variant declares, by what it declares of them."""
    supports = variant.supports
    vendors = supports["vendor"].choices() if "vendor" in supports else (None,)
    for kind in supports["device_type"].choices():
        for vendor in (None,) if kind == "cpu" else vendors:
            has_capability = kind == "cuda" and vendor != "amd" and "compute_capability" in supports
            for capability in supports["compute_capability"].choices() if has_capability else (None,):
                yield {"device_type": kind, "compute_capability": capability, "vendor": vendor}


def _of_devices(name: str, variant: Variant, runs: Sequence[Evidence]) -> Iterator[Unexercised]:
    for device in _devices(variant):
        wanted = {field: value for field, value in device.items() if value is not None}
        if not any(_is_on(evidence, wanted) for evidence in runs):
            field = list(wanted)[1 if len(wanted) > 1 else 0]  # the capability if there is one, or else the vendor
            yield unexercised(name, field, wanted[field], features=_needed_features(variant), facts=wanted)


def _is_on(evidence: Evidence, wanted: Mapping[str, Any]) -> bool:
    facts = evidence.device.facts()
    return all(
        facts.get(field) is not None and FIELDS[field].domain.allows(value, facts[field])
        for field, value in wanted.items()
    )


def _of_values(name: str, variant: Variant, runs: Sequence[Evidence]) -> Iterator[Unexercised]:
    reasons = {item: because for evidence in runs for item, because in evidence.unreached.items()}
    for field in (field for field, item in FIELDS.items() if field in variant.supports and item.kind != "device"):
        for value in _values(field, variant.supports[field]):
            if not any(evidence.covers(field, value) for evidence in runs):
                because = reasons.get((field, hashable(value)), "")
                yield unexercised(name, field, value, because, features=_needed_features(variant))
    for feature in variant.features:
        if not any(feature in evidence.features for evidence in runs):
            yield unexercised(name, "features", feature)


def _needed_features(variant: Variant) -> tuple[str, ...]:
    """Return the open features of a variant if a rule refuses requests without any."""
    needs, has_none = IsRequested("features", requested=True), IsRequested("features", requested=False)
    refuses = any(needs in rule.need or (has_none in rule.when and not rule.need) for rule in variant.rules)
    return variant.features if refuses else ()


def _values(field: str, constraint: Constraint) -> tuple[Any, ...]:
    """Return what a run of the kit exercises at least: each value of a list, and the ends of a range."""
    item = FIELDS[field]
    if isinstance(item.domain, Names):
        return tuple(dict.fromkeys((name,) for choice in constraint.choices() for name in choice))
    if isinstance(item.domain, Level):
        return tuple(value for value in item.domain.values if value != item.neutral and constraint.allows(value))
    highest = [part.max for part in constraint.alternatives if isinstance(part, Range) and part.max is not None]
    ends = (*constraint.choices(), *map(constraint.nearest, highest))
    return tuple(dict.fromkeys(v for v in ends if v != item.neutral or field == "kv_cache_dtype"))
