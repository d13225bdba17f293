"""Evidence files: found in two places, read strictly, and never a failure of anything else."""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.discovery.plugin import BY_HAND, Known
from attnplug.discovery.registry import Registry
from attnplug.evidence import store
from attnplug.evidence.coverage import hashable
from attnplug.evidence.store import EvidenceStore, parse_evidence, read_folder
from attnplug.manifest.reader import parse_manifest
from attnplug.negotiation.candidate import Candidate
from attnplug.request.device import Device
from attnplug.request.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug.discovery.plugin import Plugin

GOOD: dict[str, Any] = {
    "format": 1,
    "command": "pytest",
    "backend": "acme/default",
    "distribution": "attnplug-acme 1.0",
    "device": {"type": "cuda", "vendor": "nvidia", "name": "NVIDIA H200", "compute_capability": "9.0"},
    "features": ["acme.rope"],
    "passed": True,
    "served": [{"field": "head_size", "value": 64}, {"field": "phases", "value": ["decode"]}],
    "unreached": [{"field": "block_sparse", "value": {"b": 1, "a": 2}, "because": "no oracle knows it"}],
}
numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
scalars = numbers | st.text()
lines = st.text(max_size=200).filter(str.isprintable)
short = numbers | st.text(max_size=8)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def write(folder: Path, name: str, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


@pytest.fixture
def acme(plugin: Any, manifest: Any, tmp_path: Path) -> Plugin:
    """A plugin with a folder, in which there may be evidence."""
    (tmp_path / "acme").mkdir()
    parsed = parse_manifest(manifest("acme"), str(tmp_path / "acme" / "attnplug.toml"))
    return attrs.evolve(plugin("acme"), manifest=parsed)


def registry_of(*plugins: Plugin, evidence: tuple[str, ...] = (), **sources: str) -> Registry:
    settings = Settings(evidence=evidence, sources=sources)
    return Registry(plugins, known=Known(), version_of=lambda _: None, settings=settings)


def about(store: EvidenceStore, candidate_id: str = "acme/default", label: str = "attnplug-acme 1.0") -> list[str]:
    backend = candidate_id.partition("/")[0]
    found = store.about(Candidate(candidate_id, backend, distribution=label.replace("acme", backend)))
    return [os.path.basename(evidence.origin) for evidence in found]  # noqa: PTH119 - a text


# What a file says


def test_a_file_is_read_as_the_kit_has_written_it() -> None:
    found = parse_evidence(GOOD, "here")

    assert (found.id, found.distribution, found.origin) == ("acme/default", "attnplug-acme 1.0", "here")
    assert found.device == Device.cuda("9.0", name="NVIDIA H200")
    assert found.passed
    assert found.served == {("head_size", 64), ("phases", ("decode",))}
    assert found.unreached == {("block_sparse", (("a", 2), ("b", 1))): "no oracle knows it"}
    assert found.features == {"acme.rope"}


def test_a_file_of_format_2_has_ranges() -> None:
    ranges = {"sliding_window": [1, 4096], "logits_soft_cap": [2.0, 50.0]}

    found = parse_evidence({**GOOD, "format": 2, "ranges": ranges})

    assert found.ranges == {"sliding_window": (1, 4096), "logits_soft_cap": (2.0, 50.0)}
    assert parse_evidence({**GOOD, "ranges": ranges}).ranges is None


def test_a_file_without_open_features_is_of_a_run_without_any() -> None:
    assert parse_evidence({name: value for name, value in GOOD.items() if name != "features"}).features == frozenset()


# Values are shown, and what is shown has a longest line: these stay below it.
texts = st.dictionaries(st.text(max_size=8), short, max_size=4)


@given(st.lists(st.tuples(lines, lines | numbers | st.lists(short, max_size=4) | texts)))
def test_every_value_that_json_carries_can_be_compared(pairs) -> None:
    served = [{"field": name, "value": value} for name, value in pairs]
    read = json.loads(json.dumps({**GOOD, "served": served}))

    found = parse_evidence(read).served

    assert all((item["field"], hashable(item["value"])) in found for item in read["served"])
    assert len(found) <= len(served)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "its format is 3, and this core reads formats 1 and 2"),
        ({"format": 2}, "it has no 'ranges'"),
        ({"format": 2, "ranges": [1]}, "ranges is [1], and it is an object"),
        ({"format": 2, "ranges": {"seq_len": 9}}, "ranges has seq_len=9, and it is the smallest and the largest"),
        ({"format": 2, "ranges": {"seq_len": [9, 1]}}, "ranges has seq_len=[9, 1]"),
        ({"format": 2, "ranges": {"seq_len": [1, True]}}, "ranges has seq_len=[1, True]"),
        ({"format": 2, "ranges": {"seq_len": [1.0, 1e999]}}, "ranges has seq_len=[1.0, inf]"),
        ({"format": 2, "ranges": {"seq_len": [-1, 9]}}, "ranges has seq_len=[-1, 9]"),
        ({"format": 2, "ranges": {"seq\x1b[31m": [1, 9]}}, "a field of ranges is 'seq\\x1b[31m', and it is one line"),
        ({"format": 2, "ranges": {"seq_len": [1, 10**1001]}}, "and it is one line"),
        ({"format": True}, "its format is True"),
        ({"format": None}, "its format is None"),
        ({"backend": "acme"}, "`backend/variant`"),
        ({"backend": 3}, "backend is 3, and it is a text"),
        ({"distribution": "attnplug-acme"}, "no version says"),
        ({"distribution": BY_HAND}, "no version says"),
        ({"passed": 1}, "passed is 1, and it is true or false"),
        ({"kit_tests": 12}, "kit_tests is 12, and it is an object"),
        ({"kit_tests": {"ran": 12}}, "kit_tests is {'ran': 12}, and it has"),
        ({"kit_tests": {"ran": 12, "of": 4}}, "and it has how many tests `ran`"),
        ({"device": "cpu"}, "device is 'cpu', and it is an object"),
        ({"device": {}}, "it has no 'type'"),
        ({"device": {"type": "cuda"}}, "without a compute capability"),
        ({"device": {"type": "cpu", "color": "red"}}, "the device field 'color' was given"),
        ({"device": {"type": "cpu", "name": ["a"]}}, "its values are texts and numbers"),
        ({"served": [{"field": "head_size", "value": [[1]]}]}, "no field has a value like that"),
        ({"features": "acme.rope"}, "features is 'acme.rope', and it is a list"),
        ({"features": [["acme.rope"]]}, "features holds ['acme.rope'], and each is a text"),
        ({"features": ["acme.\x1b[31mrope"]}, "features is 'acme.\\x1b[31mrope', and it is one line"),
        ({"served": {"head_size": 64}}, "served is {'head_size': 64}, and it is a list"),
        ({"served": [64]}, "served holds 64"),
        ({"served": [{"field": "head_size"}]}, "served holds {'field': 'head_size'}"),
        ({"unreached": [{"field": "sinks", "value": True}]}, "it has no 'because'"),
        ({"backend": "acme/" + "x" * 2000}, "and it is one line, of at most 1000 characters"),
        ({"distribution": "attnplug-acme 1.0\n\x1b[31mfake"}, "and it is one line"),
        ({"device": {"type": "cpu", "name": "\x1b[31mred"}}, "the device's name is '\\x1b[31mred', and it is one line"),
        ({"device": {"type": "cpu", "num_multiprocessors": True}}, "its values are texts and numbers"),
        ({"served": [{"field": "head_size", "value": 10**1001}]}, "and it is one line"),
        ({"unreached": [{"field": "sinks", "value": True, "because": "\x1b]0;a\x07"}]}, "because is"),
    ],
)
def test_the_error_says_what_is_wrong(change, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_evidence({**GOOD, **change})


@pytest.mark.parametrize("key", ["backend", "distribution", "device", "passed", "served", "unreached"])
def test_every_key_that_is_used_is_needed(key) -> None:
    with pytest.raises(ValueError, match=f"it has no '{key}'"):
        parse_evidence({name: value for name, value in GOOD.items() if name != key})


@given(plain | st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, plain)).map(lambda change: {**GOOD, **change}))
def test_no_content_is_more_than_a_value_error(content) -> None:
    with suppress(ValueError):
        found = parse_evidence(content)
        assert content["format"] in (1, 2)
        assert found.id == content["backend"]
        assert {found.device: str(found.device)}


