"""The parts of the kit: its requests, the cover of all pairs, known failures, the merge of reports."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.manifest.reader import read_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.request.device import Device
from attnplug.request.fields import FIELDS
from attnplug.torch_backend.impl import TorchImpl
from attnplug_kit.conformance import Basic, Tier
from attnplug_kit.conformance.drawing import Draw
from attnplug_kit.conformance.field_values import Capability, field_values_of, is_served
from attnplug_kit.conformance.pairwise import covering_specs, kernel_of
from attnplug_kit.conformance.reporter import Reporter
from attnplug_kit.conformance.request_spec import RequestSpec
from attnplug_kit.conformance.subject import Subject, find_subjects
from attnplug_kit.oracle import Case, check, materialize
from tools import forked

SUBJECT = find_subjects("torch/sdpa", "cpu")[0]
MANIFEST = read_manifest(Path(__file__).parent / "vendor" / "attnplug.toml")


def vendor(jit: str | None) -> Subject:
    """Return the vendor's variant, which is not installed: the kit derives its requests from the manifest alone."""
    variant = evolve(MANIFEST.variants[0], jit=jit)
    return Subject(f"vendor/{jit}", Device.cpu(), make_candidate(MANIFEST, variant, lambda _: None))


COMPILED = vendor("nvcc")
APART = ("cudagraph", "seq_lens_cpu_kind", "compute_capability", "device_type")


def test_every_declared_field_is_listed() -> None:
    menu = field_values_of(SUBJECT)
    listed = {item.field for item in menu.specs} | {item.capability.field for item in menu.unreached}

    assert set(SUBJECT.supports) <= listed


def test_values_of_other_devices_are_listed_with_the_reason() -> None:
    unreached = {item.capability: item.because for item in field_values_of(SUBJECT).unreached}

    assert unreached[Capability("device_type", "cuda")] == "the device is cpu"


def test_every_request_is_served_and_contains_its_value() -> None:
    for capability, spec in field_values_of(SUBJECT).specs.items():
        assert is_served(SUBJECT, spec)
        if FIELDS[capability.field].kind != "device":
            assert spec.fields[capability.field] == capability.value


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("subject", [SUBJECT, vendor(None), COMPILED], ids=str)
def test_rows_cover_every_pair_that_is_served(subject: Subject, draws: bool) -> None:
    drawn = [Draw(subject, f"test_pairs[-{number:02}]")(row) for number, row in enumerate(covering_specs(subject))]
    rows = [set(row.pairs) for row in (drawn if draws else covering_specs(subject))]
    served = [item for item in field_values_of(subject).specs if item.field not in APART]
    uncovered = [
        (one, other)
        for one, other in combinations(served, 2)
        if one.field != other.field and not any({one_of(one), one_of(other)} <= row for row in rows)
    ]

    assert [pair for pair in uncovered if are_served(subject, *pair)] == []


def one_of(capability: Capability):
    return capability.field, capability.value


def are_served(subject: Subject, one: Capability, other: Capability) -> bool:
    """Whether some request that is served has both values."""
    specs = field_values_of(subject).specs
    merged = {**specs[one].fields, **specs[other].fields, **dict([one_of(one), one_of(other)])}
    merged["paged"] = all(specs[item].fields["paged"] for item in (one, other))
    spec = RequestSpec.of(merged)
    return {one_of(one), one_of(other)} <= set(spec.pairs) and is_served(subject, spec)


def test_a_variant_that_compiles_needs_few_kernels() -> None:
    kernels = [
        len({kernel_of(spec) for spec in (*field_values_of(subject).specs.values(), *covering_specs(subject))})
        for subject in (vendor(None), COMPILED)
    ]

    assert kernels[1] <= 16 < kernels[0]


def test_rows_are_the_same_each_time() -> None:
    covering_specs.cache_clear()
    first = covering_specs(SUBJECT)
    covering_specs.cache_clear()

    assert covering_specs(SUBJECT) == first


def test_a_contradictory_request_has_no_requirements() -> None:
    plain = next(iter(field_values_of(SUBJECT).specs.values()))

    assert plain.evolve(per_head_scales=True).requirements() is None
    assert plain.evolve(attn_type="encoder").requirements() is None


