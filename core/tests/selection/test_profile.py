"""Profiles of two levels: which entries count, what is chosen by them, and what `explain` says."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.errors import SettingsError
from attnplug.evidence import MeasuredTime, ProfileEntry, content_hash, dump_entries, merged, parse_entries
from attnplug.evidence.times import MARGIN, TimeTable, phase_scores, relative_times
from attnplug.request import Device, Requirements, Settings
from attnplug.selection import options, process

if TYPE_CHECKING:
    from pathlib import Path

LARGEST = 400_000  # bytes of a shipped file
H200 = Device("cuda", name="NVIDIA H200", compute_capability="9.0", num_multiprocessors=132)
LIBRARIES = {"flash/hopper": {"flash-hopper": "1.0"}, "flash/new": {"flash-new": "4.0"}, "flash/old": {}}
LAYER = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")


@pytest.fixture(autouse=True)
def _same_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.evidence.times._driver", lambda: "580")


def entry(times: dict[str, float], layer: Requirements = LAYER, **changes: Any) -> ProfileEntry:
    measured = {id_: MeasuredTime(time, 0.001, 9, libraries=LIBRARIES.get(id_, {})) for id_, time in times.items()}
    made = ProfileEntry(
        measured_on="2026-11-20",
        device=H200,
        versions={"driver": "580"},
        requirements=layer,
        phase="decode",
        num_seqs=64,
        kv_len=4096,
        query_len=1,
        default="flash/hopper",
        times=measured,
    )
    return attrs.evolve(made, **changes)


@pytest.fixture
def decide(world, tmp_path):
    """Return ``decide(entries, device, requirements)``: the explanation with these entries in the user's folder."""

    def made(entries: list[ProfileEntry], device: Device = H200, layer: Requirements = LAYER, **more: Any) -> Any:
        folder = tmp_path / "profiles"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for each in entries:
            (folder / each.name).write_text(json.dumps(each.to_dict()))
        world("flash", "generic", device=device, settings=Settings(profile=str(folder)), **more)
        return attnplug.explain(layer)

    return made


