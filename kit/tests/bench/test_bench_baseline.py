"""Baselines of plugins, replays of graphs, and steps that fail beside others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from attnplug.errors import AttnplugError, RequestError  # noqa: E402 - without torch there is nothing to measure
from attnplug_kit.bench import _checked, building, forwarding  # noqa: E402
from attnplug_kit.bench.baseline import Baseline, TorchBaseline, baseline_of  # noqa: E402
from attnplug_kit.bench.result import Measurement, ResultCollector, SectionResult, _libraries  # noqa: E402
from attnplug_kit.bench.rig import Target, decodes, first_prefills, make_rig, mixed  # noqa: E402
from kit.tests.bench.fakes import TINY, TORCH, Ticks  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

STEP = decodes(3, 17, **TINY)
SOURCE = """\
from attnplug_kit.bench import TorchBaseline

class Direct(TorchBaseline):
    backend = "flash"
    what = "direct flash calls"

class Bare:
    backend, what = "bare", "nothing"

class Other(TorchBaseline):
    backend = "other"

class Another(TorchBaseline):
    backend = "other"

class Late(TorchBaseline):
    backend = "late"
    def __init__(self):
        raise RuntimeError("no kernels")
"""


PLANNED: list[bool] = []


class Planned(TorchBaseline):
    """A baseline of a library that plans."""

    def plans(self, planner, *, captured):
        return {
            "the library's plan": lambda: PLANNED.append(captured),
            "the library's plan, its arrays included": lambda: None,
        }


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Return a file with baselines."""
    written = tmp_path / "direct_calls.py"
    written.write_text(SOURCE)
    return str(written)


# -- baselines --------------------------------------------------------------------------------------


def test_torch_is_compared_with_its_own_calls() -> None:
    found, note = baseline_of("torch")

    assert isinstance(found, TorchBaseline)
    assert isinstance(found, Baseline)
    assert note is None


def test_a_file_has_the_baseline_of_a_backend(file: str) -> None:
    found, note = baseline_of("flash", file)

    assert (found.backend, found.what, note) == ("flash", "direct flash calls", None)


def test_a_backend_without_a_baseline_is_compared_with_torch() -> None:
    found, note = baseline_of("flash")

    assert isinstance(found, TorchBaseline)
    assert note == "flash is compared with direct torch calls, without a budget: --baseline names others"


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("bare", "one attnplug_kit.bench.Baseline with backend = 'bare', and has 0"),
        ("nobody", "one attnplug_kit.bench.Baseline with backend = 'nobody'"),
        ("other", "one attnplug_kit.bench.Baseline with backend = 'other', and has 2"),
        ("late", "RuntimeError: no kernels"),
    ],
)
def test_a_file_without_it_is_refused(file: str, backend: str, why: str) -> None:
    with pytest.raises(RequestError, match=re.escape(why)):
        baseline_of(backend, file)


def test_a_file_that_does_not_run_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import direct_calls_of_nobody\n")

    with pytest.raises(RequestError, match="No module named 'direct_calls_of_nobody'"):
        baseline_of("flash", str(broken))
    with pytest.raises(RequestError, match="there is no such file"):
        Target(baseline=str(tmp_path / "absent.py")).check()


def test_a_baseline_is_not_dropped(file: str) -> None:
    with pytest.raises(RequestError, match="build and forward alone are compared"):
        _checked(["dense", "import"], Target(baseline=file))


# -- plans ---------------------------------------------------------------------------------------------------------


def test_a_build_is_reported_over_the_librarys_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANNED.clear()
    monkeypatch.setattr(building, "baseline_of", lambda *_: (Planned(), None))
    monkeypatch.setattr(building, "host_clock", lambda _: Ticks())
    steps = decodes(256, 3, **TINY), mixed(2, 9, 1, 5, **TINY)

    found = building.measure_steps(steps, (decodes(256, 3, **TINY),), TORCH, 2)

    said = [(m.what.partition("ticks: ")[2], m.budget, m.paired) for m in found.measurements]
    plans = [("the library's plan", None, False), ("the library's plan, its arrays included", None, False)]
    assert said[4:7] == [*plans, ("`build` over the library's plan", 50, True)]
    assert said[11:14] == [*plans, ("`build` over the library's plan", None, True)]  # the budget is for 256 requests
    assert said[15:] == [*plans, ("`build` over the library's plan", 50, True)]
    budgets = [(what, budget) for what, budget, _ in said if budget is not None]  # no other one where a library plans
    over = ("`build` over the library's plan", 50)
    assemblies = [
        (f"before that, `BatchAssembler` with {how}", 100)
        for how in ("requests added one by one", "arrays of all requests")
    ]
    assert budgets == [*assemblies, over, over]
    assert not any(m.decides for m in found.measurements if m.budget)
    assert set(PLANNED) == {False, True}


