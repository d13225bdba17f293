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
