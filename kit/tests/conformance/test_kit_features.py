"""The kit on variants with open features: every request has those that are named, and the evidence lists them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnplug.errors import RequirementsError, UnknownBackendError
from attnplug.evidence.store import parse_evidence
from attnplug.manifest.reader import read_manifest
from attnplug.negotiation import matching
from attnplug.negotiation.candidate import make_candidate
from attnplug.request.device import Device
from attnplug_kit.conformance import Basic, Refusals, reporter
from attnplug_kit.conformance import subject as subjects
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.pairwise import covering_specs, refused_pairs
from attnplug_kit.conformance.refusals import _refused, _without_features
from attnplug_kit.conformance.reporter import Reporter
from attnplug_kit.conformance.subject import Subject, find_subjects
from attnplug_kit.conformance.tier import plan_run
from kit.tests.conformance.test_kit_runs import require_usage_error, run
from kit.tests.conformance.test_mutants import require_failure

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
MANIFEST = HERE / "featured" / "attnplug.toml"
OPTIONAL, NEEDED = "featured.optional", "featured.needed"
READ = read_manifest(MANIFEST)
CANDIDATES = {
    one.name: make_candidate(READ, one, lambda _: None, distribution="attnplug-featured 1.0") for one in READ.variants
}


def of(variant: str, *features: str) -> Subject:
    return Subject(f"featured/{variant}", Device.cpu(), CANDIDATES[variant], features)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register both variants, as far as the kit looks for them."""
    monkeypatch.setattr(subjects, "_registered", lambda: list(CANDIDATES.values()))


def kit(folder: Path, *options: str, module: str = "minimal.least"):
    report = folder / "report"
    done = run(folder, f"--attn-report={report}", *options, module=module, manifest=MANIFEST)
    return done, json.loads((report / "report.json").read_text("utf-8"))[0]


# Requests


@pytest.mark.parametrize("subject", [of("bound", NEEDED), of("free", OPTIONAL), of("bound", NEEDED, OPTIONAL)], ids=str)
def test_every_request_has_the_features(subject: Subject) -> None:
    specs = (*field_values_of(subject).specs.values(), *covering_specs(subject), *refused_pairs(subject))
    refused = [requirements for _, _, requirements in _refused(subject).values()]

    assert specs
    assert {spec.requirements().features for spec in specs} == {tuple(sorted(subject.features))}
    assert refused
    assert all(set(subject.features) <= set(requirements.features) for requirements in refused)


def test_requests_without_features_are_the_same_but_for_them() -> None:
    assert {spec.requirements().features for spec in field_values_of(of("free")).specs.values()} == {()}
    assert field_values_of(of("free")).specs == {
        item: spec.evolve(features=None) for item, spec in field_values_of(of("free", OPTIONAL)).specs.items()
    }


def test_open_features_are_out_of_reach() -> None:
    because = {item.capability.value: item.because for item in field_values_of(of("bound", NEEDED)).unreached}

    assert because[NEEDED].startswith("every request has it, and it must not change attention; beyond that, ")
    assert because[NEEDED].endswith(because[OPTIONAL])
    assert because[OPTIONAL] == "its backend defines what an open feature means: test it beside the kit"


# A rule that needs them


def test_each_rule_that_needs_features_has_a_request() -> None:
    ((name, (requirements, rule)),) = _without_features(of("bound", NEEDED)).items()

    assert name == "head_size >= 1"
    assert requirements.features == ()
    assert rule.because == "others compute the same without it"
    assert _without_features(of("free", OPTIONAL)) == _without_features(of("bound")) == {}


def test_a_served_request_without_needed_features_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = of("bound", NEEDED)
    (point,) = _without_features(subject).values()
    monkeypatch.setattr(matching, "_objections", lambda *rules_and_facts: [])

    with pytest.raises(
        AssertionError, match=r"without features=featured\.needed was not refused by the rule that needs"
    ):
        Refusals().test_request_without_features_is_refused(subject, point)


