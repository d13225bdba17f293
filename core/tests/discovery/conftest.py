"""Folders that look like site-packages, with as little in them as a test needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attnplug.discovery.plugin import Known, KnownPlugin, Plugin
from attnplug.manifest.reader import parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANIFEST = """
api = "{api}"
backend = {{ name = "{name}", aliases = {aliases}, summary = "made for a test" }}
[supports]
device_type = "cpu"
dtype = "float32"
head_size = {{ min = 1 }}
block_size = {{ min = 1 }}
features = ["paged"]
{rest}
"""


def manifest_text(name: str, *, api: str = "1.0", aliases: tuple[str, ...] = (), rest: str = "") -> str:
    """Return the text of a valid manifest."""
    return MANIFEST.format(name=name, api=api, aliases=list(aliases), rest=rest)


class Site:
    """A folder on ``sys.path``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self.folder)

    def distribution(self, name: str, version: str = "1.0", entry_points: str | bytes | None = None) -> Path:
        """Add the metadata of a distribution; return its folder."""
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nName: not this one\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        if entry_points is not None:
            content = entry_points.encode() if isinstance(entry_points, str) else entry_points
            (info / "entry_points.txt").write_bytes(content)
        return info

    def offer(self, name: str, distribution: str, version: str = "1.0", module: str = "nowhere.plugin") -> Path:
        """Add a distribution that offers a backend."""
        return self.distribution(distribution, version, f"[attnplug.backends]\n{name} = {module}\n")

    def package(self, module: str, manifest: str | None) -> Path:
        """Add a package whose code must not run, with a manifest beside the module; return its path."""
        *parents, last = module.split(".")
        folder = self.folder.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(len(parents)):
            (self.folder.joinpath(*parents[: index + 1]) / "__init__.py").write_text("raise SystemExit('imported')\n")
        (folder / f"{last}.py").write_text("raise SystemExit('imported')\n")
        if manifest is not None:
            (folder / "attnplug.toml").write_text(manifest, encoding="utf-8")
        return folder / "attnplug.toml"


@pytest.fixture(scope="session")
def make_site() -> type[Site]:
    return Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


@pytest.fixture
def another_site(tmp_path: Path) -> Site:
    return Site(tmp_path / "another")


@pytest.fixture(scope="session")
def manifest() -> Callable[..., str]:
    return manifest_text


def make_plugin(
    name: str,
    distribution: str | None = None,
    version: str = "1.0",
    *,
    api: str = "1.0",
    aliases: tuple[str, ...] = (),
    rest: str = "",
) -> Plugin:
    """Return a plugin that exists in memory only."""
    manifest = parse_manifest(manifest_text(name, api=api, aliases=aliases, rest=rest), f"{name}.toml")
    return Plugin(name, f"{name}_package.plugin", distribution or f"attnplug-{name}", version, manifest)


@pytest.fixture(scope="session")
def plugin() -> Callable[..., Plugin]:
    return make_plugin


@pytest.fixture
def known() -> Known:
    """Two published plugins and no orders."""
    return Known(
        (
            KnownPlugin("published", ("PUBLISHED",), "a published one", "attnplug-published"),
            KnownPlugin("shipped", (), "another one", "attnplug-shipped"),
        )
    )
