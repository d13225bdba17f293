"""The dry run of a release: its own checks find each defect of an archive, and its smoke tests can fail."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest
import yaml
from attrs import evolve
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from tools import archives, release, smoke

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
PROJECTS = {project.name: project for project in release.projects()}
PROJECT = PROJECTS["attnplug-blocksparse"]
INFO = f"{PROJECT.package}-{PROJECT.version}.dist-info"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist of one plugin."""
    target = tmp_path_factory.mktemp("dist")
    wheel = next(WheelBuilder(str(PROJECT.folder)).build(directory=str(target), versions=["standard"]))
    sdist = next(SdistBuilder(str(PROJECT.folder)).build(directory=str(target), versions=["standard"]))
    return Path(wheel), Path(sdist)


def test_what_is_built_has_no_problem(built: tuple[Path, Path]) -> None:
    wheel, sdist = built

    assert archives.wheel_problems(wheel, PROJECT) == []
    assert archives.sdist_problems(sdist, PROJECT) == []
    assert archives.version_problems(PROJECTS.values()) == []


def test_every_distribution_of_the_workspace_is_released() -> None:
    folders = {path.parent for path in ROOT.glob("*/pyproject.toml")} | {
        p.parent for p in ROOT.glob("*/*/pyproject.toml")
    }

    assert {project.folder for project in PROJECTS.values()} == {
        folder for folder in folders if "tests" not in folder.parts
    }
    assert next(iter(PROJECTS)) == "attnplug"


