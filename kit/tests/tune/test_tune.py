"""``attnplug tune`` end to end on a CPU, with backends that state their costs."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any, ClassVar

import attrs
import pytest

torch = pytest.importorskip("torch")

import attnplug  # noqa: E402 - without torch there is nothing to measure
from attnplug.contract import read_steps, recording  # noqa: E402
from attnplug.contract import routed as attnplug_routed  # noqa: E402
from attnplug.errors import RequestError  # noqa: E402
from attnplug.evidence import ProfileEntry, dump_entries, parse_entries  # noqa: E402
from attnplug.request import Device, Requirements  # noqa: E402
from attnplug.selection import process  # noqa: E402
from attnplug_kit import replay, tune  # noqa: E402
from attnplug_kit.bench import Step, Target, make_rig  # noqa: E402
from attnplug_kit.tune import measuring  # noqa: E402
from attnplug_kit.tune.grid import cells_of, layers_of_json, layers_of_model, make_grid, parse_batch  # noqa: E402
from attnplug_kit.tune.measuring import Tuner  # noqa: E402
from attnplug_kit.tune.running import Order, run_comparison, run_order  # noqa: E402
from kit.tests.tune.fakes import COSTS, CostClock, fake_clocks, write_backend  # noqa: E402

SPARSE = Path(__file__).parents[1] / "conformance" / "sparse"
LAYER = Requirements(head_size=16, num_q_heads=4, num_kv_heads=2, dtype="float32")
BATCHES = ("decode:3x40", "prefill:2x20")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return ``offer(name, cost, factor)``: register a backend that states its cost in seconds."""
    (tmp_path / "fakes").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    before = process.PROCESS.state
    process.PROCESS.state = process.unread()

    def made(name: str, cost: float | tuple[float, float], **source: Any) -> None:
        COSTS.of[name] = cost
        module, manifest = write_backend(tmp_path / "fakes", name, **source)
        sys.modules.pop(module, None)  # of another test
        attnplug.register(module, manifest=manifest)

    yield made
    process.PROCESS.state = before


@pytest.fixture
def order(tmp_path: Path):
    def made(**changes: Any) -> Order:
        given = {"batch": BATCHES, "device": "cpu", "json": True, "clocks": fake_clocks(), **changes}
        return Order((LAYER,), tmp_path / "profiles", **given)

    return made


def tuned(order: Order, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = run_order(order)
    return code, json.loads(capsys.readouterr().out)


def read(tmp_path: Path) -> list[Any]:
    """Return the entries of the folder."""
    return [json.loads(path.read_text())["entries"][0] for path in sorted((tmp_path / "profiles").glob("*.json"))]


def chosen(monkeypatch: pytest.MonkeyPatch, profile: object, layer: Requirements = LAYER) -> Any:
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(profile))
    attnplug.refresh()
    return attnplug.explain(layer, Device.cpu())


def test_slow_and_wrong_candidates_are_found_out(offer, order, capsys, monkeypatch, tmp_path) -> None:
    offer("ample", 280e-6)
    offer("brisk", 200e-6)
    offer("clumsy", 10e-6, factor=1.5)
    assert attnplug.select(LAYER, Device.cpu()).id == "ample/sdpa"  # by name

    code, found = tuned(order(), capsys)

    assert code == 1  # a candidate was rejected
    (tmp_path / "usual").touch()
    assert {file.stat().st_mode for file in (tmp_path / "profiles").iterdir()} == {(tmp_path / "usual").stat().st_mode}
    assert [entry["phase"] for entry in found["entries"]] == ["decode", "prefill"]
    for entry in found["entries"]:
        assert (entry["default"], entry["fastest"]) == ("ample/sdpa", "brisk/sdpa")
        assert set(entry["times"]) == {"ample/sdpa", "brisk/sdpa"}
        assert entry["rejected"]["clumsy/sdpa"].startswith("it computes another result than the oracle: output: ")
        assert all(time["rounds"] >= 7 for time in entry["times"].values())
    decision = chosen(monkeypatch, tmp_path / "profiles")
    assert (decision.chosen.id, decision.chosen.decided_by) == ("brisk/sdpa", "measured profile")
    assert decision.measured.startswith("200 us (3 x 40 decode, cpu, ")
    assert "against 280 us of ample/sdpa, local profile; 2 shapes" in decision.measured


