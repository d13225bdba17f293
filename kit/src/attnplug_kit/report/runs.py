"""Runs of the conformance kit that verify something, from the evidence that plugins ship and the user has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.evidence import FOLDER, read_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnplug.evidence import Evidence
    from attnplug.negotiation import Candidate

_LARGEST_ERROR: Final = 1e300
"""Python's integers have no limit, and fail as floats."""


@frozen(eq=False)
class KitRun:
    """
    One run of the whole kit that passed.

    Attributes:
        evidence: Its outcome.
        facts: Versions, tests and largest errors of the run, as texts by name; empty for what the file does not say.
    """

    evidence: Evidence
    facts: Mapping[str, str]

    @property
    def anchor(self) -> str:
        """The name of the run in a page: the variant and the device, without the folders of the file."""
        return f"run-{self.evidence.id.replace('/', '-')}-{Path(self.evidence.origin).stem}"

    @property
    def device(self) -> str:
        """The product that it ran on."""
        return self.evidence.device.name or self.evidence.device.type

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found = {"id": self.evidence.id, "anchor": self.anchor, "device": self.device}
        return {**found, "distribution": self.evidence.distribution, **self.facts}


def runs_of(candidates: Iterable[Candidate], folders: Iterable[str] = ()) -> tuple[KitRun, ...]:
    """
    Return the runs about candidates, in their order, then by file name.

    Args:
        candidates: The candidates, each with a manifest.
        folders: The user's folders of evidence, besides those beside manifests.
    """
    users = [evidence for folder in folders for evidence in read_folder(Path(folder)).evidence]
    return tuple(run for candidate in candidates for run in _about(candidate, users))


def _about(candidate: Candidate, users: Iterable[Evidence]) -> Iterator[KitRun]:
    path = candidate.manifest.path if candidate.manifest else ""
    shipped = read_folder(Path(path).parent / FOLDER).evidence if path else ()
    for evidence in (*shipped, *users):
        if evidence.id == candidate.id and evidence.verifies:
            yield KitRun(evidence, _facts(Path(evidence.origin)))


def _facts(path: Path) -> dict[str, str]:
    """Return what a file says for people besides the evidence: whatever is not of the expected form is left out."""
    data = json.loads(path.read_text("utf-8"))
    versions, tests, errors = data.get("versions"), data.get("kit_tests"), data.get("errors")
    facts = {"command": data["command"]} if isinstance(data.get("command"), str) else {}
    if isinstance(versions, dict):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if isinstance(tests, dict):
        facts["tests"] = f"{tests.get('ran')} of {tests.get('of')}"
    if isinstance(errors, list):
        facts["errors"] = ", ".join(_largest(each) for each in errors if _is_of_outputs(each))
    return {name: text for name, text in facts.items() if text}


def _is_of_outputs(error: Any) -> bool:
    if not isinstance(error, dict) or error.get("what") != "output":
        return False
    return type(error.get("max")) in (int, float) and 0 <= error["max"] <= _LARGEST_ERROR  # NaN is not


def _largest(error: Mapping[str, Any]) -> str:
    cache = error.get("kv_cache_dtype")
    return f"{error['max']:.2g} ({error.get('dtype')}{'' if cache in ('auto', None) else f', KV cache {cache}'})"
