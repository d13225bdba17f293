"""``attnplug bench``: it measures and reports. No time is asserted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from attnplug.errors import AttnplugError
from attnplug.manifest.reader import parse_manifest
from attnplug_kit import bench
from attnplug_kit.bench import processes, result, selecting
from attnplug_kit.bench.processes import interpreter
from attnplug_kit.bench.result import Measurement, Result, SectionResult, formatted

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = {
    "processor": "one of many",
    "processors": 2,
    "load": 0.5,
    "system": "Linux x86_64",
    "python": "CPython 3.11.0",
    "versions": {"attnplug": "0.1.0"},
    "distributions": 7,
}
FAST = Measurement("cached", "something fast", (1e-6, 2e-6, 9e-6), "us", 3)
SLOW = Measurement("list", "something slow", (0.2, 0.1), "ms", 130)
SHOWN = Measurement("list", "shown for comparison", (0.5,), "ms")


def result_of(*measurements: Measurement) -> Result:
    return Result(measurements, command="c", machine=MACHINE)


def test_the_median_is_compared_with_the_budget() -> None:
    assert (FAST.median, FAST.best, FAST.verdict) == (pytest.approx(2), pytest.approx(1), "within")
    assert (SLOW.median, SLOW.best, SLOW.verdict) == (pytest.approx(150), pytest.approx(100), "over")
    assert (SHOWN.within, SHOWN.verdict) == (True, "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.123 us"), (1.234, "1.23 us"), (12.34, "12.3 us"), (123.4, "123 us"), (-45.67, "-45.7 us")],
)
def test_a_time_has_three_digits(value: float, text: str) -> None:
    assert formatted(value, "us") == text


def test_a_result_is_within_budget_if_all_of_it_is() -> None:
    assert result_of(FAST, SHOWN).within
    assert not result_of(FAST, SLOW).within


def test_the_backends_part_is_reported_and_fails_nothing(run, canned) -> None:
    besides = evolve(SLOW, decides=False)
    canned.append(besides)
    reported = run("bench", "cached")

    assert result_of(FAST, besides).within
    assert reported.code == 0
    assert "list             150 ms  best 100 ms  budget 130 ms  over\n" in reported.out
    assert [m.to_dict()["decides"] for m in (FAST, besides, SHOWN)] == [True, False, False]
    assert "fails no run" in result_of(FAST, besides).page()
    assert "fails no run" not in result_of(FAST, SLOW).page()


def test_a_result_is_written_as_a_page_or_as_json(tmp_path: Path) -> None:
    found = Result((FAST, SLOW, SHOWN), command="attnplug bench cached list", machine=MACHINE)

    found.write(tmp_path / "result.md")
    found.write(tmp_path / "result.json")

    page = (tmp_path / "result.md").read_text()
    assert "| processor | one of many, 2 of them |\n" in page
    assert "| command | `attnplug bench cached list` |\n" in page
    assert page.startswith("# Budgets of the selection\n")
    assert "| something fast | 2.00 us | 1.50 to 5.50 us | 1.00 us | 3 us | within |\n" in page
    assert "| something slow | 150 ms | 125 to 175 ms | 100 ms | 130 ms | over |\n" in page
    assert "| shown for comparison | 500 ms | 500 to 500 ms | 500 ms | - | - |\n" in page
    assert json.loads((tmp_path / "result.json").read_text()) == {"schema_version": 1, **found.to_dict()}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["cashed"], "the measurement 'cashed' was requested; did you mean 'cached'?"),
        (["--output", "result.txt"], "--output 'result.txt' was given"),
        (["--repeats", "0"], "--repeats 0 was given"),
        (["--repeats", "x"], "argument --repeats: invalid int value: 'x'"),
    ],
)
def test_an_invalid_request_is_refused_before_measuring(run, words: list[str], given: str) -> None:
    answer = run("bench", *words)

    assert (answer.code, answer.out) == (2, "")
    assert given in answer.err


def test_a_file_that_cannot_be_written_is_an_error(run) -> None:
    answer = run("bench", "cached", "--repeats", "1", "--output", "/nowhere/result.md")

    assert answer.code == 2
    assert "cannot be written" in answer.err


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Replace every section's measurements."""
    found = [FAST, SHOWN]
    for name, path in bench.SECTIONS.items():
        answer = (lambda *_: SectionResult(tuple(found))) if name in bench.ON_A_BACKEND else (lambda _: iter(found))
        monkeypatch.setattr(f"attnplug_kit.bench.{path.replace(':', '.')}", answer)
    return found