def test_the_choice_swaps_with_the_numbers(offer, order, capsys, monkeypatch, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("brisk", 200e-6)
    tuned(order(), capsys)

    for path in (tmp_path / "profiles").iterdir():
        (entry,) = json.loads(path.read_text())["entries"]
        ample, brisk = (entry["times"][f"{name}/sdpa"] for name in ("ample", "brisk"))
        ample["microseconds"], brisk["microseconds"] = brisk["microseconds"], ample["microseconds"]
        path.write_text(json.dumps(entry))

    assert chosen(monkeypatch, tmp_path / "profiles").chosen.id == "ample/sdpa"


def test_an_advantage_within_the_margin_changes_nothing(offer, order, capsys, monkeypatch, tmp_path) -> None:
    offer("ample", 203e-6)
    offer("brisk", 200e-6)
    code, found = tuned(order(), capsys)
    assert code == 0
    assert {entry["fastest"] for entry in found["entries"]} == {"ample/sdpa"}
    assert chosen(monkeypatch, tmp_path / "profiles").chosen.id == "ample/sdpa"


def test_hopeless_candidates_are_not_measured_further(offer, order, capsys) -> None:
    offer("ample", 400e-6)
    offer("brisk", 200e-6)
    _, found = tuned(order(batch=("decode:3x40",)), capsys)
    rounds = {id_: time["rounds"] for id_, time in found["entries"][0]["times"].items()}
    assert rounds["ample/sdpa"] == 3
    assert rounds["brisk/sdpa"] >= 7


def test_a_second_run_goes_on_with_what_is_left(offer, order, capsys) -> None:
    offer("ample", 300e-6)
    offer("brisk", 200e-6)
    _, first = tuned(order(batch=BATCHES[:1]), capsys)
    _, second = tuned(order(), capsys)
    _, third = tuned(order(seconds=1e-9), capsys)
    _, again = tuned(order(again=True, seconds=1e-9), capsys)

    assert (first["measured"], second["measured"], second["kept"]) == (1, 1, 1)
    assert (third["measured"], third["kept"], third["left"]) == (0, 2, [])
    assert (again["measured"], len(again["left"])) == (0, 2)
    offer("zippy", 100e-6)  # a new candidate: what is there does not say how fast it is
    assert tuned(order(), capsys)[1]["measured"] == 2


def test_a_candidate_that_fails_is_named_and_the_others_go_on(offer, order, capsys) -> None:
    offer("ample", 300e-6)
    offer("broken", 1e-6, extra='raise RuntimeError("out of registers")')
    code, found = tuned(order(batch=BATCHES[:1]), capsys)
    (entry,) = found["entries"]
    assert code == 1
    assert "out of registers" in entry["rejected"]["broken/sdpa"]
    assert set(entry["times"]) == {"ample/sdpa"}


@pytest.mark.parametrize(
    ("name", "source"),
    [("stern", {"refusal": "\x1b[31mno\tdriver"}), ("sudden", {"extra": r'assert False, "\x1b[31mno\tdriver"'})],
)
def test_an_entry_of_any_message_can_be_read(offer, order, capsys, tmp_path, name, source) -> None:
    offer("ample", 300e-6)
    offer(name, 1e-6, **source)
    tuned(order(), capsys)
    for file in (tmp_path / "profiles").iterdir():
        (entry,) = parse_entries(file.read_text())
        assert r"\x1b[31mno\tdriver" in {**entry.rejected, **entry.refused}[f"{name}/sdpa"]


def test_a_candidate_that_failed_once_is_judged_again(offer, order, capsys) -> None:
    offer("ample", 300e-6)
    fails_once = """first = "ran" not in vars(type(self)); type(self).ran = True
        if first: raise RuntimeError("busy")"""
    offer("flaky", 1e-6, factor=1.5, extra=fails_once)
    _, found = tuned(order(), capsys)
    assert [entry["rejected"]["flaky/sdpa"][:10] for entry in found["entries"]] == ["it failed:", "it compute"]


def test_a_candidate_that_refuses_a_batch_is_not_rejected(offer, order, capsys) -> None:
    offer("ample", 300e-6)
    refuses = """from attnplug.errors import BatchError
        if query.shape[0] == 40: raise BatchError("40 tokens", "39 at most", "split them")"""
    offer("small", 1e-6, extra=refuses)
    code, found = tuned(order(), capsys)
    assert code == 0
    assert [sorted(entry["times"]) for entry in found["entries"]] == [["ample/sdpa", "small/sdpa"], ["ample/sdpa"]]
    assert found["entries"][1]["refused"] == {"small/sdpa": "40 tokens"}


def test_a_cell_without_a_right_result_has_no_entry(offer, order, capsys) -> None:
    offer("clumsy", 1e-6, factor=1.5)
    code, found = tuned(order(batch=BATCHES[:1]), capsys)
    assert (code, found["entries"]) == (1, [])
    assert found["unserved"][0]["reason"].startswith("clumsy/sdpa: it computes another result than the oracle")


def test_an_exported_file_is_pinned_and_merged(offer, order, capsys, monkeypatch, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("brisk", 200e-6)
    whole = tmp_path / "all.json"
    _, found = tuned(order(export=str(whole)), capsys)

    variable, _, pinned = found["pinned"].partition("=")
    assert variable == "ATTNPLUG_PROFILE"
    assert chosen(monkeypatch, pinned).chosen.id == "brisk/sdpa"
    assert len(parse_entries(whole.read_text())) == 2
    other = Order((), tmp_path / "other", merge=[str(whole)], json=True)
    assert run_order(other) == 0
    capsys.readouterr()
    assert chosen(monkeypatch, tmp_path / "other").chosen.id == "brisk/sdpa"
    assert not [path for path in (tmp_path / "other").iterdir() if path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_is_found_before_measuring(offer, order, capsys, tmp_path) -> None:
    offer("unasked", 1e-6, extra='COSTS.of["measured"] = 1.0')
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "profiles"):
        with pytest.raises(RequestError, match="cannot be written"):
            run_order(attrs.evolve(order(), folder=folder))
    assert run_order(attrs.evolve(order(dry_run=True), folder=tmp_path / "none")) == 0  # which writes nothing
    assert not (tmp_path / "none").exists()
    assert "measured" not in COSTS.of


def test_merging_leaves_newer_entries(offer, order, capsys, tmp_path) -> None:
    offer("ample", 300e-6)
    tuned(order(batch=BATCHES[:1]), capsys)
    (entry,) = (parse_entries(file.read_text())[0] for file in (tmp_path / "profiles").iterdir())
    older, newer = (attrs.evolve(entry, measured_on=date) for date in ("2020-01-01", "2099-01-01"))

    def merge(*entries: ProfileEntry) -> str:
        (tmp_path / "more.json").write_text(dump_entries(entries))
        run_order(Order((), tmp_path / "profiles", merge=[str(tmp_path / "more.json")], json=True))
        return read(tmp_path)[0]["measured_on"]

    assert merge(older) == entry.measured_on
    assert merge(newer, older) == "2099-01-01"
    (tmp_path / "profiles" / entry.name).write_text("{")  # torn: there is nothing to keep
    assert merge(older) == "2020-01-01"


def test_an_exported_file_has_nothing_of_the_machine(offer, order, capsys, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("faulty", 1e-6, extra='raise RuntimeError("no kernel in /home/me/cache/a.so, 3 of 4")')
    tuned(order(export=str(tmp_path / "all.json")), capsys)

    entries = parse_entries((tmp_path / "all.json").read_text())

    assert {each.rejected["faulty/sdpa"].partition(": ")[2] for each in entries} == {
        "RuntimeError: no kernel in ..., 3 of 4"
    }
    times = [time for each in entries for time in each.times.values()]
    assert all(time.compile_s == 0 and len(time.samples) == time.rounds for time in times)
    assert "/home" in read(tmp_path)[0]["rejected"]["faulty/sdpa"]


def test_two_runs_are_compared(offer, order, capsys, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("brisk", 200e-6)
    tuned(order(), capsys)
    other = attrs.evolve(order(), folder=tmp_path / "other")
    tuned(other, capsys)
    folders = [str(tmp_path / "profiles"), str(tmp_path / "other")]

    assert run_comparison(folders, as_json=False) == 0
    assert "2 measurements in both; 0 choices differ, 0 within the margin" in capsys.readouterr().out
    COSTS.of["ample"] = 100e-6
    tuned(attrs.evolve(other, again=True, batch=BATCHES[:1]), capsys)
    assert run_comparison(folders, as_json=False) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 choices differ, 0 within the margin" in shown
    assert "3 x 40 decode, " in shown
    assert "brisk/sdpa and ample/sdpa, beyond the margin" in shown
    (tmp_path / "none").mkdir()
    with pytest.raises(RequestError, match="measurements of the same layers"):
        run_comparison([folders[0], str(tmp_path / "none")], as_json=True)


def test_no_profile_counts_while_tuning(offer, order, capsys, monkeypatch, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("brisk", 200e-6)
    tuned(order(), capsys)
    assert chosen(monkeypatch, tmp_path / "profiles").chosen.id == "brisk/sdpa"
    _, found = tuned(order(again=True), capsys)
    assert {entry["default"] for entry in found["entries"]} == {"ample/sdpa"}
    assert attnplug.select(LAYER, Device.cpu()).id == "brisk/sdpa"


def test_the_grid_is_shown_first_and_a_dry_run_measures_nothing(offer, order, capsys, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("brisk", 200e-6)
    clocks = fake_clocks()
    assert run_order(order(json=False, dry_run=True, clocks=clocks)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("1 layers, 2 batches, 2 cells, 4 measurements on cpu: about ")
    assert "decode, 3 x 40; 4/2 heads of 16, float32: 2 candidates" in shown
    assert isinstance(clocks.hidden, CostClock)
    assert clocks.hidden.samples == 0
    assert not (tmp_path / "profiles").exists()


def test_results_are_said_in_words(offer, order, capsys) -> None:
    offer("ample", 203e-6)
    offer("brisk", 200e-6)
    offer("clumsy", 10e-6, factor=1.5)
    run_order(order(json=False, batch=BATCHES[:1]))
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 x 40 decode, 4/2 heads of 16, float32: ample/sdpa 203 us, brisk/sdpa 200 us" in shown
    assert "(2 within the margin: the default order decides)" in shown
    assert "rejected clumsy/sdpa: it computes another result than the oracle" in shown


class TestPairs:
    """Decodes are faster on one candidate, prefills on another one."""

    PAIR = "brisk/sdpa+ample/sdpa"

    def test_a_pair_that_wins_is_measured_and_chosen(self, offer, order, capsys, monkeypatch, tmp_path) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))

        code, found = tuned(order(), capsys)

        assert code == 0
        (pair,) = found["pairs"]
        assert (pair["pair"], pair["wins"], pair["problem"]) == (self.PAIR, True, "")
        assert pair["gain"] == pytest.approx(pair["expected_gain"], abs=0.005)
        assert {entry["phase"]: entry["times"][self.PAIR]["microseconds"] for entry in read(tmp_path)} == {
            "decode": pytest.approx(200, rel=0.01),
            "prefill": pytest.approx(200, rel=0.01),
        }
        decision = chosen(monkeypatch, tmp_path / "profiles")
        assert (decision.chosen.id, decision.chosen.decided_by) == (self.PAIR, "measured profile")
        assert {role: one.id for role, one in decision.chosen.roles.items()} == {
            "decode": "brisk/sdpa",
            "rest": "ample/sdpa",
        }
        assert decision.measured.startswith("decodes 200 us (3 x 40 decode, cpu, ")
        assert "against 260 us of ample/sdpa; other batches 200 us (2 x 20 prefill, cpu, " in decision.measured
        assert decision.measured.endswith("against 260 us of brisk/sdpa, local profile; 2 shapes")
        _, again = tuned(order(), capsys)
        assert (again["measured"], again["kept"], again["pairs"][0]["wins"]) == (0, 2, True)

    def test_a_pair_is_measured_after_each_batch(self, offer, order, capsys, monkeypatch) -> None:
        """A command that is interrupted has the pairs of the batches before; later ones measure it at once."""
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))
        asked: list[tuple[str, str]] = []
        for name in ("measure", "measure_pair"):
            own = getattr(Tuner, name)
            monkeypatch.setattr(
                Tuner,
                name,
                lambda self, cell, pair="", own=own: (
                    asked.append((cell.phase, getattr(pair, "pair", pair))) or own(self, cell, pair)
                ),
            )
        _, found = tuned(order(batch=[*BATCHES, "mixed:2x40+1x16"]), capsys)
        assert asked == [
            ("decode", ""),
            ("prefill", ""),
            ("decode", self.PAIR),
            ("prefill", self.PAIR),
            ("mixed", self.PAIR),
        ]
        assert all(self.PAIR in entry["times"] for entry in found["entries"])
        assert found["pairs"][0]["wins"]

    @pytest.mark.parametrize("prefill_cost", [200e-6, 202e-6, 204e-6])
    def test_a_gain_within_the_margin_proposes_none(self, offer, order, capsys, prefill_cost) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, prefill_cost))
        assert tuned(order(), capsys)[1]["pairs"] == []

    def test_a_pair_that_is_slower_than_expected_is_not_chosen(
        self, offer, order, capsys, monkeypatch, tmp_path
    ) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))
        tuned(order(), capsys)
        for path in (tmp_path / "profiles").iterdir():
            (entry,) = json.loads(path.read_text())["entries"]
            entry["times"][self.PAIR]["microseconds"] = min(t["microseconds"] for t in entry["times"].values()) * 1.15
            path.write_text(json.dumps(entry))

        decision = chosen(monkeypatch, tmp_path / "profiles")

        assert decision.chosen.roles == {}
        note = f"the pair {self.PAIR} was measured, and wins by less than 2%: nothing is routed"
        assert note in decision.profile_notes
        assert note in " ".join(str(decision).split())

    def test_batch_invariance_allows_none(self, offer, order, capsys, monkeypatch, tmp_path) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))
        layer = LAYER.evolve(batch_invariant=True)

        _, found = tuned(attrs.evolve(order(), layers=(layer,)), capsys)

        problems = {pair["pair"]: pair["problem"] for pair in found["pairs"]}
        assert "a request's result would depend on the batch" in problems[self.PAIR]
        assert not any(self.PAIR in entry["times"] for entry in read(tmp_path))
        assert chosen(monkeypatch, tmp_path / "profiles", layer).chosen.roles == {}

    def test_a_pair_with_a_wrong_result_is_rejected(self, offer, order, capsys, monkeypatch, tmp_path) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))
        run = attnplug_routed.RoutedImpl.run

        def wrong(*arguments: Any) -> None:
            run(*arguments)
            arguments[6].mul_(1.5)

        monkeypatch.setattr(attnplug_routed.RoutedImpl, "run", wrong)
        code, found = tuned(order(), capsys)
        assert code == 1
        assert "it computes another result than the oracle" in found["pairs"][0]["problem"]
        assert chosen(monkeypatch, tmp_path / "profiles").chosen.roles == {}

    def test_where_a_pair_fails_the_next_best_is_tried(self, offer, order, capsys, monkeypatch) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))
        offer("calm", (207e-6, 260e-6))
        tried: list[str] = []
        measure = Tuner.measure_pair

        def failing(self: Any, cell: Any, proposal: Any) -> Any:
            tried.append(proposal.pair)
            found = measure(self, cell, proposal)
            if proposal.pair != self_pair:
                return found
            times = {id_: time for id_, time in found.times.items() if id_ != self_pair}
            return attrs.evolve(found, times=times, rejected={self_pair: "it failed: out of memory"})

        self_pair = self.PAIR
        monkeypatch.setattr(Tuner, "measure_pair", failing)
        code, found = tuned(order(batch=[*BATCHES, "mixed:2x40+1x16"]), capsys)

        assert code == 1
        assert tried.count(self.PAIR) == 1
        assert [(pair["pair"], pair["wins"]) for pair in found["pairs"]] == [
            (self.PAIR, False),
            ("calm/sdpa+ample/sdpa", True),
        ]

    def test_results_are_said_in_words(self, offer, order, capsys) -> None:
        offer("ample", (260e-6, 200e-6))
        offer("brisk", (200e-6, 260e-6))
        run_order(order(json=False))
        shown = " ".join(capsys.readouterr().out.split())
        found = re.search(r"pair (\S+): (\S+)% less time than (\S+) is expected, (\S+)% measured; (.*)", shown)
        assert found is not None
        assert (found[1], found[3], found[5]) == (self.PAIR, "brisk/sdpa", "selections route to it")
        assert 6 < float(found[2]) < 8  # decodes weigh 0.6 of 0.8, and prefills take 1.3 times as long
        assert 6 < float(found[4]) < 8


