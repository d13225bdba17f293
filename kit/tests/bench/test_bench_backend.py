"""``attnplug bench build forward``: what is compared, reported and refused. No time is asserted."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

torch = pytest.importorskip("torch")

import attnplug  # noqa: E402 - without torch there is nothing to measure
from attnplug.batching import BatchAssembler  # noqa: E402
from attnplug.contract import forward_context  # noqa: E402
from attnplug.errors import AttnplugError, BatchError, DeviceError, NoBackendError, TensorError  # noqa: E402
from attnplug_kit import bench  # noqa: E402
from attnplug_kit.bench import building, forwarding, processes  # noqa: E402
from attnplug_kit.bench.baseline import TorchBaseline, baseline_of  # noqa: E402
from attnplug_kit.bench.result import Measurement, SectionResult, setup_of  # noqa: E402
from attnplug_kit.bench.rig import (  # noqa: E402
    LAYER,
    Step,
    Target,
    decodes,
    first_prefills,
    make_planner,
    make_rig,
    mixed,
    ragged_decodes,
)
from attnplug_kit.bench.timing import host_clock, work_clock  # noqa: E402
from attnplug_kit.oracle import assert_close  # noqa: E402
from kit.tests.bench.fakes import TINY, TORCH, Ticks  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

STEPS = (
    first_prefills(2, 5, **TINY),
    decodes(3, 17, **TINY),
    decodes(1, 1, **TINY),
    ragged_decodes(3, 2, 37, **TINY),
    mixed(3, 17, 2, 5, **TINY),
)


# -- steps ---------------------------------------------------------------------------------------------------------


def test_steps_say_what_they_are() -> None:
    step = mixed(3, 10, 2, 7)

    assert step.what == "3 decodes of 10 tokens and 2 first prefills of 7"
    assert (step.num_reqs, step.num_tokens, step.seq_lens) == (5, 17, (10, 10, 10, 7, 7))
    assert (step.is_decode, step.is_ragged) == (False, True)
    assert (decodes(3, 8).is_decode, decodes(3, 8).is_ragged, first_prefills(2, 4).is_decode) == (True, False, False)


@pytest.mark.parametrize(("requests", "lengths"), [(1, (5,)), (3, (5, 7, 9)), (2, (5, 9))])
def test_ragged_lengths_are_between_the_shortest_and_the_longest(requests: int, lengths: tuple[int, ...]) -> None:
    assert ragged_decodes(requests, 5, 9).seq_lens == lengths


def test_the_budgets_are_for_256_requests_and_small_layers() -> None:
    assert [step.num_reqs for step in building.STEPS] == [256, 256, 256, 34, 4]
    assert [step.num_reqs for step in building.GRAPH_STEPS] == [256]
    assert (building.BUDGET, forwarding.BUDGET) == (100, 10)
    assert forwarding.LARGE.keys() == {"cpu", "cuda"}


# -- direct calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.what)
def test_direct_calls_and_backend_compute_the_same(step) -> None:
    rig = make_rig(step, TORCH)
    direct, forward = baseline_of("torch")[0].layer(rig), rig.forward()

    for _ in range(2):  # a second time, in a cache that was written
        assert_close(forward(), direct().double(), dtype=torch.float32, scale=5)


@pytest.mark.parametrize("step", STEPS[:2], ids=lambda step: step.what)
def test_a_cache_that_the_host_writes_is_written(monkeypatch: pytest.MonkeyPatch, step) -> None:
    monkeypatch.setattr("attnplug.torch_backend.impl.TorchImpl.cache_write", "host")
    rig = make_rig(step, TORCH)
    expected = TorchBaseline().layer(rig)().double()

    assert rig.impl.host_writes
    assert_close(rig.forward()(), expected, dtype=torch.float32, scale=5)
    rig.output.zero_()
    with forward_context({LAYER: rig.metadata}):
        assert_close(rig.forward_op()(), expected, dtype=torch.float32, scale=5)


def test_both_caches_have_the_past() -> None:
    step = decodes(2, 20, **TINY)
    rig = make_rig(step, TORCH)
    before = rig.forward()().clone()

    for pages in (rig.cache.k, rig.cache.v):
        pages.zero_()

    assert not torch.allclose(rig.forward()(), before)
    assert torch.allclose(TorchBaseline().layer(rig)(), before, atol=1e-5)


def test_direct_calls_write_their_pages() -> None:
    step = decodes(2, 20, **TINY)
    rig = make_rig(step, TORCH)
    direct = TorchBaseline().layer(rig)
    first = direct().clone()

    rig.value.mul_(2)  # the token's own value, which comes back through the pages

    assert not torch.allclose(direct(), first)


class Wrong:
    """A baseline with wrong results."""

    backend, what = "torch", "wrong calls"

    def layer(self, rig):
        direct = TorchBaseline().layer(rig)
        return lambda: direct() * 0.99


def test_a_baseline_with_another_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "baseline_of", lambda *_: (Wrong(), None))
    clock = Ticks()

    with pytest.raises(AttnplugError, match="compute different results") as caught:
        forwarding.measure_steps([(STEPS[1:2], clock, True)], TORCH, 1)

    assert clock.calls == 0
    assert caught.value.expected.startswith("the results are equal but for rounding: output: ")


def test_a_backend_that_writes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.torch_backend.impl.TorchImpl.run", lambda *_: None)

    with pytest.raises(AttnplugError, match="torch/sdpa and direct torch calls compute different results"):
        forwarding.measure_steps([(STEPS[:1], Ticks(), True)], TORCH, 1)


def test_a_layer_of_the_noop_backend_checks_and_computes_nothing() -> None:
    rig = make_rig(STEPS[0], TORCH)
    rig.output.fill_(7)

    forwarding.noop_backend(rig)()

    assert bool((rig.output == 7).all())
    with pytest.raises(TensorError):
        forwarding.noop_backend(evolve(rig, query=rig.query[:1]))()


@pytest.mark.gpu
def test_a_gpu_is_timed_by_launches_and_by_events() -> None:
    works = [(STEPS[1:2], host_clock("cuda"), True), (STEPS[1:2], work_clock("cuda"), False)]

    found = forwarding.measure_steps(works, Target("torch/sdpa", "cuda"), 1)

    assert {m.what.split(", ")[2].partition(":")[0] for m in found.measurements} == {"host time", "device time"}
    assert all(m.median > 0 for m in found.measurements if not m.paired)
    assert found.setup["device"].startswith("cuda:")


# -- findings ------------------------------------------------------------------------------------------------------


def test_forward_is_reported_over_direct_calls() -> None:
    found = forwarding.measure_steps([(STEPS[1:2], Ticks(), True), (STEPS[3:4], Ticks(), False)], TORCH, 2)

    small, large = found.measurements[:5], found.measurements[5:]
    assert [m.what.rpartition(": ")[2] for m in small[:3]] == [
        "direct torch calls",
        "`forward`, the cache write included",
        "`forward` over direct calls",
    ]
    assert [(m.unit, m.budget, m.paired) for m in small] == [
        ("us", None, False),
        ("us", None, False),
        ("us", 10, True),
        ("us", 10, False),
        ("us", None, True),
    ]
    assert [(m.unit, m.budget, m.paired) for m in large] == [
        ("ms", None, False),
        ("ms", None, False),
        ("x", None, True),
    ]
    assert [m.what.rpartition(": ")[0].endswith("own part") for m in small if m.budget and m.decides] == [True]
    assert large[2].median == 1
    assert all(m.name == "forward" and "ticks" in m.what for m in found.measurements)
    assert found.setup == {
        "backend": "torch/sdpa, float32, blocks of 16, layout NHD, joint KV cache",
        "device": "cpu",
        "torch threads": str(torch.get_num_threads()),
    }


def test_another_backend_has_no_budget_over_torchs_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBaseline, "backend", "another")

    forward = forwarding.measure_steps([(STEPS[1:2], Ticks(), True)], TORCH, 1).measurements
    build = building.measure_steps((decodes(256, 3, **TINY),), (), TORCH, 1).measurements

    assert [m.budget for m in forward] == [None, None, None, 10, None]  # the contract's own part is everybody's
    assert [m.budget for m in build] == [None, None, 100, 100]  # the assembly is core's


def test_builds_are_reported_with_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "host_clock", lambda _: Ticks())
    steps = decodes(256, 3, **TINY), mixed(2, 9, 1, 5, **TINY)

    found = building.measure_steps(steps, (decodes(4, 9, **TINY),), TORCH, 2)

    assert [m.budget for m in found.measurements] == [100, None, 100, 100, *[None] * 5]
    assert not any(m.decides for m in found.measurements if m.budget)  # how long a plan takes is the backend's
    whole, check, assembly, of_arrays = (m.what for m in found.measurements[:4])
    assert "`build`, one group" in whole
    assert "builder that plans nothing" in check
    assert "`BatchAssembler` with requests added one by one" in assembly
    assert "`BatchAssembler` with arrays" in of_arrays
    assert "into graph buffers" in found.measurements[-1].what
    assert "with the work that a device would do" in found.measurements[-1].what


@pytest.mark.parametrize("step", [decodes(3, 9, **TINY), mixed(2, 40, 2, 5, **TINY)])
def test_the_arrays_of_a_step_make_its_batch(step: Step) -> None:
    planner = make_planner(step, TORCH)
    assembler = BatchAssembler.of(planner.backend.agreement)

    assembler.add_many(*planner.arrays())
    batch, expected = assembler.finish(), planner.batch()

    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "num_computed_tokens_cpu"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist()


def test_a_builder_that_plans_nothing_checks_the_batch() -> None:
    planner = make_planner(decodes(2, 9, **TINY), TORCH)
    bare = building._without_plan(planner.builder)

    assert not bare.build(planner.batch()).plans
    assert planner.builder.build(planner.batch()).plans
    with pytest.raises(BatchError):
        bare.build(evolve(planner.batch(), num_actual_tokens=1))


def test_a_graph_level_that_nothing_serves_is_noted(site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("eager", EAGER)
    monkeypatch.setattr(building, "host_clock", lambda _: Ticks())

    found = building.measure_steps((decodes(2, 9, **TINY),), (decodes(2, 9, **TINY),), Target("eager"), 1)

    assert len(found.measurements) == 4
    assert "into graph buffers: not measured, since nothing serves it: " in found.notes[-1]
    assert not found.failures
    assert found.setup["backend"].startswith("eager/only, float32")


def test_what_was_not_steady_is_noted() -> None:
    class Jumping(Ticks):
        def seconds(self, call, argument) -> float:
            return super().seconds(call, argument) * random.random()

    found = forwarding.measure_steps([(STEPS[1:2], Jumping(), True)], TORCH, 1)

    assert found.notes == (
        "forward, decode, 3 requests of 17 tokens: time ran out before each median was known to 1 %",
    )


def test_a_result_can_be_serialized() -> None:
    number = Measurement("forward", "some", (1.0, 2.0), "x", paired=True)
    found = SectionResult((number,), {"device": "cpu"}, ("a note",), ("a failure",))

    assert SectionResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


# -- the command ---------------------------------------------------------------------------------------------------

EAGER = """\
api = "1.0"
backend = { name = "eager", summary = "no graphs" }
[supports]
device_type = "cpu"
dtype = ["float32"]
head_size = { max = 128 }
block_size = { multiple_of = 16 }
features = ["paged"]
[variants.only]
"""


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["build", "--backend", "tocrh"], "did you mean 'torch'?"),
        (["build", "--backend", "torch/sdap"], "did you mean 'sdpa'?"),
        (["build", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["build", "--threads", "0"], "--threads 0 was given"),
        (["cached", "--backend", "torch"], "--backend was given, to measure cached"),
        (["cached", "list", "--device", "cpu"], "--device was given, to measure cached, list"),
    ],
)
def test_an_invalid_target_is_refused_before_measuring(run, words: list[str], given: str) -> None:
    answer = run("bench", *words)

    assert (answer.code, answer.out) == (2, "")
    assert given in answer.err


def test_a_refusal_in_the_measuring_process_is_raised(run) -> None:
    answer = run("bench", "forward", "--backend", "torch/flex", "--device", "cpu", "--json")

    assert answer.code == 1
    assert answer.json["error"]["type"] == "NoBackendError"
    assert "requires device type cuda; the device is cpu" in str(answer.json["error"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="--device cuda was given"):
        Target(device="cuda").prepare()


def test_threads_are_set_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", reported.append)

    Target(device="cpu", threads=3).prepare()

    assert reported == [3]
    assert Target("torch", "cpu", 3).options() == ["--backend", "torch", "--device", "cpu", "--threads", "3"]
    assert Target().options() == []


def test_a_build_is_measured_in_a_separate_process(run, tmp_path: Path) -> None:
    page = tmp_path / "build.md"
    options = ["--backend", "torch", "--device", "cpu", "--threads", "1", "--repeats", "1"]

    answer = run("bench", "build", *options, "--json", "--output", str(page))

    assert answer.code in (0, 1), answer.err
    assert answer.json["command"] == f"attnplug bench build {' '.join(options)}"
    assert answer.json["setup"]["torch threads"] == "1"
    found = answer.json["measurements"]
    assert len(found) == 4 * len(building.STEPS) + len(building.GRAPH_STEPS)
    assert [m["verdict"] in ("within", "over") for m in found].count(True) == 9
    assert all(m["samples"] >= 1 and m["quartiles"][0] <= m["median"] <= m["quartiles"][1] for m in found)
    assert page.read_text().startswith("# Build and forward of torch/sdpa\n")


def test_what_a_process_prints_is_not_part_of_its_result(start) -> None:
    code = (
        "import os; from attnplug_kit.bench import SectionResult, forwarding, processes;"
        "forwarding.measure_here = lambda *given: print('noise') or os.write(1, b'more') and SectionResult();"
        "processes.print_section('forwarding', 2, {})"
    )

    reported = start("-c", code)

    assert SectionResult.from_dict(reported.json["result"]) == SectionResult()
    assert "noise" in reported.err
    assert "more" in reported.err


def test_an_error_of_a_process_is_raised_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {"error": {"type": "NoBackendError", "problem": "a", "expected": "b", "fix": "c"}}
    monkeypatch.setattr(processes.Interpreter, "json_of", lambda *_: reported)

    with pytest.raises(NoBackendError) as caught:
        processes.measure_in_process("forwarding", 1, Target())

    assert (caught.value.problem, caught.value.expected, caught.value.fix) == ("a", "b", "c")


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the results of sections."""
    number = Measurement("build", "something", (1e-6, 3e-6), "us", 10, paired=True)
    for path in bench.SECTIONS.values():
        monkeypatch.setattr(f"attnplug_kit.bench.{path.replace(':', '.')}", lambda _: iter([number]))
    for name in ("building", "forwarding", "dense"):
        found = SectionResult((number,), {"device": "one of many"}, (f"a note of {name}",))
        monkeypatch.setattr(f"attnplug_kit.bench.{name}.measure", lambda *_, found=found: found)