def test_the_simplest_tests_run_first(tmp_path: Path) -> None:
    """So that `-x` stops at one of them."""
    (tmp_path / "test_mine.py").write_text(
        "from attnplug_kit.conformance import Conformance\nclass TestMine(Conformance):\n    backend = 'torch/sdpa'\n"
    )
    plain = ("-q", "--collect-only", "-p", "no:randomly", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    done = forked.run("-m", "pytest", *plain, "--attn-device=cpu", str(tmp_path), cwd=tmp_path)
    tests = [line.split("::")[2].partition("[")[0] for line in done.stdout.splitlines() if "::" in line]
    order = list(dict.fromkeys(tests))

    assert order[0] == "test_plain_attention", done.stdout
    assert order.index("test_mixed_batch") < order.index("test_pairs") < order.index("test_written_slots")
    assert order.index("test_forward_twice") < order.index("test_replays") < order.index("test_late_scales")


@pytest.mark.parametrize(
    ("paged", "raised", "said"),
    [
        (False, "'NoneType' object has no attribute 'k'", "when = { paged = false }"),
        (True, "index 1000010 is out of bounds for dimension 0 with size 9", "1,000,000 and more, and no block"),
        (True, "index 10 is out of bounds for dimension 0 with size 9", ""),
    ],
)
def test_a_forward_that_raises_says_what_it_has_read(paged, raised, said, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise RuntimeError(raised)

    monkeypatch.setattr(TorchImpl, "run", run)
    scene = materialize(Case(query_lens=(1, 9), context_lens=(30, 0)))
    backend = attnplug.load(scene.case.requirements(paged=paged), "cpu", backend="torch/sdpa")
    with pytest.raises(AssertionError if said else RuntimeError, match=re.escape(raised)) as caught:
        check(backend, scene)
    assert said in str(caught.value)


def test_a_difference_in_one_phase_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TorchImpl.run
    scene = materialize(Case(query_lens=(1, 9), context_lens=(30, 0)))
    backend = attnplug.load(scene.case.requirements(), "cpu", backend="torch/sdpa")
    for rows, value, said in (
        (slice(1), 7.0, "; in decodes only"),
        (slice(3, 5), 7.0, "; in prefills only"),
        (slice(4), torch.nan, "; NaN is in every slot, row and byte that the call may not read"),
    ):

        def wrong(self: Any, *given: Any, rows: slice = rows, value: float = value) -> None:
            run(self, *given)
            given[5][rows] = value

        monkeypatch.setattr(TorchImpl, "run", wrong)
        with pytest.raises(AssertionError) as caught:
            check(backend, scene)
        assert str(caught.value).endswith(said)


def test_known_failures_are_expected_to_fail_strictly() -> None:
    (mark,) = Known()._marks("test_one_token", "")

    assert mark.kwargs == {"reason": "a reason", "strict": True}
    assert Known()._marks("test_mixed_batch", "") == []


class Known(Basic):
    __test__ = False
    known_failures = {"test_one_token": "a reason"}  # noqa: RUF012 - as a plugin's author would write it


@pytest.mark.parametrize("part", [False, True])
def test_a_whole_run_that_leaves_values_out_fails(monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    reporter, session = Reporter(None, "pytest", complete=True), of_session()
    passed = collected(reporter, monkeypatch, part=part)
    reporter.pytest_runtest_logreport(passed)
    reporter.pytest_sessionfinish(session)

    assert session.exitstatus == (0 if part else 1)


@pytest.mark.parametrize("part", [False, True])
def test_the_first_process_merges_the_reports_of_others(monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    other, first, session = Reporter(None, "", complete=True), Reporter(None, "", complete=True), of_session()
    passed = collected(other, monkeypatch, part=part)
    other.pytest_sessionfinish(of_session(workeroutput={}))
    passed.user_properties = [list(note) for note in passed.user_properties]  # as they travel
    first.pytest_runtest_logreport(passed)
    first.pytest_sessionfinish(session)

    assert [report.subject for report in first._found] == [SUBJECT]
    assert session.exitstatus == (0 if part else 1)
    assert other._found == []


def of_session(**config: object) -> SimpleNamespace:
    return SimpleNamespace(exitstatus=0, config=SimpleNamespace(**config))


def collected(reporter: Reporter, monkeypatch: pytest.MonkeyPatch, *, part: bool) -> pytest.TestReport:
    """Return the report of a test that passed and exercised nothing, of a kit with this test alone or with another."""
    tests = frozenset({"test_a", "test_b"} if part else {"test_a"})
    monkeypatch.setattr("attnplug_kit.conformance.reporter.tests_of_kit", lambda subject: tests)
    item = SimpleNamespace(user_properties=[], callspec=SimpleNamespace(params={"subject": SUBJECT}))
    reporter.pytest_itemcollected(item)
    place, notes = "kit.py::TestBasic::test_a", item.user_properties
    return pytest.TestReport(place, ("kit.py", 1, ""), {}, "passed", None, "call", user_properties=notes)


def test_a_class_without_a_backend_says_how_to_name_one() -> None:
    config = SimpleNamespace(getoption=lambda name, default: default)
    metafunc = SimpleNamespace(fixturenames=("subject",), config=config)

    said = r"(?s)tests an installed one: .*torch/flex, torch/sdpa\b.*fix: pass --attn-backend=NAME"
    with pytest.raises(pytest.Collector.CollectError, match=said):
        Tier().pytest_generate_tests(metafunc)
