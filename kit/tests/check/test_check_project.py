"""``attnplug check`` of a plugin project: from the entry point to the manifest in the wheel, without imports."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from attnplug.contract import hooks
from attnplug_kit.check.source import HOOKS

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "attnplug-acme"
version = "1.0"
dependencies = ["attnplug>=0.1,<1"]
[project.entry-points."attnplug.backends"]
acme = "attnplug_acme.plugin"
"""
MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "an example" }
supports = { device_type = "cpu", dtype = "float32", head_size = 64 }
"""
PLUGIN = """\
raise RuntimeError("this module is not to be imported")
from attnplug.contract import hookimpl

@hookimpl
def attnplug_backend(variant, agreement):
    ...

@hookimpl
def attnplug_probe(device):
    ...
"""
OPTION = '[options.splits]\ntype = "int"\ndefault = 0\nhelp = "parts"\n'
HATCH, TOOLS = "hatchling.build", '["hatchling"]'
SETUPTOOLS = PYPROJECT.replace(HATCH, "setuptools.build_meta").replace(TOOLS, '["setuptools"]')


class Folder:
    """A valid project; each test introduces one mistake."""

    def __init__(self, folder: Path, run) -> None:
        self.folder = folder
        self.run = run
        self.pyproject = self.write("pyproject.toml", PYPROJECT)
        self.write("src/attnplug_acme/__init__.py", "")
        self.plugin = self.write("src/attnplug_acme/plugin.py", PLUGIN)
        self.manifest = self.write("src/attnplug_acme/attnplug.toml", MANIFEST)

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def change(self, file: Path, old: str, new: str) -> None:
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new, 1), encoding="utf-8")

    def check(self, path: str = ".") -> tuple[int, list[tuple[str, int | None, str]]]:
        """Return the exit code, and the findings as (file, line, text)."""
        outcome = self.run("check", str(self.folder / path), "--json")
        found = [*outcome.json["problems"], *outcome.json["notes"]]
        reported = [(Path(f["path"]).name, f["line"], f"{f['problem']}; {f['expected']}; {f['fix']}") for f in found]
        return outcome.code, reported


@pytest.fixture
def project(tmp_path: Path, run, empty) -> Folder:
    return Folder(tmp_path / "project", run)


def one(outcome: tuple[int, list[tuple[str, int | None, str]]]) -> tuple[int, str, int | None, str]:
    code, ((file, line, text),) = outcome
    return code, file, line, text


@pytest.mark.parametrize("path", [".", "pyproject.toml"])
def test_a_valid_project_has_no_finding(project, path) -> None:
    assert project.check(path) == (0, [])


def test_every_file_that_was_looked_at_is_listed(project) -> None:
    found = project.run("check", str(project.folder), "--json").json

    assert [Path(file).name for file in found["files"]] == ["pyproject.toml", "plugin.py", "attnplug.toml"]
    assert found["backends"] == ["acme"]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("[build-system]", "[build-system", 1, "it is not TOML"),
        ("attnplug.backends", "attnplug.backend", 8, "is it 'attnplug.backend'?"),
        ('[project.entry-points."attnplug.backends"]', "[project.scripts]", 4, "no entry point in the group"),
        ('"attnplug_acme.plugin"', "3", 9, "an entry point is a text"),
        ("acme.plugin", "acme.plugin:hooks", 9, "write acme = 'attnplug_acme.plugin'"),
        ("acme.plugin", "acme.plugn", 9, "did you mean 'attnplug_acme.plugin'?"),
        ('acme = "', 'acne = "', 2, "the entry point calls this backend 'acne'"),
        ('name = "attnplug-acme"\n', "", 4, "a distribution has a name"),
        ('"attnplug>=0.1,<1"', '"attnplug>=2,<1"', 7, "some version meets all of them"),
        ('"attnplug>=0.1,<1"', '"attnplug", "acme kernels"', 7, "PEP 508"),
    ],
)
def test_what_is_wrong_with_the_pyproject(project, old, new, line, said) -> None:
    project.change(project.pyproject, old, new)

    code, _, at, text = one(project.check())

    assert (code, at) == (1, line)
    assert said in text


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ('"attnplug>=0.1,<1"', '"torch"', 7, "no 'attnplug' in the dependencies"),
        ('[project.entry-points."attnplug.backends"]', "[tool.acme]", 4, "the entry points are dynamic"),
        (HATCH, "mesonpy", 1, "whether 'mesonpy' packs data beside modules is unknown here"),
    ],
)
def test_what_is_unknown_is_a_note(project, old, new, line, said) -> None:
    if "dynamic" in said:
        project.change(project.pyproject, "[project]\n", '[project]\ndynamic = ["entry-points"]\n')
        line += 1
    project.change(project.pyproject, old, new)

    code, _, at, text = one(project.check())

    assert (code, at) == (0, line)
    assert said in text


def test_a_manifest_elsewhere_is_pointed_at(project) -> None:
    project.manifest.rename(project.folder / "src" / "attnplug.toml")

    code, file, line, text = one(project.check())

    assert (code, file, line) == (1, "pyproject.toml", 9)
    assert "there is one at src/attnplug.toml" in text
    assert "it is src/attnplug_acme/attnplug.toml" in text


def test_a_missing_manifest_is_found(project) -> None:
    project.manifest.unlink()

    assert "no attnplug.toml beside 'attnplug_acme.plugin'; it is src" in one(project.check())[3]


def test_a_plugin_that_is_a_package_has_its_manifest_inside(project) -> None:
    project.plugin.unlink()
    project.write("src/attnplug_acme/plugin/__init__.py", PLUGIN)
    project.manifest.rename(project.folder / "src/attnplug_acme/plugin/attnplug.toml")

    assert project.check() == (0, [])


def test_mistakes_of_manifest_and_project_are_found_together(project) -> None:
    project.change(project.manifest, "head_size", "head_sise")
    project.change(project.pyproject, "<1", "<0")
    project.change(project.plugin, "(device)", "(devise)")

    code, found = project.check()

    assert code == 1
    assert [(file, line) for file, line, _ in found] == [("pyproject.toml", 7), ("plugin.py", 9), ("attnplug.toml", 3)]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("(device)", "(device, colour)", 9, "the argument 'colour' of attnplug_probe"),
        ("def attnplug_probe", "def attnplug_prob", 9, "did you mean 'attnplug_probe'?"),
        ("def attnplug_backend", "def backend", None, "no hook 'attnplug_backend'"),
        ("(device):", "(device)", 9, "it is not Python"),
        pytest.param(
            "from attnplug.contract", f"x = y{'.a' * 5000}\nfrom attnplug.contract", None, "it is not Python", id="deep"
        ),
        ("from attnplug.contract", "from __future__ import annotations\nfrom attnplug.contract", 2, "it is not Python"),
    ],
)
def test_hooks_are_read_and_not_run(project, old, new, line, said) -> None:
    project.change(project.plugin, old, new)
    most = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # as in a fresh process: with the limit that torch's compiler sets, this is read
    try:
        code, file, at, text = one(project.check())
    finally:
        sys.setrecursionlimit(most)

    assert (code, file, at) == (1, "plugin.py", line)
    assert said in text


@pytest.mark.parametrize(
    "line", ["from attnplug_acme.hooks import *", "from x import attnplug_backend", "attnplug_backend = 1"]
)
def test_a_hook_may_come_from_elsewhere(project, line) -> None:
    project.plugin.write_text(f"{line}\n", encoding="utf-8")

    assert project.check() == (0, [])


def test_the_hooks_are_those_of_the_contract() -> None:
    specified = {name: value for name, value in vars(hooks).items() if name.startswith("attnplug_")}

    assert {name: tuple(inspect.signature(hook).parameters) for name, hook in specified.items()} == dict(HOOKS)


def test_a_hook_without_its_marker_is_noted(project) -> None:
    project.change(project.plugin, "@hookimpl\ndef attnplug_probe", "def attnplug_probe")

    code, file, line, text = one(project.check())

    assert (code, file, line) == (0, "plugin.py", 8)
    assert "attnplug_probe without @hookimpl" in text


def test_an_option_that_no_module_reads_is_noted(project) -> None:
    project.write("src/attnplug_acme/attnplug.toml", MANIFEST + OPTION)

    code, file, line, text = one(project.check())
    assert (code, file, line) == (0, "attnplug.toml", 4)
    assert "the option 'splits'" in text

    project.write("src/attnplug_acme/kernels.py", 'SPLITS = "splits"')
    assert project.check() == (0, [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('[tool.hatch.build.targets.wheel]\npackages = ["src/attnplug_acme"]', ""),
        ('[tool.hatch.build.targets.wheel]\npackages = ["src/other"]', "`packages` of hatchling is ['src/other']"),
        ('[tool.hatch.build.targets.wheel]\nonly-include = ["src"]', ""),
        ('[tool.hatch.build]\ninclude = ["src/**/*.py"]', "`include` of hatchling"),
        ('[tool.hatch.build]\ninclude = ["src/**/*.py", "*.toml"]', ""),
        ('[tool.hatch.build]\nexclude = ["*.toml"]', "`exclude` of hatchling"),
        ('[tool.hatch.build]\nexclude = ["/tests"]', ""),
        ('[tool.hatch.build]\nexclude = ["*.toml"]\nartifacts = ["attnplug.toml"]', ""),
    ],
)
def test_hatchling_takes_the_manifest_or_leaves_it(project, settings, said) -> None:
    project.write("pyproject.toml", f"{PYPROJECT}{settings}\n")

    code, found = project.check()

    assert code == bool(said)
    assert [said in text for _, _, text in found] == [True] * bool(said)


@pytest.mark.parametrize(("ignored", "code"), [("*.toml", 1), ("*.toml\n!attnplug.toml", 0), ("# *.toml\n/dist/", 0)])
def test_hatchling_leaves_out_what_git_ignores(project, ignored, code) -> None:
    project.write(".gitignore", f"{ignored}\n")

    assert project.check()[0] == code


def test_hatchling_takes_the_package_of_the_projects_name(project) -> None:
    project.change(project.pyproject, "attnplug-acme", "acme-attention")

    code, _, _, text = one(project.check())

    assert code == 1
    assert "hatchling takes the package 'acme_attention'" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "neither `package-data` nor MANIFEST.in names it"),
        ('[tool.setuptools.package-data]\n"*" = ["*.toml"]', ""),
        ('[tool.setuptools.package-data]\nattnplug_acme = ["attnplug.toml"]', ""),
        ('[tool.setuptools.package-data]\nattnplug_other = ["attnplug.toml"]', "neither `package-data`"),
        ('[tool.setuptools.exclude-package-data]\n"*" = ["*.toml"]', "`exclude-package-data` of setuptools"),
        ("[tool.setuptools]\ninclude-package-data = false", "`include-package-data` of setuptools is false"),
    ],
)
def test_setuptools_takes_what_is_named(project, settings, said) -> None:
    project.write("pyproject.toml", f"{SETUPTOOLS}{settings}\n")

    code, found = project.check()

    assert code == bool(said)
    assert [said in text for _, _, text in found] == [True] * bool(said)


@pytest.mark.parametrize("template", ["recursive-include src *.toml", "graft src", "global-include attnplug.toml"])
def test_setuptools_reads_its_template(project, template) -> None:
    project.write("pyproject.toml", SETUPTOOLS)
    project.write("MANIFEST.in", f"{template}\n")

    assert project.check() == (0, [])


def test_setuptools_uses_version_control(project) -> None:
    project.write("pyproject.toml", SETUPTOOLS.replace('"setuptools"', '"setuptools", "setuptools-scm>=8"'))

    assert project.check() == (0, [])


def test_an_entry_point_of_poetry_is_one(project) -> None:
    project.change(project.pyproject, "project.entry-points", "tool.poetry.plugins")
    project.change(project.pyproject, HATCH, "poetry.core.masonry.api")

    assert project.check() == (0, [])


@pytest.mark.parametrize(("distribution", "code"), [("attnplug-acme", 0), ("attnplug-rival", 1)])
def test_the_name_of_another_distribution_is_taken(project, empty, distribution, code) -> None:
    empty.add("acme", MANIFEST, distribution=distribution)

    assert project.check()[0] == code
