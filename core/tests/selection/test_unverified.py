"""What a decision reports of itself: which part of it no evidence covers on this device."""

from __future__ import annotations

import json
import logging
import pickle
import sys

import pytest

import attnplug
from attnplug.negotiation.reason import Reason
from attnplug.negotiation.verdict import Verdict
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection.explanation import detail
from attnplug.selection.selection import Selection

NOTHING_KNOWN = ("device", "cuda:9.0", "no run of the conformance kit on cuda:9.0 is known")
BASICS = {
    "head_size": 64,
    "dtype": "bfloat16",
    "paged": True,
    "block_size": 16,
    "kv_layout": "NHD",
    "kv_cache_form": "joint",
}


def records(found):
    return [(item.field, item.value, item.because) for item in found]


@pytest.fixture
def shelf(tmp_path):
    """Return ``put(id, values, ...)``, which writes an evidence file; ``put.settings`` names its folder."""
    folder = tmp_path / "evidence"
    folder.mkdir()

    def put(candidate, values=BASICS, version="1.0", device=Device.cuda("9.0"), *, passed=True):  # noqa: B008 - frozen
        data = {
            "format": 1,
            "backend": candidate,
            "distribution": f"dist-{candidate.partition('/')[0]} {version}",
            "device": device.to_dict(),
            "passed": passed,
            "served": [{"field": name, "value": value} for name, value in values.items()],
            "unreached": [],
        }
        (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(data))

    put.settings = Settings(evidence=(str(folder),))
    return put


def test_evidence_is_read_anew_after_the_registry_has_changed(world, shelf, request_of) -> None:
    registry = world("generic", settings=shelf.settings)
    assert attnplug.select(request_of()).unverified
    shelf("generic/default")

    assert attnplug.select(request_of(head_size=128)).unverified[0].field == "device"
    registry.mark_broken("flash/old", Reason("broken", "flash/old", None, "it failed"))
    assert attnplug.select(request_of()).unverified == ()


def test_without_evidence_everything_that_can_serve_is_unverified(both, request_of) -> None:
    pick = attnplug.select(request_of(block_size=256))

    reported = {verdict.id: records(verdict.unverified) for verdict in pick.verdicts}
    assert reported["flash/old"] == reported["generic/default"] == [NOTHING_KNOWN]
    assert records(pick.unverified) == [NOTHING_KNOWN]


def test_what_cannot_serve_has_reasons_instead(both, request_of) -> None:
    verdicts = attnplug.explain(request_of(sinks=True, block_size=256), backend="flash/old").verdicts

    old = next(verdict for verdict in verdicts if verdict.id == "flash/old")
    assert old.status == "refused"
    assert old.reasons
    assert old.unverified == ()


def test_a_decision_with_exercised_values_has_nothing_unverified(world, shelf, request_of) -> None:
    shelf("generic/default")
    world("flash", "generic", settings=shelf.settings)

    explanation = attnplug.explain(request_of(), backend="generic")

    assert explanation.chosen.unverified == ()
    assert "not verified" not in "\n".join(detail(explanation.verdicts[0]))
    assert records(attnplug.select(request_of(head_size=96), backend="generic").unverified) == [
        ("head_size", 96, "verified is 64")
    ]


def test_what_was_agreed_on_counts_not_what_was_left_open(world, shelf, request_of) -> None:
    shelf("flash/hopper", {**BASICS, "block_size": 32})
    world("flash", settings=shelf.settings)

    pick = attnplug.select(request_of(), backend="flash/hopper")

    assert pick.requirements.block_size is None
    assert records(pick.unverified) == [("block_size", 16, "verified is 32")]
    assert attnplug.select(request_of(block_size=32), backend="flash/hopper").unverified == ()


def test_evidence_of_another_version_is_named(world, shelf, request_of) -> None:
    shelf("generic/default", version="0.9")
    world("generic", settings=shelf.settings)

    assert records(attnplug.select(request_of()).unverified) == [
        ("distribution", "dist-generic 1.0", "verified is dist-generic 0.9")
    ]


