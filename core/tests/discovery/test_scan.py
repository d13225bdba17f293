"""The walk over what is installed: what it finds, and what it survives."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_DEFLATED, ZipExtFile, ZipFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.commands import version_of
from attnplug.discovery.distribution import Entry, normalized
from attnplug.discovery.registry import Registry
from attnplug.discovery.scan import scan
from attnplug.request.settings import Settings
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,6}[A-Za-z0-9])?", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}(rc[0-9]|\.post[0-9]|\+cpu)?", fullmatch=True)
MODULES = st.from_regex(r"[a-z_]{1,5}(\.[a-z_]{1,5})?", fullmatch=True)
GROUPS = st.sampled_from(["attnplug.backends", "console_scripts", "attnplug.other"])
POINTS = st.lists(st.tuples(GROUPS, MODULES, MODULES), max_size=5, unique_by=lambda point: point[:2])
DISTRIBUTIONS = st.lists(st.tuples(NAMES, VERSIONS, POINTS), max_size=6, unique_by=lambda d: normalized(d[0]))


def test_entries_come_by_name_then_distribution(site: Any) -> None:
    site.distribution("zeta", "2.0", "[attnplug.backends]\nbeta = zeta.plugin\nalpha = zeta.other\n")
    site.distribution("eta", "1.5", "[attnplug.backends]\nbeta=eta.plugin\n[console_scripts]\nbeta = eta.cli:main\n")

    assert scan([str(site)]).entries == (
        Entry("alpha", "zeta.other", "zeta", "2.0"),
        Entry("beta", "eta.plugin", "eta", "1.5"),
        Entry("beta", "zeta.plugin", "zeta", "2.0"),
    )


@given(DISTRIBUTIONS)
@settings(max_examples=60)
def test_it_agrees_with_the_standard_library(make_site: Any, found: list[tuple[str, str, list]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = make_site(Path(folder))
        for name, version, points in found:
            lines = (f"[{group}]\n{key} = {value}\n# a comment\n\n" for group, key, value in points)
            site.distribution(name, version, "".join(lines))

        result = scan([folder])

        theirs = [
            Entry(point.name, point.value, each.name, each.version)
            for each in importlib.metadata.distributions(path=[folder])
            for point in each.entry_points
            if point.group == "attnplug.backends"
        ]
        assert sorted(result.entries, key=str) == sorted(theirs, key=str)
        assert result.notes == ()
        assert {name: result.version_of(name) for name, _, _ in found} == {name: version for name, version, _ in found}


@given(st.binary(max_size=200))
@settings(max_examples=examples(100))
def test_no_content_of_a_neighbour_hides_a_plugin(make_site: Any, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = make_site(Path(folder))
        site.distribution("a-neighbour", "1.0", content)
        site.offer("good", "plugin")
        site.distribution("z-neighbour", "1.0", content)

        assert Entry("good", "nowhere.plugin", "plugin", "1.0") in scan([folder]).entries


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[anything]\nno equals sign\n", "'no equals sign'"),
        (b"[anything]\nname = \xff\xfe\n", "UnicodeDecodeError"),
        ("[attnplug.backends]\nodd = not a module!\n", "'not a module!'"),
        ("[attnplug.backends]\nodd = package:attribute\n", "'package:attribute'"),
    ],
)
def test_a_malformed_neighbour_is_noted_by_name(site: Any, content: str | bytes, complaint: str) -> None:
    site.distribution("neighbour", "3.1", content)
    site.offer("good", "plugin")

    result = scan([str(site)])

    assert "good" in [entry.name for entry in result.entries]
    (note,) = result.notes
    assert note.subject == "neighbour 3.1"
    assert note.stage == "scan"
    assert complaint in note.message
    assert str(note) == f"neighbour 3.1: {note.message}"


def test_good_lines_of_a_malformed_distribution_count(site: Any) -> None:
    site.distribution("half", "1.0", "[other]\nbroken\n[attnplug.backends]\ngood = half.plugin\n")

    result = scan([str(site)])

    assert result.entries == (Entry("good", "half.plugin", "half", "1.0"),)
    assert len(result.notes) == 1


def test_entry_points_that_are_no_file_are_noted(site: Any) -> None:
    (site.distribution("neighbour") / "entry_points.txt").mkdir()

    (note,) = scan([str(site)]).notes

    assert "IsADirectoryError" in note.message


def test_an_interrupted_uninstallation_is_no_distribution(site: Any) -> None:
    site.offer("good", "~lugin")

    result = scan([str(site)])

    assert result.entries == ()
    assert "~lugin" in result.notes[0].subject


def test_a_distribution_without_metadata_goes_by_its_folder(site: Any) -> None:
    (site.offer("good", "my-plugin", "4.2") / "METADATA").unlink()

    result = scan([str(site)])

    assert result.entries == (Entry("good", "nowhere.plugin", "my_plugin", "4.2"),)
    assert result.version_of("My.Plugin") == "4.2"


def test_metadata_that_cannot_be_read_goes_by_its_folder(site: Any) -> None:
    info = site.offer("good", "plugin", "4.2")
    (info / "METADATA").unlink()
    (info / "METADATA").mkdir()

    assert scan([str(site)]).entries[0].version == "4.2"


def test_a_folder_without_version_has_none(site: Any) -> None:
    (site.folder / "bare.dist-info").mkdir()

    result = scan([str(site)])

    assert result.version_of("bare") is None
    assert [note.message for note in result.notes] == [
        "has no version, as after an interrupted installation, and is passed over"
    ]


def test_what_has_no_version_hides_no_other_copy(site: Any, another_site: Any) -> None:
    (site.folder / "plugin-.dist-info").mkdir()
    (site.folder / "plugin-.dist-info" / "METADATA").write_text("Name: plugin\n", encoding="utf-8")
    another_site.offer("good", "plugin", "2.0")

    result = scan([str(site), str(another_site)])

    assert [entry.name for entry in result.entries] == ["good"]
    assert result.version_of("plugin") == "2.0"


@pytest.mark.parametrize("kind", ["zzz-1.0.egg-info", "attnplug.egg-info", "attnplug-9.9.dist-info"])
def test_nothing_passes_for_core_and_nothing_removes_it(site: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = site.folder / kind
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Name: attnplug\nVersion: 9.9\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text("[attnplug.backends]\nmine = mine.plugin\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    found = Registry.scan(Settings())

    assert found.plugin("torch").label == f"attnplug {attnplug.__version__}"
    assert scan().version_of("attnplug") == attnplug.__version__
    assert not [plugin for plugin in found.plugins if plugin.label == "attnplug 9.9"]
    (note,) = (note for note in found.notes if kind in str(note) or "zzz" in note.subject)
    assert ("it is in" if kind.startswith("zzz") else "is not this core, which is attnplug") in str(note) or (
        "the name of another distribution" in str(note)
    )


@pytest.mark.parametrize("raised", [RuntimeError("\x1b[31mred"), SystemExit(3)])
def test_a_finder_may_raise_anything(raised: BaseException, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising:
        def find_distributions(self, context: object) -> Iterator[importlib.metadata.Distribution]:
            raise raised

    site.offer("good", "plugin")
    monkeypatch.setattr(sys, "meta_path", [Raising(), *sys.meta_path])

    assert [entry.name for entry in scan([str(site)]).entries] == ["good"]
    assert version_of("attrs") == ""
    assert "\x1b" not in str(scan([str(site)]).notes)


def test_a_finder_that_offers_without_an_end_is_left(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def find_distributions(self, context: object) -> Iterator[importlib.metadata.Distribution]:
            return (Foreign(f"foreign-{number}", "") for number in count())

    site.offer("good", "plugin")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Endless()])

    result = scan([str(site)])

    assert [entry.name for entry in result.entries] == ["good"]
    assert result.notes[-1].message == "offers more than 5,000 distributions, and the rest is not read"


def test_older_forms_of_metadata_count(site: Any) -> None:
    developed = site.folder / "developed.egg-info"
    developed.mkdir()
    (developed / "PKG-INFO").write_text("Name: developed\nVersion: 0.3\n", encoding="utf-8")
    (developed / "entry_points.txt").write_text("[attnplug.backends]\nold = developed.plugin\n", encoding="utf-8")
    (site.folder / "ancient-1.2-py3.11.egg-info").write_text("Name: ancient\nVersion: 1.2.0\n", encoding="utf-8")

    result = scan([str(site)])

    assert result.entries == (Entry("old", "developed.plugin", "developed", "0.3"),)
    assert result.version_of("ancient") == "1.2.0"
    assert result.version_of("developed") == "0.3"
    assert result.version_of("absent") is None


def test_a_copy_further_down_the_path_is_shadowed_and_noted(site: Any, another_site: Any) -> None:
    site.offer("good", "my-plugin", "2.0")
    another_site.offer("good", "My_Plugin", "1.0")
    another_site.offer("other", "other")

    result = scan([str(site), str(another_site)])

    assert [(entry.name, entry.version) for entry in result.entries] == [("good", "2.0"), ("other", "1.0")]
    assert result.version_of("my-plugin") == "2.0"
    (note,) = result.notes
    assert note.subject == "My_Plugin 1.0"
    assert "shadowed by my-plugin 2.0" in note.message
    assert str(another_site) in note.message


def test_a_shadowed_copy_of_no_plugin_is_nothing_odd(site: Any, another_site: Any) -> None:
    for each in (site, another_site):
        each.distribution("library", "1.0", "[console_scripts]\nlibrary = library:main\n")

    assert scan([str(site), str(another_site)]).notes == ()


def test_of_two_versions_in_one_folder_the_newer_is_used(site: Any) -> None:
    for version in ("1.9", "1.10", "1.2"):
        site.offer("good", "plugin", version)

    result = scan([str(site)])

    assert [entry.version for entry in result.entries] == ["1.10"]
    assert sorted(note.subject for note in result.notes) == ["plugin 1.2", "plugin 1.9"]


def test_the_same_folder_is_walked_once(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("good", "plugin")
    (tmp_path / "link").symlink_to(site.folder)
    monkeypatch.chdir(site.folder)

    result = scan([str(site), str(tmp_path / "link"), "", "."])

    assert len(result.entries) == 1
    assert result.notes == ()


def test_odd_items_of_the_path_are_passed_over(site: Any) -> None:
    site.offer("good", "plugin")

    result = scan([str(site.folder / "absent"), "x" * 300, "nul\0", site.folder, str(site)])  # type: ignore[list-item]

    assert len(result.entries) == 1
    assert [note.subject for note in result.notes] == ["x" * 300, "nul\0"]


def test_archives_are_walked(site: Any, tmp_path: Path) -> None:
    info = site.offer("zipped", "zipped", "0.9")
    (site.distribution("odd") / "entry_points.txt").write_text("[other]\nbroken\n", encoding="utf-8")
    with ZipFile(tmp_path / "plugins.zip", "w") as archive:
        for file in [*info.iterdir(), *(site.folder / "odd-1.0.dist-info").iterdir()]:
            archive.write(file, file.relative_to(site.folder))

    result = scan([str(tmp_path / "plugins.zip")])

    assert result.entries == (Entry("zipped", "nowhere.plugin", "zipped", "0.9"),)
    assert [note.subject for note in result.notes] == ["odd 1.0"]


def test_unpacked_eggs_are_walked(tmp_path: Path) -> None:
    egg = tmp_path / "hatched-0.4-py3.11.egg"
    (egg / "EGG-INFO").mkdir(parents=True)
    (egg / "EGG-INFO" / "PKG-INFO").write_text("Name: hatched\nVersion: 0.4\n", encoding="utf-8")
    (egg / "EGG-INFO" / "entry_points.txt").write_text("[attnplug.backends]\nbird = hatched\n", encoding="utf-8")

    assert scan([str(egg)]).entries == (Entry("bird", "hatched", "hatched", "0.4"),)


class Foreign(importlib.metadata.Distribution):
    """A distribution that is in no folder."""

    def __init__(self, name: str, points: str) -> None:
        self.files_by_name = {"METADATA": f"Name: {name}\nVersion: 7.0\n", "entry_points.txt": points}

    def read_text(self, filename: str) -> str | None:
        return self.files_by_name.get(filename)

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


class Nameless(Foreign):
    @property
    def metadata(self) -> object:  # type: ignore[override]
        msg = "no metadata here"
        raise LookupError(msg)


class Finder:
    """Another finder on ``sys.meta_path``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: object) -> Iterator[importlib.metadata.Distribution]:
        yield Nameless("nameless", "")
        yield Foreign("foreign", "[attnplug.backends]\nfar = far.plugin\n")
        msg = "the finder gives up"
        raise RuntimeError(msg)


