"""``attnplug bench --host``: a host's calls beside those through attnplug. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Names

import pytest

from attnplug.request.settings import parse_toml
from attnplug_kit.bench import Measurement, SectionResult, Target, hosting, processes

ROOT = Path(__file__).parents[3]
CPU = Target(device="cpu", host="acme")


class Step:
    """Offers the calls of a step, and records them."""

    DISTRIBUTIONS = ("attnplug", "acme-engine")

    def __init__(self, fail: str = "") -> None:
        self.fail, self.calls = fail, []

    def parts(self, device: str, backend: str | None):
        self.given = device, backend
        for name in ("build", "forward"):
            yield (
                name,
                {
                    each: (lambda given, key=(name, each): self.call(*key, given), lambda: "new")
                    for each in ("acme", "attnplug on torch/sdpa")
                },
            )
        if self.fail == "parts":
            raise ValueError("the engine has no layers")

    def call(self, part: str, who: str, given: str) -> None:
        self.calls.append((part, who, given))
        if part == self.fail:
            raise ValueError("no kernel")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch):
    """Return a function that offers the steps of a host."""

    def offer(step: Step) -> Step:
        entry = Names(name="acme", load=lambda: step)
        monkeypatch.setattr(hosting.metadata, "entry_points", lambda group: [entry] if group == hosting.GROUP else [])
        return step

    return offer


def test_each_part_is_measured_beside_the_hosts_own(offered) -> None:
    step = offered(Step())
    found = hosting.measure_here(2, Target("torch/sdpa", "cpu", host="acme"))

    assert step.given == ("cpu", "torch/sdpa")
    assert [(one.name, one.what, one.unit, one.paired) for one in found.measurements] == [
        ("acme", f"{part}, wall time: {what}", unit, unit == "x")
        for part in ("build", "forward")
        for what, unit in (
            ("acme", "us"),
            ("attnplug on torch/sdpa", "us"),
            ("attnplug on torch/sdpa over acme", "x"),
        )
    ]
    assert len({len(one.samples) for one in found.measurements[:3]}) == 1
    assert {given for *_, given in step.calls} == {"new"}
    assert found.setup["host"].startswith("attnplug 0.")  # what is not installed has no version
    assert found.setup["device"].startswith("cpu")
    assert not any(one.budget for one in found.measurements)


def test_a_part_that_fails_is_a_failure_beside_the_others(offered) -> None:
    offered(Step(fail="build"))
    found = hosting.measure_here(1, CPU)

    assert [one.what.partition(",")[0] for one in found.measurements] == ["forward"] * 3
    assert found.failures == ("--host acme, build: ValueError: no kernel",)


def test_a_host_that_raises_is_an_error(offered) -> None:
    offered(Step(fail="parts"))

    with pytest.raises(hosting.PluginError, match=r"(?s)acme raised ValueError: the engine has no layers.*without"):
        hosting.measure_here(1, CPU)


@pytest.mark.parametrize("host", hosting.KNOWN)
def test_a_host_that_is_not_installed_is_refused_with_the_fix(run, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(hosting.metadata, "entry_points", lambda group: [])
    answer = run("bench", "--host", host)

    assert (answer.code, answer.out) == (2, "")
    assert f"--host {host} was given, and attnplug-{host} is not installed here" in answer.err
    assert f"pip install ./hosts/{host})" in " ".join(answer.err.split())


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--host", "vlm"], "--host vlm was given; did you mean 'vllm'?"),
        (["--host", "torch", "cached"], "--host torch was given, to measure cached"),
        (["--host", "torch", "--baseline", "x.py"], "--host torch was given, to measure with a --baseline"),
    ],
)
def test_a_wrong_request_is_refused(run, words: list[str], given: str) -> None:
    answer = run("bench", *words)

    assert (answer.code, answer.out) == (2, "")
    assert given in answer.err


def test_a_host_is_measured_in_a_process(run, offered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offered(Step())
    given = []

    def measured(section: str, repeats: int, target: Target) -> SectionResult:
        given.append((section, repeats, target))
        return SectionResult((Measurement("acme", "forward", (1.5, 1.7), "x", paired=True),), {"host": "acme-engine 7"})

    monkeypatch.setattr(hosting, "measure_in_process", measured)
    answer = run("bench", "--host", "acme", "--device", "cpu", "--repeats", "3", "--json")
    run("bench", "--host", "acme", "--output", str(tmp_path / "acme.md"))

    assert given[0] == ("hosting", 3, CPU)
    assert answer.json["command"] == "attnplug bench --device cpu --host acme --repeats 3"
    assert [one["median"] for one in answer.json["measurements"]] == [1.6]
    assert answer.json["setup"] == {"host": "acme-engine 7"}
    assert (tmp_path / "acme.md").read_text().startswith("# A step of acme-engine 7, natively and through attnplug\n")


def test_the_process_measures_what_is_asked_of_it(offered, capfd: pytest.CaptureFixture[str]) -> None:
    offered(Step())
    processes.print_section("hosting", 1, {"device": "cpu", "host": "acme"})

    assert len(json.loads(capfd.readouterr().out)["result"]["measurements"]) == 6


@pytest.mark.parametrize("host", hosting.KNOWN)
def test_this_projects_hosts_offer_their_steps(host: str) -> None:
    folder = ROOT / "hosts" / host
    project = parse_toml((folder / "pyproject.toml").read_text("utf-8"))["project"]

    assert project["name"] == hosting.KNOWN[host][1]
    module = project["entry-points"][hosting.GROUP][host]
    assert (folder / "src" / f"{module.replace('.', '/')}.py").is_file()


def test_launches_and_waits_of_a_call_are_counted_in_a_profile() -> None:
    def event(name, start, length=1):
        return Names(name=name, time_range=Names(start=start, end=start + length))

    launches = ["cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync"]
    waits = ["cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
    others = ["cudaEventQuery", "cudaStreamIsCapturing", "aten::empty", "void vectorized_elementwise_kernel"]
    events = [event("cudaLaunchKernel", 4), event(hosting._CALL, 5, 9), event("cudaDeviceSynchronize", 15)]

    found = hosting._counted(events + [event(name, 6) for name in (*launches, *waits, *others)])

    assert found == "5 launches, 3 waits for the device"