def test_evidence_never_changes_what_is_chosen(world, shelf, request_of) -> None:
    requests = [request_of(head_size=size, sinks=sinks) for size in (64, 128, 512) for sinks in (False, True)]
    world("flash", "generic")
    before = [attnplug.explain(wanted) for wanted in requests]

    for candidate in ("flash/old", "flash/new", "generic/default"):
        shelf(candidate)
    shelf("flash/hopper", passed=False)
    world("flash", "generic", settings=shelf.settings)
    after = [attnplug.explain(wanted) for wanted in requests]

    assert [found.unverified for found in before[0].verdicts] != [found.unverified for found in after[0].verdicts]
    assert before == after
    for ours, theirs in zip(before, after, strict=True):
        assert [v.agreement for v in ours.verdicts] == [v.agreement for v in theirs.verdicts]


def test_a_decision_that_travels_keeps_what_it_said(world, shelf, request_of) -> None:
    shelf("generic/default")
    world("flash", "generic", settings=shelf.settings)
    pick = attnplug.select(request_of(head_size=96), backend=["generic", "auto"])
    sent = json.loads(json.dumps(pick.to_dict()))

    world("flash", "generic")  # the other process has no evidence at all

    read = Selection.from_dict(sent)
    assert read == pick
    assert [records(v.unverified) for v in read.verdicts] == [records(v.unverified) for v in pick.verdicts]
    assert read.unverified[0].field == "head_size"
    assert pickle.loads(pickle.dumps(pick)).unverified == pick.unverified
    assert sent["verdicts"][0]["unverified"] == [{"field": "head_size", "value": 96, "because": "verified is 64"}]


def test_a_verdict_without_it_was_written_by_another_version(both, request_of) -> None:
    sent = attnplug.select(request_of()).to_dict()
    for verdict in sent["verdicts"]:
        del verdict["unverified"]

    with pytest.raises(attnplug.AttnplugError, match="both sides need the same version"):
        Selection.from_dict(sent)


def test_a_verdict_by_hand_says_nothing() -> None:
    assert Verdict("a/b", "eligible").unverified == ()


def test_it_is_printed_with_what_is_verified_instead(world, shelf, request_of, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shelf("generic/default")
    world("generic", settings=shelf.settings)

    text = str(attnplug.explain(request_of(head_size=96, sliding_window=7)))
    elsewhere = str(attnplug.explain(request_of(), Device.cpu()))

    assert "    not verified by the conformance kit on this device: head_size=96 (verified is 64)\n" in text
    assert (
        "    not verified by the conformance kit on this device: sliding_window=7 (no test has requested it)\n"
        in f"{text}\n"
    )
    assert "    not verified: no run of the conformance kit on cpu is known\n" in f"{elsewhere}\n"


def test_a_plan_has_it_for_each_group(world, shelf, request_of) -> None:
    shelf("generic/default")
    world("generic", settings=shelf.settings)

    found = attnplug.plan({"a": request_of(), "b": request_of(sliding_window=7)})

    assert found["a"].unverified == ()
    assert [item.field for item in found["b"].unverified] == ["sliding_window"]
    assert str(found).count("not verified") == 1


def test_the_log_record_has_it(world, shelf, request_of, caplog) -> None:
    shelf("generic/default")
    world("generic", settings=shelf.settings)

    with caplog.at_level(logging.INFO, "attnplug"):
        attnplug.select(request_of())
        attnplug.select(request_of(head_size=96, sinks=True))

    verified, unverified = caplog.records
    assert "not verified" not in verified.getMessage()
    assert unverified.getMessage().endswith("; not verified there by the conformance kit: head_size=96, sinks=True")
    assert unverified.selection.unverified


def test_no_file_is_opened_unless_it_is_needed(world, shelf, request_of, monkeypatch, caplog) -> None:
    shelf("generic/default")
    world("generic", settings=shelf.settings)
    monkeypatch.setitem(sys.modules, "attnplug.evidence.store", None)  # importing it fails

    with caplog.at_level(logging.WARNING, "attnplug"):
        pick = attnplug.select(request_of())

    assert pick.id == "generic/default"
    with pytest.raises(ImportError):
        _ = pick.unverified