def test_a_refusal_is_no_rejection(offer, order, capsys, tmp_path) -> None:
    offer("ample", 300e-6)
    offer("choosy", 1e-6, refusal="no driver for it")

    code, found = tuned(order(), capsys)

    assert code == 0
    assert [entry["rejected"] for entry in found["entries"]] == [{}, {}]
    assert all("no driver for it" in entry["refused"]["choosy/sdpa"] for entry in found["entries"])
    assert {entry["default"] for entry in found["entries"]} == {"ample/sdpa"}
    run_order(order(json=False, again=True))
    assert "refused choosy/sdpa: " in capsys.readouterr().out


class TestBlockSparse:
    """Local blocks hold every key of the small batches that are judged: the pattern shows in the measured batch."""

    PATTERN: ClassVar = {"max_seqlen": 1024, "block_size": 64, "local_blocks": 6, "vert_stride": 4}

    @pytest.fixture
    def sparse(self, offer, tmp_path):
        """Register backends of block-sparse patterns: a right one and one without vertical blocks."""
        for name, module in (("patterned", "sparse.patterned"), ("forgets_vertical", "defects.plugin")):
            text = (SPARSE / "attnplug.toml").read_text("utf-8").replace('"sparse"', f'"{name}"')
            (tmp_path / f"{name}.toml").write_text(text)
            attnplug.register(f"kit.tests.conformance.{module}", manifest=tmp_path / f"{name}.toml")

    def test_a_pattern_is_judged_by_the_oracle(self, sparse, order, capsys) -> None:
        layer = LAYER.evolve(block_sparse=self.PATTERN)
        batches = ("decode:2x700", "prefill:1x600")
        code, found = tuned(attrs.evolve(order(batch=batches), layers=(layer,)), capsys)

        assert code == 1
        for entry in found["entries"]:
            assert set(entry["times"]) == {"patterned/plain"}
            problem = entry["rejected"]["forgets_vertical/plain"]
            assert "differs from the oracle: output: " in problem
        (read_back, _) = (parse_entries(json.dumps(entry))[0] for entry in found["entries"])
        assert read_back.requirements == layer