@pytest.mark.parametrize(
    ("condition", "needs"),
    [
        ("when = { head_size = 8 }\nneed = { features = true }", True),
        ("when = { features = false, dtype = 'float32' }", True),
        ("when = { features = false }\nneed = { dtype = 'float32' }", False),
        ("when = { features = true }", False),
        ("when = { dtype = 'float32' }\nneed = { features = false }", False),
    ],
)
def test_which_rules_need_features(condition: str, needs: bool, tmp_path: Path) -> None:
    text = MANIFEST.read_text("utf-8").partition("[[variants.bound.rules]]")[0]
    path = tmp_path / "attnplug.toml"
    path.write_text(f"{text}\n[[variants.bound.rules]]\n{condition}\nbecause = 'so'\n", "utf-8")
    manifest = read_manifest(path)
    subject = Subject("featured/bound", Device.cpu(), make_candidate(manifest, manifest.variants[-1], lambda _: None))

    assert bool(subject.rules_that_need_features) is needs


# Subjects


@pytest.mark.usefixtures("installed")
def test_a_backend_means_its_variants_that_list_the_features() -> None:
    assert [one.id for one in find_subjects("featured", "cpu")] == ["featured/free", "featured/bound"]
    (bound,) = find_subjects("featured", "cpu", [NEEDED, OPTIONAL, NEEDED])
    assert (bound.id, bound.features) == ("featured/bound", (NEEDED, OPTIONAL))
    assert {bound} != set(find_subjects("featured/bound", "cpu"))


def test_the_error_says_how_to_install_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacks = '[variants.free]\nrequires = ["a >=2", "b"]\ninstall = { b = "from its vendor" }'
    text = MANIFEST.read_text("utf-8").replace("[variants.free]", lacks)
    (tmp_path / "attnplug.toml").write_text(text, "utf-8")
    manifest = read_manifest(tmp_path / "attnplug.toml")
    lacking = make_candidate(manifest, manifest.variants[0], lambda _: None)
    monkeypatch.setattr(subjects, "_registered", lambda: [lacking])

    with pytest.raises(UnknownBackendError, match="b is required and not installed") as caught:
        find_subjects("featured", "cpu")

    reported = "featured/free: install b: from its vendor; pip install 'a >=2'; or test it on a device that it serves"
    assert caught.value.fix == reported


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "features", "said"),
    [
        ("featured", ["featured.neded"], r"\('featured.neded',\); did you mean 'featured.needed'\?"),
        ("featured/free", [NEEDED], "expected: featured/free lists featured.optional\n"),
        ("featured", [NEEDED, "acme.rope"], "free lists featured.optional; featured/bound lists featured.optional, fe"),
        ("featured", ["rope"], r"\['rope'\] were requested\n  expected: each is a dotted name"),
        ("featured", NEEDED, "'featured.needed' were requested\n  expected: each is a dotted name"),
    ],
)
def test_features_that_no_variant_lists_are_refused(name: str, features: list[str], said: str) -> None:
    with pytest.raises(RequirementsError, match=said):
        find_subjects(name, "cpu", features)


class Named(Basic):
    __test__ = False
    backend, device = "featured/free", "cpu"


class NamedBound(Named):
    backend = "featured/bound"


class NamedWith(Named):
    features = (OPTIONAL,)


class NamedWithNone(Named):
    features = ()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("tier", "given", "expected"),
    [
        (NamedBound, [OPTIONAL, NEEDED], (NEEDED, OPTIONAL)),
        (Named, [OPTIONAL], (OPTIONAL,)),
        (Named, None, ()),
        (NamedWith, [NEEDED], (OPTIONAL,)),
        (NamedWithNone, [OPTIONAL], ()),
    ],
)
def test_the_class_overrides_the_command_line(tier: type[Basic], given: object, expected: tuple[str, ...]) -> None:
    made = []
    metafunc = SimpleNamespace(
        fixturenames=("subject",),
        config=SimpleNamespace(getoption=lambda name, default: given if name == "--attn-feature" else default),
        function=tier.test_profiling_run,
        parametrize=lambda names, parameters: made.extend(parameters),
    )

    tier().pytest_generate_tests(metafunc)

    assert [subject.features for one in made for subject in one.values] == [expected]


