"""Requirements against installed versions: the quick comparison agrees with `packaging`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from attnplug.manifest.installed import check_requirement, find, requirement_name

PARTS = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
SUFFIXES = st.sampled_from(["", "", "", "a1", "b2", "rc1"])
VERSIONS = st.builds("{}{}{}".format, PARTS, SUFFIXES, st.sampled_from(["", "", "+cpu", "+cu130.1", ".post1", ".dev3"]))
BOUNDS = st.builds(
    "{}{}{}{}".format, st.sampled_from(["<", "<=", "==", "!=", ">=", ">"]), st.sampled_from(["", " "]), PARTS, SUFFIXES
)
REQUIREMENTS = st.lists(BOUNDS, max_size=3).map(lambda bounds: f"some-kernels {','.join(bounds)}".strip())


@given(REQUIREMENTS, VERSIONS)
def test_a_version_is_judged_as_packaging_judges_it(text: str, version: str) -> None:
    admitted = Requirement(text).specifier.contains(version, prereleases=True)

    assert find(text, lambda _: version) == ("met" if admitted else "version", version)


@given(REQUIREMENTS)
def test_what_is_not_installed_is_missing(text: str) -> None:
    assert find(text, lambda _: None) == ("missing", None)


@pytest.mark.parametrize(
    ("text", "version", "finding"),
    [
        ("torch >=2.6", "2.13.0+cpu", "met"),
        ("torch >=2.6,<2.13", "2.13.0+cpu", "version"),
        ("flash-attn-4 >=4.0.0b11", "4.0.0b10", "version"),
        ("torch ~=2.6", "2.13.0", "met"),
        ("torch ==2.*", "2.13.0", "met"),
        ("torch[extra] >=2.6", "2.13.0", "met"),
        ("torch >=2.6; python_version < '3'", "1.0", "met"),
        ("torch >=2.6", "1!1.0", "met"),
    ],
)
def test_every_form_of_a_requirement_is_read(text: str, version: str, finding: str) -> None:
    assert find(text, lambda _: version)[0] == finding


@pytest.mark.parametrize("text", ["torch ~=2", "torch >=", "torch >=2,,<3", "-torch", "torch >= x", ""])
def test_a_malformed_requirement_is_refused(text: str) -> None:
    assert check_requirement(text)


@pytest.mark.parametrize("text", ["torch", "torch>=2", "torch[a,b] ~=2.6 ; python_version > '3'"])
def test_the_distribution_of_a_requirement_is_its_name(text: str) -> None:
    assert check_requirement(text) == ""
    assert requirement_name(text) == "torch"


def test_packaging_is_not_imported_for_final_releases_and_simple_bounds() -> None:
    code = (
        "import sys; from attnplug.manifest.installed import find;"
        "assert find('torch >=2.6,<3', lambda _: '2.13.0+cpu')[0] == 'met';"
        "sys.exit('packaging' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MARKERS = ("os_name ~= 'linux'", "python_version ~= 'x'", "os_name > 'a' or os_name ~= 'b'", "'a' == 'b'", "os_name")


@pytest.mark.parametrize("marker", [*MARKERS, "(" * 490, f"{'(' * 450}os_name == 'a'"])
def test_a_marker_that_cannot_be_evaluated_is_refused(marker: str) -> None:
    assert check_requirement(f"torch; {marker}")


def test_a_long_requirement_is_refused_before_it_is_read() -> None:
    assert check_requirement(f"torch >={'9' * 5000}") == "it has 5,008 characters, at most 1,000"


def test_parentheses_are_bounded_whatever_the_stack_has_left() -> None:
    accepted, refused = (f"torch; {'(' * depth}os_name == 'nt'{')' * depth}" for depth in (50, 51))

    assert check_requirement(accepted) == ""
    assert check_requirement(refused) == "its marker is nested too deeply: it has more than 50 parentheses"
    assert check_requirement(f"torch >={'9' * 900}") == ""
    assert find(f"torch >={'9' * 900}", lambda _: "2.0") == ("version", "2.0")


@pytest.mark.parametrize("version", ["9" * 5000, "1.0!", "x", "", "1" * 4000 + ".0rc" + "1" * 5000, "\0", "1.0.*"])
@pytest.mark.parametrize("text", ["torch >=2.6", "torch ~=2.6", "torch ==2.*", "torch[extra] !=3"])
def test_an_odd_version_meets_no_bound(text: str, version: str) -> None:
    assert find(text, lambda _: version) == ("version", version)


@pytest.mark.parametrize("text", ["torch", "torch; os_name != 'x'"])
def test_an_odd_version_meets_a_requirement_without_bounds(text: str) -> None:
    assert find(text, lambda _: "odd!")[0] == "met"


@given(st.text(alphabet="a1.>=<~;'\"() !,*[]osname_\\", max_size=30), st.text(alphabet="019.ab!+rcx", max_size=8))
def test_whatever_is_not_refused_can_be_compared(text: str, version: str) -> None:
    if not check_requirement(text):
        assert find(text, lambda _: version)[0] in ("met", "missing", "version")
        assert requirement_name(text)