def test_only_named_candidates_are_measured(offer, order, capsys) -> None:
    for name in ("ample", "brisk", "third"):
        offer(name, 200e-6)
    _, found = tuned(order(backend=["third", "brisk/sdpa"]), capsys)
    assert {id_ for entry in found["entries"] for id_ in entry["times"]} == {"brisk/sdpa", "third/sdpa"}


def test_kernels_are_compiled_before_the_first_measurement(offer, order, capsys, monkeypatch) -> None:
    """Each of what is left, once; a failure is left to the measurement."""
    for name in ("ample", "brisk", "clumsy"):
        offer(name, 200e-6)
    tuned(order(batch=BATCHES[:1]), capsys)
    done: list[str] = []

    def compile_one(request: Requirements, device: Device, id_: str) -> str:
        assert request.phases == ("prefill", "decode")
        done.append(id_)
        return "it failed" if id_ == "clumsy/sdpa" else ""

    processes: list[int] = []
    monkeypatch.setattr(measuring, "compile_one", compile_one)
    monkeypatch.setattr(measuring, "compilers", lambda jobs: processes.append(jobs) or ThreadPoolExecutor(jobs))
    monkeypatch.setattr(Tuner, "measure", lambda tuner, cell, pair="": done.append(str(cell)))
    with pytest.raises(AttributeError):  # of what was measured
        tuned(order(jobs=1000), capsys)
    assert sorted(done[:3]) == ["ample/sdpa", "brisk/sdpa", "clumsy/sdpa"]
    assert done[3].startswith("prefill")
    assert processes == [3]


