"""CONTRIBUTING lists the files that a change touches, and the lists are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
SENTINELS = ("logits_soft_cap", "attention_chunk")  # fields of a layer that have nothing else in common
HOST = "comfyui"  # no engine that other parts of the project name
VARIANTS = ("fa3_vllm", "fa2_vllm", "fa4")  # of flash_attn: their names mean nothing else
PLACES = ("*.md", "*.toml", "*.yml", "Makefile", "tools/*", "docs/**/*.md", "*/src/**/*.py", "tests/*.py")
OF_PLUGINS = (*PLACES, "core/src/**/*.toml", "plugins/*/*.toml", "plugins/*/src/**/*.toml", "plugins/*/src/**/*.py")


def listed(section: str) -> list[str]:
    """Return the files in the table of a section."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE)


def naming(paths: Iterable[Path], *words: str) -> list[str]:
    """Return the files that name all words."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths if path.is_file()}
    return [name for name, text in texts.items() if all(re.search(rf"\b{word}\b", text) for word in words)]


def test_the_files_of_a_field_are_listed() -> None:
    sources = [path for part in ("core/src", "kit/src") for path in (ROOT / part).rglob("*.py")]

    assert sorted(listed("Add a field")) == sorted(naming(sources, *SENTINELS))


def test_the_files_of_a_host_are_listed() -> None:
    found = naming((path for place in PLACES for path in ROOT.glob(place) if path != Path(__file__)), rf"[\w-]*{HOST}")

    assert sorted(name.replace("NAME", HOST) for name in listed("Add a host")) == sorted(found)


def of_plugins(*words: str) -> set[str]:
    """Return the files that name all words, but for tests and measurements."""
    paths = {path for place in OF_PLUGINS for path in ROOT.glob(place)}
    return set(
        naming((path for path in paths if not {"tests", "evidence"} & set(path.relative_to(ROOT).parts)), *words)
    )


def test_the_files_of_a_variant_are_listed() -> None:
    found = of_plugins(*VARIANTS)

    assert sorted(name.replace("NAME", "flash_attn") for name in listed("Add a variant")) == sorted(found)


def test_the_files_of_a_plugin_are_listed() -> None:
    plugins = [path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")]
    named = {one: of_plugins(rf"(?:{one}|[\w-]*{one.replace('_', '-')})") for one in plugins}

    everywhere = set.intersection(*({name.replace(one, "NAME") for name in found} for one, found in named.items()))
    assert sorted(listed("Add a plugin")) == sorted(everywhere)