class Repeating:
    """A finder that finds what Python's own finds, as the backport of the standard library's module does."""

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> object:
        return importlib.metadata.MetadataPathFinder.find_distributions(context)


def test_other_finders_are_used_and_guarded(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("good", "plugin")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])

    result = scan([str(site)])

    assert [entry.name for entry in result.entries] == ["far", "good"]
    assert result.version_of("foreign") == "7.0"
    complaints = [note.message for note in result.notes]
    assert "LookupError: no metadata here" in complaints[0]
    assert "RuntimeError: the finder gives up" in complaints[1]


def test_what_another_finder_repeats_is_no_second_copy(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("good", "plugin")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Repeating()])

    result = scan([str(site)])

    assert len(result.entries) == 1
    assert result.notes == ()


def test_a_line_that_is_repeated_counts_once(site: Any) -> None:
    site.distribution("plugin", "1.0", "[attnplug.backends]\ngood = a.b\ngood = a.b\n")

    assert len(scan([str(site)]).entries) == 1


def test_this_environment_is_walked_by_default() -> None:
    result = scan()

    assert "torch" not in [entry.name for entry in result.entries]  # it is part of core, and no metadata offers it
    assert "flash_attn" in [entry.name for entry in result.entries]
    assert result.version_of("attrs") == importlib.metadata.version("attrs")
    assert result.version_of("pytest_randomly") == importlib.metadata.version("pytest-randomly")


