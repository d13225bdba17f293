"""The wheel, installed by pip into a scratch folder: found by its entry points, told from its metadata alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

PROJECT = Path(__file__).parents[1]
OURS = ("ATTNPLUG_", "COV", "PYTEST", "PYTHONPATH")  # settings and measurements of this run
PIP = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
REQUIRED = "flashinfer-python >=0.6.8,<0.7.3"
PROGRAM = """
import sys
from attnplug.cli.main import main
status = main(sys.argv[1:])
imported = {name.partition(".")[0] for name in sys.modules} & {"attnplug_flashinfer", "flashinfer", "torch", "pluggy"}
assert not imported, imported
sys.exit(status)
"""
LOAD = """
import sys
import torch
torch.cuda.is_available = lambda: False  # on a machine with a GPU too
import attnplug
asked = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
device = attnplug.Device.cuda("9.0")
try:
    attnplug.load(asked, device, backend="flashinfer")
except attnplug.AttnplugError as error:
    print(error)
assert "flashinfer" not in sys.modules and "attnplug_flashinfer.backend" not in sys.modules
for verdict in attnplug.explain(asked, device, backend="flashinfer").verdicts:
    print(verdict.id, verdict.status)
"""
ASKED = ("--head-size", "128", "--num-q-heads", "32", "--num-kv-heads", "8", "--dtype", "bfloat16")
absent = pytest.mark.skipif(find_spec("flashinfer") is not None, reason="the library is installed here")


@frozen
class Site:
    """A folder that pip has installed the plugin into."""

    folder: Path

    def attnplug(self, *words: str, libraries: Path | None = None, status: int = 0) -> Any:
        """Run a verb in a fresh Python that imports nothing of the plugin; return what it says to a program."""
        return json.loads(self.run(PROGRAM, *words, "--json", libraries=libraries, status=status))

    def run(self, program: str, *words: str, libraries: Path | None = None, status: int = 0) -> str:
        """Run a program in a fresh Python, and return what it prints."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        paths = (str(path) for path in (libraries, self.folder) if path is not None)
        home = str(self.folder)
        own = {"PYTHONPATH": os.pathsep.join(paths), "HOME": home, "XDG_CONFIG_HOME": home}
        command = [sys.executable, "-W", "error", "-c", program, *words]
        done = subprocess.run(command, env={**outside, **own}, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def backend(self, libraries: Path | None = None) -> dict[str, Any]:
        """Return what `attnplug list` says of the plugin."""
        (found,) = [b for b in self.attnplug("list", libraries=libraries)["backends"] if b["name"] == "flashinfer"]
        return found

    def explanation(self, device: str, *words: str, libraries: Path | None = None, status: int = 0) -> dict[str, Any]:
        """Return what `attnplug explain` answers to a common decoder."""
        asked = ("explain", *ASKED, "--device", device, *words)
        (found,) = self.attnplug(*asked, libraries=libraries, status=status)["explanations"]
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", *PIP, "--target", str(folder), str(PROJECT)]
    subprocess.run(command, check=True)
    return Site(folder)


def library(folder: Path, version: str) -> Path:
    """Return a folder with the metadata of the library, and a package that nobody may import."""
    metadata = folder / f"flashinfer_python-{version}.dist-info" / "METADATA"
    package = folder / "flashinfer" / "__init__.py"
    for file in (metadata, package):
        file.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n", encoding="utf-8")
    package.write_text("raise AssertionError('flashinfer is not to be imported')\n", encoding="utf-8")
    return folder


def test_every_module_and_the_manifest_are_in_the_wheel(site: Site) -> None:
    source = PROJECT / "src" / "attnplug_flashinfer"
    kinds = ("*.py", "*.toml", "py.typed")

    written = {file.relative_to(source) for kind in kinds for file in source.rglob(kind)}

    package = site.folder / "attnplug_flashinfer"
    assert written == {file.relative_to(package) for kind in kinds for file in package.rglob(kind)}
    assert Path("attnplug.toml") in written


def test_the_metadata_says_what_it_needs_and_offers(site: Site) -> None:
    (found,) = [d for d in distributions(path=[str(site.folder)]) if d.name == "attnplug-flashinfer"]

    assert [(e.group, e.name, e.value) for e in found.entry_points] == [
        ("attnplug.backends", "flashinfer", "attnplug_flashinfer.plugin"),
        ("attnplug.benchmarks", "flashinfer", "attnplug_flashinfer.raw:RawFlashInfer"),
    ]
    assert [text for text in found.requires or () if "extra" not in text] == ["attnplug[torch]<1,>=0.1"]
    assert found.metadata.get_all("Provides-Extra") == ["library", "test"]


@absent
def test_without_the_library_it_is_listed_as_lacking_it(site: Site) -> None:
    found = site.backend()

    assert found["distribution"] == "attnplug-flashinfer 0.1.0"
    assert [(v["id"], v["standing"]) for v in found["variants"]] == [
        ("flashinfer/fa3", "lacks_dependency"),
        ("flashinfer/fa2", "lacks_dependency"),
    ]


@absent
def test_without_the_library_the_remedy_is_to_install_it(site: Site) -> None:
    explanation = site.explanation("cuda:9.0", "--backend", "flashinfer", status=1)

    (verdict,) = [v for v in explanation["verdicts"] if v["id"] == "flashinfer/fa3"]
    assert verdict["status"] == "lacks_dependency"
    assert [(r["code"], r["supported"]) for r in verdict["reasons"]] == [
        ("missing", f"{REQUIRED} is required and not installed")
    ]
    assert verdict["remedy"]["install"] == [REQUIRED]


@pytest.mark.parametrize("version", ["0.5.0", "0.7.3", "0.8.0"])
def test_another_version_of_the_library_is_told_as_such(site: Site, tmp_path: Path, version: str) -> None:
    libraries = library(tmp_path, version)

    explanation = site.explanation("cuda:8.0", "--backend", "flashinfer", libraries=libraries, status=1)

    (verdict,) = [v for v in explanation["verdicts"] if v["id"] == "flashinfer/fa2"]
    assert verdict["status"] == "lacks_dependency"
    assert [(r["code"], r["supported"]) for r in verdict["reasons"]] == [
        ("version", f"{REQUIRED} is required and {version} is installed")
    ]
    assert verdict["remedy"]["install"] == [REQUIRED]


@pytest.mark.parametrize("version", ["0.6.8", "0.6.12", "0.7.2", "0.6.12.post1"])
def test_with_the_library_it_is_ready_and_chosen(site: Site, tmp_path: Path, version: str) -> None:
    libraries = library(tmp_path, version)

    assert {v["standing"] for v in site.backend(libraries)["variants"]} == {"ready"}
    assert site.explanation("cuda:9.0", libraries=libraries)["chosen"] == "flashinfer/fa3"
    assert site.explanation("cuda:8.0", libraries=libraries)["chosen"] == "flashinfer/fa2"
    assert site.explanation("cpu", libraries=libraries)["chosen"] == "torch/sdpa"


def test_its_old_name_selects_it(site: Site, tmp_path: Path) -> None:
    explanation = site.explanation("cuda:9.0", "--backend", "FLASHINFER", libraries=library(tmp_path, "0.6.12"))

    assert explanation["chosen"] == "flashinfer/fa3"


def test_what_the_probe_finds_is_what_loading_says(site: Site, tmp_path: Path) -> None:
    printed = site.run(LOAD, libraries=library(tmp_path, "0.6.12"))

    assert "'flashinfer/fa3' was probed" in printed
    assert "it refuses this machine: torch 2." in printed
    assert ("is built without CUDA" in printed) or ("sees no CUDA device" in printed)
    assert "flashinfer/fa3 broken" in printed
