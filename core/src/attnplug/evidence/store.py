"""
Evidence files, as the conformance kit writes them: found beside manifests and in the user's own folders, and read.

They record what was verified, and decide nothing. So nothing that is wrong with one is raised: it becomes a note, and
hides neither its neighbors nor a plugin. Imported only when somebody reads what is verified.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug._foreign import ForeignCode
from attnplug.discovery.plugin import BY_HAND
from attnplug.discovery.scan import Diagnostic
from attnplug.errors import AttnplugError
from attnplug.evidence.coverage import Evidence, find_unverified, hashable
from attnplug.request.device import Device
from attnplug.request.files import read_bytes

if TYPE_CHECKING:
    from attnplug.discovery.plugin import Plugin
    from attnplug.evidence.ranges import Interval
    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.reason import Unverified

FOLDER: Final = "evidence"
"""The folder beside an ``attnplug.toml`` in which a plugin ships its evidence."""

FORMATS: Final = (1, 2)
"""The versions of the files that this core reads: the first has no ranges, so that its values are exact."""

_LARGEST: Final = 4 * 2**20
"""Bytes of a file that are read at most; the kit writes some ten thousand."""

_MOST: Final = 1000
"""Files of a folder that are read at most, by name; the kit writes one for each device and variant."""

_LONGEST: Final = 1000
"""Characters of a text at most: it is shown in one line."""

_MOST_TESTS: Final = 10**9
"""More tests than any kit has: the numbers are shown."""

_ENDS: Final = ([int, int], [float, float])

_KINDS: Final[Mapping[type, str]] = {str: "a text", bool: "true or false", list: "a list", Mapping: "an object"}


@frozen(eq=False)
class EvidenceFolder:
    """
    The content of one folder.

    Attributes:
        evidence: What was read, by file name.
        notes: What is wrong with the rest.
    """

    evidence: tuple[Evidence, ...] = ()
    notes: tuple[Diagnostic, ...] = ()


class EvidenceStore:
    """
    All evidence that plugins ship and the user has. Each folder is read once, when it is first needed.

    Args:
        plugins: The plugins.
        folders: The user's folders.
    """

    def __init__(self, plugins: Iterable[Plugin], folders: Iterable[str] = ()) -> None:
        self._plugins = tuple(plugin for plugin in plugins if plugin.manifest is not None)
        self._folders = tuple(map(Path, dict.fromkeys(folders)))
        self._read: dict[Path, EvidenceFolder] = {}

    def about(self, candidate: Candidate) -> tuple[Evidence, ...]:
        """
        Return all evidence about a candidate: of any version, on any device, passed or not. Another distribution that
        offers its backend too, and is blocked or broken, ships none for it.
        """
        own = (p for p in self._plugins if (p.name, p.label) == (candidate.backend, candidate.distribution))
        folders = [*map(self._shipped, own), *self._users()]
        return tuple(evidence for folder in folders for evidence in folder.evidence if evidence.id == candidate.id)

    def find_unverified(self, candidate: Candidate, agreement: Agreement, device: Device) -> tuple[Unverified, ...]:
        """Return what of an agreement with a candidate no evidence covers on a device."""
        return find_unverified(candidate, agreement, device, self.about(candidate))

    def verified_on(self, candidate: Candidate) -> tuple[Device, ...]:
        """Return the devices on which the kit has passed with a candidate, in the installed version."""
        found = (e for e in self.about(candidate) if e.verifies and e.distribution == candidate.distribution)
        return tuple(sorted({evidence.device for evidence in found}, key=str))

    def notes(self) -> tuple[Diagnostic, ...]:
        """Return what is wrong with the files."""
        shipped, users = [self._shipped(plugin) for plugin in self._plugins], list(self._users())
        notes = [note for folder in (*shipped, *users) for note in folder.notes]
        known = {f"{p.name}/{v.name}" for p in self._plugins if p.manifest for v in p.manifest.variants}
        notes += [
            _note(Path(evidence.origin), f"is about {evidence.id!r}, which no installed plugin offers")
            for folder in users
            for evidence in folder.evidence
            if evidence.id not in known
        ]
        return tuple(dict.fromkeys(notes))

    def _shipped(self, plugin: Plugin) -> EvidenceFolder:
        """Return what a plugin ships. It may be about that plugin only."""
        manifest = plugin.manifest
        if manifest is None:
            return EvidenceFolder()
        found = self._folder(Path(manifest.path).parent / FOLDER)
        ids = {f"{plugin.name}/{variant.name}" for variant in manifest.variants}
        foreign = [evidence for evidence in found.evidence if evidence.id not in ids]
        if not foreign:
            return found
        notes = (_note(Path(e.origin), f"is about {e.id!r}, which is no variant of {plugin.name!r}") for e in foreign)
        return EvidenceFolder(tuple(e for e in found.evidence if e.id in ids), (*found.notes, *notes))

    def _users(self) -> Iterator[EvidenceFolder]:
        yield from map(self._folder, self._folders)

    def _folder(self, path: Path) -> EvidenceFolder:
        known = self._read.get(path)
        return self._read.setdefault(path, read_folder(path)) if known is None else known


def read_folder(folder: Path) -> EvidenceFolder:
    """Read all ``*.json`` of a folder, by name. A folder that is not there is empty."""
    evidence, notes = [], []
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        return EvidenceFolder()
    except (OSError, ValueError) as error:
        return EvidenceFolder(notes=(_note(folder, f"cannot be listed: {_text_of(error)}"),))
    if len(files) > _MOST:
        notes.append(_note(folder, f"holds {len(files):,} files, of which the first {_MOST:,} are read"))
    for path in files[:_MOST]:
        with ForeignCode("reading it raises") as code:
            found = read_file(path)
        if code.error is not None:
            notes.append(_note(path, f"is not read: {_text_of(code.error) or code.problem}"))
        else:
            evidence.append(found)
            if found.part:
                notes.append(_note(path, f"records {found.part} for {found.id!r}, and verifies nothing"))
            elif not found.passed:
                notes.append(_note(path, f"records a run in which {found.id!r} failed, and verifies nothing"))
    return EvidenceFolder(tuple(evidence), tuple(notes))


def read_file(path: Path) -> Evidence:
    """
    Read one file.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger than 4 MiB.
        ValueError: It holds something else than evidence; says what.
    """
    return parse_evidence(_read_json(read_bytes(path, _LARGEST)), str(path))


def _read_json(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error


def _refuse_constant(text: str) -> Any:
    """Refuse NaN and infinities: Python reads and writes them, JSON does not have them, and no field has them."""
    raise ValueError(f"it is no JSON: there is no number {text}")


def parse_evidence(data: Any, origin: str = "") -> Evidence:
    """
    Read the content of a file. Other keys are left alone.

    Raises:
        ValueError: It is something else; says what.
    """
    if not isinstance(data, Mapping):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - like everything else that is wrong with a file
    found = data.get("format")
    if type(found) is not int or found not in FORMATS:
        raise ValueError(
            f"its format is {reprlib.repr(found)}, and this core reads formats {' and '.join(map(str, FORMATS))}"
        )
    id_, distribution, passed = _of(data, "backend", str), _of(data, "distribution", str), _of(data, "passed", bool)
    if not all(id_.partition("/")):
        raise ValueError(f"backend is {id_!r}, and it is `backend/variant`")
    if distribution == BY_HAND or not all(distribution.rpartition(" ")):
        raise ValueError(f"distribution is {distribution!r}, and no version says which code was verified")
    return Evidence(
        id_,
        distribution,
        _device(_of(data, "device", Mapping)),
        passed,
        frozenset(_pair(item, "served") for item in _of(data, "served", list)),
        {_pair(item, "unreached"): _of(item, "because", str) for item in _of(data, "unreached", list)},
        origin,
        frozenset(_names(data, "features")),
        None if found == FORMATS[0] else _ranges(_of(data, "ranges", Mapping)),
        _part(data),
    )


def _part(data: Mapping[str, Any]) -> str:
    """Return which part of the kit ran; empty for all of it, and for a file from before this was recorded."""
    if "kit_tests" not in data:
        return ""
    counts = _of(data, "kit_tests", Mapping)
    ran, of = counts.get("ran"), counts.get("of")
    if type(ran) is not int or type(of) is not int or not 0 <= ran <= of < _MOST_TESTS:
        raise ValueError(f"kit_tests is {reprlib.repr(counts)}, and it has how many tests `ran`, and `of` how many")
    return f"part of the kit ({ran} of {of} tests)" if ran < of else ""


def _of(data: Mapping[str, Any], name: str, kind: Any) -> Any:
    if name not in data:
        raise ValueError(f"it has no {name!r}")
    value = data[name]
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {reprlib.repr(value)}, and it is {_KINDS[kind]}")  # noqa: TRY004 - likewise
    if isinstance(value, str):
        _check_line(name, value)
    return value


def _names(data: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of names, one line each; a file that lacks it has none."""
    names: list[Any] = _of(data, name, list) if name in data else []
    for each in names:
        if not isinstance(each, str):
            raise ValueError(f"{name} holds {reprlib.repr(each)}, and each is a text")  # noqa: TRY004 - likewise
        _check_line(name, each)
    return names