# What is in a folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "it is no JSON object"),
        (b"\xff\xfe\x00", "it is no UTF-8: invalid start byte at byte 0"),
        (json.dumps({**GOOD, "fraction": float("nan")}).encode(), "it is no JSON: there is no number NaN"),
        (b" " * (4 * 2**20 + 1), "it is larger than 4 MiB"),
        (b"[" * 100_000, "it is nested too deeply"),
        (json.dumps({**GOOD, "format": 7}).encode(), "its format is 7"),
    ],
    ids=["empty", "cut off", "a list", "no text", "no number", "huge", "deep", "newer"],
)
def test_a_file_that_is_no_evidence_is_a_note_and_hides_no_other(tmp_path: Path, content, message) -> None:
    write(tmp_path, "a.json", GOOD)
    (tmp_path / "b.json").write_bytes(content)
    write(tmp_path, "c.json", {**GOOD, "backend": "acme/other"})
    write(tmp_path, "read.me", "no evidence at all")

    shelf = read_folder(tmp_path)

    assert [evidence.id for evidence in shelf.evidence] == ["acme/default", "acme/other"]
    (note,) = shelf.notes
    assert (note.subject, note.stage) == (str(tmp_path / "b.json"), "evidence")
    assert message in note.message


def test_what_is_no_file_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")  # opening it would wait for a writer
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")

    shelf = read_folder(tmp_path)

    assert shelf.evidence == ()
    why = ("No such file or directory", "Is a directory", "it is no regular file")
    assert [note.message for note in shelf.notes] == [f"is not read: {each}" for each in why]