class TestLocal:
    def test_the_choice_follows_the_numbers_when_they_swap(self, decide) -> None:
        assert decide([entry({"flash/hopper": 259.0, "flash/new": 240.0})]).chosen.id == "flash/new"
        swapped = decide([entry({"flash/hopper": 240.0, "flash/new": 259.0})])
        assert (swapped.chosen.id, swapped.chosen.decided_by) == ("flash/hopper", "measured profile")

    def test_the_reason_names_shape_device_date_and_library(self, decide) -> None:
        found = decide([entry({"flash/hopper": 259.0, "flash/new": 240.0})])

        assert found.measured == (
            "240 us (64 x 4k decode, NVIDIA H200, 2026-11-20, flash-new 4.0) against 259 us of flash/hopper, "
            "local profile"
        )
        assert f"measured: {found.measured}" in " ".join(str(found).split())
        assert found.to_dict()["measured"] == found.measured

    def test_an_advantage_within_the_margin_leaves_the_default(self, decide) -> None:
        found = decide([entry({"flash/hopper": 259.0, "flash/new": 255.0})])
        assert (found.chosen.id, found.chosen.decided_by, found.measured) == (
            "flash/hopper",
            "the plugin's preference",
            "",
        )

    def test_a_wide_spread_widens_the_margin(self, decide) -> None:
        noisy = entry({"flash/hopper": 259.0, "flash/new": 240.0})
        times = {id_: attrs.evolve(time, spread=0.05) for id_, time in noisy.times.items()}
        assert decide([attrs.evolve(noisy, times=times)]).chosen.id == "flash/hopper"

    def test_a_layer_has_its_share_of_the_build(self, decide) -> None:
        made = entry({"flash/hopper": 259.0, "flash/new": 240.0})
        plan = {"flash/hopper": 160.0, "flash/new": 1600.0}  # of which a layer has a 32nd: 264 and 290 us
        times = {id_: attrs.evolve(time, build_us=plan[id_]) for id_, time in made.times.items()}

        found = decide([attrs.evolve(made, times=times)])

        assert found.chosen.id == "flash/hopper"
        assert found.measured.startswith("264 us (64 x 4k decode")
        assert "against 290 us of flash/new" in found.measured

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"device": attrs.evolve(H200, name="NVIDIA H100 80GB HBM3")}, "measured on cuda:9.0 (NVIDIA H100"),
            ({"device": attrs.evolve(H200, num_multiprocessors=114)}, "with 114 multiprocessors"),
            ({"versions": {"driver": "570"}}, "measured with driver 570; here it is 580"),
            ({"versions": {"driver": "580", "torch": "2.1"}}, "measured with torch 2.1; here it is absent"),
        ],
    )
    def test_an_entry_of_elsewhere_is_ignored_and_said(self, decide, changes, why) -> None:
        found = decide([entry({"flash/hopper": 259.0, "flash/new": 240.0}, **changes)])

        assert found.chosen.id == "flash/hopper"
        (note,) = found.profile_notes
        assert note.startswith("1 entry of the profile is not used: ")
        assert why in note
        assert f"note: {note}" in " ".join(str(found).split())

    def test_another_version_of_a_kernel_library_is_ignored(self, decide) -> None:
        old = entry({"flash/hopper": 259.0, "flash/new": 240.0})
        times = {**old.times, "flash/new": attrs.evolve(old.times["flash/new"], libraries={"flash-new": "3.9"})}
        found = decide([attrs.evolve(old, times=times)])
        assert found.chosen.id == "flash/hopper"
        assert "measured with flash-new 3.9; here it is 4.0" in found.profile_notes[0]

    def test_an_explicit_choice_wins(self, decide) -> None:
        decide([entry({"flash/hopper": 259.0, "flash/new": 240.0})])
        assert attnplug.select(LAYER, backend=["flash/hopper", "auto"]).id == "flash/hopper"

    def test_between_two_measured_layers_both_have_to_agree(self, decide) -> None:
        few, many = LAYER.evolve(num_q_heads=16, num_kv_heads=4), LAYER.evolve(num_q_heads=64, num_kv_heads=16)
        new, old = {"flash/hopper": 259.0, "flash/new": 240.0}, {"flash/hopper": 240.0, "flash/new": 259.0}

        agree = decide([entry(new, few), entry(new, many)])
        differ = decide([entry(new, few), entry(old, many)])

        assert agree.chosen.id == "flash/new"
        assert "measured with 16/4 and 64/16 heads, the nearest to 32/8" in agree.measured
        assert differ.chosen.decided_by != "measured profile"
        assert decide([entry(new, LAYER.evolve(num_q_heads=4, num_kv_heads=1))]).chosen.id == "flash/hopper"

    def test_a_phase_that_is_not_requested_does_not_count(self, decide) -> None:
        slow = entry({"flash/hopper": 100.0, "flash/new": 200.0}, phase="prefill", query_len=4096)
        fast = entry({"flash/hopper": 200.0, "flash/new": 100.0})
        both = [slow, fast]
        assert decide(both).chosen.id == "flash/new"  # decodes weigh 0.6, prefills 0.2
        assert decide(both, layer=LAYER.evolve(phases=("prefill",))).chosen.id == "flash/hopper"

    def test_a_broken_file_of_a_folder_is_a_note(self, decide, tmp_path, world) -> None:
        decide([entry({"flash/hopper": 259.0, "flash/new": 240.0})])
        (tmp_path / "profiles" / "half.json").write_text('{"format": 1, ')
        world("flash", "generic", device=H200, settings=Settings(profile=str(tmp_path / "profiles")))
        found = attnplug.explain(LAYER)
        assert found.chosen.id == "flash/new"
        assert "half.json" in found.profile_notes[0]


