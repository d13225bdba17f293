"""The wheel, installed by pip into a scratch folder: found by its entry points, examined by its metadata only."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.backends.plugin import InstalledPlugin

if TYPE_CHECKING:
    from collections.abc import Mapping

PROJECT = Path(__file__).parents[1]
VARIANTS = ("fa2", "fa2_vllm", "fa3", "fa3_vllm", "fa3_tokenspeed", "fa4", "torch")
OF_TRITON = "triton/unified"  # the workspace's kernels over pages come before a variant that gathers them
NEEDS = {
    "fa2": "flash-attn >=2.7.1,<2.9",
    "fa2_vllm": "vllm >=0.19",
    "fa3": "flash-attn-3 >=3.0.0b1,<4",
    "fa3_vllm": "vllm >=0.19",
    "fa3_tokenspeed": "tokenspeed-fa3 >=3.0.0.post20260810,<4",
    "fa4": "flash-attn-4 >=4.0.0b11,<4.1",
}
COMPILED = {"fa2": "--no-build-isolation 'flash-attn >=2.7.1,<2.9'", "fa3": "#subdirectory=hopper' compiles it"}
"""What is installed by more than `pip install NAME`, and what the fix says of it."""

EVERYTHING = {
    "flash-attn": "2.8.3",
    "vllm": "0.24.0",
    "flash-attn-3": "3.0.0",
    "tokenspeed-fa3": "3.0.0.post20260810",
    "flash-attn-4": "4.0.0b36",
}
PACKAGES = ("vllm", "flash_attn", "flash_attn_interface", "flash_attn_3")


def installed() -> list[str]:
    """Return which of the libraries are installed here, and would be found in every folder."""
    found = []
    for name in EVERYTHING:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


pytestmark = [
    pytest.mark.slow,  # pip, and a process for each command
    pytest.mark.skipif(bool(installed()), reason=f"installed here: {', '.join(installed())}"),
]


def availabilities(site: InstalledPlugin, libraries: Path | None = None) -> dict[str, str]:
    """Return what `attnplug list` says of each variant."""
    found = site.listed(libraries)
    assert found["distribution"] == "attnplug-flash-attn 0.1.0"
    return {v["id"].partition("/")[2]: v["availability"] for v in found["variants"]}


def check_fix(fix: Mapping[str, Any], variant: str) -> None:
    assert fix["install"] == ([] if variant in COMPILED else [NEEDS[variant]])
    assert COMPILED.get(variant, "") in fix["action"]
    assert bool(fix["action"]) is (variant in COMPILED)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> InstalledPlugin:
    return InstalledPlugin.install(tmp_path_factory.mktemp("site"), PROJECT, "flash_attn", PACKAGES)


def test_every_module_and_the_manifest_are_in_the_wheel(site: InstalledPlugin) -> None:
    site.check_files([Path("attnplug.toml"), Path("kernels", "fa4.py")])


def test_the_metadata_says_what_it_needs_and_offers(site: InstalledPlugin) -> None:
    (found,) = [d for d in distributions(path=[str(site.folder)]) if d.name == "attnplug-flash-attn"]

    assert [(e.group, e.name, e.value) for e in found.entry_points] == [
        ("attnplug.backends", "flash_attn", "attnplug_flash_attn.plugin"),
    ]
    assert [text for text in found.requires or () if "extra" not in text] == ["attnplug[torch]<1,>=0.1", "attrs>=24.1"]
    assert sorted(found.metadata.get_all("Provides-Extra") or ()) == ["fa2", "fa4", "test", "tokenspeed", "vllm"]


def test_without_a_library_torch_remains(site: InstalledPlugin) -> None:
    assert availabilities(site) == {name: "missing_dependency" if name in NEEDS else "ready" for name in VARIANTS}


@pytest.mark.parametrize("variant", NEEDS)
def test_without_its_library_the_fix_of_a_variant_is_to_install_it(site: InstalledPlugin, variant: str) -> None:
    explanation = site.explanation("cuda:9.0", "--backend", f"flash_attn/{variant}", status=1)

    (verdict,) = [v for v in explanation["verdicts"] if v["id"] == f"flash_attn/{variant}"]
    assert verdict["status"] == "missing_dependency"
    assert [(r["code"], r["supported"]) for r in verdict["reasons"]] == [
        ("missing", f"{NEEDS[variant]} is required and not installed")
    ]
    check_fix(verdict["fix"], variant)


def test_another_version_of_a_library_is_reported(site: InstalledPlugin, tmp_path: Path) -> None:
    old = {
        "flash-attn": "2.6.3",
        "vllm": "0.18.1",
        "flash-attn-3": "2.9",
        "tokenspeed-fa3": "3.0.0.post20260408",
        "flash-attn-4": "4.0.0b8",
    }
    explanation = site.explanation("cuda:9.0", libraries=site.libraries(tmp_path, old))

    verdicts = {v["id"].partition("/")[2]: v for v in explanation["verdicts"] if v["id"].startswith("flash_attn/")}
    for variant, needed in NEEDS.items():
        (reason,) = verdicts[variant]["reasons"]
        there = old[needed.partition(" ")[0]]
        assert (reason["code"], reason["supported"]) == ("version", f"{needed} is required and {there} is installed")
        check_fix(verdicts[variant]["fix"], variant)
    assert verdicts["torch"]["status"] == "eligible"
    assert explanation["chosen"] == OF_TRITON


def test_flash_attention_4_alone_is_no_flash_attention_2(site: InstalledPlugin, tmp_path: Path) -> None:
    """`import flash_attn` would succeed with either; versions are those of distributions."""
    alone = site.libraries(tmp_path, {"flash-attn-4": "4.0.0b36"})

    ready = [name for name, availability in availabilities(site, alone).items() if availability == "ready"]

    assert ready == ["fa4", "torch"]


def test_with_every_library_each_device_selects_its_variant(site: InstalledPlugin, tmp_path: Path) -> None:
    everything = site.libraries(tmp_path, EVERYTHING)
    sixteen = ("--block-size", "16")

    def chosen(device: str, *words: str) -> str:
        return site.explanation(device, *words, libraries=everything)["chosen"]

    assert set(availabilities(site, everything).values()) == {"ready"}
    assert chosen("cuda:8.0", *sixteen) == "flash_attn/fa2_vllm"
    assert chosen("cuda:9.0", *sixteen) == "flash_attn/fa3_vllm"
    assert chosen("cuda:10.0", *sixteen) == "flash_attn/fa4"
    assert chosen("cuda:9.0", "--alibi", "linear") == "flash_attn/fa2"
    assert chosen("cuda:8.0", "--sinks") == OF_TRITON
    assert chosen("cuda:8.0", "--sinks", "--backend", "flash_attn", "--backend", "torch").startswith("torch/")
    assert chosen("cpu") == "torch/sdpa"


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"vllm": "0.24.0", "flash-attn-4": "4.0.0b36"}, "flash_attn/fa3_vllm"),
        ({"flash-attn-3": "3.0.0b1", "flash-attn-4": "4.0.0b11"}, "flash_attn/fa3"),
        ({"tokenspeed-fa3": "3.0.0.post20260810", "flash-attn-4": "4.0.0b11"}, "flash_attn/fa3_tokenspeed"),
        ({"flash-attn-4": "4.0.0b20", "flash-attn": "2.8.3.post1"}, "flash_attn/fa4"),
        ({"flash-attn": "2.7.4.post1+cu13"}, "flash_attn/fa2"),
        ({}, OF_TRITON),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_on_hopper_the_best_of_what_is_there_is_chosen(
    site: InstalledPlugin, tmp_path: Path, there: dict[str, str], chosen: str
) -> None:
    explanation = site.explanation("cuda:9.0", libraries=site.libraries(tmp_path, there))

    assert explanation["chosen"] == chosen
    own = next(
        v["id"] for v in explanation["verdicts"] if v["status"] in {"chosen", "eligible"} and v["id"] != OF_TRITON
    )
    assert own == (chosen if there else "flash_attn/torch")


def test_values_verified_on_hopper_are_not_unverified(site: InstalledPlugin, tmp_path: Path) -> None:
    """The wheel contains the files of the kit's runs, and they count for its version."""
    given = site.libraries(tmp_path, EVERYTHING)

    def unverified(head_size: str) -> dict[str, list[str]]:
        words = ("--block-size", "16", "--head-size", head_size, "--backend", "flash_attn")
        verdicts = site.explanation("cuda:9.0", *words, libraries=given)["verdicts"]
        ours = {v["id"].partition("/")[2]: v for v in verdicts if v["id"].startswith("flash_attn/")}
        return {name: [item["because"] for item in v["unverified"]] for name, v in ours.items()}

    shown, between = unverified("128"), unverified("112")
    for variant in ("fa3_vllm", "fa3_tokenspeed", "fa4", "torch"):
        assert shown[variant] == []
        (because,) = between[variant]
        assert because.startswith("verified are 8, ")
        assert "112" not in because
    for variant in ("fa2_vllm", "fa3"):
        assert shown[variant] == ["no run of the conformance kit on cuda:9.0 is known"]


