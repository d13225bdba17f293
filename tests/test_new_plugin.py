"""
What ``attnplug new`` writes is a plugin: built and installed by pip into a scratch folder, it is listed, checked and
chosen, and its own tests, which are the conformance kit, pass.
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

CORE = Path(__file__).parents[1] / "core"
OURS = ("ATTNPLUG_", "COV", "PYTEST")  # settings and measurements of this run
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2]))
"""

ASKED = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "2", "--dtype", "bfloat16", "--device", "cpu")


@frozen
class Installed:
    """A new project, and the folder that it is installed into."""

    project: Path
    site: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a module of Python in the project, with what is installed."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        own = {"PYTHONPATH": str(self.site), "HOME": str(self.site), "XDG_CONFIG_HOME": str(self.site)}
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, cwd=self.project, env={**outside, **own}, capture_output=True, text=True, check=False
        )

    def attnplug(self, *words: str) -> object:
        """Run a verb that has to succeed, and return what it says to a program."""
        done = self.run("attnplug", *words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("new")
    new = [sys.executable, "-m", "attnplug", "new", "acme_fast"]
    subprocess.run(new, cwd=folder, check=True, capture_output=True)
    made = Installed(folder / "attnplug-acme-fast", folder / "site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(made.site), str(made.project)]
    subprocess.run(command, check=True)
    return made


def test_the_templates_are_in_the_wheel_of_the_core(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BUILD, str(CORE), str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")

    with ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("attnplug/cli/new/template/")}

    assert packed == {f"attnplug/cli/new/template/{template}" for template in FILES.values()}


def test_pip_installs_the_manifest_and_the_modules(installed: Installed) -> None:
    package = {file.name for file in (installed.site / "attnplug_acme_fast").iterdir() if file.is_file()}

    assert package == {"__init__.py", "attnplug.toml", "backend.py", "plugin.py"}


def test_a_new_plugin_is_listed_as_ready(installed: Installed) -> None:
    backends = installed.attnplug("list")["backends"]

    (found,) = [backend for backend in backends if backend["name"] == "acme_fast"]
    assert found["distribution"] == "attnplug-acme-fast 0.1.0"
    assert [(variant["id"], variant["availability"]) for variant in found["variants"]] == [("acme_fast/plain", "ready")]


def test_check_finds_nothing_in_it(installed: Installed) -> None:
    report = installed.attnplug("check", ".")

    assert (report["backends"], report["problems"], report["notes"]) == (["acme_fast"], [], [])


def test_it_is_chosen_by_name(installed: Installed) -> None:
    (explanation,) = installed.attnplug("explain", *ASKED, "--backend", "acme_fast")["explanations"]

    assert explanation["chosen"] == "acme_fast/plain"


def test_it_refuses_what_it_does_not_declare(installed: Installed) -> None:
    done = installed.run("attnplug", "explain", *ASKED, "--sinks", "--backend", "acme_fast")

    assert done.returncode == 1
    assert "sinks=True asked, " in done.stdout


def test_a_name_that_is_installed_by_now_is_refused(installed: Installed, tmp_path: Path) -> None:
    done = installed.run("attnplug", "new", "acme_fast", "--path", str(tmp_path / "again"))

    assert done.returncode == 2
    assert "the backend 'acme_fast' of attnplug-acme-fast" in done.stderr


def test_its_own_tests_pass(installed: Installed, tmp_path: Path) -> None:
    report = tmp_path / "report"

    done = installed.run("pytest", "-q", "-p", "no:cacheprovider", f"--attn-report={report}")

    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    (evidence,) = [json.loads(file.read_text("utf-8")) for file in report.glob("evidence-*.json")]
    assert (evidence["backend"], evidence["fraction"]) == ("acme_fast/plain", 1.0)
