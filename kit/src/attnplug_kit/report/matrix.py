"""
Which candidate serves which feature on which device, and what shows it: a kit run, or its manifest alone.

Each cell is a decision of core about the plainest request with the feature that the candidate serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

from attnplug import explain
from attnplug.manifest import Exact
from attnplug.request import FIELDS, Flag, Level, Name, Names, Table
from attnplug_kit.conformance.field_values import Capability, FieldValues, is_served, plainest
from attnplug_kit.conformance.models import MODELS
from attnplug_kit.conformance.subject import Subject
from attnplug_kit.fields import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug import Device, Verdict
    from attnplug.manifest import Constraint
    from attnplug.negotiation import Candidate
    from attnplug.request import Field
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.report.runs import KitRun

Status = Literal["run", "declared", "refused"]

STATUSES: Final[Mapping[Status, tuple[str, str]]] = {
    "run": ("\N{CHECK MARK}", "run"),
    "declared": ("\N{WHITE CIRCLE}", "not run"),
    "refused": ("\N{BALLOT X}", "refused"),
}
"""The symbol and the words of each status: a run of the kit verifies it, the manifest declares it, core refuses it."""

_NOT_SHOWN: Final = ("num_q_heads", "num_kv_heads", "phases", "query_lens_cpu_kind", "unquantized_queries", "features")
"""Fields that every backend serves, and open features, whose meaning a backend defines."""


@frozen
class Feature:
    """
    One value of a field.

    Attributes:
        field: The field.
        value: The value, as requirements have it.
    """

    field: str
    value: Any

    @property
    def label(self) -> str:
        """The feature in a word or two: a flag's name alone, and the parameters of a pattern left out."""
        item = FIELDS[self.field]
        if self.value is True or isinstance(item.domain, Table):
            return self.field
        return f"{self.field}={item.domain.dump(self.value)}".replace("['", "").replace("']", "")


_FOLLOWING: Final = Feature("kv_cache_form", "latent")
"""It follows from `latent`, and is not requested."""


@frozen
class Cell:
    """
    What is known of one feature, for a candidate on a device.

    Attributes:
        status: ``run`` (a run of the kit on such a device, of this version, has exercised it), ``declared`` (it is
            served, and no such run has) or ``refused``.
        because: Every reason for a refusal, or what is verified instead; of an emulated feature its cost.
        request: The plainest request with the feature; empty where none is served.
        runs: The runs of the kit that have exercised it.
    """

    status: Status
    because: str = ""
    request: str = ""
    runs: tuple[KitRun, ...] = ()


