"""The wheel, installed by pip into a scratch folder: found by its entry points, told from its metadata alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

PROJECT = Path(__file__).parents[1]
OURS = ("ATTNPLUG_", "COV", "PYTEST", "PYTHONPATH")  # settings and measurements of this run
PIP = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
VARIANTS = ("fa2", "fa2_vllm", "fa3", "fa3_vllm", "fa4", "torch")
NEEDS = {
    "fa2": "flash-attn >=2.7.1,<2.9",
    "fa2_vllm": "vllm >=0.19",
    "fa3": "flash-attn-3 >=3.0.0b1,<4",
    "fa3_vllm": "vllm >=0.19",
    "fa4": "flash-attn-4 >=4.0.0b11,<4.1",
}
EVERYTHING = {"flash-attn": "2.8.3", "vllm": "0.24.0", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36"}
PACKAGES = ("vllm", "flash_attn", "flash_attn_interface", "flash_attn_3")
PROGRAM = """
import sys
from attnplug.cli.main import main
status = main(sys.argv[1:])
imported = {name.partition(".")[0] for name in sys.modules}
unwanted = imported & {"attnplug_flash_attn", "flash_attn", "flash_attn_interface", "vllm", "torch", "pluggy"}
assert not unwanted, unwanted
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
    attnplug.load(asked, device, backend="flash_attn")
except attnplug.AttnplugError as error:
    print(error)
assert not {"flash_attn", "vllm", "attnplug_flash_attn.backend"} & set(sys.modules)
for verdict in attnplug.explain(asked, device, backend="flash_attn").verdicts:
    print(verdict.id, verdict.status)
