"""The registry: candidates under settings, duplicates, failures, registration by hand, and threads."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug._install import install_text
from attnplug.discovery import candidates
from attnplug.discovery.distribution import Entry
from attnplug.discovery.plugin import BY_HAND, Known, KnownPlugin, Plugin, read_known, read_plugin
from attnplug.discovery.registry import Registry
from attnplug.discovery.scan import Diagnostic
from attnplug.errors import ApiVersionError, DuplicateBackendError, ManifestError, SettingsError, UnknownBackendError
from attnplug.negotiation.probe_refusals import ProbeRefusal
from attnplug.negotiation.reason import Reason
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection.options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.negotiation.candidate import Candidate

TWO_VARIANTS = '[variants.one]\n[variants.two]\nrequires = ["library >=2"]\n'
FAILED = Reason("probe", "good/default", None, "the probe refuses")


def block(*names: str) -> Settings:
    return Settings(block=frozenset(names))


def allow(*names: str) -> Settings:
    return Settings(allow=frozenset(names))


def statuses(candidates: tuple[Candidate, ...]) -> dict[str, str]:
    return {candidate.id: candidate.availability for candidate in candidates}


def reasons_of(candidate: Candidate) -> str:
    return " | ".join(map(str, candidate.reasons))


def only(candidates: tuple[Candidate, ...], backend: str) -> Candidate:
    (found,) = (candidate for candidate in candidates if candidate.backend == backend)
    return found


@pytest.fixture
def registry(known: Known) -> Callable[..., Registry]:
    """Return a maker of registries over plugins in memory."""

    def make(*plugins: Plugin, installed: dict[str, str] | None = None, **more: Any) -> Registry:
        return Registry(plugins, known=known, version_of=(installed or {}).get, **more)

    return make


# Candidates


def test_every_variant_and_every_absent_plugin_is_a_candidate(plugin: Any, registry: Any) -> None:
    found = registry(plugin("zeta", rest=TWO_VARIANTS), plugin("good")).candidates(Settings())

    assert statuses(found) == {
        "good/default": "ready",
        "published": "absent",
        "shipped": "absent",
        "zeta/one": "ready",
        "zeta/two": "missing_dependency",
    }
    assert only(found, "good").distribution == "attnplug-good 1.0"


def test_what_is_installed_decides_about_dependencies(plugin: Any, registry: Any) -> None:
    with_old, with_new = (
        registry(plugin("good", rest=TWO_VARIANTS), installed={"library": v}).candidates(Settings()) for v in "12"
    )

    assert statuses(with_old)["good/two"] == "missing_dependency"
    assert statuses(with_new)["good/two"] == "ready"


def test_dependencies_may_be_assumed(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good", rest=TWO_VARIANTS))

    assert statuses(of.candidates(Settings(), assume_installed=True))["good/two"] == "ready"
    assert statuses(of.candidates(Settings()))["good/two"] == "missing_dependency"
    assert statuses(of.candidates(Settings(), assume_installed=True))["published"] == "absent"


def test_an_absent_plugin_has_how_to_install_it(registry: Any) -> None:
    candidate = only(registry().candidates(Settings()), "published")

    assert candidate.aliases == ("PUBLISHED",)
    assert candidate.install == ("attnplug-published",)
    assert reasons_of(candidate) == "'published' is not installed: a published one"


def test_an_unpublished_plugin_comes_from_a_checkout() -> None:
    waiting = KnownPlugin("waiting", (), "a later one", "attnplug-waiting", folder="plugins/waiting")
    of = Registry([], known=Known((waiting,)))
    candidate = only(of.candidates(Settings()), "waiting")

    assert (candidate.install, candidate.fix) == ((), "in a checkout of attnplug: pip install ./plugins/waiting")
    with pytest.raises(UnknownBackendError) as caught:
        of.plugin("waiting")
    assert caught.value.fix == candidate.fix
    blocked = only(of.candidates(block("waiting")), "waiting")
    assert blocked.fix.startswith(f"{candidate.fix}; remove 'waiting' from")


def test_a_plugin_of_the_checkout_that_core_runs_from_has_a_command_for_every_folder(monkeypatch, tmp_path) -> None:
    known = KnownPlugin("here", (), "a plugin", "attnplug-here", folder="plugins/flashinfer")
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    assert str(known.fix) == "pip install ./plugins/flashinfer"
    monkeypatch.chdir(tmp_path)
    assert str(known.fix) == f"pip install {root}/plugins/flashinfer"


def test_one_constant_says_that_the_index_has_them(monkeypatch) -> None:
    known = KnownPlugin("here", (), "a plugin", "attnplug-here", folder="plugins/flashinfer")
    assert install_text("attnplug-kit") == "in a checkout of attnplug: pip install ./kit"
    assert install_text("attnplug-vllm").endswith("pip install ./hosts/vllm")

    monkeypatch.setattr("attnplug._install.ON_INDEX", True)

    assert str(known.fix) == "pip install attnplug-here"
    assert install_text("attnplug-kit") == "pip install attnplug-kit"


def test_an_absent_plugin_may_be_blocked_as_well(registry: Any) -> None:
    candidate = only(registry().candidates(block("attnplug-published")), "published")

    assert candidate.availability == "absent"
    assert [reason.code for reason in candidate.reasons] == ["absent", "blocked"]
    assert "remove 'attnplug-published'" in candidate.fix


def test_an_installed_plugin_is_not_absent_whatever_its_status(plugin: Any, registry: Any) -> None:
    broken = attrs.evolve(plugin("published"), manifest=None, problem=Reason("broken", "published", None, "it is"))

    for each in (plugin("published"), broken):
        assert "published" not in {
            c.backend for c in registry(each).candidates(block("published")) if c.availability == "absent"
        }


def test_the_order_in_which_plugins_are_found_plays_no_part(plugin: Any, registry: Any) -> None:
    plugins = [plugin("good"), plugin("good", "attnplug-double"), plugin("zeta", aliases=("Z",)), plugin("alpha")]

    lineups = {
        tuple((c.id, c.availability, c.distribution, reasons_of(c)) for c in registry(*order).candidates(Settings()))
        for order in permutations(plugins)
    }

    assert len(lineups) == 1


def test_candidates_are_lined_up_once_for_equal_settings(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))

    assert of.candidates(Settings()) is of.candidates(Settings(backend=("good",)))
    assert of.candidates(Settings()) is not of.candidates(block("good"))


# Allow and block


def test_a_blocked_backend_is_refused_with_a_fix(plugin: Any, registry: Any) -> None:
    settings = Settings(block=frozenset({"good"}), sources={"block": "environment variable ATTNPLUG_BLOCK"})
    candidate = only(registry(plugin("good")).candidates(settings), "good")

    assert candidate.id == "good/default"
    assert candidate.availability == "refused"
    assert candidate.variant is not None
    assert [reason.code for reason in candidate.reasons] == ["blocked"]
    assert candidate.fix == "remove 'good' from the setting block (environment variable ATTNPLUG_BLOCK)"


def test_a_blocked_variant_that_lacks_a_library_says_both(plugin: Any, registry: Any) -> None:
    found = registry(plugin("good", rest=TWO_VARIANTS)).candidates(block("good/two"))

    assert statuses(found)["good/one"] == "ready"
    (two,) = (candidate for candidate in found if candidate.id == "good/two")
    assert [reason.code for reason in two.reasons] == ["blocked", "missing"]
    assert two.install == ("library >=2",)


def test_an_empty_allow_list_refuses_the_built_in_backend_too(plugin: Any, registry: Any) -> None:
    built_in = attrs.evolve(plugin("inner"), built_in=True)
    found = registry(plugin("good"), built_in).candidates(allow())

    assert {candidate.availability for candidate in found} == {"refused", "absent"}
    assert "not even the built-in backend" in reasons_of(only(found, "inner"))


def test_a_blocked_problem_is_refused_for_both_reasons(plugin: Any, registry: Any) -> None:
    broken = Plugin(
        "bad", "bad.plugin", "attnplug-bad", "1.0", None, Reason("broken", "bad", None, "no manifest"), "ship it"
    )
    candidate = only(registry(broken).candidates(block("bad")), "bad")

    assert candidate.availability == "refused"
    assert [reason.code for reason in candidate.reasons] == ["blocked", "broken"]
    assert candidate.fix == "remove 'bad' from the setting block (ATTNPLUG_BLOCK); ship it"


def test_unknown_names_are_warned_about_once_with_the_near_match(
    plugin: Any, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        allow=frozenset({"good"}),
        block=frozenset({"attnplug-publishd", "zzz"}),
        sources={"block": "environment variable ATTNPLUG_BLOCK"},
    )
    of = registry(plugin("good"))

    with caplog.at_level(logging.WARNING, logger="attnplug"):
        of.candidates(settings)
        of.candidates(settings, assume_installed=True)
        of.mark_broken("good/default", FAILED)
        of.candidates(settings)

    mistyped, meaningless = (record.getMessage() for record in caplog.records)
    assert mistyped.startswith(
        "'attnplug-publishd' in the setting block (environment variable ATTNPLUG_BLOCK) means no"
    )
    assert mistyped.endswith("did you mean 'attnplug-published'?")
    assert meaningless.startswith("'zzz' in the setting block")
    assert "did you mean" not in meaningless


# Problems


def test_problems_stand_as_they_are(registry: Any) -> None:
    broken = Plugin(
        "bad", "bad.plugin", "attnplug-bad", "1.0", None, Reason("broken", "bad", None, "no manifest"), "ship it"
    )
    future = Plugin(
        "new", "new.plugin", "attnplug-new", "2.0", None, Reason("api", "new", None, "contract 2"), "upgrade"
    )
    found = registry(broken, future).candidates(Settings())

    assert statuses(found) == {"bad": "broken", "new": "refused", "published": "absent", "shipped": "absent"}
    assert only(found, "bad").fix == "ship it"
    assert [reason.code for reason in only(found, "new").reasons] == ["api"]


def test_the_name_of_another_backend_is_no_alias(registry: Any, plugin: Any) -> None:
    borrowing = plugin("acme", aliases=("ACME", "other", "published"))
    made = registry(borrowing, plugin("other"))

    made.check_name("other")
    named = {c.backend for c in made.candidates(Settings()) if "other" in (c.backend, *c.aliases)}

    assert named == {"other"}
    assert made.plugin("acme").manifest.aliases == ("ACME",)
    assert [note.subject for note in made.notes if "another backend" in note.message] == ["other", "published"]
    assert {
        c.backend for c in made.candidates(Settings(block=frozenset({"other"}))) if c.availability == "refused"
    } == {"other"}
    made.register(borrowing)  # the same as given: nothing changes


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large"), RecursionError("deep"), TypeError()])
def test_whatever_comparing_a_plugin_raises_breaks_it(
    plugin: Any, registry: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = candidates.make_candidate

    def make(manifest: Any, *arguments: Any, **keywords: Any) -> Any:
        if manifest.name == "bad":
            raise error
        return real(manifest, *arguments, **keywords)

    monkeypatch.setattr(candidates, "make_candidate", make)
    of = registry(plugin("bad", rest=TWO_VARIANTS), plugin("good"))
    found = of.candidates(Settings())

    assert statuses(found) == {
        "bad": "broken",
        "good/default": "ready",
        "published": "absent",
        "shipped": "absent",
    }
    assert f"comparing 'bad.toml' with what is installed raises {type(error).__name__}" in reasons_of(
        only(found, "bad")
    )
    with pytest.raises(ManifestError, match=type(error).__name__):
        of.candidates(Settings(strict=True))
    assert only(of.candidates(block("bad")), "bad").availability == "refused"
    assert of.candidates(attrs.evolve(block("bad"), strict=True))


@pytest.fixture
def inner(plugin: Any) -> Plugin:
    """The built-in backend."""
    return attrs.evolve(plugin("inner", "attnplug", aliases=("INNER",)), built_in=True)


@pytest.mark.parametrize("first", [True, False])
def test_nobody_takes_the_name_of_the_built_in_backend(plugin: Any, registry: Any, inner: Plugin, first: bool) -> None:
    rival = plugin("inner", "attnplug-rival", aliases=("GOOD",), rest=TWO_VARIANTS)
    of = registry(*((rival, inner) if first else (inner, rival)), plugin("good", aliases=("GOOD",)))
    found = [c for c in of.candidates(Settings()) if c.backend == "inner"]
    own, taken = sorted(found, key=lambda c: not c.built_in)

    assert (own.id, own.availability, own.aliases) == ("inner/default", "ready", ("INNER",))
    assert (taken.id, taken.availability, taken.distribution) == ("inner", "broken", "attnplug-rival 1.0")
    assert "'inner' is offered by attnplug 1.0 and by attnplug-rival 1.0" in reasons_of(taken)
    assert "the built-in backend keeps its own" in reasons_of(taken)
    assert "ATTNPLUG_BLOCK=attnplug-rival to keep 'attnplug'" in taken.fix
    assert of.plugin("inner") is inner
    assert only(of.candidates(Settings()), "good").aliases == ("GOOD",)
    of.check_name("inner/default")
    of.check_name("GOOD")


def test_options_of_the_built_in_backend_are_its_own(plugin: Any, registry: Any, inner: Plugin) -> None:
    option = '[options.size]\ntype = "int"\ndefault = 1\nhelp = "a size"\n'
    of = registry(plugin("inner", "attnplug-rival"), attrs.evolve(plugin("inner", rest=option), built_in=True))

    check_options(of, Settings(options={"inner": {"size": 2}}))
    with pytest.raises(SettingsError, match="length"):
        check_options(of, Settings(options={"inner": {"length": 2}}))


def test_no_alias_is_a_name_of_the_built_in_backend(plugin: Any, registry: Any, inner: Plugin) -> None:
    of = registry(plugin("acme", aliases=("inner", "INNER", "ACME")), inner)

    assert only(of.candidates(Settings()), "inner").aliases == ("INNER",)
    assert only(of.candidates(Settings()), "acme").aliases == ("ACME",)
    assert [note.subject for note in of.notes if "another backend" in note.message] == ["inner", "INNER"]
    of.check_name("INNER")


def test_a_registered_plugin_takes_no_name_of_the_built_in(plugin: Any, registry: Any, inner: Plugin) -> None:
    of = registry(inner)

    with pytest.raises(DuplicateBackendError, match="'inner'"):
        of.register(attrs.evolve(plugin("inner", BY_HAND), version=""))
    of.register(attrs.evolve(plugin("acme", BY_HAND, aliases=("inner", "INNER")), version=""))

    assert only(of.candidates(Settings()), "inner").aliases == ("INNER",)
    assert only(of.candidates(Settings()), "acme").aliases == ()


def test_where_the_built_in_is_blocked_its_name_is_free(plugin: Any, registry: Any, inner: Plugin) -> None:
    settings = block("attnplug")
    of = registry(inner, plugin("inner", "attnplug-rival"), settings=settings)

    assert of.plugin("inner").distribution == "attnplug-rival"
    assert [c.availability for c in of.candidates(settings) if c.backend == "inner"] == ["refused", "ready"]


def test_a_broken_plugin_of_the_built_in_name_disables_nothing(registry: Any, inner: Plugin) -> None:
    problem = Reason("broken", "inner", None, "no manifest")
    for name in ("inner", "INNER"):
        rival = Plugin(name, "rival.plugin", "attnplug-rival", "1.0", None, problem, "ship it")
        of = registry(rival, inner)

        own = next(c for c in of.candidates(Settings()) if c.built_in)
        assert (own.availability, own.aliases) == ("ready", ("INNER",))


@pytest.fixture
def problems(site: Any, manifest: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Plugin]:
    """Return a maker of plugins with a problem, read from files."""
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def make(kind: str) -> Plugin:
        text = {"broken": "no toml", "api": manifest("api", api="3.0")}[kind]
        site.package(f"{kind}_pkg.plugin", text)
        return read_plugin(Entry(kind, f"{kind}_pkg.plugin", f"attnplug-{kind}", "1.0"))

    return make


@pytest.mark.parametrize(("kind", "error"), [("broken", ManifestError), ("api", ApiVersionError)])
def test_strict_raises_problems_unless_they_are_blocked(
    kind: str, error: type[Exception], problems: Any, registry: Any
) -> None:
    of = registry(problems(kind))

    with pytest.raises(error):
        of.candidates(Settings(strict=True))
    assert of.candidates(Settings())
    assert of.candidates(Settings(strict=True, block=frozenset({kind})))
    assert of.candidates(Settings(strict=True, allow=frozenset()))


def test_strict_raises_duplicates_unless_the_settings_choose(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), plugin("good", "attnplug-double"))

    with pytest.raises(DuplicateBackendError, match=r"attnplug-double 1\.0 and by attnplug-good 1\.0"):
        of.candidates(Settings(strict=True))
    assert of.candidates(Settings(strict=True, block=frozenset({"attnplug-double"})))


def test_a_newer_minor_contract_is_used_and_noted(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good", api="1.9"), notes=[Diagnostic("folder", "scan", "is odd")])

    assert statuses(of.candidates(Settings()))["good/default"] == "ready"
    assert [(note.subject, note.stage) for note in of.notes] == [("folder", "scan"), ("attnplug-good 1.0", "api")]
    assert "contract 1.9; this core implements 1.0" in of.notes[1].message


# Duplicates


def test_of_two_distributions_with_one_name_neither_wins(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good", aliases=("GOOD",)), plugin("good", "attnplug-double", "2.5"))
    candidate = only(of.candidates(Settings()), "good")

    assert (candidate.id, candidate.availability, candidate.variant) == ("good", "broken", None)
    assert candidate.aliases == ("GOOD",)
    assert candidate.distribution == "attnplug-double 2.5, attnplug-good 1.0"
    assert "offered by attnplug-double 2.5 and by attnplug-good 1.0" in reasons_of(candidate)
    assert "ATTNPLUG_BLOCK=attnplug-good to keep 'attnplug-double'" in candidate.fix
    assert "ATTNPLUG_BLOCK=attnplug-double to keep 'attnplug-good'" in candidate.fix
    with pytest.raises(DuplicateBackendError, match="none of them wins silently"):
        of.plugin("good")


@pytest.mark.parametrize("settings", [block("attnplug-double"), block("Attnplug_Double"), allow("attnplug-good")])
def test_blocking_or_allowing_one_distribution_chooses(settings: Settings, plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), plugin("good", "attnplug-double", "2.5"), settings=settings)
    used, other = sorted(
        (c for c in of.candidates(settings) if c.backend == "good"), key=lambda candidate: candidate.id, reverse=True
    )

    assert (used.id, used.availability, used.distribution) == ("good/default", "ready", "attnplug-good 1.0")
    assert (other.id, other.availability, other.distribution) == ("good", "refused", "attnplug-double 2.5")
    assert of.plugin("good").distribution == "attnplug-good"


def test_the_proposed_fix_works(plugin: Any, registry: Any) -> None:
    of = registry(*(plugin("good", f"attnplug-{name}") for name in "abc"))
    fix = only(of.candidates(Settings()), "good").fix
    proposals = [word.partition("=")[2] for word in fix.split() if word.startswith("ATTNPLUG_BLOCK=")]

    assert len(proposals) == 3
    for proposal in proposals:
        ready = [c for c in of.candidates(block(*proposal.split(","))) if c.availability == "ready"]
        assert len(ready) == 1


def test_a_duplicate_blocked_by_its_name_is_blocked_altogether(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), plugin("good", "attnplug-double"), settings=block("good"))

    assert {c.availability for c in of.candidates(block("good")) if c.backend == "good"} == {"refused"}


def test_a_distribution_that_offers_a_name_twice_is_named(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), attrs.evolve(plugin("good"), module="elsewhere.plugin"))

    assert "install 'attnplug-good' again" in only(of.candidates(Settings()), "good").fix


def test_an_alias_that_two_backends_claim_selects_neither(plugin: Any, registry: Any) -> None:
    of = registry(plugin("one", aliases=("SHARED", "ONE")), plugin("two", aliases=("SHARED",)))
    found = of.candidates(Settings())

    assert (only(found, "one").aliases, only(found, "two").aliases) == (("ONE",), ())
    assert [(note.subject, note.stage) for note in of.notes] == [("SHARED", "alias")]
    with pytest.raises(DuplicateBackendError, match=r"attnplug-one 1\.0 and by attnplug-two 1\.0"):
        of.check_name("SHARED")
    of.check_name("ONE")
    assert only(of.candidates(block("attnplug-two")), "one").aliases == ("SHARED", "ONE")


def test_a_name_wins_over_an_alias(plugin: Any, registry: Any) -> None:
    of = registry(plugin("one", aliases=("two",)), plugin("two"))

    assert only(of.candidates(Settings()), "one").aliases == ()
    of.check_name("two")


# Names


@pytest.mark.parametrize(
    "name",
    ["auto", "good", "GOOD", "good/one", "GOOD/two", "published", "PUBLISHED", "published/any", "bad", "bad/any"],
)
def test_names_that_mean_something_resolve(name: str, plugin: Any, registry: Any) -> None:
    broken = Plugin("bad", "bad.plugin", "attnplug-bad", "1.0", None, Reason("broken", "bad", None, "no manifest"))
    registry(plugin("good", aliases=("GOOD",), rest=TWO_VARIANTS), broken).check_name(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [("goood", "did you mean 'good'?"), ("PUBLISH", "did you mean 'PUBLISHED'?"), ("good/ones", "did you mean 'one'?")],
)
def test_names_that_mean_nothing_are_refused_with_the_near_match(
    name: str, near: str, plugin: Any, registry: Any
) -> None:
    of = registry(plugin("good", rest=TWO_VARIANTS))

    with pytest.raises(UnknownBackendError) as caught:
        of.check_name(name)
    assert repr(name) in caught.value.problem
    assert near in caught.value.problem


def test_an_unknown_backend_is_refused_with_the_known_ones(plugin: Any, registry: Any) -> None:
    with pytest.raises(UnknownBackendError) as caught:
        registry(plugin("good")).plugin("xyz")

    assert caught.value.expected == "installed: good; known and not installed: published, shipped"
    assert caught.value.fix == "correct the name, or install the distribution that offers it"


def test_a_known_backend_is_refused_with_how_to_install_it(registry: Any) -> None:
    with pytest.raises(UnknownBackendError) as caught:
        registry().plugin("published")

    assert caught.value.fix == "pip install attnplug-published"
    assert isinstance(caught.value, LookupError)


def test_plugins_are_found_by_name(plugin: Any, registry: Any) -> None:
    good = plugin("good")

    assert registry(good, plugin("other")).plugin("good") is good


# State


def test_a_failure_breaks_one_candidate_from_then_on(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good", rest=TWO_VARIANTS))
    before = of.generation
    of.candidates(Settings())

    of.mark_broken("good/one", FAILED)

    assert of.generation > before
    (one,) = (c for c in of.candidates(Settings()) if c.id == "good/one")
    assert (one.availability, one.reasons) == ("broken", (FAILED,))
    assert "attnplug-good 1.0" in one.fix
    assert statuses(of.candidates(Settings()))["good/two"] == "missing_dependency"
    assert statuses(of.candidates(block("good")))["good/one"] == "refused"


def test_the_same_failure_changes_nothing_the_second_time(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    of.mark_broken("good/default", FAILED)
    generation = of.generation

    of.mark_broken("good/default", FAILED)
    assert of.generation == generation

    of.mark_broken("good/default", attrs.evolve(FAILED, because="worse"))
    assert of.generation > generation


def test_what_a_probe_refuses_leaves_the_candidate_ready(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    refusal = ProbeRefusal(FAILED, device=Device.cpu())
    generation = of.generation

    of.mark_refused("good/default", refusal)
    changed = of.generation
    of.mark_refused("good/default", refusal)

    assert generation < changed == of.generation
    found = only(of.candidates(Settings()), "good")
    assert (found.availability, found.refusals) == ("ready", of.refusals["good/default"])
    assert of.refusals["good/default"].find(None, Device.cpu()) is refusal
    assert of.refusals["good/default"].find(None, Device("xpu")) is None
    assert "good/other" not in of.refusals


def test_what_refuses_everything_is_broken_with_its_own_fix(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    of.mark_refused("good/default", ProbeRefusal(attrs.evolve(FAILED, because="install the other one")))

    broken = only(of.candidates(Settings()), "good")

    assert (broken.availability, broken.reasons) == ("broken", (attrs.evolve(FAILED, because=""),))
    assert broken.fix == "install the other one, then attnplug.refresh()"
    assert "good/default" not in of.refusals


def test_registering_adds_a_plugin(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    generation = of.generation

    of.register(plugin("mine", BY_HAND, ""))

    assert of.generation > generation
    assert [each.name for each in of.plugins] == ["good", "mine"]
    assert statuses(of.candidates(Settings()))["mine/default"] == "ready"


def test_registering_twice_changes_nothing(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    of.register(plugin("mine"))
    state = of.generation, of.plugins

    of.register(plugin("mine"))
    of.register(plugin("good"))

    assert (of.generation, of.plugins) == state


def test_registering_another_one_of_that_name_is_refused(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    state = of.generation, of.plugins

    with pytest.raises(DuplicateBackendError, match=r"attnplug-good 1\.0 offers 'good' already"):
        of.register(plugin("good", BY_HAND, ""))
    with pytest.raises(DuplicateBackendError):
        of.register(plugin("good", rest=TWO_VARIANTS))

    assert (of.generation, of.plugins) == state


def test_a_blocked_plugin_may_be_replaced_by_hand(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), settings=block("attnplug-good"))

    of.register(plugin("good", BY_HAND, ""))

    assert of.plugin("good").distribution == BY_HAND
    assert statuses(of.candidates(block("attnplug-good")))["good/default"] == "ready"


def test_a_module_registered_again_replaces_its_manifest(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    of.register(plugin("mine", BY_HAND, ""))
    of.mark_broken("mine/default", attrs.evolve(FAILED, field="mine/default"))
    of.mark_refused("mine/default", ProbeRefusal(FAILED, device=Device.cpu()))
    of.mark_refused("good/default", ProbeRefusal(FAILED, device=Device.cpu()))
    assert statuses(of.candidates(Settings()))["mine/default"] == "broken"

    of.register(plugin("mine", BY_HAND, "", rest=TWO_VARIANTS))

    assert {each for each in statuses(of.candidates(Settings())) if each.startswith("mine/")} == {
        "mine/one",
        "mine/two",
    }
    assert [each.name for each in of.by_hand] == ["mine"]
    assert "mine/default" not in of._content.failures
    assert ("mine/default" in of.refusals, "good/default" in of.refusals) == (False, True)


def test_what_is_registered_by_hand_has_no_name_to_block(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"))
    of.register(plugin("mine", BY_HAND, ""))
    of.mark_broken("mine/default", FAILED)
    broken = next(c for c in of.candidates(Settings()) if c.id == "mine/default")

    with pytest.raises(DuplicateBackendError) as caught:
        of.register(attrs.evolve(plugin("mine", BY_HAND, ""), module="another.module"))

    assert broken.fix == f"repair the module {of.plugin('mine').module!r}, then attnplug.refresh()"
    assert caught.value.fix == "give it another name in its manifest"
    assert (
        caught.value.expected == f"the module {of.plugin('mine').module!r}, registered by hand, offers 'mine' already"
    )


def test_a_distribution_with_a_registered_name_is_a_conflict(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), plugin("good", BY_HAND, ""))

    found = next(c for c in of.candidates(Settings()) if c.backend == "good")

    assert (found.availability, found.fix) == (
        "broken",
        f"register {of.by_hand[0].module!r} under another name, or set ATTNPLUG_BLOCK=attnplug-good to keep it",
    )


def test_generations_differ_between_registries(plugin: Any, registry: Any) -> None:
    assert registry(plugin("good")).generation != registry(plugin("good")).generation


def test_default_orders_come_from_what_is_known(registry: Any) -> None:
    assert registry().default_orders == ()
    assert Registry([]).default_orders == read_known().orders


def test_installed_versions_are_looked_up_here_by_default(plugin: Any, known: Known) -> None:
    rest = '[variants.one]\nrequires = ["attrs >=1"]\n[variants.two]\nrequires = ["attrs >=9999"]\n'
    found = Registry([plugin("good", rest=rest)], known=known).candidates(Settings())

    assert statuses(found)["good/one"] == "ready"
    assert statuses(found)["good/two"] == "missing_dependency"


@given(st.lists(st.sampled_from(["register", "clash", "fail", "ask"]), max_size=12))
def test_the_generation_changes_exactly_when_candidates_may(plugin: Any, actions: list[str]) -> None:
    of = Registry([plugin("good")], known=Known(), version_of={}.get)
    fresh = 0
    for action in actions:
        generation, found = of.generation, of.candidates(Settings())
        if action == "register":
            fresh += 1
            of.register(plugin(f"new{fresh}"))
        elif action == "clash":
            with pytest.raises(DuplicateBackendError):
                of.register(plugin("good", "attnplug-clash"))
        elif action == "fail":
            of.mark_broken("good/default", attrs.evolve(FAILED, because=str(fresh)))
        changed = of.candidates(Settings()) is not found
        assert changed == (of.generation != generation)
        assert changed or action in ("clash", "ask", "fail")


def test_threads_see_one_registry(plugin: Any, registry: Any) -> None:
    of = registry(plugin("good"), plugin("other"))
    barrier = Barrier(32)

    def work(number: int) -> tuple[int, ...]:
        barrier.wait()
        of.register(plugin("mine"))
        of.mark_broken("good/default", FAILED)
        clashes = 0
        try:
            of.register(plugin(f"contested_{number % 2}", f"attnplug-by-{number}"))
        except DuplicateBackendError:
            clashes = 1
        barrier.wait()
        return id(of.candidates(Settings())), of.generation, clashes

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(work, range(32)))

    assert len({result[:2] for result in results}) == 1
    assert sum(result[2] for result in results) == 30
    assert sorted(each.name for each in of.plugins) == ["contested_0", "contested_1", "good", "mine", "other"]
    assert statuses(of.candidates(Settings()))["good/default"] == "broken"


def test_the_environment_is_scanned(site: Any, manifest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    site.package("scanned_pkg.plugin", manifest("scanned"))
    site.offer("scanned", "attnplug-scanned", "3.0", "scanned_pkg.plugin")
    site.distribution("odd", "1.0", "nonsense\n")

    of = Registry.scan(Settings())

    assert of.plugin("scanned").label == "attnplug-scanned 3.0"
    assert "odd 1.0" in [note.subject for note in of.notes]
    assert statuses(of.candidates(Settings()))["scanned/default"] == "ready"


def test_a_strict_scan_raises(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    site.package("damaged_pkg.plugin", "no toml")
    site.offer("damaged", "attnplug-damaged", "3.0", "damaged_pkg.plugin")

    with pytest.raises(ManifestError, match=r"damaged_pkg.attnplug\.toml"):
        Registry.scan(Settings(strict=True))
    assert "damaged" in [plugin.name for plugin in Registry.scan(Settings()).plugins]
