"""The table of what is used of SGLang: true of the installed version, and complete for what the sources import."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import attnplug_sglang
from hosts.sglang.tests import stand_ins
from hosts.sglang.tests.members import MEMBERS, members_of
from tests.drift import drift
from tests.test_import_law import imports_of

stand_ins.install()
SOURCES = Path(attnplug_sglang.__file__).parent


def missing_imports(source: str) -> list[str]:
    """Return what a source imports of SGLang and the table lacks."""
    named = [each.path for each in MEMBERS]
    used = [
        f"{found.module}:{name}" if name else found.module
        for found in imports_of(source, "attnplug_sglang")
        if found.runs and found.module.partition(".")[0] == "sglang"
        for name in found.names or ("",)
    ]
    return [
        each for each in used if not any(path.replace(":", ".").startswith(each.replace(":", ".")) for path in named)
    ]


@pytest.mark.parametrize("file", sorted(SOURCES.rglob("*.py")), ids=lambda file: file.name)
def test_what_a_source_imports_of_sglang_is_in_the_table(file: Path) -> None:
    assert missing_imports(file.read_text("utf-8")) == []


def test_an_import_outside_of_the_table_is_found() -> None:
    assert missing_imports("def f():\n    from sglang.srt.nothing import Name") == ["sglang.srt.nothing:Name"]


@pytest.mark.parametrize("release", ["0.5.15", "0.5.20", "0.5.23"])
def test_no_member_is_in_the_table_twice(release: str) -> None:
    paths = [each.path for each in members_of(Version(release))]

    assert [path for path in set(paths) if paths.count(path) > 1] == []


@pytest.mark.parametrize("member", members_of(Version(version("sglang"))), ids=lambda member: member.path)
def test_a_member_is_as_the_table_says(member) -> None:
    assert drift(member) is None
