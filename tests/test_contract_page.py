"""The page of the contract follows from the source: sections say who calls a member, marks what may be overridden."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import attnplug.contract
from attnplug.contract.calls.check import _CALLED
from tools import contract

if TYPE_CHECKING:
    from pathlib import Path


def rows(cls: type) -> dict[str, contract.Member]:
    return {member.name: member for member in contract.members(cls)}


def test_every_public_name_is_on_the_page(tmp_path: Path) -> None:
    page = contract.page(tmp_path)
    for name in attnplug.contract.__all__:
        assert f"### {name}\n" in page or f"| `{name}` |" in page


def test_a_name_without_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnplug.contract, "__all__", [*attnplug.contract.__all__, "Newcomer"])
    with pytest.raises(contract.ContractError, match="Newcomer"):
        contract.page(tmp_path)


def test_sections_say_who_calls() -> None:
    builder = rows(attnplug.contract.MetadataBuilder)
    assert (builder["plan_batch"].caller, builder["plan_batch"].override) == ("core", "yes")
    assert (builder["persist"].caller, builder["persist"].override) == ("plugin", "-")
    assert (builder["graph_lengths"].caller, builder["graph_lengths"].override) == ("core", "yes")
    assert rows(attnplug.contract.StepBuilder)["build"].caller == "engine"
    assert "has_captured" not in rows(attnplug.contract.StepBuilder)
    assert builder["prepare_in_graph"].default == "The default has nothing to compute."
    assert rows(attnplug.contract.AttentionImpl)["run"].override == "must"
    assert rows(attnplug.contract.AttentionImpl)["cache_write"].override == "must"
    assert rows(attnplug.contract.Batch)["causal"].default == "`True`"
    assert "enlarge" not in rows(attnplug.contract.State)


def test_what_core_calls_with_checked_signatures_may_be_overridden() -> None:
    """`check_backend_class` compares signatures of overrides: the page calls each of them one."""
    for _, base, names in _CALLED:
        found = rows(base)
        overridable = {name for name in names if name != "__init__"}
        assert all(found[name].override in ("yes", "must") for name in overridable)


@pytest.mark.parametrize("name", contract.GROUPS["What a plugin subclasses"])
def test_a_host_calls_nothing_that_a_plugin_writes(name: str) -> None:
    assert {member.caller for member in rows(getattr(attnplug.contract, name)).values()} <= {"core", "plugin"}


class Unsorted:
    """A class whose methods are in sections, but for one."""

    def lost(self) -> None:
        """Be in no section."""

    # --- what a host calls ---

    def found(self) -> None:
        """Be in a section."""


class Misnamed:
    """A class with a section that the page does not know."""

    # --- what anybody does ---

    def found(self) -> None:
        """Be in a section."""


@pytest.mark.parametrize(("cls", "said"), [(Unsorted, "Unsorted.lost"), (Misnamed, "what anybody does")])
def test_a_member_in_no_section_is_refused(cls: type, said: str) -> None:
    with pytest.raises(contract.ContractError, match=said):
        contract.members(cls)
