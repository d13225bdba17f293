"""The table of what is used of vLLM: true of the installed version, and complete for what the sources import."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

import attnplug_vllm
from attnplug_vllm import versions
from hosts.vllm.tests.cuda_platform import stub_compiled
from hosts.vllm.tests.members import MEMBERS, members_of
from tests.drift import Member, Use, drift
from tests.test_import_law import imports_of

SOURCES = Path(attnplug_vllm.__file__).parent
INSTALLED = versions.installed_version()


def missing_imports(source: str, members=MEMBERS) -> list[str]:
    """Return what a source imports of vLLM and the table lacks."""
    named = [each.path for each in members]
    used = [
        f"{found.module}:{name}" if name else found.module
        for found in imports_of(source, "attnplug_vllm")
        if found.runs and found.module.partition(".")[0] == "vllm"
        for name in found.names or ("",)
    ]
    return [
        each for each in used if not any(path == each or path.startswith((f"{each}.", f"{each}:")) for path in named)
    ]


@pytest.mark.parametrize("file", sorted(SOURCES.rglob("*.py")), ids=lambda file: file.name)
def test_what_a_source_imports_of_vllm_is_in_the_table(file):
    assert missing_imports(file.read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from vllm.a import B", []),
        ("def f():\n    from vllm.a import B, C", ["vllm.a:C"]),
        ("import vllm.a", []),
        ("import vllm.b", ["vllm.b"]),
        ("import vllm", []),
        ("from importlib import import_module\nimport_module('vllm.b')", ["vllm.b"]),
        ("if TYPE_CHECKING:\n    from vllm.b import D", []),
        ("import vllmish", []),
    ],
)
def test_an_import_outside_of_the_table_is_found(source, expected):
    assert missing_imports(source, [Member("vllm.a:B.c")]) == expected


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.0"])
def test_no_member_is_in_the_table_twice(version):
    paths = [each.path for each in members_of(Version(version))]

    assert [path for path in set(paths) if paths.count(path) > 1] == []


# Each member beside the installed vLLM. A failure names the member, and says how it is now.


@pytest.mark.needs_vllm
@pytest.mark.parametrize("member", members_of(INSTALLED) if INSTALLED else MEMBERS[:1], ids=lambda member: member.path)
def test_a_member_is_as_the_table_says(member, monkeypatch):
    stub_compiled(monkeypatch)

    assert drift(member) is None


class _Backend:
    plain: int
    value = 1

    def __init__(self):
        self.made = 1

    @staticmethod
    def static(a, b=1): ...

    @classmethod
    def of_class(cls, a): ...

    def method(self, a, *, b): ...

    def anything(self, **more): ...


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (Member("m:Backend.plain"), None),
        (Member("m:Backend.value"), None),
        (Member("m:Backend.made"), None),
        (Member("m:Backend.other"), "m:Backend.other is missing"),
        (Member("m:Other.value"), "m:Other.value is missing"),
        (Member("m:Backend.static", Use.OVERRIDDEN, ("a", "b")), None),
        (Member("m:Backend.of_class", Use.OVERRIDDEN, ("a",)), None),
        (Member("m:Backend.method", Use.OVERRIDDEN, ("a", "b")), None),
        (
            Member("m:Backend.method", Use.OVERRIDDEN, ("b", "a")),
            "m:Backend.method takes (a, b), and attnplug overrides",
        ),
        (Member("m:Backend.method", Use.OVERRIDDEN, ("a",)), "m:Backend.method takes (a, b)"),
        (Member("m:Backend.static", Use.CALLED, ("a",)), None),
        (Member("m:Backend.static", Use.CALLED, ("a", "c")), "m:Backend.static has no parameter c"),
        (Member("m:Backend.method", Use.CALLED, ("a",)), "m:Backend.method requires b too"),
        (Member("m:Backend.anything", Use.CALLED, ("x",)), None),
        (Member("m:Backend.gone", Use.CALLED), "m:Backend.gone is missing"),
    ],
)
def test_drift_names_the_member(member, expected, monkeypatch):
    monkeypatch.setattr("tests.drift.import_module", lambda name: SimpleNamespace(Backend=_Backend))

    found = drift(member)

    assert found == expected if expected is None else found.startswith(expected)


def test_a_module_that_is_gone_is_named():
    assert drift(Member("vllm_without.such.module:Name")).startswith(
        "vllm_without.such.module:Name is missing: No module"
    )
