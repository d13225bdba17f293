"""The wheel, installed by pip into a scratch folder: found by its entry points, described by its metadata."""

from __future__ import annotations

from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backends.plugin import InstalledPlugin

pytestmark = pytest.mark.slow  # runs pip, and a process per command

PROJECT = Path(__file__).parents[1]
REQUIRED = "flashinfer-python >=0.6.8,<0.7.3"
not_installed = pytest.mark.skipif(find_spec("flashinfer") is not None, reason="the library is installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> InstalledPlugin:
    return InstalledPlugin.install(tmp_path_factory.mktemp("site"), PROJECT, "flashinfer", ("flashinfer",))


def test_every_module_and_the_manifest_are_in_the_wheel(site: InstalledPlugin) -> None:
    site.check_files([Path("attnplug.toml")])


def test_the_metadata_has_requirements_and_entry_points(site: InstalledPlugin) -> None:
    (found,) = [d for d in distributions(path=[str(site.folder)]) if d.name == "attnplug-flashinfer"]

    assert [(e.group, e.name, e.value) for e in found.entry_points] == [
        ("attnplug.backends", "flashinfer", "attnplug_flashinfer.plugin"),
    ]
    assert [text for text in found.requires or () if "extra" not in text] == ["attnplug[torch]<1,>=0.1", "attrs>=24.1"]
    assert sorted(found.metadata.get_all("Provides-Extra") or ()) == ["library", "test"]


@not_installed
def test_without_the_library_it_is_listed_as_missing(site: InstalledPlugin) -> None:
    found = site.listed()

    assert found["distribution"] == "attnplug-flashinfer 0.1.0"
    assert [(v["id"], v["availability"]) for v in found["variants"]] == [
        ("flashinfer/fa3", "missing_dependency"),
        ("flashinfer/fa2", "missing_dependency"),
    ]


@not_installed
def test_without_the_library_the_fix_is_to_install_it(site: InstalledPlugin) -> None:
    explanation = site.explanation("cuda:9.0", "--backend", "flashinfer", status=1)

    (verdict,) = [v for v in explanation["verdicts"] if v["id"] == "flashinfer/fa3"]
    assert verdict["status"] == "missing_dependency"
    assert [(r["code"], r["supported"]) for r in verdict["reasons"]] == [
        ("missing", f"{REQUIRED} is required and not installed")
    ]
    assert verdict["fix"]["install"] == [REQUIRED]


@pytest.mark.parametrize("version", ["0.5.0", "0.7.3", "0.8.0"])
def test_an_unsupported_version_is_reported(site: InstalledPlugin, tmp_path: Path, version: str) -> None:
    libraries = site.libraries(tmp_path, {"flashinfer-python": version})

    explanation = site.explanation("cuda:8.0", "--backend", "flashinfer", libraries=libraries, status=1)

    (verdict,) = [v for v in explanation["verdicts"] if v["id"] == "flashinfer/fa2"]
    assert verdict["status"] == "missing_dependency"
    assert [(r["code"], r["supported"]) for r in verdict["reasons"]] == [
        ("version", f"{REQUIRED} is required and {version} is installed")
    ]
    assert verdict["fix"]["install"] == [REQUIRED]


@pytest.mark.parametrize("version", ["0.6.8", "0.6.12", "0.7.2", "0.6.12.post1"])
def test_with_the_library_it_is_ready_and_chosen(site: InstalledPlugin, tmp_path: Path, version: str) -> None:
    libraries = site.libraries(tmp_path, {"flashinfer-python": version})

    assert {v["availability"] for v in site.listed(libraries)["variants"]} == {"ready"}
    assert site.explanation("cuda:9.0", libraries=libraries)["chosen"] == "flashinfer/fa3"
    assert site.explanation("cuda:8.0", libraries=libraries)["chosen"] == "flashinfer/fa2"
    assert site.explanation("cpu", libraries=libraries)["chosen"] == "torch/sdpa"


def test_its_alias_selects_it(site: InstalledPlugin, tmp_path: Path) -> None:
    explanation = site.explanation(
        "cuda:9.0", "--backend", "FLASHINFER", libraries=site.libraries(tmp_path, {"flashinfer-python": "0.6.12"})
    )

    assert explanation["chosen"] == "flashinfer/fa3"


def test_loading_reports_what_the_probe_finds(site: InstalledPlugin, tmp_path: Path) -> None:
    printed = site.load(site.libraries(tmp_path, {"flashinfer-python": "0.6.12"}))

    assert "the probe of 'flashinfer/fa3' refuses this machine" in printed
    assert "refuses this machine: torch 2." in printed
    assert ("is built without CUDA" in printed) or ("sees no CUDA device" in printed)
    assert "flashinfer/fa3 broken" in printed


def test_sinks_are_unverified_below_hopper(site: InstalledPlugin, tmp_path: Path) -> None:
    """The kit has run on compute capability 9.0 only; its files are in the wheel."""
    libraries = site.libraries(tmp_path, {"flashinfer-python": "0.6.12"})
    words = ("--backend", "flashinfer", "--sinks", "--block-size", "16")

    def unverified(device: str) -> dict[str, list[str]]:
        verdicts = site.explanation(device, *words, libraries=libraries)["verdicts"]
        supported = [v for v in verdicts if v["id"].startswith("flashinfer/") and v["status"] != "refused"]
        return {v["id"]: [item["because"] for item in v["unverified"]] for v in supported}

    assert unverified("cuda:8.0") == {"flashinfer/fa2": ["no run of the conformance kit on cuda:8.0 is known"]}
    assert unverified("cuda:9.0") == {"flashinfer/fa3": [], "flashinfer/fa2": []}