# -- device times and graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [STEP, decodes(1, 1, **TINY), decodes(4, 33, **TINY)], ids=lambda step: step.what)
def test_replays_compute_what_direct_calls_do(step) -> None:
    rig = make_rig(step, TORCH, cudagraph="single_token_decode")
    expected = TorchBaseline().layer(rig)().clone()

    ours, direct = forwarding.replay_of(rig), forwarding.captured(rig, TorchBaseline().captured(rig))

    for way in (ours, direct):
        rig.output.fill_(float("nan"))
        torch.testing.assert_close(way(), expected)


def test_replays_are_reported_over_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "work_clock", lambda _: Ticks())

    found = forwarding.measure_steps([], TORCH, 2, [STEP])

    assert [m.what.partition("of 16: ")[2] for m in found.measurements] == [
        "direct torch calls",
        "`forward` in a graph",
        "`forward` in a graph / direct calls",
    ]
    assert all("replayed from a graph, ticks" in m.what for m in found.measurements)
    assert found.measurements[-1].median == 1


def test_a_replay_with_another_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(forwarding, "work_clock", lambda _: ticks)
    monkeypatch.setattr(TorchBaseline, "captured", lambda self, rig: lambda: rig.output * 0)

    with pytest.raises(AttnplugError, match="compute different results"):
        forwarding.measure_replay(STEP, TORCH, 1)

    assert ticks.calls == 0


def test_the_ratio_has_a_budget_on_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = forwarding.measure_steps([((STEP,), Ticks(), False)], TORCH, 1)

    assert [m.budget for m in found.measurements] == [None, None, None]
    assert 0.99 <= 1 / forwarding.RATIO < 0.991


def test_the_setup_names_the_libraries_of_the_variant(site) -> None:
    backend = SimpleNamespace(id="flash/old")

    assert _libraries(backend) == "flash-old 2.8.3"
    assert not _libraries(SimpleNamespace(id="flash/new"))  # its library is not installed
    assert not _libraries(SimpleNamespace(id="torch/sdpa"))


# -- steps that fail -----------------------------------------------------------------------------------------------


def test_a_failed_step_is_reported_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Choosy(TorchBaseline):
        def layer(self, rig):
            if not rig.step.is_decode:
                raise RuntimeError("out of\nmemory")
            return super().layer(rig)

    monkeypatch.setattr(forwarding, "baseline_of", lambda *_: (Choosy(), "a note"))
    steps = first_prefills(2, 5, **TINY), STEP, first_prefills(1, 5, **TINY)

    found = forwarding.measure_steps([(steps, Ticks(), True)], TORCH, 1)

    assert {m.what.partition(", ticks")[0] for m in found.measurements} == {STEP.what}
    assert found.notes[0] == "a note"
    assert found.failures == (
        "forward, first prefill, 2 prompts of 5 tokens: RuntimeError: out of\nmemory",
        "forward, first prefill, 1 prompt of 5 tokens: RuntimeError: out of\nmemory",
    )


def test_where_every_step_fails_the_first_failure_is_raised() -> None:
    collector = ResultCollector("forward")

    collector.add("one", lambda: _raise(ValueError("the first")))
    collector.add("two", lambda: _raise(KeyError("the second")))

    with pytest.raises(ValueError, match="the first"):
        collector.result()


def _raise(error: Exception) -> SectionResult:
    raise error


def test_a_failure_fails_the_run_and_is_written(run, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = Measurement("forward", "something", (1e-6, 3e-6), "us")
    found = SectionResult((number,), {}, ("a note",), ("forward, one: RuntimeError: out of\nmemory",))
    monkeypatch.setattr("attnplug_kit.bench.forwarding.measure", lambda *_: found)
    page = tmp_path / "page.md"

    answer = run("bench", "forward", "--output", str(page))

    assert answer.code == 1
    assert answer.out.endswith("\nfailed: forward, one: RuntimeError: out of memory\nnote: a note\n")
    assert page.read_text().endswith("\n- failed: forward, one: RuntimeError: out of memory\n- a note\n")
    assert run("bench", "forward", "--json").json["failures"] == list(found.failures)