def test_everything_is_measured_unless_something_is_named(run, canned) -> None:
    everything = run("bench", "--json")
    named = run("bench", "list", "cached", "list", "--repeats", "3", "--json")

    assert everything.json["command"] == "attnplug bench"
    assert len(everything.json["measurements"]) == 2 * len(bench.SECTIONS)
    assert named.json["command"] == "attnplug bench list cached --repeats 3"
    assert len(named.json["measurements"]) == 4


def test_a_terminal_shows_what_is_measured_except_beside_json(run, canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    assert "measuring cached" in run("bench", "cached").err
    assert run("bench", "cached", "--json").err == ""


def test_a_missed_budget_fails_the_run(run, canned) -> None:
    kept = run("bench", "cached")
    canned.append(SLOW)
    missed = run("bench", "cached")

    assert (kept.code, missed.code) == (0, 1)
    assert (
        "cached          2.00 us  best 1.00 us  budget 3 us  within\n    something fast (quartiles 1.50 to 5.50 us)\n"
        in kept.out
    )
    assert "list             150 ms  best 100 ms  budget 130 ms  over\n" in missed.out


def test_a_result_has_the_machine(run, canned) -> None:
    facts = run("bench", "cached", "--json").json["machine"]

    assert facts.keys() == MACHINE.keys()
    assert facts["processors"] > 0
    assert facts["distributions"] > 0
    assert "attnplug" in facts["versions"]


@pytest.mark.parametrize("variants", [1, 3, 5])
def test_made_up_manifests_are_valid_and_differ(variants: int) -> None:
    manifests = [parse_manifest(processes.manifest_text(i, variants)) for i in range(10)]

    assert [manifest.name for manifest in manifests] == [f"bench_{i}" for i in range(10)]
    assert {len(manifest.variants) for manifest in manifests} == {variants}
    assert len({str(variant.supports["head_size"]) for manifest in manifests for variant in manifest.variants}) > 1


@pytest.mark.parametrize(("total", "expected"), [(12, [5, 5, 2]), (10, [5, 5]), (3, [3]), (0, []), (-2, [])])
def test_variants_are_split_over_backends(total: int, expected: list[int]) -> None:
    assert processes.shares(total, 5) == expected


def test_a_measuring_process_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", "torch")
    code = (
        "import attnplug, json; s = attnplug.Settings.read();"
        "print(json.dumps([sorted(s.block), [p.name for p in attnplug.registry().plugins]]))"
    )

    with interpreter([1, 1]) as python:
        block, names = python.json_of(code)

    assert block == []
    assert {"bench_0", "bench_1", "torch"} <= set(names)


def test_a_failed_measuring_process_is_an_error() -> None:
    with interpreter() as python, pytest.raises(AttnplugError, match="a measuring process ended with 3") as caught:
        python.json_of("import sys; print('why', file=sys.stderr); sys.exit(3)")

    assert caught.value.expected == "it printed\nwhy"


@pytest.mark.parametrize("name", ["import", "list", "first-select", "uncached", "cached"])
def test_each_section_measures(run, name: str) -> None:
    answer = run("bench", name, "--repeats", "1", "--json")

    assert answer.code in (0, 1), answer.err
    found = answer.json["measurements"]
    assert {measurement["name"] for measurement in found} == {name}
    assert any(measurement["budget"] for measurement in found)
    assert all(measurement["samples"] >= 1 for measurement in found)


def test_the_first_selection_is_among_five_plugins() -> None:
    first = next(selecting.first_select(1))

    assert f"manifests of {selecting.PLUGINS} plugins" in first.what


def test_without_torch_no_process_with_torch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "find_spec", lambda _: None)

    assert not [found for found in selecting.first_select(1) if "torch" in found.what]


def test_the_processor_is_found_without_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result, "_CPUINFO", tmp_path / "missing")
    monkeypatch.setattr(result.platform, "processor", lambda: "an unusual one")

    assert result.machine()["processor"] == "an unusual one"


def test_fifty_candidates_have_reasons() -> None:
    first = next(selecting.new_requests(1))

    assert "with 50 candidates" in first.what
    assert " with 0 reasons" not in first.what
    assert len(first.samples) > 100
