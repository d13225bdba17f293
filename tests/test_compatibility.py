"""The compatibility page says what the metadata says, for every distribution that the workspace has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tools import compatibility, tables

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unmeasured

PROJECT = """\
[project]
name = "{name}"
version = "{version}"
requires-python = ">=3.10"
dependencies = [{dependencies}]
"""
MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "A backend" }
[supports]
device_type = "cuda"
dtype = "bfloat16"
head_size = 64
[variants.fast]
requires = ["acme-kernels <2,>=1.5", "triton"]
[variants.slow]
"""


def _distribution(
    root: Path, folder: str, name: str, *dependencies: str, more: str = "", version: str = "0.1.0"
) -> Path:
    path = root / folder / "pyproject.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = ", ".join(f"'{each}'" for each in dependencies)
    path.write_text(PROJECT.format(name=name, version=version, dependencies=listed) + more, encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a core, a sibling of it, two hosts and a plugin."""
    _distribution(tmp_path, "core", "attnplug", "attrs>=24.1", 'tomli>=2; python_version < "3.11"', version="0.3.0")
    _distribution(tmp_path, "kit", "attnplug-kit", "attnplug[torch]>=0.2,<1", "pytest>=8")
    _distribution(tmp_path, "hosts/engine", "attnplug-engine", "attnplug>=0.3", "attrs", "engine>=5,<6", version="7.0")
    extra = '[project.optional-dependencies]\nengine = ["Big.Engine>=1"]\n'
    _distribution(tmp_path, "hosts/big_engine", "attnplug-big", "attnplug", "attrs", more=extra)
    extra = '[project.optional-dependencies]\nlibrary = ["acme_kernels>=1.5,<2"]\ntest = ["attnplug-kit>=0.1"]\n'
    plugin = _distribution(tmp_path, "plugins/acme", "attnplug-acme", "attnplug[torch] <1,>=0.1", more=extra)
    (plugin.parent / "src" / "acme").mkdir(parents=True)
    (plugin.parent / "src" / "acme" / "attnplug.toml").write_text(MANIFEST, encoding="utf-8")
    return tmp_path


def _section(page: str, title: str) -> dict[str, list[str]]:
    text = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name.strip("`"): [cell.replace("`", "") for cell in rest] for name, *rest in cells[2:]}


def test_the_page_lists_every_distribution(root: Path) -> None:
    rows = _section(compatibility.page(root), "Distributions")

    assert list(rows) == ["attnplug", "attnplug-kit", "attnplug-big", "attnplug-engine", "attnplug-acme"]
    assert rows["attnplug"] == ["0.3.0", ">=3.10", "-", "-", 'attrs >=24.1, tomli >=2; python_version < "3.11"']
    assert rows["attnplug-kit"] == ["0.1.0", ">=3.10", "attnplug[torch] >=0.2,<1", "-", "pytest >=8"]
    assert rows["attnplug-big"] == ["0.1.0", ">=3.10", "attnplug", "-", "attrs"]
    assert rows["attnplug-acme"] == ["0.1.0", ">=3.10", "attnplug[torch] >=0.1,<1", "1.0", "-"]


def test_the_page_lists_the_engine_of_each_host(root: Path) -> None:
    rows = _section(compatibility.page(root), "Engines")

    assert rows == {
        "attnplug-big": ["0.1.0", "attnplug", "Big.Engine >=1"],
        "attnplug-engine": ["7.0", "attnplug >=0.3", "engine >=5,<6"],
    }


def test_a_host_without_an_engine_of_its_name_lists_its_libraries(root: Path) -> None:
    _distribution(root, "hosts/engine", "attnplug-engine", "attnplug>=0.3", "attrs", "motor>=5")

    assert _section(compatibility.page(root), "Engines")["attnplug-engine"][-1] == "attrs, motor >=5"


def test_the_page_lists_what_each_variant_requires(root: Path) -> None:
    rows = _section(compatibility.page(root), "Kernel libraries")

    assert rows == {
        "acme/fast": ["attnplug-acme", "acme-kernels >=1.5,<2, triton", "attnplug-acme[library]"],
        "acme/slow": ["attnplug-acme", "-", "-"],
    }


def test_a_manifest_without_variants_has_one(root: Path) -> None:
    file = root / "plugins/acme/src/acme/attnplug.toml"
    file.write_text(MANIFEST.partition("[variants.fast]")[0], encoding="utf-8")

    assert list(_section(compatibility.page(root), "Kernel libraries")) == ["acme/default"]


def test_the_page_lists_what_each_extra_installs(root: Path) -> None:
    rows = _section(compatibility.page(root), "Extras")

    assert rows == {
        "attnplug-big[engine]": ["Big.Engine >=1"],
        "attnplug-acme[library]": ["acme_kernels >=1.5,<2"],
        "attnplug-acme[test]": ["attnplug-kit >=0.1"],
    }


def test_a_workspace_without_hosts_has_no_table_of_hosts(tmp_path: Path) -> None:
    _distribution(tmp_path, "core", "attnplug")
    page = compatibility.page(tmp_path)

    assert "## Distributions" in page
    assert "## Engines" not in page
    assert "## Extras" not in page


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("core/pyproject.toml", "0.3.0", "0.4.0"),
        ("kit/pyproject.toml", ">=0.2", ">=0.3"),
        ("hosts/engine/pyproject.toml", "<6", "<7"),
        ("hosts/big_engine/pyproject.toml", "Engine>=1", "Engine>=2"),
        ("plugins/acme/pyproject.toml", ">=3.10", ">=3.11"),
        ("plugins/acme/src/acme/attnplug.toml", 'api = "1.0"', 'api = "1.1"'),
    ],
)
def test_changed_metadata_makes_the_page_stale(file: str, old: str, new: str, root: Path) -> None:
    tables.write(root)
    assert tables.stale(root) == []

    text = (root / file).read_text("utf-8")
    (root / file).write_text(text.replace(old, new), encoding="utf-8")

    assert tables.stale(root) == ["docs/reference/compatibility.md"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", "a"),
        ("a<2,!=1.5,>=1", "a >=1,!=1.5,<2"),
        ("a[y,x]==1.*", "a[x,y] ==1.*"),
        ("a~=1.2; sys_platform == 'linux'", 'a ~=1.2; sys_platform == "linux"'),
        ("a @ https://acme.example/a.whl", "a @ https://acme.example/a.whl"),
    ],
)
def test_a_requirement_is_written_with_lower_bounds_first(given: str, expected: str) -> None:
    text = compatibility.written(Requirement(given))

    assert text == expected
    assert Requirement(text) == Requirement(given)


# The metadata of this workspace


def test_every_distribution_of_the_workspace_is_listed() -> None:
    root = tables.ROOT
    folders = {path.parent.relative_to(root) for place in ("*", "*/*") for path in root.glob(f"{place}/pyproject.toml")}
    expected = {folder.as_posix() for folder in folders if folder.parts[0] != "tests"}

    assert {one.folder for one in compatibility.distributions(root)} == expected
    assert "core" in expected


def test_every_distribution_admits_the_core_beside_it() -> None:
    core, *others = compatibility.distributions(tables.ROOT)

    assert (core.name, core.core) == ("attnplug", None)
    assert [one.name for one in others if one.core is None or not one.core.specifier.contains(core.version)] == []


def test_an_extra_admits_what_a_variant_of_its_plugin_requires() -> None:
    wrong = [
        f"{one.name}[{extra}]: {requirement}"
        for one in compatibility.distributions(tables.ROOT)
        for manifest in one.manifests
        for extra, requires in one.extras.items()
        for requirement in requires
        if (named := _required(manifest, requirement.name)) and requirement.specifier not in named
    ]

    assert wrong == []


def _required(manifest: dict, name: str) -> list:
    """Return the versions of a library that the variants of a manifest require."""
    requires = [Requirement(text) for each in manifest["variants"].values() for text in each.get("requires", ())]
    return [each.specifier for each in requires if each.name == name]
