"""From an entry to a plugin: where its manifest is, and what may be wrong. Every package here exits when imported."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_DEFLATED, ZipExtFile, ZipFile

import pytest

import attnplug
from attnplug.discovery import plugin as plugin_module
from attnplug.discovery.distribution import Entry
from attnplug.discovery.plugin import find_manifest, read_plugin, read_plugins
from attnplug.errors import ApiVersionError, ManifestError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def importable(site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a site that Python imports from."""
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


def entry(name: str, module: str, distribution: str = "my-plugin") -> Entry:
    return Entry(name, module, distribution, "1.0")


def test_a_manifest_beside_the_module_is_read_without_an_import(importable: Any, manifest: Callable[..., str]) -> None:
    path = importable.package("beside.plugin", manifest("beside"))

    plugin = read_plugin(entry("beside", "beside.plugin"))

    assert find_manifest("beside.plugin") == path
    assert plugin.manifest is not None
    assert plugin.manifest.name == "beside"
    assert (plugin.problem, plugin.fix, plugin.built_in, plugin.label) == (None, "", False, "my-plugin 1.0")
    assert "beside" not in sys.modules


def test_a_module_deeper_down_has_its_manifest_there(importable: Any, manifest: Callable[..., str]) -> None:
    path = importable.package("deep.inside.plugin", manifest("deep"))

    assert find_manifest("deep.inside.plugin") == path
    assert read_plugin(entry("deep", "deep.inside.plugin")).problem is None
    assert "deep" not in sys.modules


def test_a_plugin_that_is_a_package_has_its_manifest_inside(importable: Any, manifest: Callable[..., str]) -> None:
    top = importable.package("whole.plugin", manifest("whole"))
    inside = importable.package("outer.whole.plugin", manifest("whole"))

    assert find_manifest("whole") == top
    assert find_manifest("outer.whole") == inside


def test_a_single_module_has_its_manifest_beside_it(importable: Any, manifest: Callable[..., str]) -> None:
    path = importable.package("single", manifest("single"))

    assert find_manifest("single") == path
    assert read_plugin(entry("single", "single")).problem is None
    assert "single" not in sys.modules


def test_every_part_of_a_namespace_package_is_looked_into(
    importable: Any, another_site: Any, manifest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(another_site), *sys.path])
    (another_site.folder / "shared_name").mkdir()
    path = importable.package("shared_name.plugin", manifest("spread"))
    (path.parent / "__init__.py").unlink()

    assert find_manifest("shared_name.plugin") == path


def test_a_package_in_an_archive_is_read(
    importable: Any, manifest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = importable.package("zipped_plugin.plugin", manifest("zipped"))
    archive = importable.folder.parent / "plugins.zip"
    with ZipFile(archive, "w") as file:
        file.write(path.with_name("__init__.py"), "zipped_plugin/__init__.py")
        file.write(path, "zipped_plugin/attnplug.toml")
        file.write(path, "unlike/attnplug.toml")
        file.write(path.with_name("__init__.py"), "bare/__init__.py")
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path[1:]])

    plugin = read_plugin(entry("zipped", "zipped_plugin.plugin"))
    bare = read_plugin(entry("bare", "bare.plugin"))

    assert plugin.manifest is not None
    assert plugin.manifest.path == str(archive / "zipped_plugin" / "attnplug.toml")
    assert bare.problem is not None
    assert "cannot be read" in bare.problem.because


def test_a_package_that_was_installed_a_moment_ago_is_found(importable: Any, manifest: Callable[..., str]) -> None:
    assert read_plugin(entry("fresh", "fresh.plugin")).problem is not None  # the import system now remembers the folder

    importable.package("fresh.plugin", manifest("fresh"))

    assert read_plugin(entry("fresh", "fresh.plugin")).problem is None


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        ("no such module", "has the value 'no such module'"),
        ("", "has the value ''"),
        (".relative", "has the value '.relative'"),
        ("absent_package.plugin", "there is no package 'absent_package'"),
        ("__main__.plugin", "looking for '__main__' fails"),
    ],
)
def test_what_leads_nowhere_is_a_problem(module: str, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    plugin = read_plugin(entry("lost", module))

    assert plugin.manifest is None
    assert plugin.problem is not None
    assert plugin.problem.code == "broken"
    assert complaint in str(plugin.problem)
    assert plugin.fix
    with pytest.raises(ManifestError, match="fix"):
        find_manifest(module)


def test_a_missing_manifest_is_a_problem(importable: Any) -> None:
    path = importable.package("forgetful.plugin", None)

    plugin = read_plugin(entry("forgetful", "forgetful.plugin"))

    assert find_manifest("forgetful.plugin") == path
    assert plugin.problem is not None
    assert str(path) in plugin.problem.because
    assert plugin.fix == "ship it in the wheel"


def test_a_malformed_manifest_is_a_problem_with_file_and_line(importable: Any, manifest: Callable[..., str]) -> None:
    text = manifest("wrong").replace("head_size", "haed_size")
    path = importable.package("wrong.plugin", text)
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "haed_size" in each)

    plugin = read_plugin(entry("wrong", "wrong.plugin"))

    assert plugin.problem is not None
    assert plugin.problem.code == "broken"
    assert plugin.problem.supported == "my-plugin 1.0 has no valid manifest"
    assert f"{path}:{line}: " in plugin.problem.because
    assert "did you mean 'head_size'?" in plugin.problem.because
    assert isinstance(plugin.error, ManifestError)