def test_one_layer_of_each_kind_is_compiled_first(offer, order, monkeypatch) -> None:
    """Layers that differ in their numbers of heads share kernels: the others would wait for it."""
    offer("ample", 200e-6)
    done: list[tuple[int, int]] = []

    def compile_one(request: Requirements, device: Device, id_: str) -> str:
        done.append((request.num_kv_heads, request.head_size))
        return ""

    monkeypatch.setattr(measuring, "compile_one", compile_one)
    monkeypatch.setattr(measuring, "compilers", ThreadPoolExecutor)
    monkeypatch.setattr(Tuner, "measure", lambda tuner, cell, pair="": measuring.Measured({}, {}, {}))
    layers = (LAYER, LAYER.evolve(num_kv_heads=1), LAYER.evolve(num_kv_heads=4), LAYER.evolve(head_size=32))
    run_order(attrs.evolve(order(jobs=1, batch=BATCHES[:1]), layers=layers))
    assert done == [(2, 16), (2, 32), (1, 16), (4, 16)]


@pytest.mark.slow
def test_processes_compile(capfd) -> None:
    with measuring.compilers(1) as pool:
        right, wrong = (
            pool.submit(measuring.compile_one, LAYER, Device.cpu(), f"torch/{name}") for name in ("sdpa", "no")
        )
        assert right.result() == ""
        assert "torch/no" in wrong.result()
        assert pool.submit(os.write, 1, b"ninja").result() == 5
    assert capfd.readouterr() == ("", "ninja")


