"""
What ``attnplug new`` writes is a plugin: in a fresh environment with only what its README installs, it is listed,
checked and chosen, and its own tests, which are the conformance kit, pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from attrs import frozen

from attnplug_kit.new.project import FILES
from tools.session import closure, link

ROOT = Path(__file__).parents[1]
CORE, KIT = ROOT / "core", ROOT / "kit"
OURS = ("ATTNPLUG_", "COV", "PYTEST", "PYTHONPATH")  # settings, measurements and paths of this run
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2]))
"""

REQUEST = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "2", "--dtype", "bfloat16", "--device", "cpu")


@frozen
class Environment:
    """A new project, and a Python environment that has it, core, kit, what these require, and nothing else."""

    folder: Path

    @property
    def project(self) -> Path:
        return self.folder / "attnplug-acme-fast"

    @property
    def site(self) -> Path:
        return next(self.folder.glob("venv/lib/python*/site-packages"))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a module of Python in the project."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        own = {"HOME": str(self.project), "XDG_CONFIG_HOME": str(self.project)}
        command = [str(self.folder / "venv" / "bin" / "python"), "-m", *words]
        return subprocess.run(
            command, cwd=self.project, env={**outside, **own}, capture_output=True, text=True, check=False
        )

    def attnplug(self, *words: str) -> object:
        """Run a command that has to succeed, and return its JSON."""
        done = self.run("attnplug", *words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """
    Install as the README says, without an index: pip installs the projects, links stand in for their requirements.

    The links are the closure of the requirements of core and kit, read from the metadata. What is installed beside
    it here, numpy for one, is not there.
    """
    made = Environment(tmp_path_factory.mktemp("fresh"))
    venv = [sys.executable, "-m", "venv", "--without-pip", str(made.folder / "venv")]
    new = [sys.executable, "-m", "attnplug", "new", "acme_fast", "--path", str(made.project)]
    for command in (venv, new):
        subprocess.run(command, check=True, capture_output=True)
    for distribution in closure("attnplug-kit", "attnplug[torch]"):
        link(distribution, made.site)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(made.site)]
    subprocess.run([*install, str(CORE), str(KIT), str(made.project)], check=True)
    return made


def test_the_templates_are_in_the_wheel_of_the_kit(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, str(KIT), str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")

    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("attnplug_kit/new/template/")}

    assert packed == {f"attnplug_kit/new/template/{template}" for template in FILES.values()}


def test_pip_installs_the_manifest_and_the_modules(fresh: Environment) -> None:
    package = {file.name for file in (fresh.site / "attnplug_acme_fast").iterdir() if file.is_file()}

    assert package == {"__init__.py", "attnplug.toml", "backend.py", "plugin.py"}


def test_a_new_plugin_is_listed_as_ready(fresh: Environment) -> None:
    backends = fresh.attnplug("list")["backends"]

    (found,) = [backend for backend in backends if backend["name"] == "acme_fast"]
    assert found["distribution"] == "attnplug-acme-fast 0.1.0"
    assert [(variant["id"], variant["availability"]) for variant in found["variants"]] == [("acme_fast/plain", "ready")]


def test_check_finds_nothing_in_it(fresh: Environment) -> None:
    report = fresh.attnplug("check", ".")

    assert (report["backends"], report["problems"], report["notes"]) == (["acme_fast"], [], [])


def test_it_is_chosen_by_name(fresh: Environment) -> None:
    (explanation,) = fresh.attnplug("explain", *REQUEST, "--backend", "acme_fast")["explanations"]

    assert explanation["chosen"] == "acme_fast/plain"


def test_it_refuses_what_it_does_not_declare(fresh: Environment) -> None:
    done = fresh.run("attnplug", "explain", *REQUEST, "--sinks", "--backend", "acme_fast")

    assert done.returncode == 1
    assert "chosen: none" in done.stdout
    assert "sinks" in done.stdout.partition("not chosen:")[2].partition("acme_fast/plain")[2].partition("\n")[0]


def test_a_name_that_is_installed_by_now_is_refused(fresh: Environment, tmp_path: Path) -> None:
    done = fresh.run("attnplug", "new", "acme_fast", "--path", str(tmp_path / "again"))

    assert done.returncode == 2
    assert "the backend 'acme_fast' of attnplug-acme-fast" in done.stderr


def test_its_tests_run_without_numpy(fresh: Environment) -> None:
    missing = fresh.run("numpy")
    done = fresh.run("pytest", "-q", "-p", "no:cacheprovider", "-k", "one_token")

    assert "No module named numpy" in missing.stderr
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_its_own_tests_pass(fresh: Environment, tmp_path: Path) -> None:
    report = tmp_path / "report"

    done = fresh.run("pytest", "-q", "-p", "no:cacheprovider", f"--attn-report={report}")

    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    (evidence,) = [json.loads(file.read_text("utf-8")) for file in report.glob("evidence-*.json")]
    assert (evidence["backend"], evidence["fraction"]) == ("acme_fast/plain", 1.0)