class TestShipped:
    @pytest.fixture
    def ship(self, world, tmp_path, monkeypatch):
        def made(entries: list[ProfileEntry], device: Device = H200, local: list[ProfileEntry] = []) -> Any:  # noqa: B006 - read only
            (tmp_path / "shipped").mkdir(exist_ok=True)
            (tmp_path / "shipped" / "nvidia-h200.json").write_text(dump_entries(entries))
            (tmp_path / "local.json").write_text(dump_entries(local))
            settings = Settings(profile=str(tmp_path / "local.json") if local else None)
            world("flash", "generic", device=device, settings=settings)
            state = process.PROCESS.state
            state.profile = options.Profile(settings.profile, tmp_path / "shipped")
            return attnplug.explain(LAYER)

        return made

    def test_minor_versions_and_the_device_match(self, ship) -> None:
        base = entry({"flash/hopper": 259.0, "flash/new": 240.0}, versions={"driver": "570", "torch": "2.1"})
        patch = {**base.times, "flash/new": attrs.evolve(base.times["flash/new"], libraries={"flash-new": "4.0.7"})}
        minor = {**base.times, "flash/new": attrs.evolve(base.times["flash/new"], libraries={"flash-new": "4.1.0"})}

        found = ship([attrs.evolve(base, times=patch)])

        assert (found.chosen.id, found.chosen.decided_by) == ("flash/new", "shipped profile")
        assert "flash-new 4.0.7) against 259 us of flash/hopper, shipped profile" in found.measured
        assert ship([attrs.evolve(base, times=minor)]).chosen.id == "flash/hopper"  # the default's time is left alone
        assert ship([base], attrs.evolve(H200, num_multiprocessors=114)).chosen.id == "flash/hopper"
        assert ship([base], attrs.evolve(H200, name="NVIDIA H20")).chosen.id == "flash/hopper"
        assert ship([base], Device.cuda("9.0")).profile_notes == ()
        assert ship([base], Device.parse("h200")).chosen.id == "flash/new"  # a product that is not here

    @pytest.mark.parametrize(
        ("other", "chosen", "note"),
        [
            ("flash/new", "flash/old", "1 time of the profile is not used: measured with flash-new 9.1"),
            ("flash/hopper", "flash/hopper", "1 entry of the profile is not used: measured with flash-hopper 9.1"),
        ],
    )
    def test_another_minor_version_is_without_its_time(self, ship, other: str, chosen: str, note: str) -> None:
        base = entry({"flash/hopper": 259.0, "flash/old": 250.0, "flash/new": 240.0})
        library = {next(iter(LIBRARIES[other])): "9.1"}
        times = {**base.times, other: attrs.evolve(base.times[other], libraries=library)}

        found = ship([attrs.evolve(base, times=times)])

        assert found.chosen.id == chosen
        assert found.profile_notes[0].startswith(note)

    def test_a_file_of_a_product_is_found_by_the_name_of_the_device(self, ship, tmp_path) -> None:
        h100 = attrs.evolve(H200, name="NVIDIA H100 80GB HBM3")
        measured = entry({"flash/hopper": 259.0, "flash/new": 240.0}, device=h100)
        ship([])
        (tmp_path / "shipped" / "nvidia-h100.json").write_text(dump_entries([measured]))

        assert ship([], h100).chosen.decided_by == "shipped profile"
        assert ship([], Device.parse("h100")).chosen.decided_by == "shipped profile"
        other = ship([], attrs.evolve(H200, name="NVIDIA H100 PCIe", num_multiprocessors=114))
        assert other.chosen.decided_by != "shipped profile"
        assert "measured on cuda:9.0 (NVIDIA H100 80GB HBM3)" in other.profile_notes[0]
        assert ship([], attrs.evolve(H200, name="NVIDIA H10")).profile_notes == ()

    def test_a_damaged_file_is_a_note(self, ship, tmp_path) -> None:
        ship([])
        for text in ("", "[" * 100_000, '{"format": 2, "entries": []}'):
            (tmp_path / "shipped" / "nvidia-h200-sxm.json").write_text(text)
            found = ship([entry({"flash/hopper": 259.0, "flash/new": 240.0})])
            assert (found.chosen.id, found.chosen.decided_by) == ("flash/new", "shipped profile")
            assert "nvidia-h200-sxm.json" in found.profile_notes[0]
        (tmp_path / "shipped" / "nvidia-h200-sxm.json").unlink()
        (tmp_path / "shipped" / "nvidia-h200-sxm.json").mkdir()
        assert "Is a directory" in ship([]).profile_notes[0]

    def test_a_local_profile_ranks_before_it(self, ship) -> None:
        shipped = entry({"flash/hopper": 259.0, "flash/new": 240.0})
        local = entry({"flash/hopper": 240.0, "flash/new": 259.0})
        found = ship([shipped], local=[local])
        assert (found.chosen.id, found.chosen.decided_by) == ("flash/hopper", "measured profile")