@pytest.mark.slow
def test_an_interrupt_ends_what_compiles(tmp_path) -> None:
    """Also what it started, and what it did not begin."""
    begun = tmp_path / "begun"
    with suppress(KeyboardInterrupt), measuring.compilers(1) as pool:
        pool.submit(os.system, f"sleep 87 & echo $! > {begun}; wait")
        waiting = pool.submit(os.getpid)
        while not (begun.exists() and begun.read_text()):
            sleep(0.05)
        raise KeyboardInterrupt
    assert waiting.cancelled() or isinstance(waiting.exception(10), BrokenExecutor)
    assert _has_ended(int(begun.read_text()))


@pytest.mark.slow
def test_compilers_end_with_the_command(tmp_path) -> None:
    begun = tmp_path / "begun"
    source = f"""
import os, time
from attnplug_kit.tune.measuring import compilers
if __name__ == "__main__":
    with compilers(1) as pool:
        pool.submit(os.system, "sleep 87 & echo $! > {begun}; wait")
        while not (os.path.exists("{begun}") and os.path.getsize("{begun}")):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
"""
    (tmp_path / "command.py").write_text(source)
    subprocess.run([sys.executable, tmp_path / "command.py"], check=False, timeout=100)
    assert _has_ended(int(begun.read_text()))


def _has_ended(pid: int) -> bool:
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        sleep(0.05)
    return False


def _end(*given: object) -> None:
    os._exit(1)


@pytest.mark.slow
def test_a_process_that_compiled_may_end(offer, order, capsys, monkeypatch) -> None:
    offer("ample", 200e-6)
    monkeypatch.setattr(measuring, "compile_one", _end)
    code = run_order(order(jobs=2))
    found = capsys.readouterr()
    assert (code, json.loads(found.out)["measured"]) == (0, 2)
    assert "a process that compiled ended" in found.err


def test_serving_never_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RequestError, match="while a CUDA graph is captured"):
        Tuner(Device.cpu())