def test_features_reach_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    there, first = Reporter(None, "", complete=True), Reporter(None, "", complete=True)
    item = SimpleNamespace(user_properties=[], callspec=SimpleNamespace(params={"subject": of("bound", NEEDED)}))
    there.pytest_itemcollected(item)
    ((_, name),) = item.user_properties
    monkeypatch.setattr(subjects, "_registered", lambda: list(CANDIDATES.values()))

    assert first._subject(name) == of("bound", NEEDED)


def test_files_with_and_without_features_differ_in_name(tmp_path: Path) -> None:
    found = [reporter.report_of(subject, [], frozenset()) for subject in (of("bound"), of("bound", NEEDED))]

    reporter._write(tmp_path, "pytest", found)

    assert {path.name for path in tmp_path.glob("evidence-*.json")} == {
        "evidence-featured-bound.json",
        "evidence-featured-bound-featured.needed.json",
    }


# Variants that refuse every request


def choosing(monkeypatch: pytest.MonkeyPatch, folder: Path, rules: str) -> None:
    """Replace the variant that needs features by another one, with these rules."""
    text = MANIFEST.read_text("utf-8").partition("[[variants.bound.rules]]")[0]
    text = text.replace('["featured.needed"]', '["featured.needed", "featured.also"]')
    text = text.replace(
        'name = "featured"', f'name = "{folder.name}"'
    )  # what is known of a subject is kept by its name
    (folder / "attnplug.toml").write_text(f"{text}\n{rules}", "utf-8")
    changed = read_manifest(folder / "attnplug.toml")
    found = [make_candidate(changed, one, lambda _: None) for one in changed.variants]
    monkeypatch.setattr(subjects, "_registered", lambda: found)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("features", [(), (OPTIONAL,), (NEEDED,)])
def test_a_run_tests_variants_that_serve_its_features(features: tuple[str, ...]) -> None:
    plan = plan_run("featured", "cpu", features)

    assert {each.id for each in plan.subjects} == {
        subject.id
        for subject in find_subjects("featured", "cpu", features)
        if field_values_of(subject).spec() is not None
    }
    assert [left.subject.id for left in plan.left_out] == ([] if features else ["featured/bound"])


@pytest.mark.usefixtures("installed")
def test_the_features_named_by_the_error_suffice() -> None:
    with pytest.raises(RequirementsError, match=r"add --attn-feature=featured") as caught:
        plan_run("featured/bound", "cpu")
    named = re.findall(r"--attn-feature=([\w.]+)", caught.value.fix)

    assert [each.id for each in plan_run("featured/bound", "cpu", named).subjects] == ["featured/bound"]


def test_features_that_are_needed_together_are_named_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rule = "[[variants.bound.rules]]\nwhen = {{ features = ['featured.also', '{}'] }}\nbecause = 'not alone'\n"
    choosing(monkeypatch, tmp_path, rule.format(NEEDED) + rule.format(OPTIONAL))

    with pytest.raises(RequirementsError, match=f"add --attn-feature={OPTIONAL} --attn-feature={NEEDED}, or"):
        plan_run(f"{tmp_path.name}/bound", "cpu")


def test_a_variant_that_refuses_everything_has_a_wrong_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choosing(monkeypatch, tmp_path, "[[variants.bound.rules]]\nwhen = { head_size = { min = 1 } }\nbecause = 'never'\n")

    with pytest.raises(
        RequirementsError, match=r"(?s)bound refuses even the plainest.*never\n.*fix: change the rules or what"
    ):
        plan_run(tmp_path.name, "cpu")


