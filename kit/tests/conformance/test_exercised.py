"""What comparisons record: ranges of what passed, and nothing of what failed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from attrs import evolve

import attnplug
from attnplug_kit.conformance import report, reporter
from attnplug_kit.conformance.failures import lines_of_causes
from attnplug_kit.conformance.field_values import Capability
from attnplug_kit.conformance.reporter import Reporter
from attnplug_kit.conformance.subject import find_subjects
from attnplug_kit.oracle import Case, check, compare, materialize, run
from attnplug_kit.oracle.exercised import Exercised, observing
from attnplug_kit.unexercised import unexercised

SUBJECT = find_subjects("torch/sdpa", "cpu")[0]
CASE = Case(query_lens=(1, 5, 0), context_lens=(40, 0, 9), num_q_heads=6, num_kv_heads=2, block_size=4)


def backend_of(case):
    return attnplug.load(case.requirements(), "cpu", backend="torch/sdpa")


def exercised(*cases):
    found = Exercised()
    with observing(found.add):
        for case in cases:
            check(backend_of(case), materialize(case))
    return found


def test_a_batch_has_lengths_requests_and_heads() -> None:
    found = exercised(CASE)

    highest = found.ranges.pop("block_number")[1]
    assert found.to_dict() == {
        "ranges": {
            "decode_query_len": [1, 1],
            "gqa_ratio": [3, 3],
            "num_kv_heads": [2, 2],
            "num_q_heads": [6, 6],
            "num_reqs": [3, 3],
            "num_tokens": [6, 6],
            "query_len": [1, 5],
            "seq_len": [5, 41],
        },
        "sizes": {"block_size": [4], "head_size": [16]},
    }
    used = materialize(CASE).block_table[:2]
    assert highest == max(used[0, :11].max(), used[1, :2].max())


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk"])
def test_a_window_counts_with_longer_sequences_only(field) -> None:
    found = exercised(*(evolve(CASE, **{field: value}) for value in (40, 7, 41, 500)))

    assert found.ranges[field] == (7, 40)


def test_a_block_size_counts_with_more_than_one_block() -> None:
    assert exercised(evolve(CASE, block_size=64)).sizes.get("block_size") is None
    assert exercised(evolve(CASE, block_size=40)).sizes["block_size"] == {40}


def test_a_size_of_values_counts_where_it_differs() -> None:
    assert "head_size_v" not in exercised(evolve(CASE, head_size_v=16)).sizes
    assert exercised(evolve(CASE, head_size_v=24)).sizes["head_size_v"] == {24}


def test_a_comparison_that_fails_records_nothing() -> None:
    backend, scene, found = backend_of(CASE), materialize(CASE), Exercised()
    ran = run(backend, scene)
    ran.output[0] += 1

    with observing(found.add), pytest.raises(AssertionError):
        compare(ran, backend, scene)

    assert found.ranges == {}


def test_nothing_is_recorded_behind_the_test() -> None:
    found = exercised(CASE)
    before = found.to_dict()

    check(backend_of(CASE), materialize(evolve(CASE, context_lens=(90, 0, 9))))

    assert found.to_dict() == before


def of_test(outcome: str, *cases: Case) -> pytest.TestReport:
    """Return the report of a test that compares these cases."""
    item = SimpleNamespace(user_properties=[])
    wrapper = Reporter(None, "pytest", complete=True).pytest_runtest_call(item)
    next(wrapper)
    for case in cases:
        check(backend_of(case), materialize(case))
    assert next(wrapper, None) is None
    return pytest.TestReport("test", ("", 0, ""), {}, outcome, None, "call", user_properties=item.user_properties)


def test_the_evidence_has_the_ranges_of_the_tests_that_passed(tmp_path) -> None:
    window = evolve(CASE, sliding_window=30, head_size=48)
    reports = [of_test("passed", CASE), of_test("passed", window), of_test("failed", evolve(window, sliding_window=2))]
    found = report.report_of(SUBJECT, reports, frozenset())

    reporter._write(tmp_path, "pytest", [found])

    written = json.loads((tmp_path / "evidence-torch-sdpa.json").read_text("utf-8"))
    assert written["format"] == 2
    assert written["ranges"]["sliding_window"] == [30, 30]
    assert written["ranges"]["seq_len"] == [5, 41]
    assert {"field": "head_size", "value": 48} in written["served"]
    assert "  seq_len            5 to 41" in list(report.lines_of(found))


def test_a_window_is_exercised_by_longer_sequences_only() -> None:
    """A window of 64 over 41 keys has no effect: a backend that ignores it gives the same."""
    short, cut = (of_test("passed", evolve(CASE, sliding_window=size)) for size in (64, 7))
    for one in (short, cut):
        one.user_properties += [(report.EXERCISED, report.text_of("sliding_window", size)) for size in (7, 64)]

    found = [report.report_of(SUBJECT, reports, frozenset()) for reports in ([short], [short, cut])]

    served = [[item.value for item in each.served if item.field == "sliding_window"] for each in found]
    assert served == [[], [7]]
    assert all(Capability("sliding_window", 64) in each.missing for each in found)


def test_what_no_test_exercised_has_a_device_and_a_command() -> None:
    lines = list(report.lines_of(report.report_of(SUBJECT, [], frozenset({"test_mixed_batch[torch/sdpa]"}))))

    run_it = "      pytest --pyargs attnplug_kit --attn-backend=torch/sdpa --attn-report=report"
    at = lines.index("  to exercise compute_capability=7.5, on a CUDA device of compute capability 7.5:")
    assert lines[at + 1] == run_it
    (rest,) = [line for line in lines if line.startswith("  to exercise head_size=1, 1024, ")]
    assert "; sinks=True; " in rest
    assert lines[lines.index(rest) + 1] == run_it


def failed(name: str, message: str) -> dict[str, str]:
    return {"id": f"kit.py::TestAll::{name}", "outcome": "failed", "message": message}


def test_a_value_whose_test_failed_has_no_command() -> None:
    one = pytest.TestReport("a.py::T::test_capability[torch/sdpa-head_size=1]", ("", 0, ""), {}, "failed", None, "call")
    planned = {"test_capability[torch/sdpa-head_size=1]"}

    part = list(
        report.lines_of(report.report_of(SUBJECT, [one], frozenset({*planned, "test_mixed_batch[torch/sdpa]"})))
    )
    whole = list(report.lines_of(report.report_of(SUBJECT, [one], frozenset(planned))))

    for lines in (part, whole):
        assert "  failed: head_size=1" in lines
        assert not [line for line in lines if line.startswith("  not exercised: head_size=1,")]
        assert lines[-2:] == ["failed, by cause:", "  head_size (1 test)"]
    assert [line for line in part if line.startswith("  to exercise head_size=1024, ")]
    assert not [line for line in whole if line.startswith("  to exercise head_size=")]


def test_failures_are_counted_by_cause() -> None:
    ignored = "sliding_window=7 was requested, and the output is that of a request without it: ignored"
    tests = [
        failed("test_feature_is_used[acme/plain-sliding_window=7]", f"AssertionError: acme/plain: {ignored}"),
        failed(
            "test_pairs[acme/plain-03]", "AssertionError: acme/plain with head_size=64 sliding_window=64: output: 3"
        ),
        failed("test_capability[acme/plain-sliding_window=1]", "AssertionError: output"),
        failed("test_capability[acme/plain-head_size=40]", "AssertionError: acme/plain with dtype=float16: output"),
        failed("test_mixed_batch[acme/plain]", "RuntimeError: no such kernel"),
        {"id": "test_one_token[acme/plain]", "outcome": "passed", "message": ""},
    ]

    assert list(lines_of_causes(tests, "acme/plain")) == [
        "failed, by cause:",
        "  sliding_window: ignored (3 tests)",
        "  head_size (1 test)",
        "  others (1 test)",
    ]
    assert list(lines_of_causes(tests[-1:], "acme/plain")) == []


def test_what_all_failures_have_in_common_is_said_first() -> None:
    message = "AssertionError: acme/plain with head_size={} sliding_window={} paged=True: output: 3; in decodes only"
    tests = [failed(f"test_pairs[acme/plain-{one}]", message.format(64 + one, 7)) for one in range(3)]

    assert list(lines_of_causes(tests, "acme/plain"))[:2] == [
        "failed, by cause:",
        "  all 3 that show their request have sliding_window=7 in common, in decodes only",
    ]
    tests.append(failed("test_pairs[acme/plain-4]", message.format(64, 9).removesuffix("; in decodes only")))
    assert "  all 4 that show their request have sliding_window in common" in lines_of_causes(tests, "acme/plain")
    tests.append(failed("test_pairs[acme/plain-5]", "AssertionError: acme/plain with dtype=float16: output"))
    assert not any("in common" in line for line in lines_of_causes(tests, "acme/plain"))


def test_an_open_feature_is_exercised_by_an_option() -> None:
    found = unexercised("acme/fast", "features", ("acme.rope",), "test it beside the kit", features=("acme.bias",))

    assert found.command == (
        "pytest --pyargs attnplug_kit --attn-backend=acme/fast "
        "--attn-feature=acme.bias --attn-feature=acme.rope --attn-report=report"
    )


@pytest.mark.parametrize(
    ("because", "where", "has_command"),
    [
        ("the kit requests sizes up to 1024", "", False),
        ("requires compute capability 8.9; the device has 8.0", "a device that serves it", True),
        ("", "", True),
    ],
)
def test_a_reason_says_whether_another_run_helps(because, where, has_command) -> None:
    found = unexercised("acme/fast", "head_size", 2048, because)

    assert (found.where, bool(found.command)) == (where, has_command)