def _ranges(data: Mapping[str, Any]) -> dict[str, Interval]:
    """Return the smallest and the largest value by field."""
    for name, value in data.items():
        _check_line("a field of ranges", name)
        if not isinstance(value, list) or [*map(type, value)] not in _ENDS or not 0 <= value[0] <= value[1] < inf:
            raise ValueError(f"ranges has {name}={reprlib.repr(value)}, and it is the smallest and the largest number")
        _check_line(f"ranges of {name}", str(value))
    return {name: (low, high) for name, (low, high) in data.items()}


def _check_line(name: str, text: str) -> None:
    """Refuse what would fill a terminal, or control it."""
    if len(text) > _LONGEST or not text.isprintable():
        raise ValueError(f"{name} is {reprlib.repr(text)}, and it is one line, of at most {_LONGEST} characters")


def _device(data: Mapping[str, Any]) -> Device:
    _of(data, "type", str)
    for name, value in data.items():
        if type(value) not in (str, int):
            raise ValueError(f"device is {reprlib.repr(data)}, and its values are texts and numbers")
        _check_line(f"the device's {name}", str(value))
    try:
        return Device.from_dict(data)
    except AttnplugError as error:
        raise ValueError(f"device: {error.problem}; {error.expected}") from error


def _pair(item: Any, name: str) -> tuple[str, Any]:
    if not isinstance(item, Mapping) or not isinstance(item.get("field"), str) or "value" not in item:
        raise ValueError(f"{name} holds {reprlib.repr(item)}, and each is an object with `field` and `value`")
    if not _is_flat(item["value"]):
        raise ValueError(f"{name} holds {reprlib.repr(item)}, and no field has a value like that")
    _check_line(name, f"{item['field']}={item['value']}")
    return item["field"], hashable(item["value"])


def _is_flat(value: Any) -> bool:
    """Whether a value is plain, or a list or a table of plain ones: fields have no others."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(item, (dict, list)) for item in items)


def _text_of(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(getattr(error, "strerror", None) or error) if isinstance(error, (OSError, ValueError)) else ""


def _note(path: Path, message: str) -> Diagnostic:
    name = str(path)
    return Diagnostic(name if name.isprintable() else ascii(name), "evidence", message)
