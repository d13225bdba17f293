"""Contradictions of requirements, compared with every version of one or two numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

from attnplug_kit.check.requires import contradict, follows, meets, parsed

NUMBERS = [f"{major}.{minor}{rest}" for major in range(4) for minor in range(4) for rest in ("", "rc1", ".1", ".post1")]
VERSIONS = list(map(Version, NUMBERS))
CLAUSES = st.tuples(st.sampled_from([">=", "<=", ">", "<", "==", "!=", "~="]), st.sampled_from(NUMBERS)).map("".join)
REQUIREMENTS = st.lists(CLAUSES, max_size=3).map(lambda clauses: Requirement("acme" + ",".join(clauses)))


@given(st.lists(REQUIREMENTS, max_size=3))
def test_a_version_that_meets_all_is_no_contradiction(requirements) -> None:
    if any(all(meets(version, each) for each in requirements) for version in VERSIONS):
        assert not contradict(requirements)


@given(st.lists(REQUIREMENTS, min_size=1, max_size=2), REQUIREMENTS)
def test_a_version_that_meets_all_but_one_disproves_that_one(requirements, other) -> None:
    if any(all(meets(v, each) for each in requirements) and not meets(v, other) for v in VERSIONS):
        assert not follows(requirements, other)


def test_contradictions_are_found() -> None:
    for texts in (
        ["a<1", "a>1"],
        ["a>=2,<2"],
        ["a==1", "a!=1"],
        ["a~=1.4", "a>=2"],
        ["a==1.*", "a==2.*"],
        ["a>1,<=1"],
        ["a>=4.0b1", "a<4"],
    ):
        assert contradict(map(Requirement, texts)), texts
    for texts in ([], ["a"], ["a>1,<1.1"], ["a>=4.0.0b11", "a<4.0.0b12"], ["a===1.0+local"], ["a>=1.0", "a<=1.0"]):
        assert not contradict(map(Requirement, texts)), texts


def test_an_invalid_requirement_has_no_versions() -> None:
    assert parsed("a b") is None
    assert str(parsed("a >=1")) == "a>=1"
