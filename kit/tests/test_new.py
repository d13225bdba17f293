"""``attnplug new``: names, files and refusals. Another test builds, installs and runs a project."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from attnplug.errors import RequestError
from attnplug_kit.new.project import FILES, Name, render, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which commands run."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def _files(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_a_project_is_written_beside_the_caller(run, here: Path) -> None:
    outcome = run("new", "acme_fast")

    package = "attnplug-acme-fast/src/attnplug_acme_fast"
    assert outcome.code == 0
    assert outcome.err == ""
    assert "cd attnplug-acme-fast" in outcome.out
    assert _files(here) == {
        *(f"attnplug-acme-fast/{name}" for name in ("README.md", "pyproject.toml", ".gitignore")),
        *(f"{package}/{name}" for name in ("__init__.py", "attnplug.toml", "plugin.py", "backend.py")),
        "attnplug-acme-fast/tests/test_conformance.py",
    }


def test_json_has_the_names_and_files(run, here: Path) -> None:
    reported = run("new", "acme_fast", "--path", "deep/down", "--json").json

    assert {name: reported[name] for name in ("backend", "distribution", "package", "path", "alike")} == {
        "backend": "acme_fast",
        "distribution": "attnplug-acme-fast",
        "package": "attnplug_acme_fast",
        "path": "deep/down",
        "alike": None,
    }
    assert set(reported["files"]) == _files(here / "deep" / "down")


def test_no_placeholder_is_left_and_every_template_is_used() -> None:
    files = render(Name("acme_fast"))

    assert not [path for path, text in files.items() if "{{" in path + text or "}}" in path + text]
    assert len(files) == len(FILES)
    assert "class AcmeFastBackend(Backend):" in files["src/attnplug_acme_fast/backend.py"]


@pytest.mark.parametrize("name", ["a", "acme_fast", "x9"])
def test_the_modules_are_python_within_the_columns(name: str) -> None:
    modules = {path: text for path, text in render(Name(name)).items() if path.endswith(".py")}

    for text in modules.values():
        ast.parse(text, feature_version=(3, 10))
    assert max(len(line) for text in modules.values() for line in text.splitlines()) <= 120


def test_failures_are_short_and_reports_are_not_committed() -> None:
    files = render(Name("acme"))

    assert 'addopts = "--tb=line"' in files["pyproject.toml"]
    assert "report/" in files[".gitignore"].splitlines()


def test_the_backend_is_short() -> None:
    lines = render(Name("acme"))["src/attnplug_acme/backend.py"].splitlines()

    assert len([line for line in lines if line.strip()]) <= 45


def test_the_readme_lists_the_project_and_has_no_links(run, here: Path) -> None:
    out = run("new", "acme", "--path", "made").out
    readme = (here / "made" / "README.md").read_text("utf-8")
    rows = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")]
    commands = [line.partition("#")[0].strip() for line in readme.splitlines() if line.startswith("    ")]
    offered = [line.strip() for line in out.partition("next:")[2].splitlines() if line]

    assert "](" not in readme
    assert "://" not in readme
    assert set(rows) < _files(here / "made")
    assert [each for each in commands if "CHECKOUT" not in each and each != "attnplug list"] == offered[1:]


@pytest.mark.parametrize(
    ("folder", "shown"),
    [("made", "made"), ("two words", "'two words'"), ("a;id $(id)", "'a;id $(id)'"), ("a\x1b[2J", "'a\\x1b[2J'")],
)
def test_the_folder_is_quoted_for_a_shell(run, here: Path, folder: str, shown: str) -> None:
    assert f"\n  cd {shown}\n" in run("new", "acme", "--path", folder).out


def test_check_finds_nothing_in_a_new_project(run, here: Path) -> None:
    run("new", "acme", "--path", "made")

    outcome = run("check", "made")

    assert outcome.code == 0
    assert outcome.out == (
        "acme/plain, not exercised by the conformance kit:\n"
        "    any value, on a CPU:\n"
        "      pytest --pyargs attnplug_kit --attn-backend=acme/plain --attn-device=cpu --attn-report=report\n"
        "then move report/evidence-*.json to evidence/VARIANT-DEVICE.json beside the manifest\n"
        "\n"
        "no problem, 3 files checked\n"
    )


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("Acme-Fast", "attnplug new acme_fast"),
        ("acme__fast", "attnplug new acme_fast"),
        ("_acme", "attnplug new acme"),
        ("attnplug_acme", "attnplug new acme"),
        ("attnplug-acme", "attnplug new acme"),
        ("acme.fast/plain", "attnplug new acme_fast_plain"),
        ("../acme", "attnplug new acme"),
        ("9lives", "choose another name"),
        ("auto", "choose another name"),
        ("", "choose another name"),
        ("größe", "attnplug new gr_e"),
    ],
)
def test_an_invalid_name_is_refused_with_a_valid_one(run, here: Path, name: str, fix: str) -> None:
    outcome = run("new", name)

    assert outcome.code == 2
    assert f"the name {name!r} was given" in outcome.err
    assert f"fix: {fix}" in outcome.err
    assert not _files(here)


def test_the_name_of_an_installed_backend_is_refused(run, here: Path) -> None:
    outcome = run("new", "torch", "--json")

    assert outcome.code == 2
    assert (
        "a name belongs to one distribution; that is the backend 'torch' of attnplug"
        in outcome.json["error"]["expected"]
    )
    assert not _files(here)


def test_the_name_of_a_known_backend_is_refused(run, here: Path) -> None:
    outcome = run("new", "flashinfer")

    assert outcome.code == 2
    assert "the backend 'flashinfer' of attnplug-flashinfer" in outcome.err  # known everywhere, and perhaps installed
    assert not _files(here)


def test_the_name_of_a_plugin_and_its_alias_are_refused(run, site, here: Path) -> None:
    site.add("other", 'api = "1.0"\nbackend = { name = "other", aliases = ["second"], summary = "x" }\n[supports]\n'
             'device_type = "cpu"\ndtype = "float32"\nhead_size = 8\n')  # fmt: skip

    assert "'flash' of attnplug-flash\n" in run("new", "flash").err
    assert "an alias of the backend 'other'" in run("new", "second").err
    assert not _files(here)


def test_a_name_that_is_close_to_another_is_noted(run, here: Path) -> None:
    shown = run("new", "flashinfr", "--path", "one").out

    assert "note: 'flashinfr' is close to 'flashinfer'" in shown
    assert run("new", "flashinfr", "--path", "two", "--json").json["alike"] == "flashinfer"
    assert "note" not in run("new", "acme").out


def test_nothing_is_overwritten(run, here: Path) -> None:
    (here / "attnplug-acme").mkdir()
    (here / "attnplug-acme" / "README.md").write_text("mine")

    outcome = run("new", "acme")

    assert outcome.code == 2
    assert "'attnplug-acme', which contains 'README.md'" in outcome.err
    assert _files(here) == {"attnplug-acme/README.md"}
    assert (here / "attnplug-acme" / "README.md").read_text() == "mine"


def test_an_empty_folder_is_filled(run, here: Path) -> None:
    (here / "made").mkdir()

    assert run("new", "acme", "--path", "made").code == 0
    assert "pyproject.toml" in _files(here / "made")


@pytest.mark.parametrize("path", ["file", "file/below", "dangling"])
def test_what_is_no_folder_is_refused(run, here: Path, path: str) -> None:
    (here / "file").write_text("mine")
    (here / "dangling").symlink_to("nowhere")

    outcome = run("new", "acme", "--path", path)

    assert outcome.code == 2
    assert f"cannot be written to '{path}'" in outcome.err
    assert _files(here) == {"file"}


def test_a_project_that_cannot_be_finished_leaves_nothing(here: Path) -> None:
    (here / "empty").mkdir()

    for folder in (here / "deep" / "new", here / "empty"):
        with pytest.raises(RequestError, match="cannot be written to"):
            write(folder, {"README.md": "one", "src/a.py": "two", "src/a.py/b.py": "three"})

    assert [path.name for path in here.rglob("*")] == ["empty"]


def test_help_reads_no_templates(start, here: Path) -> None:
    """Help imports no templates, and the command no torch."""
    code = """
import sys
from attnplug.cli.main import main
main(["new", "--help"])
early = {"attnplug_kit.new.project", "attnplug_kit.new.project"} & set(sys.modules)
main(["new", "acme"])
print(sorted(early), "torch" in sys.modules, file=sys.stderr)
"""

    assert start("-c", code).err.splitlines()[-1] == "[] False"
