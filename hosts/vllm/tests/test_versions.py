"""The installed vLLM, the tested range, and the warning outside of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import attnplug_vllm
from attnplug_vllm import versions

WRITTEN = "__version__: str\n__version__ = version = '{}'\n__version_tuple__ = (0, 1)\n"


def _package(folder, monkeypatch, version_file=None):
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n", encoding="utf-8")
    if version_file is not None:
        (package / "_version.py").write_text(version_file, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(folder))


def _loaded(monkeypatch, version):
    module = ModuleType("vllm")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_the_version_of_a_loaded_vllm_is_its_own(monkeypatch):
    _loaded(monkeypatch, "0.31.2")

    assert versions.installed_version() == Version("0.31.2")


@pytest.mark.parametrize("written", ["0.26.0", "0.33.1rc2+cpu"])
def test_the_version_is_read_without_an_import(written, tmp_path, monkeypatch):
    _package(tmp_path, monkeypatch, WRITTEN.format(written))

    assert versions.installed_version() == Version(written)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("content", [None, "", "__version__ = commit()\n"])
def test_a_source_tree_without_a_version_has_none(content, tmp_path, monkeypatch):
    _package(tmp_path, monkeypatch, content)

    assert versions.installed_version() is None


def test_the_version_dev_of_a_source_tree_is_none(monkeypatch):
    _loaded(monkeypatch, "dev")

    assert versions.installed_version() is None


def test_without_vllm_there_is_no_version(monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(versions, "find_spec", lambda name: None)

    assert versions.installed_version() is None


@pytest.mark.parametrize("version", ["0.26", "0.26.0", "0.26.1rc1", "0.32.0+cpu", "0.33.9", "0.33.0.post1"])
def test_a_version_inside_the_range_is_tested(version):
    assert versions.untested(Version(version)) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.34.0rc1", "1.0", "0.9.2"])
def test_a_version_outside_the_range_is_named(version):
    message = versions.untested(Version(version))

    assert f"tested with vLLM >=0.26,<0.34, and this is vLLM {version}." in message
    assert "Install a tested vLLM" in message


def test_a_version_that_is_unknown_is_untested():
    assert "vLLM of an unknown version" in versions.untested(None)


@pytest.fixture
def warned(monkeypatch):
    """Return what is written to vLLM's log, in a process that has warned of nothing yet."""
    messages = []
    monkeypatch.setattr(versions._LOGGER, "warning", messages.append)
    versions.warn_if_untested.cache_clear()
    yield messages
    versions.warn_if_untested.cache_clear()


def test_the_warning_is_logged_once(warned, monkeypatch):
    _loaded(monkeypatch, "0.99.0")

    versions.warn_if_untested()
    versions.warn_if_untested()

    assert warned == [versions.untested(Version("0.99.0"))]


def test_vllm_shows_the_log_of_the_warning():
    assert versions._LOGGER.name.partition(".")[0] == "vllm"


def test_registering_with_an_untested_vllm_warns(warned, monkeypatch):
    _loaded(monkeypatch, "0.99.0")
    for step in ("registration.register", "int8.register_dtypes", "phi3_small_config.register_model"):
        monkeypatch.setattr(f"attnplug_vllm.{step}", lambda: None)

    attnplug_vllm.register()

    assert len(warned) == 1


def test_a_tested_version_warns_of_nothing(warned, monkeypatch):
    _loaded(monkeypatch, "0.33.0")

    versions.warn_if_untested()

    assert warned == []


def test_the_extras_admit_the_tested_range():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]

    assert [SpecifierSet(text.removeprefix("vllm").removeprefix("-cpu")) for text in extras] == [versions.TESTED] * 2


def test_the_version_is_known_without_torch():
    code = "import sys, attnplug_vllm.versions as v; v.installed_version(); print({'torch', 'vllm'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


@pytest.mark.needs_vllm
def test_the_version_read_is_the_one_imported():
    read = versions._written_version()
    import vllm  # noqa: PLC0415 - it is read first

    assert read == vllm.__version__