# Whole runs


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_variant_that_needs_a_feature_passes_with_it(tmp_path: Path) -> None:
    done, report = kit(tmp_path, "--attn-backend=featured/bound", f"--attn-feature={NEEDED}")

    assert done.returncode == 0, done.stdout
    assert "(100%)" in done.stdout
    assert f"every request has features={NEEDED}" in done.stdout
    assert report["features"] == [NEEDED]
    assert f"--attn-feature={NEEDED}" in report["command"]
    (one,) = [test for test in report["tests"] if "test_request_without_features_is_refused" in test["id"]]
    assert one["outcome"] == "passed"
    evidence = json.loads((tmp_path / "report" / f"evidence-featured-bound-{NEEDED}.json").read_text("utf-8"))
    assert parse_evidence({**evidence, "distribution": "attnplug-featured 1.0"}).features == {NEEDED}


def test_without_the_feature_a_usage_error_names_the_option(tmp_path: Path) -> None:
    done = run(tmp_path, "--attn-backend=featured/bound", manifest=MANIFEST)

    require_usage_error(
        done,
        "ERROR: the backend 'featured/bound' cannot be tested by requests with no open feature\n",
        "  expected: each variant serves some; featured/bound refuses even the plainest: ",
        "others compute the same without it\n",
        f"  fix: add --attn-feature={OPTIONAL}, or features = ('{OPTIONAL}',) to the class of the test\n",
    )


def test_a_variant_that_needs_a_feature_is_reported_as_left_out(tmp_path: Path) -> None:
    done, report = kit(tmp_path, "--attn-backend=featured", "-k", "test_one_token", "-rs")

    assert done.returncode == 0, done.stdout
    assert [test["id"].rpartition("::")[2] for test in report["tests"]] == ["test_one_token[featured/free]"]
    options = "--attn-backend=featured/bound --attn-feature=featured.optional"
    assert done.stdout.count(f"others compute the same without it; {options} tests it") == 2, (
        done.stdout
    )  # of the skipped test, and at the end


OWN = """
from attnplug_kit.conformance import {tier}


class TestMine({tier}):
    backend = "featured/bound"
    features = {features}
"""


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["Basic", "Conformance"])
def test_an_error_in_a_plugins_class_has_no_traceback(tier: str, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN.format(tier=tier, features=()), "utf-8")
    done = run(tmp_path, tests=(str(tmp_path / "test_own.py"),), manifest=MANIFEST)

    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert done.stdout.count(f"  fix: add --attn-feature={OPTIONAL}, or features = ('{OPTIONAL}',) to the class") == 1
    assert "tier.py" not in done.stdout
    assert "1 error in" in done.stdout


def test_a_class_with_features_needs_no_option(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN.format(tier="Basic", features=(NEEDED,)), "utf-8")
    own = (str(tmp_path / "test_own.py"),)
    done = run(tmp_path, "--attn-backend=featured/bound", "-k", "one_token", tests=own, manifest=MANIFEST)

    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options_of_run", [(), (f"--attn-feature={OPTIONAL}",)])
def test_attention_that_is_wrong_with_a_feature_fails_with_it(options_of_run, tmp_path: Path) -> None:
    options = ("--attn-backend=featured/free", "-k", "TestBasic and test_mixed_batch")
    done, report = kit(tmp_path, *options, *options_of_run, module="featured.wrong_with_feature")

    if not options_of_run:
        assert done.returncode == 0, done.stdout
    else:
        require_failure(("test_mixed_batch[*", f"features=('{OPTIONAL}',)*output: * elements differ"), report["tests"])


def test_an_undeclared_feature_is_a_usage_error_before_any_test(tmp_path: Path) -> None:
    options = ("--attn-backend=featured", f"--attn-feature={NEEDED}", "--attn-feature=featured.unknown")
    done = run(tmp_path, *options, manifest=MANIFEST)

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    said = done.stdout + done.stderr
    assert "the backend 'featured' cannot be tested with features=('featured.needed', 'featured.unknown')" in said
    assert "fix: request what a variant lists" in said
    assert "passed" not in said