def test_a_note_steers_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "\x1b[31mred.json").write_text("{}", "utf-8")

    (note,) = read_folder(tmp_path).notes

    assert note.subject.endswith("\\x1b[31mred.json'")


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", GOOD)

    assert read_folder(tmp_path / "none").notes == read_folder(file).notes == ()
    assert read_folder(tmp_path / "none").evidence == read_folder(file).evidence == ()


def test_a_folder_that_cannot_be_named_is_a_note(tmp_path: Path) -> None:
    (note,) = read_folder(tmp_path / "nul\0byte").notes

    assert "cannot be listed" in note.message


def test_a_run_that_failed_is_noted(tmp_path: Path) -> None:
    write(tmp_path, "a.json", {**GOOD, "passed": False})

    shelf = read_folder(tmp_path)

    assert [evidence.passed for evidence in shelf.evidence] == [False]
    assert [note.message for note in shelf.notes] == [
        "records a run in which 'acme/default' failed, and verifies nothing"
    ]


def test_a_run_of_part_of_the_kit_is_noted_with_its_part(tmp_path: Path) -> None:
    write(tmp_path, "part.json", {**GOOD, "kit_tests": {"ran": 12, "of": 400}})
    write(tmp_path, "whole.json", {**GOOD, "kit_tests": {"ran": 400, "of": 400}})
    write(tmp_path, "without.json", GOOD)

    shelf = read_folder(tmp_path)

    assert [evidence.verifies for evidence in shelf.evidence] == [False, True, True]
    assert [note.message for note in shelf.notes] == [
        "records part of the kit (12 of 400 tests) for 'acme/default', and verifies nothing"
    ]


# Where it is found


def test_a_plugin_ships_evidence_and_the_user_has_more(acme: Plugin, tmp_path: Path) -> None:
    write(tmp_path / "acme" / "evidence", "default-cpu.json", GOOD)
    write(tmp_path / "mine", "evidence-acme-default.json", GOOD)
    write(tmp_path / "more", "x.json", GOOD)
    folders = (str(tmp_path / "mine"), str(tmp_path / "more"), str(tmp_path / "mine"))

    assert about(EvidenceStore([acme])) == ["default-cpu.json"]
    found = EvidenceStore([acme], folders)
    assert about(found) == ["default-cpu.json", "evidence-acme-default.json", "x.json"]
    assert found.notes() == ()


