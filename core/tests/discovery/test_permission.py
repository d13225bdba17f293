"""Allow and block lists: which names mean what."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from attnplug.discovery.permission import Identity, deny, unknown_names
from attnplug.request.settings import Settings

FAST = Identity("fast", ("FAST", "FAST_V2"), "attnplug-fast", ("one", "two"))
SLOW = Identity("slow", (), "Attnplug_Slow")

MEANS_FAST = ("fast", "FAST", "FAST_V2", "attnplug-fast", "Attnplug_Fast")
MEANS_ONE = ("fast/one", "FAST/one")
NAMES = st.sampled_from([*MEANS_FAST, *MEANS_ONE, "fast/two", "fast/three", "slow", "slow/any", "other", "fas"])


@pytest.mark.parametrize("name", MEANS_FAST)
def test_a_backend_goes_by_name_alias_and_distribution(name: str) -> None:
    assert deny(Settings(block=frozenset({name})), FAST) is not None
    assert deny(Settings(block=frozenset({name})), FAST, "one") is not None
    assert deny(Settings(allow=frozenset({name})), FAST, "two") is None
    assert deny(Settings(allow=frozenset({name})), SLOW) is not None


@pytest.mark.parametrize("name", MEANS_ONE)
def test_a_variant_is_blocked_and_allowed_alone(name: str) -> None:
    blocked, allowed = Settings(block=frozenset({name})), Settings(allow=frozenset({name}))

    assert deny(blocked, FAST, "one") is not None
    assert deny(blocked, FAST, "two") is None
    assert deny(blocked, FAST) is None
    assert deny(allowed, FAST, "one") is None
    assert deny(allowed, FAST, "two") is not None
    assert deny(allowed, FAST) is None


@given(st.none() | st.frozensets(NAMES), st.frozensets(NAMES), st.sampled_from(["one", "two"]))
def test_the_rule_in_one_sentence(allow: frozenset[str] | None, block: frozenset[str], variant: str) -> None:
    """A variant may be used if no name of it is blocked and, where there is an allow list, one is allowed."""
    meaning = {*MEANS_FAST, f"fast/{variant}", f"FAST/{variant}"}
    may = not block & meaning and (allow is None or bool(allow & meaning))

    assert (deny(Settings(allow=allow, block=block), FAST, variant) is None) == may


@given(st.none() | st.frozensets(NAMES), st.frozensets(NAMES))
def test_a_backend_is_out_only_if_all_of_its_variants_are(allow: frozenset[str] | None, block: frozenset[str]) -> None:
    settings = Settings(allow=allow, block=block)
    if deny(settings, FAST) is not None:
        assert all(deny(settings, FAST, variant) is not None for variant in ("one", "two"))


def test_nothing_is_denied_by_default() -> None:
    assert deny(Settings(), FAST) is None
    assert deny(Settings(), SLOW, "any") is None


def test_a_denial_names_the_setting_and_where_it_comes_from() -> None:
    blocked = Settings(block=frozenset({"FAST"}), sources={"block": "environment variable ATTNPLUG_BLOCK"})
    unlisted = Settings(allow=frozenset({"slow"}), sources={"allow": "file settings.toml"})

    denial = deny(blocked, FAST, "one")
    assert denial is not None
    assert denial.reason.code == "blocked"
    assert str(denial.reason) == (
        "the settings exclude 'fast/one': 'FAST' is in the setting block (environment variable ATTNPLUG_BLOCK)"
    )
    assert denial.fix == "remove 'FAST' from the setting block (environment variable ATTNPLUG_BLOCK)"

    denial = deny(unlisted, FAST)
    assert denial is not None
    assert "the setting allow (file settings.toml) allows 'slow'" in denial.reason.because
    assert denial.fix == "add 'fast' to the setting allow (file settings.toml)"


def test_both_lists_are_named_where_both_are_in_the_way() -> None:
    denial = deny(Settings(allow=frozenset({"slow"}), block=frozenset({"fast"})), FAST)

    assert denial is not None
    assert denial.fix == (
        "remove 'fast' from the setting block (ATTNPLUG_BLOCK); add 'fast' to the setting allow (ATTNPLUG_ALLOW)"
    )


def test_an_empty_allow_list_allows_nothing_and_says_so() -> None:
    denial = deny(Settings(allow=frozenset()), FAST)

    assert denial is not None
    assert (
        denial.reason.because
        == "the setting allow (ATTNPLUG_ALLOW) allows nothing at all, not even the built-in backend"
    )


def test_names_that_mean_nothing_are_found() -> None:
    settings = Settings(
        allow=frozenset({"fast", "fast/one", "fast/three", "slow/any", "slwo"}),
        block=frozenset({"attnplug-slow", "attnplug-fats"}),
        sources={"block": "environment variable ATTNPLUG_BLOCK"},
    )

    assert list(unknown_names(settings, (FAST, SLOW))) == [
        ("fast/three", "the setting allow (ATTNPLUG_ALLOW)"),
        ("slwo", "the setting allow (ATTNPLUG_ALLOW)"),
        ("attnplug-fats", "the setting block (environment variable ATTNPLUG_BLOCK)"),
    ]


VERSIONS = ("1.0", "1.0.1", "2.0rc1", "2.0+cu128")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["fast", "Attnplug.Fast", "FAST_V2"])
@pytest.mark.parametrize("bounds", ["==1.0", " == 1.0", ">=1.0,<2", "!=1.0", "~=1.0", "<2", "===1.0.1", "==2.0+cu128"])
def test_a_version_is_blocked_and_allowed_alone(name: str, bounds: str, version: str) -> None:
    backend = evolve(FAST, version=version)
    entry = frozenset({f"{name}{bounds}"})
    is_meant = SpecifierSet(bounds).contains(version, prereleases=True)

    assert (deny(Settings(block=entry), backend) is not None) == is_meant
    assert (deny(Settings(block=entry), backend, "one") is not None) == is_meant
    assert (deny(Settings(allow=entry), backend) is None) == is_meant
    assert (deny(Settings(allow=entry), backend, "two") is None) == is_meant
    assert deny(Settings(block=entry), SLOW) is None
    assert list(unknown_names(Settings(block=entry), (backend, SLOW))) == []


@pytest.mark.parametrize("version", ["", "unknown", "9" * 5000])
def test_a_version_that_cannot_be_read_is_blocked_and_not_allowed(version: str) -> None:
    """The code of what is blocked never runs: what may be that version does not either."""
    backend, entry = evolve(FAST, version=version), frozenset({"fast==1.0"})

    assert deny(Settings(block=entry), backend) is not None
    assert deny(Settings(allow=entry), backend) is not None


def test_a_plugin_that_is_absent_has_no_version_to_block() -> None:
    assert deny(Settings(block=frozenset({"fast==1.0"})), FAST) is None
    assert deny(Settings(allow=frozenset({"fast==1.0"})), FAST) is None


@pytest.mark.parametrize("name", ["Attnplug--Fast", "attnplug.fast", "Fast", "FAST_v2", "fast.v2"])
def test_names_are_compared_normalized(name: str) -> None:
    assert deny(Settings(block=frozenset({name})), FAST) is not None
    assert deny(Settings(block=frozenset({f"{name}/one"})), FAST, "one") is not None or "attnplug" in name.lower()


def test_an_allowed_alias_is_meant_as_it_is_written() -> None:
    """Else a plugin with the alias ``Slow`` would be allowed wherever ``slow`` is."""
    rival = Identity("rival", ("Slow",), "attnplug-rival")

    assert deny(Settings(allow=frozenset({"slow"})), rival) is not None
    assert deny(Settings(allow=frozenset({"Slow"})), rival) is None
    assert deny(Settings(allow=frozenset({"SLOW", "Attnplug-SLOW"})), SLOW) is None
    assert deny(Settings(block=frozenset({"slow"})), rival) is not None