def test_old_releases_of_flash_attention_4_lack_what_rules_say(site: InstalledPlugin, tmp_path: Path) -> None:
    old = site.libraries(tmp_path, {"flash-attn-4": "4.0.0b20"})
    words = ("--head-size", "256", "--backend", "flash_attn/fa4")

    (verdict,) = [
        v
        for v in site.explanation("cuda:10.0", *words, libraries=old, status=1)["verdicts"]
        if v["id"] == "flash_attn/fa4"
    ]

    assert [reason["because"] for reason in verdict["reasons"]] == [
        (
            "before 4.0.0b36 the Blackwell kernel for head size 256 supports no logit soft-capping, and block tables"
            " of one width only"
        )
    ]


def test_its_old_name_selects_it(site: InstalledPlugin, tmp_path: Path) -> None:
    given = site.libraries(tmp_path, {"vllm": "0.24.0"})

    assert site.explanation("cuda:9.0", "--backend", "FLASH_ATTN", libraries=given)["chosen"] == "flash_attn/fa3_vllm"


def test_what_the_probe_finds_is_what_loading_says(site: InstalledPlugin, tmp_path: Path) -> None:
    printed = site.load(site.libraries(tmp_path, {"vllm": "0.24.0"}))

    assert "the probe of 'flash_attn/fa3_vllm' refuses this machine" in printed
    assert "refuses this machine: torch 2." in printed
    assert ("is built without CUDA" in printed) or ("sees no CUDA device" in printed)
    assert "flash_attn/fa3_vllm broken" in printed