def test_a_plugin_vouches_for_itself_alone(acme: Plugin, plugin: Any, tmp_path: Path) -> None:
    write(tmp_path / "acme" / "evidence", "other.json", {**GOOD, "backend": "other/default"})
    write(tmp_path / "acme" / "evidence", "slow.json", {**GOOD, "backend": "acme/slow"})
    found = EvidenceStore([acme, plugin("other")])

    assert about(found) == about(found, "other/default") == []
    assert [note.message for note in found.notes()] == [
        "is about 'other/default', which is no variant of 'acme'",
        "is about 'acme/slow', which is no variant of 'acme'",
    ]


def test_another_distribution_of_that_backend_ships_none_for_it(acme: Plugin, tmp_path: Path) -> None:
    """A blocked distribution may claim what another one's variant does."""
    write(tmp_path / "acme" / "evidence", "a.json", GOOD)
    blocked = attrs.evolve(acme, distribution="attnplug-blocked")

    assert about(EvidenceStore([blocked])) == []
    assert about(EvidenceStore([blocked]), label="attnplug-blocked 1.0") == ["a.json"]


def test_evidence_about_what_is_not_installed_is_a_note(acme: Plugin, tmp_path: Path) -> None:
    file = write(tmp_path / "mine", "x.json", {**GOOD, "backend": "gone/default"})
    found = EvidenceStore([acme], [str(tmp_path / "mine")])

    (note,) = found.notes()
    assert str(note) == f"{file}: is about 'gone/default', which no installed plugin offers"


def test_bad_files_hide_no_plugin_and_change_no_candidate(acme: Plugin, tmp_path: Path) -> None:
    before = registry_of(acme).candidates(Settings())
    write(tmp_path / "acme" / "evidence", "bad.json", "{")

    found = registry_of(acme)

    assert [note.stage for note in EvidenceStore(found.plugins).notes()] == ["evidence"]
    assert [(c.id, c.availability) for c in found.candidates(Settings())] == [(c.id, c.availability) for c in before]


def test_a_folder_that_does_not_exist_is_warned_about_once(
    acme: Plugin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, gone = tmp_path / "there", str(tmp_path / "gone")
    there.mkdir()
    settings = Settings(evidence=(str(there), gone), sources={"evidence": "environment variable ATTNPLUG_EVIDENCE"})
    found = registry_of(acme, evidence=settings.evidence)

    with caplog.at_level(logging.WARNING, logger="attnplug"):
        found.candidates(settings)
        found.candidates(settings, assume_installed=True)

    (record,) = caplog.records
    assert record.getMessage() == (
        f"{gone!r} in environment variable ATTNPLUG_EVIDENCE is no folder, and holds no evidence"
    )


# When it is read


def test_files_are_read_once_and_not_before_they_are_needed(acme: Plugin, tmp_path: Path) -> None:
    found = EvidenceStore([acme])
    file = write(tmp_path / "acme" / "evidence", "a.json", GOOD)

    assert about(found) == ["a.json"]
    file.unlink()
    assert about(found) == ["a.json"]


def test_of_many_files_the_first_are_read(tmp_path: Path) -> None:
    for number in range(1003):
        (tmp_path / f"{number:04}.json").write_text("{}")

    notes = read_folder(tmp_path).notes

    assert notes[0].message == "holds 1,003 files, of which the first 1,000 are read"
    assert len(notes) == 1001


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large"), TypeError("odd"), RecursionError()])
def test_whatever_reading_a_file_raises_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text("{}")

    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(store.json, "loads", lambda *_, **__: fail(None))

    notes = read_folder(tmp_path).notes

    assert len(notes) == 2
    expected = "nested too deeply" if isinstance(error, RecursionError) else type(error).__name__
    assert all(expected in note.message for note in notes)