"""
ASKED = ("--head-size", "128", "--num-q-heads", "32", "--num-kv-heads", "8", "--dtype", "bfloat16")


def installed() -> list[str]:
    """Return which of the libraries are installed here, and would be found in every folder."""
    found = []
    for name in EVERYTHING:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


pytestmark = pytest.mark.skipif(bool(installed()), reason=f"installed here: {', '.join(installed())}")


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

    def standings(self, libraries: Path | None = None) -> dict[str, str]:
        """Return what `attnplug list` says of each variant."""
        (found,) = [b for b in self.attnplug("list", libraries=libraries)["backends"] if b["name"] == "flash_attn"]
        assert found["distribution"] == "attnplug-flash-attn 0.1.0"
        return {v["id"].partition("/")[2]: v["standing"] for v in found["variants"]}

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


def libraries(folder: Path, versions: dict[str, str]) -> Path:
    """Return a folder with metadata, and the packages, which nobody may import."""
    for name, text in versions.items():
        metadata = folder / f"{name.replace('-', '_')}-{text}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {text}\n", encoding="utf-8")
    for name in PACKAGES:
        package = folder / name / "__init__.py"
        package.parent.mkdir()
        package.write_text(f"raise AssertionError('{name} is not to be imported')\n", encoding="utf-8")
    return folder


def test_every_module_and_the_manifest_are_in_the_wheel(site: Site) -> None:
    source = PROJECT / "src" / "attnplug_flash_attn"
    kinds = ("*.py", "*.toml", "py.typed")

    written = {file.relative_to(source) for kind in kinds for file in source.rglob(kind)}

    package = site.folder / "attnplug_flash_attn"
    assert written == {file.relative_to(package) for kind in kinds for file in package.rglob(kind)}
    assert {Path("attnplug.toml"), Path("kernels", "fa4.py")} <= written


def test_the_metadata_says_what_it_needs_and_offers(site: Site) -> None:
    (found,) = [d for d in distributions(path=[str(site.folder)]) if d.name == "attnplug-flash-attn"]

    assert [(e.group, e.name, e.value) for e in found.entry_points] == [
        ("attnplug.backends", "flash_attn", "attnplug_flash_attn.plugin"),
        ("attnplug.benchmarks", "flash_attn", "attnplug_flash_attn.raw:RawFlashAttention"),
    ]
    assert [text for text in found.requires or () if "extra" not in text] == ["attnplug[torch]<1,>=0.1"]
    assert sorted(found.metadata.get_all("Provides-Extra") or ()) == ["fa2", "fa4", "test", "vllm"]


def test_without_a_library_torch_remains(site: Site) -> None:
    assert site.standings() == {name: "lacks_dependency" if name in NEEDS else "ready" for name in VARIANTS}


@pytest.mark.parametrize("variant", NEEDS)
def test_without_its_library_the_remedy_of_a_variant_is_to_install_it(site: Site, variant: str) -> None:
    explanation = site.explanation("cuda:9.0", "--backend", f"flash_attn/{variant}", status=1)

    (verdict,) = [v for v in explanation["verdicts"] if v["id"] == f"flash_attn/{variant}"]
    assert verdict["status"] == "lacks_dependency"
    assert [(r["code"], r["supported"]) for r in verdict["reasons"]] == [
        ("missing", f"{NEEDS[variant]} is required and not installed")
    ]
    assert verdict["remedy"]["install"] == [NEEDS[variant]]


def test_another_version_of_a_library_is_told_as_such(site: Site, tmp_path: Path) -> None:
    old = {"flash-attn": "2.6.3", "vllm": "0.18.1", "flash-attn-3": "2.9", "flash-attn-4": "4.0.0b8"}
    explanation = site.explanation("cuda:9.0", libraries=libraries(tmp_path, old))

    verdicts = {v["id"].partition("/")[2]: v for v in explanation["verdicts"] if v["id"].startswith("flash_attn/")}
    for variant, needed in NEEDS.items():
        (reason,) = verdicts[variant]["reasons"]
        there = old[needed.partition(" ")[0]]
        assert (reason["code"], reason["supported"]) == ("version", f"{needed} is required and {there} is installed")
        assert verdicts[variant]["remedy"]["install"] == [needed]
    assert explanation["chosen"] == "flash_attn/torch"


def test_flash_attention_4_alone_is_no_flash_attention_2(site: Site, tmp_path: Path) -> None:
    """`import flash_attn` would succeed with either; versions are those of distributions."""
    alone = libraries(tmp_path, {"flash-attn-4": "4.0.0b36"})

    ready = [name for name, standing in site.standings(alone).items() if standing == "ready"]

    assert ready == ["fa4", "torch"]


def test_with_every_library_each_device_has_its_own(site: Site, tmp_path: Path) -> None:
    everything = libraries(tmp_path, EVERYTHING)
    sixteen = ("--block-size", "16")

    def chosen(device: str, *words: str) -> str:
        return site.explanation(device, *words, libraries=everything)["chosen"]

    assert set(site.standings(everything).values()) == {"ready"}
    assert chosen("cuda:8.0", *sixteen) == "flash_attn/fa2_vllm"
    assert chosen("cuda:9.0", *sixteen) == "flash_attn/fa3_vllm"
    assert chosen("cuda:10.0", *sixteen) == "flash_attn/fa4"
    assert chosen("cuda:9.0", "--alibi", "linear") == "flash_attn/fa2"
    assert chosen("cuda:8.0", "--sinks").startswith("torch/")
    assert chosen("cpu") == "torch/sdpa"


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"vllm": "0.24.0", "flash-attn-4": "4.0.0b36"}, "fa3_vllm"),
        ({"flash-attn-3": "3.0.0b1", "flash-attn-4": "4.0.0b11"}, "fa3"),
        ({"flash-attn-4": "4.0.0b20", "flash-attn": "2.8.3.post1"}, "fa4"),
        ({"flash-attn": "2.7.4.post1+cu13"}, "fa2"),
        ({}, "torch"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_on_hopper_the_best_of_what_is_there_is_chosen(
    site: Site, tmp_path: Path, there: dict[str, str], chosen: str
) -> None:
    explanation = site.explanation("cuda:9.0", libraries=libraries(tmp_path, there))

    assert explanation["chosen"] == f"flash_attn/{chosen}"


def test_old_releases_of_flash_attention_4_lack_what_rules_say(site: Site, tmp_path: Path) -> None:
    old = libraries(tmp_path, {"flash-attn-4": "4.0.0b20"})
    words = ("--head-size", "256", "--backend", "flash_attn/fa4")

    (verdict,) = [
        v
        for v in site.explanation("cuda:10.0", *words, libraries=old, status=1)["verdicts"]
        if v["id"] == "flash_attn/fa4"
    ]

    assert [reason["because"] for reason in verdict["reasons"]] == [
        "before 4.0.0b36 the kernel for heads of 256 on Blackwell has no soft cap, and tables of one width only"
    ]


def test_its_old_name_selects_it(site: Site, tmp_path: Path) -> None:
    given = libraries(tmp_path, {"vllm": "0.24.0"})

    assert site.explanation("cuda:9.0", "--backend", "FLASH_ATTN", libraries=given)["chosen"] == "flash_attn/fa3_vllm"


def test_what_the_probe_finds_is_what_loading_says(site: Site, tmp_path: Path) -> None:
    printed = site.run(LOAD, libraries=libraries(tmp_path, {"vllm": "0.24.0"}))

    assert "'flash_attn/fa3_vllm' was probed" in printed
    assert "it refuses this machine: torch 2." in printed
    assert ("is built without CUDA" in printed) or ("sees no CUDA device" in printed)
    assert "flash_attn/fa3_vllm broken" in printed