def problems_of(path: Path) -> list[str]:
    """Return what is wrong with a file of the folder of shipped profiles; a sentence each."""
    try:
        entries = parse_entries(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [str(error)]
    found = [f"it has {path.stat().st_size} bytes"] if path.stat().st_size > LARGEST else []
    keys = Counter((e.device, e.requirements, e.phase, e.bucket) for e in entries)
    found += [f"{count} entries for {key[1]}, {key[2]} {key[3]}" for key, count in keys.items() if count > 1]
    for one in entries:
        device, what = one.device, f"{one.shape} of {one.requirements}"
        if not options.is_product(path.stem, options.file_of(device.name or "")):
            found.append(f"{what}: measured on {device}")
        if device.num_multiprocessors is None or device.compute_capability is None or "torch" not in one.versions:
            found.append(f"{what}: the device or the versions are not complete")
        if not re.fullmatch(r"20\d\d-\d\d-\d\d", one.measured_on) or one.default not in one.times:
            found.append(f"{what}: measured on {one.measured_on}, default {one.default}")
        if re.search(r"/(home|work|tmp|root|usr|opt|var)/", json.dumps([one.rejected, one.refused])):
            found.append(f"{what}: a path of the machine")
        for id_, time in one.times.items():
            median = statistics.median(time.samples or (0.0,))
            if len(time.samples) != time.rounds or abs(median - time.microseconds) > 1e-3 * time.microseconds:
                found.append(f"{what}: the samples of {id_} are not those of its median")
            if not time.libraries and not id_.startswith("torch/"):
                found.append(f"{what}: no version of {id_}")
    return found


def shipped_entry(**changes: Any) -> ProfileEntry:
    times = {"flash/new": MeasuredTime(3.0, 0.01, 3, libraries={"flash-new": "4.0"}, samples=(2.9, 3.0, 3.2))}
    made = attrs.evolve(entry({}), times=times, versions={"torch": "2.10.0"}, default="flash/new")
    return attrs.evolve(made, **changes)


class TestShippedFiles:
    def test_the_shipped_files_have_no_problem(self) -> None:
        assert {path.name: found for path in options.SHIPPED.glob("*.json") if (found := problems_of(path))} == {}

    @pytest.mark.parametrize(
        ("name", "changes", "problem"),
        [
            ("nvidia-h200", {}, ""),
            ("nvidia-h100", {}, "measured on cuda:9.0 (NVIDIA H200)"),
            ("nvidia-h200", {"versions": {}}, "not complete"),
            ("nvidia-h200", {"measured_on": "today"}, "measured_on is 'today'"),
            ("nvidia-h200", {"measured_on": "1970-01-01"}, "measured on 1970-01-01"),
            ("nvidia-h200", {"default": "flash/old"}, "default flash/old"),
            ("nvidia-h200", {"rejected": {"a/b": "no file /home/me/kernel.so"}}, "a path"),
            ("nvidia-h200", {"times": {"flash/new": MeasuredTime(3.0, 0.0, 3)}}, "the samples"),
            (
                "nvidia-h200",
                {"times": {"flash/new": MeasuredTime(3.0, 0.0, 1, samples=(3.0,))}, "default": "flash/new"},
                "no version",
            ),
            ("nvidia-h200", {"phase": "training"}, "phase is 'training'"),
        ],
    )
    def test_a_planted_file_is_judged(self, tmp_path: Path, name: str, changes: dict[str, Any], problem: str) -> None:
        path = tmp_path / f"{name}.json"
        path.write_text(dump_entries([shipped_entry(**changes)]))
        found = problems_of(path)
        assert (found == []) is (problem == "")
        assert any(problem in each for each in found) or not problem

    def test_two_entries_of_one_measurement_are_a_problem(self, tmp_path: Path) -> None:
        other = shipped_entry(versions={"torch": "2.9.0"})
        (tmp_path / "nvidia-h200.json").write_text(dump_entries([shipped_entry(), other]))
        assert "2 entries for " in problems_of(tmp_path / "nvidia-h200.json")[0]


class TestFiles:
    def test_entries_survive_a_file(self) -> None:
        made = entry({"flash/hopper": 259.0}, rejected={"acme/wrong": "output: 3 of 4 elements differ"})
        (read,) = parse_entries(dump_entries([made]))
        assert read.to_dict() == made.to_dict()
        assert parse_entries(json.dumps(made.to_dict()))[0].to_dict() == made.to_dict()

    @pytest.mark.parametrize(
        "change",
        [
            {"format": 2},
            {"phase": "training"},
            {"times": {}},
            {"times": {"a": {"microseconds": 0}}},
            {"times": {"a": {"microseconds": 1, "spread": -1}}},
            {"times": {"a\n": {"microseconds": 1}}},
            {"num_seqs": 0},
            {"device": {"type": "cuda"}},
            {"requirements": {"head_size": 64}},
            {"versions": {"torch": 2}},
            {"measured_on": "tomorrow"},  # is after every date, and would be the newest for ever
            {"measured_on": "2026-11-28\n"},
            {"times": {"a": {"microseconds": 10**400}}},
            {"times": {"a": {"microseconds": 1e-5}}},  # a file keeps three digits behind the point
            {"times": {"a": {"microseconds": 1, "spread": 10**400}}},
            {"times": {"a": {"microseconds": 1, "samples": [10**400]}}},
            {"requirements": {"head_size": 64, "dtype": "bfloat16", "late": ["num_q_heads", "num_kv_heads"]}},
        ],
    )
    def test_a_wrong_entry_is_refused(self, change) -> None:
        with pytest.raises(ValueError, match=r"\w"):
            parse_entries(json.dumps({**entry({"a": 1.0}).to_dict(), **change}))

    @pytest.mark.parametrize(
        "change",
        [
            {"requirements": LIBRARIES["flash/new"]},
            {"device": LIBRARIES["flash/new"]},
            {"times": {"a": {"microseconds": 1, "libraries": H200.to_dict()}}},
        ],
    )
    def test_what_one_field_holds_is_no_value_of_another(self, change) -> None:
        first = entry({"flash/new": 1.0}).to_dict()
        with pytest.raises(ValueError, match=r"\w"):
            parse_entries(json.dumps({"format": 1, "entries": [first, {**first, **change}]}))

    def test_a_file_that_is_nested_too_deeply_is_refused(self) -> None:
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_entries('{"format": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}")

    def test_merging_keeps_the_newest_of_each_measurement(self) -> None:
        old, new = entry({"a": 1.0}), entry({"a": 2.0}, measured_on="2026-12-01")
        other = entry({"a": 1.0}, kv_len=1024)
        assert {each.to_dict()["measured_on"] for each in merged([new, old])} == {"2026-12-01"}
        assert content_hash(merged([old, new, other])) == content_hash(merged([other, new, old]))
        assert len(merged([old, new, other])) == 2

    def test_files_of_one_hash_decide_alike(self, tmp_path: Path) -> None:
        short = entry({"flash/hopper": 259.0, "flash/new": 220.0}, kv_len=1024)
        entries, before = [entry({"flash/hopper": 200.0, "flash/new": 240.0}), short], "2026-01-01"
        found = []
        for more in ([], [short, short], [attrs.evolve(short, measured_on=before)]):
            (tmp_path / "profile.json").write_text(dump_entries([*entries, *more]))
            content = options.read_profile(str(tmp_path / "profile.json"))
            times = TimeTable(content.entries, "local", {"flash-hopper": "1.0", "flash-new": "4.0"}.get)
            found.append((content_hash(content.entries), times.measured(LAYER, H200).scores))
        assert found == [found[0]] * 3

    def test_ranks_with_another_profile_are_refused(self, world, tmp_path) -> None:
        path = tmp_path / "profile.json"
        path.write_text(dump_entries([entry({"flash/hopper": 259.0, "flash/new": 240.0})]))
        pinned = f"{path}#sha256={content_hash(parse_entries(path.read_text()))}"

        world("flash", device=H200, settings=Settings(profile=pinned))
        assert attnplug.select(LAYER).id == "flash/new"
        path.write_text(dump_entries([entry({"flash/hopper": 240.0, "flash/new": 259.0})]))
        world("flash", device=H200, settings=Settings(profile=pinned))
        with pytest.raises(SettingsError, match="all ranks of a model decide on the times of the first rank"):
            attnplug.select(LAYER)

    def test_the_users_folder_counts_as_soon_as_it_has_entries(self, tmp_path) -> None:
        environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
        folder = tmp_path / "attnplug" / "profiles"
        folder.mkdir(parents=True)
        assert Settings.read(environ).profile is None
        (folder / "decode-1.json").write_text("{}")
        found = Settings.read(environ)
        assert (found.profile, found.sources["profile"]) == (str(folder), f"folder {folder}")
        assert Settings.read({**environ, "ATTNPLUG_PROFILE": "mine.json"}).profile == "mine.json"


TIMES = st.dictionaries(st.sampled_from("abcd"), st.floats(1, 1e4), min_size=1)


@given(TIMES, st.floats(0, 0.2))
def test_the_fastest_is_one_and_order_is_kept(times: dict[str, float], spread: float) -> None:
    made = entry(times)
    made = attrs.evolve(made, times={id_: attrs.evolve(t, spread=spread) for id_, t in made.times.items()})
    found = relative_times(made)
    least, margin = min(times.values()), max(MARGIN, 2 * spread)
    for id_, time in times.items():
        assert (found[id_] == 1.0) == (time < least * (1 + margin)) or time == least
        assert all(found[id_] <= found[other] for other in times if time <= times[other])


@given(st.lists(st.tuples(TIMES, st.sampled_from(["decode", "prefill", "mixed"])), min_size=1, max_size=5))
def test_a_candidate_that_is_fastest_everywhere_is_first(tables: list[tuple[dict[str, float], str]]) -> None:
    entries = [
        entry({**times, "best": 0.5}, phase=phase, kv_len=2**n) for n, (times, phase) in enumerate(tables, start=4)
    ]
    found = TimeTable(entries, "local", lambda _: None).measured(LAYER, H200)
    assert found is not None
    assert found.scores["best"] == min(found.scores.values()) == 1.0
    assert set(found.phases) == set(phase_scores(entries, LAYER))