class TestGrid:
    def test_batches_of_all_layers_come_one_after_another(self) -> None:
        other = LAYER.evolve(num_kv_heads=1)
        cells = make_grid((LAYER, other), BATCHES)
        assert [(cell.phase, cell.layer) for cell in cells] == [
            (phase, layer) for phase in ("decode", "prefill") for layer in (LAYER, other)
        ]

    def test_lengths_are_those_that_were_written(self) -> None:
        assert parse_batch("decode:2x40")[1:3] == ((1, 1), (39, 39))
        assert parse_batch("verify:2x4@36")[1:3] == ((4, 4), (36, 36))
        assert parse_batch("chunk:1x128@64")[1:3] == ((128,), (64,))
        assert parse_batch("mixed:2x40+1x16")[1:3] == ((1, 1, 16), (39, 39, 0))

    @pytest.mark.parametrize(
        "text",
        [
            *(
                "decode",
                "decode:3",
                "decode:0x4",
                "train:3x4",
                "verify:3x9@4",
                "chunk:1x4",
                "mixed:2x4",
                "decode:2x4@1",
            ),
            *("mixed:2x4+0x4", "mixed:2x4+4x0", "decode:\uff13x4", f"decode:1x{'9' * 5000}"),
            *("decode:9999999999x4", "decode:1x2147483648", "chunk:1x4@2147483644"),
        ],
    )
    def test_another_form_is_refused(self, text: str) -> None:
        with pytest.raises(RequestError, match="--batch"):
            parse_batch(text)

    def test_layers_have_only_their_phases(self) -> None:
        drafts = LAYER.evolve(decode_query_len=4)
        assert [cell.layer for cell in make_grid((LAYER, drafts), ["verify:2x4@36"])] == [drafts]
        contiguous = LAYER.evolve(paged=False, phases=("prefill",))
        assert [cell.phase for cell in make_grid((contiguous,), BATCHES)] == ["prefill"]

    def test_latents_have_no_long_queries(self) -> None:
        """Engines expand latents to keys and values for these."""
        latent = Requirements(
            head_size=576, head_size_v=512, num_q_heads=16, num_kv_heads=1, dtype="bfloat16", latent=True
        )
        batches = ["decode:2x40", "prefill:1x129", "prefill:1x128", "chunk:2x200@64", "mixed:2x40+1x200"]
        assert [cell.step.what for cell in make_grid((latent,), batches)] == ["decode, 2 x 40", "prefill, 1 x 128"]

    def test_layers_of_a_model_are_those_of_a_rank(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (layer,) = layers_of_model(str(tmp_path), 2)
        assert (layer.num_q_heads, layer.num_kv_heads, layer.head_size) == (16, 4, 128)

    def test_layers_are_read_from_json(self, tmp_path: Path) -> None:
        (tmp_path / "layers.json").write_text(json.dumps([LAYER.to_dict(), LAYER.to_dict()]))
        assert layers_of_json(f"@{tmp_path / 'layers.json'}") == (LAYER,)
        with pytest.raises(RequestError, match="cannot be read"):
            layers_of_json("@nothing.json")
        with pytest.raises(RequestError, match="cannot be read"):
            layers_of_json("[" * 100_000)
        with pytest.raises(RequestError, match="a layer at least"):
            layers_of_json("[]")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no layers were given"),
        (["config.json", "--requirements", "{}"], "CONFIG and --requirements"),
        (["--requirements", "{}", "--tp", "2"], "with options of a model's configuration"),
        (["--requirements", json.dumps(LAYER.to_dict()), "--seconds", "-1"], "--seconds -1"),
        (["--requirements", json.dumps(LAYER.to_dict()), "--jobs", "-1"], "--jobs -1"),
        (["--requirements", json.dumps(LAYER.to_dict()), "--backend", "torch+triton/unified"], "--backend torch+"),
        (["--requirements", json.dumps(LAYER.to_dict()), "--seconds", "nan"], "--seconds nan"),
        (["CONFIG", "--tp", "0"], "over 0 devices"),
    ],
)
def test_an_invalid_order_is_refused(words: list[str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = [str(tmp_path) if word == "CONFIG" else word for word in words]
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    with pytest.raises(RequestError, match=problem):
        tune.run(parser.parse_args([*words, "--out", str(tmp_path / "profiles")]))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offer):
    """Return the file of a process in which a step of each phase ran, on the backend ample."""
    offer("ample", 280e-6)
    file = tmp_path / "steps.jsonl"
    recording.recorder.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("ATTNPLUG_RECORD", str(file))
        attnplug.refresh()
        for new, old in (((1, 1, 1), (20, 7, 39)), ((1, 9), (30, 0)), ((8, 12), (16, 1)), ((1, 1, 1), (21, 8, 40))):
            step = Step("recorded", new, old, num_q_heads=4, num_kv_heads=2, head_size=16)
            make_rig(step, Target("ample", "cpu"), dtype="float32", sliding_window=25)
    attnplug.refresh()
    recording.recorder.cache_clear()
    return file


def replayed(*words: str) -> int:
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    return replay.run(parser.parse_args(words))


def test_recorded_steps_run_again(recorded, capsys) -> None:
    assert replayed(str(recorded), "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "ran on ample/sdpa, 13 were recorded: 13 right, 0 wrong" in out.replace("\n", " ")


def test_a_wrong_backend_is_found_by_recorded_steps(recorded, offer, capsys) -> None:
    offer("clumsy", 10e-6, factor=1.5)
    offer("narrow", 10e-6, extra="output[-1].mul_(1.01 if metadata.num_decodes == 3 else 1)")
    assert replayed(str(recorded), "--device", "cpu", "--backend", "clumsy", "--json") == 1
    assert all("differs from the oracle" in step["problem"] for step in json.loads(capsys.readouterr().out)["steps"])

    assert replayed(str(recorded), "--device", "cpu", "--backend", "narrow", "--json") == 1
    found = json.loads(capsys.readouterr().out)["steps"]
    assert [step["seq_lens"] for step in found if step["problem"]] == [[21, 8, 40], [22, 9, 41]]
    assert all(step["problem"].startswith("request 2") for step in found if step["problem"])

    assert replayed(str(recorded), "--device", "cpu", "--backend", "narrow") == 1
    assert "narrow is wrong: decode, 3 requests, 3 new tokens, 8 to 40 keys" in capsys.readouterr().out


def test_a_few_recorded_steps_are_from_all_parts(recorded, capsys) -> None:
    assert replayed(str(recorded), "--device", "cpu", "--most", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["recorded"], found["different"], len(found["steps"])] == [13, 13, 2]
    with pytest.raises(RequestError, match="--most 0"):
        replayed(str(recorded), "--most", "0")


def test_recorded_steps_are_measured(recorded, offer, order, capsys) -> None:
    offer("brisk", 200e-6)
    cells = cells_of(read_steps(recorded))
    phases = [cell.phase for cell in cells]
    assert phases[0] == "prefill"  # the most frequent
    assert {phase: phases.count(phase) for phase in ("decode", "mixed", "chunk")} == {
        "decode": 2,
        "mixed": 1,
        "chunk": 1,
    }
    decode = next(cell for cell in cells if cell.phase == "decode" and cell.step.num_reqs == 3)
    assert decode.step.seq_lens == (22, 9, 41)
    assert decode.layer.sliding_window == 25

    code, found = tuned(attrs.evolve(order(), layers=(), cells=cells), capsys)

    assert code == 0
    assert {entry["fastest"] for entry in found["entries"]} == {"brisk/sdpa"}
    assert {entry["requirements"]["sliding_window"] for entry in found["entries"]} == {25}


def test_replayed_steps_are_measured(recorded, offer, capsys) -> None:
    offer("narrow", 10e-6, extra="output[-1].mul_(1.01 if metadata.num_decodes == 3 else 1)")
    assert replayed(str(recorded), "--device", "cpu", "--most", "2", "--times") == 0
    assert len(re.findall(r"^ +\d+\.\d us  \w+, \d requests", capsys.readouterr().out, re.MULTILINE)) == 2

    assert replayed(str(recorded), "--device", "cpu", "--backend", "narrow", "--times", "--json") == 1
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert {(bool(step["problem"]), step["seconds"] is None) for step in steps} == {(True, True), (False, False)}


def test_steps_that_are_left_out_are_counted(recorded, tmp_path, capsys) -> None:
    rows = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    rows[-2]["seq_lens"] = None
    rows[-1]["step"] = 1
    rows.insert(2, {**rows[1], "layer": 1, "dcp_size": 2})
    (tmp_path / "some").write_text("\n".join([*map(json.dumps, rows), ""]), encoding="utf-8")

    assert replayed(str(tmp_path / "some"), "--device", "cpu", "--most", "3") == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "3 of 11 different steps ran on ample/sdpa, 13 were recorded (2 cannot run again): 3 right" in said

    assert replayed(str(tmp_path / "some"), "--device", "cpu", "--most", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recorded"], found["different"], found["left_out"]) == (13, 11, 2)


@pytest.mark.parametrize("unknown", ["seq_lens", "custom_mask", "attn_bias", "mm_prefix"])
def test_steps_that_cannot_run_again_are_refused(recorded, tmp_path, unknown) -> None:
    rows = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if unknown == "seq_lens" and "step" in row:
            row[unknown] = None
        elif unknown != "seq_lens" and "layer" in row:
            row["agreement"]["requirements"][unknown] = True
    lines = map(json.dumps, rows)
    (tmp_path / "absent").write_text("\n".join([*lines, ""]), encoding="utf-8")

    with pytest.raises(RequestError, match="none of 13 recorded steps"):
        replayed(str(tmp_path / "absent"), "--device", "cpu")
    with pytest.raises(RequestError, match="no recorded step can be measured"):
        cells_of(read_steps(tmp_path / "absent"))


@pytest.mark.parametrize("other", [["config.json"], ["--tp", "2"], ["--batch", "decode:1x1"], ["--dtype", "float16"]])
def test_steps_have_their_layers_and_batches(other) -> None:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)

    with pytest.raises(RequestError, match="--steps was given with other layers or batches"):
        tune.run(parser.parse_args(["--steps", "steps.jsonl", *other]))