def _changed(wheel: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Write a wheel with other files, whose RECORD fits them."""
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    record = f"{INFO}/RECORD"
    if record in files and b"stale" not in files[record]:
        digests = {
            n: base64.urlsafe_b64encode(hashlib.sha256(c).digest()).rstrip(b"=").decode() for n, c in files.items()
        }
        files[record] = "".join(f"{n},sha256={d},\n" for n, d in digests.items() if n != record).encode()
    made = target / wheel.name
    with ZipFile(made, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made


def _replace(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        assert old in files[name]
        files[name] = files[name].replace(old, new)

    return change


def _add(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.update({name: b"x"})


def _remove(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.__delitem__(name)


METADATA, PACKAGE = f"{INFO}/METADATA", PROJECT.package
WRONG = {
    "a cache": (_add(f"{PACKAGE}/__pycache__/plugin.pyc"), "has no place in a wheel"),
    "tests": (_add("tests/test_plugin.py"), "has no place in a wheel"),
    "another package": (_add("other/__init__.py"), "has no place in a wheel"),
    "a hidden file": (_add(f"{PACKAGE}/.env"), "has no place in a wheel"),
    "a compiled part": (_add(f"{PACKAGE}/kernels.so"), "has no place in a wheel"),
    "no py.typed": (_remove(f"{PACKAGE}/py.typed"), "py.typed is missing"),
    "no manifest": (_remove(f"{PACKAGE}/attnplug.toml"), "attnplug.toml of the backend 'blocksparse' is missing"),
    "no plugin module": (_remove(f"{PACKAGE}/plugin.py"), "the module of the entry point 'blocksparse'"),
    "no licence": (_remove(f"{INFO}/licenses/LICENSE"), "the licence is missing"),
    "no entry points": (_remove(f"{INFO}/entry_points.txt"), "its entry points are {}"),
    "another version": (_replace(METADATA, b"Version: 0", b"Version: 9"), "its metadata has Version: '9"),
    "another licence": (_replace(METADATA, b"Apache-2.0", b"MIT"), "its metadata has License-Expression: 'MIT'"),
    "another requirement": (
        _replace(METADATA, b"Requires-Dist: attrs", b"Requires-Dist: attr"),
        "its metadata requires",
    ),
    "another type of README": (_replace(METADATA, b"text/markdown", b"text/plain"), "Description-Content-Type"),
    "another README": (lambda files: files.update({METADATA: files[METADATA] + b"more"}), "is not the README"),
    "a stale record": (_replace(f"{INFO}/RECORD", b"sha256=", b"stale="), "RECORD has another hash"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_defect_of_a_wheel_is_found(name: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    change, problem = WRONG[name]

    found = archives.wheel_problems(_changed(built[0], tmp_path, change), PROJECT)

    assert any(problem in each for each in found), found


def test_a_wheel_for_one_platform_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    made = tmp_path / built[0].name.replace("any", "linux_x86_64")
    made.write_bytes(built[0].read_bytes())

    assert any("its name is not" in each for each in archives.wheel_problems(made, PROJECT))


def test_a_link_that_an_index_does_not_have_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# A title\n\nA sentence with [a link](../docs/index.md).\n")
    (tmp_path / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    made = _changed(
        built[0],
        tmp_path,
        lambda files: files.update({METADATA: files[METADATA].partition(b"\n\n")[0] + b"\n\n" + readme.read_bytes()}),
    )

    found = archives.wheel_problems(made, evolve(PROJECT, folder=tmp_path))

    assert [each.partition(": ")[2] for each in found] == [
        "its README links to '../docs/index.md', which an index does not have"
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("notes.txt", "has no place in an sdist"),
        ("src/attnplug_blocksparse/__pycache__/plugin.pyc", "has no place in an sdist"),
        ("tests/.env", "has no place in an sdist"),
        ("../outside", "is outside of"),
    ],
)
def test_a_stray_file_of_an_sdist_is_found(name: str, problem: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    made = tmp_path / built[1].name
    with tarfile.open(built[1]) as source, tarfile.open(made, "w:gz") as target:
        for member in source.getmembers():
            target.addfile(member, source.extractfile(member))
        stray = tarfile.TarInfo(name if name.startswith("..") else f"{PACKAGE}-{PROJECT.version}/{name}")
        stray.size = 1
        target.addfile(stray, io.BytesIO(b"x"))

    found = archives.sdist_problems(made, PROJECT)

    assert any(problem in each for each in found), found


def test_versions_that_do_not_admit_each_other_are_found() -> None:
    newer = evolve(PROJECTS["attnplug"], metadata={**PROJECTS["attnplug"].metadata, "version": "1.0.0"})

    found = archives.version_problems([newer, PROJECT])

    assert found == ["attnplug-blocksparse requires attnplug[torch]<1,>=0.1, and the workspace has 1.0.0"]


@pytest.mark.parametrize("name", PROJECTS)
def test_each_distribution_has_a_smoke_test(name: str) -> None:
    is_host = smoke.host_test(name).exists()
    assert name in smoke.TESTS or is_host or "attnplug.backends" in PROJECTS[name].entry_points


@pytest.mark.parametrize("name", PROJECTS)
def test_each_readme_can_be_shown_by_an_index(name: str) -> None:
    text = (PROJECTS[name].folder / "README.md").read_text("utf-8")

    assert list(archives.readme_problems(text, PROJECTS[name])) == []


def test_each_distribution_is_installed_with_core_only() -> None:
    planned = dict(release.plan_installs(list(PROJECTS.values())))

    assert planned.pop("attnplug[torch]") == ["attnplug"]
    assert planned.pop("attnplug") == ["attnplug"]
    assert planned == {name: ["attnplug", name] for name in PROJECTS if name != "attnplug"}


@pytest.mark.unmeasured
def test_the_smoke_test_of_a_plugin_runs_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke.plugin("attnplug-blocksparse")
    with pytest.raises(smoke.SmokeError, match="it offers no backend"):
        smoke.plugin("attnplug-kit")
    with pytest.raises(smoke.SmokeError, match="exits with 2"):
        smoke.command("no-such-command")
    with pytest.raises(smoke.SmokeError, match="torch is installed"):
        smoke.core()
    monkeypatch.setattr(smoke, "command", lambda *_: '{"backends": []}')
    with pytest.raises(smoke.SmokeError, match="has 0 backends 'blocksparse'"):
        smoke.plugin("attnplug-blocksparse")


@pytest.mark.unmeasured
def test_the_script_prints_why_a_smoke_test_fails() -> None:
    script = ROOT / "tools" / "smoke.py"

    done = subprocess.run([sys.executable, "-I", str(script), "attnplug"], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stdout.startswith("attnplug: ")


@pytest.mark.unmeasured
def test_wheels_of_a_folder_are_installed_without_an_index(tmp_path: Path) -> None:
    wheels = release.make_wheels([PROJECT], tmp_path / "wheels")
    (link,) = re.findall(r'href="(.*?)#sha256=(.*?)"', (tmp_path / "wheels" / "index.html").read_text("utf-8"))
    assert link == (wheels[0].name, hashlib.sha256(wheels[0].read_bytes()).hexdigest())

    for where in (tmp_path / "wheels", tmp_path / "wheels" / "index.html"):
        target = tmp_path / where.name
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-index",
            "--no-deps",
            "--quiet",
            "--target",
            str(target),
        ]
        subprocess.run([*command, "--find-links", str(where), PROJECT.name], check=True)
        assert (target / PROJECT.package).is_dir()


def test_the_workflow_of_a_release_uploads_what_was_checked() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    (upload,) = (step["with"]["path"] for step in jobs["build"]["steps"] if "upload" in step.get("uses", ""))

    assert ROOT / upload == release.DIST
    assert any(step.get("run", "").startswith("make release-check") for step in jobs["build"]["steps"])
    assert (jobs["publish"]["needs"], jobs["publish"]["permissions"]) == ("build", {"id-token": "write"})
    assert "password" not in text