@frozen(eq=False)
class Matrix:
    """
    Every cell.

    Attributes:
        devices: The devices, with the name of each.
        candidates: The candidates, as if all that they require were installed.
        features: The features, in the order of the fields.
        cells: A cell for each feature, by candidate and device.
        runs: The runs of the kit.
    """

    devices: Mapping[str, Device]
    candidates: tuple[Candidate, ...]
    features: tuple[Feature, ...]
    cells: Mapping[tuple[str, str], tuple[Cell, ...]]
    runs: tuple[KitRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; texts that repeat are numbers of ``texts``."""
        texts: dict[str, int] = {"": 0}
        places = {run.anchor: place for place, run in enumerate(self.runs)}

        def plain(cell: Cell) -> list[int]:
            numbers = (texts.setdefault(text, len(texts)) for text in (cell.because, cell.request))
            return [[*STATUSES].index(cell.status), *numbers, *(places[run.anchor] for run in cell.runs)]

        cells = {
            each.id: {device: [*map(plain, self.cells[each.id, device])] for device in self.devices}
            for each in self.candidates
        }
        return {
            "statuses": list(map(list, STATUSES.values())),
            "devices": list(self.devices),
            "candidates": [_described(each) for each in self.candidates],
            "features": [[each.field, each.label] for each in self.features],
            "fields": {each.field: FIELDS[each.field].help for each in self.features},
            "cells": cells,
            "texts": list(texts),
            "runs": [run.to_dict() for run in self.runs],
        }


def make_matrix(candidates: Sequence[Candidate], devices: Mapping[str, Device], runs: Sequence[KitRun]) -> Matrix:
    """
    Decide every cell, by the installed backends and settings of this process.

    Args:
        candidates: The candidates, each with a variant. What they require is supposed to be installed.
        devices: The devices, by the name that a reader sees.
        runs: The runs of the kit.
    """
    supposed = tuple(each.if_installed for each in candidates)
    features = tuple(_features(supposed))
    cells: dict[tuple[str, str], tuple[Cell, ...]] = {}
    for each in supposed:
        specs: dict[Feature, RequestSpec] = {}
        for name, device in devices.items():
            cells[each.id, name] = tuple(_cells(each, device, features, runs, specs))
    return Matrix(devices, supposed, features, cells, tuple(runs))


# Features


def _features(candidates: Sequence[Candidate]) -> Iterator[Feature]:
    """Yield each value that some candidate supports, in the order of the fields."""
    for name, item in FIELDS.items():
        if name in _NOT_SHOWN or item.kind not in ("model", "engine"):
            continue
        for value in dict.fromkeys(map(item.domain.canonical, _values(item, candidates))):
            feature = Feature(name, value)
            if feature != _FOLLOWING and any(not each.objections([(name, value)]) for each in candidates):
                yield feature


def _values(item: Field, candidates: Sequence[Candidate]) -> list[Any]:
    """Return the values of a list; of numbers those that the kit or a published model requests, or a manifest lists."""
    row, domain = ROWS[item.name], item.domain
    if isinstance(domain, Flag):
        return list(row.always) or [not item.neutral]
    if isinstance(domain, Names):
        return [(name,) for name in item.neutral]
    if isinstance(domain, (Name, Level)):
        return [value for value in getattr(domain, "values", ()) if value != item.neutral]
    if isinstance(domain, Table):
        return list(row.samples[:1])
    published = [fields[item.name] for fields in MODELS.values() if item.name in fields]
    requested = [*published, *(row.samples or row.odd)]
    if item.has_ranges:  # evidence at two values is evidence at those between
        return [max(requested)]
    declared = (each.supports(item.name) for each in candidates)
    listed = [part.value for each in declared if each for part in each.alternatives if isinstance(part, Exact)]
    return sorted({*requested, *listed})


# Cells


def _cells(
    candidate: Candidate,
    device: Device,
    features: Sequence[Feature],
    runs: Sequence[KitRun],
    specs: dict[Feature, RequestSpec],
) -> Iterator[Cell]:
    """Yield a cell for each feature. Requests that are served on another device are tried first, and kept."""
    facts = [(name, value) for name, value in device.facts().items() if value is not None]
    reasons = candidate.objections(facts)
    if reasons:
        yield from [Cell("refused", _joined(reasons))] * len(features)
        return
    values = FieldValues(Subject(candidate.id, device, candidate), {}, ())
    counting = [run for run in runs if _counts(run, candidate, device)]
    for feature in features:
        yield _cell(values, feature, counting, specs)


def _counts(run: KitRun, candidate: Candidate, device: Device) -> bool:
    return run.evidence.id == candidate.id and run.evidence.counts_for(candidate.distribution, device)


def _cell(values: FieldValues, feature: Feature, runs: Sequence[KitRun], specs: dict[Feature, RequestSpec]) -> Cell:
    subject, own = values.subject, {feature.field: feature.value}
    reasons = subject.candidate.objections(own.items())
    if reasons:
        return Cell("refused", _joined(reasons))
    spec = specs.get(feature)
    if spec is None or not is_served(subject, spec):
        spec = plainest(subject, Capability(feature.field, feature.value))
    requirements = None if spec is None else spec.requirements()
    if spec is None or requirements is None:
        return Cell("refused", _joined(values.refusal(**own)))
    specs[feature] = spec
    found = explain(requirements, subject.device, backend=subject.id, assume_installed=True)
    verdict = next(each for each in found.verdicts if each.id == subject.id)
    if verdict.status not in ("chosen", "eligible"):
        return Cell("refused", _joined(verdict.reasons), str(spec))
    return _served(verdict, feature, str(spec), runs)


def _served(verdict: Verdict, feature: Feature, request: str, runs: Sequence[KitRun]) -> Cell:
    """Return a cell of a served feature: what core finds unverified of the request decides its status."""
    about = ("device", "distribution", feature.field)
    unverified = [str(each) for each in verdict.unverified if each.field in about]
    recorded = FIELDS[feature.field].domain.dump(feature.value)
    covering = tuple(run for run in runs if run.evidence.covers(feature.field, recorded))
    if not (unverified or covering):  # a request for the value that is requested anyway needs no evidence
        unverified = ["no run has requested it"]
    slower = [f"slower: {verdict.emulated[feature.field]}"] if feature.field in verdict.emulated else []
    if unverified:
        return Cell("declared", "; ".join([*unverified, *slower]), request)
    return Cell("run", "; ".join(slower), request, covering)


def _joined(reasons: Sequence[Any]) -> str:
    return "; ".join(dict.fromkeys(map(str, reasons)))


def _described(candidate: Candidate) -> dict[str, Any]:
    variant, manifest = candidate.variant, candidate.manifest
    declared = {} if variant is None else {name: _words(name, each) for name, each in variant.supports.items()}
    return {
        "id": candidate.id,
        "summary": (variant and variant.summary) or (manifest.summary if manifest else ""),
        "distribution": candidate.distribution,
        "declares": declared,
    }


def _words(name: str, declared: Constraint) -> str:
    """Return what a manifest declares for a field; of a flag whether it may be requested, or has to be."""
    item = FIELDS[name]
    if not isinstance(item.domain, Flag):
        return str(declared)
    return "yes" if declared.allows(item.neutral) else "only"