def test_the_entry_point_and_the_manifest_agree_on_the_name(importable: Any, manifest: Callable[..., str]) -> None:
    path = importable.package("renamed.plugin", manifest("before"))
    line = next(number for number, each in enumerate(path.read_text().splitlines(), 1) if "name =" in each)

    plugin = read_plugin(entry("after", "renamed.plugin"))

    assert plugin.manifest is None
    assert plugin.problem is not None
    assert f"{path}:{line}: name = 'before'" in plugin.problem.because
    assert "calls this backend 'after'" in plugin.problem.because


def test_another_major_contract_is_a_separate_problem(importable: Any, manifest: Callable[..., str]) -> None:
    importable.package("future.plugin", manifest("future", api="2.0"))

    plugin = read_plugin(entry("future", "future.plugin"))

    assert plugin.problem is not None
    assert plugin.problem.code == "api"
    assert str(plugin.problem).startswith("this core has contract 1.x")
    assert isinstance(plugin.error, ApiVersionError)


def test_only_the_core_is_built_in(importable: Any, manifest: Callable[..., str]) -> None:
    importable.package("pretender.plugin", manifest("pretender"))
    elsewhere = entry("torch", "attnplug.torch_backend.plugin", "elsewhere")

    found = read_plugins((elsewhere, entry("pretender", "pretender.plugin", "attnplug")))

    assert [(plugin.label, plugin.built_in) for plugin in found] == [
        (f"attnplug {attnplug.__version__}", True), ("elsewhere 1.0", False), ("attnplug 1.0", False)
    ]  # fmt: skip
    assert importlib.metadata.version("attnplug") == attnplug.__version__
    assert Path(find_manifest("attnplug.torch_backend.plugin")).parts[-3:] == (
        "attnplug",
        "torch_backend",
        "attnplug.toml",
    )


# Whatever reading a plugin raises


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "raises MemoryError"),
        (RecursionError("too deep"), "raises RecursionError: too deep"),
        (OverflowError("int too large"), "raises OverflowError: int too large"),
        (KeyError("odd"), "raises KeyError: 'odd'"),
        (UnprintableError(), "raises UnprintableError (its text cannot be shown: str() of it raises ValueError)"),
        (ValueError("x" * 10_000), "raises ValueError: xxx"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_unforeseen_exception_names_its_type_and_what_was_read(
    importable: Any, manifest: Callable[..., str], monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    importable.package("odd.plugin", manifest("odd"))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(plugin_module, "parse_manifest", fail)

    plugin = read_plugin(entry("odd", "odd.plugin"))

    assert plugin.manifest is None
    assert plugin.problem is not None
    assert plugin.problem.code == "broken"
    assert f"reading the attnplug.toml of 'odd.plugin' {text}" in plugin.problem.because
    assert len(plugin.problem.because) < 3000
    assert plugin.fix
    assert plugin.error is not None
    assert plugin.error.__cause__ is error


def test_the_users_interrupt_passes(
    importable: Any, manifest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    importable.package("odd.plugin", manifest("odd"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plugin_module, "parse_manifest", interrupt)

    with pytest.raises(KeyboardInterrupt):
        read_plugin(entry("odd", "odd.plugin"))


def test_a_large_manifest_in_an_archive_is_not_unpacked(
    importable: Any, manifest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = importable.folder / "bomb.zip"
    with ZipFile(archive, "w", ZIP_DEFLATED) as file:
        file.writestr("bomb/__init__.py", "raise SystemExit('imported')")
        file.writestr("bomb/attnplug.toml", manifest("bomb") + "#" * 50 * 2**20)
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path])
    sizes: list[int] = []
    real = ZipExtFile.read

    def read(self: ZipExtFile, size: int | None = -1) -> bytes:
        sizes.append(len(content := real(self, size)))
        return content

    monkeypatch.setattr(ZipExtFile, "read", read)

    plugin = read_plugin(entry("bomb", "bomb.plugin"))

    assert plugin.problem is not None
    assert "larger than 64 KiB" in plugin.problem.because
    assert sum(sizes) <= 2**16 + 1


def test_a_loader_that_returns_too_much_is_refused(importable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def get_data(self, path: str) -> bytes:
            return b"#" * (2**16 + 1)

    spec = ModuleSpec("remote", Loader(), is_package=True)  # type: ignore[arg-type] - as little as a loader may have
    spec.submodule_search_locations = ["/nowhere/remote"]
    monkeypatch.setattr(plugin_module, "find_spec", lambda _: spec)

    plugin = read_plugin(entry("remote", "remote.plugin"))

    assert plugin.problem is not None
    assert "larger than 64 KiB" in plugin.problem.because


def test_of_more_bytes_than_are_read_the_smallest_count(importable: Any, manifest: Any, monkeypatch: Any) -> None:
    entries = []
    for name, size in (("large", 900), ("little", 0), ("middle", 300)):
        importable.package(f"{name}_pkg.plugin", manifest(name) + "#" * size)
        entries.append(entry(name, f"{name}_pkg.plugin", f"attnplug-{name}"))
    entries.append(entry("gone", "nowhere_pkg.plugin", "attnplug-gone"))
    size = len(manifest("little"))
    monkeypatch.setattr(plugin_module, "MOST_BYTES", 2 * size + 302)

    found = {plugin.name: str(plugin.problem or "") for plugin in read_plugins(entries)}

    assert found["little"] == found["middle"] == found["torch"] == ""
    assert f"have more than {2 * size + 302:,} bytes; the smallest are read" in found["large"]
    assert "there is no package 'nowhere_pkg'" in found["gone"]