# What would block, or fill the memory


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "device"])
def test_an_item_of_the_path_that_is_no_file_is_passed_over(site: Any, tmp_path: Path, make: Any) -> None:
    site.offer("good", "plugin")
    make(tmp_path / "odd")

    assert [entry.name for entry in scan([str(tmp_path / "odd"), str(site)]).entries] == ["good"]


@pytest.mark.parametrize("file", ["entry_points.txt", "METADATA"])
def test_what_is_compressed_is_read_up_to_a_limit(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    site.offer("good", "plugin")
    with ZipFile(tmp_path / "bomb.zip", "w", ZIP_DEFLATED) as archive:
        archive.writestr("bomb-1.0.dist-info/METADATA", "Name: bomb\nVersion: 1.0\n")
        archive.writestr("bomb-1.0.dist-info/entry_points.txt", "[attnplug.backends]\nbomb = bomb.plugin\n")
        archive.writestr("fine-1.0.dist-info/METADATA", "Name: fine\nVersion: 2.0\n")
        archive.writestr("fine-1.0.dist-info/entry_points.txt", "[attnplug.backends]\nfine = fine.plugin\n")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(f"bomb-1.0.dist-info/{file}", b" " * 50 * 2**20)
    sizes: list[int] = []
    real = ZipExtFile.read

    def read(self: ZipExtFile, size: int | None = -1) -> bytes:
        sizes.append(len(content := real(self, size)))
        return content

    monkeypatch.setattr(ZipExtFile, "read", read)

    result = scan([str(tmp_path / "bomb.zip"), str(site)])

    assert {"good", "fine"} <= {entry.name for entry in result.entries}
    assert "larger than" in " ".join(note.message for note in result.notes)
    assert [entry for entry in result.entries if entry.name == "bomb" and not entry.problem] == []
    assert max(sizes) <= 4 * 2**20 + 1


class Odd:
    """A finder no attribute of which can be read."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error(name)

    def __repr__(self) -> str:
        raise self._error


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_finder_that_fails_at_once_is_noted(
    error: type[BaseException], site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.offer("good", "plugin")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Odd(error)])

    result = scan([str(site)])

    assert [entry.name for entry in result.entries] == ["good"]
    assert f"cannot list its distributions: {error.__name__}: find_distributions" in result.notes[0].message


@pytest.mark.parametrize("name", ["attnplug", "plugin"])
def test_no_distribution_passes_for_another(site: Any, name: str) -> None:
    site.offer("good", "plugin")
    (site.offer("torch", "rival", module="attnplug.rival") / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")

    (good, torch) = scan([str(site)]).entries

    assert (good.distribution, good.problem) == ("plugin", "")
    assert torch.distribution == "rival"
    assert torch.problem == f"its metadata has the name of another distribution, {name!r}"