def test_setup_and_notes_are_shown(run, canned, tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    reported = run("bench", "build", "forward", "--backend", "torch", "--output", str(page)).out

    assert "device: one of many\n" in reported
    assert "build           2.00 us  budget 10 us  within\n    something (quartiles 1.50 to 2.50 us)\n" in reported
    assert reported.endswith("\nnote: a note of building\nnote: a note of forwarding\n")
    assert "| device | one of many |\n" in page.read_text()
    assert "| something | 2.00 us | 1.50 to 2.50 us | - | 10 us | within |\n" in page.read_text()
    assert page.read_text().endswith("\n- a note of building\n- a note of forwarding\n")


def test_a_backend_may_be_named_where_everything_is_measured(run, canned) -> None:
    reported = run("bench", "--backend", "torch", "--json").json

    assert reported["command"] == "attnplug bench --backend torch"
    assert len(reported["measurements"]) == len(bench.SECTIONS)


def test_without_torch_backend_sections_are_left_out_or_refused(run, canned, monkeypatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda _: None)

    everything, named = run("bench", "--json"), run("bench", "forward", "cached")

    assert everything.json["command"] == "attnplug bench import list first-select uncached cached"
    assert "left out, since torch is not installed: build, forward, dense" in everything.err
    assert named.code == 2
    assert "the measurement 'forward' was requested\n" in named.err


@pytest.mark.parametrize(("hip", "expected"), [(None, "with CUDA 13.0"), ("6.3", "with ROCm 6.3")])
def test_a_result_names_the_toolkit_of_torch(hip: str | None, expected: str, monkeypatch) -> None:
    backend = attnplug.load(attnplug.Requirements(head_size=64, num_q_heads=2, num_kv_heads=2, dtype="float32"), "cpu")
    fake = SimpleNamespace(
        id=backend.id, agreement=backend.agreement, device_properties=attnplug.Device.parse("mi300x" if hip else "h100")
    )
    monkeypatch.setattr("torch.version.cuda", None if hip else "13.0")
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("attnplug_kit.bench.result._libraries", lambda _: "")

    assert setup_of(fake)["device"].endswith(expected)
