"""Selecting: which one, why this one, why not the others."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import pytest
from attrs import evolve

import attnplug
from attnplug.discovery.plugin import Known, KnownPlugin, read_known
from attnplug.errors import (
    DeviceError,
    NoBackendError,
    RegistryError,
    RequirementsError,
    SettingsError,
    UnknownBackendError,
)
from attnplug.negotiation.reason import Fix, Reason
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process, select
from attnplug.selection.explanation import Explanation
from attnplug.selection.selection import Selection
from core.tests.selection.conftest import FLASH, GENERIC
from tests.threads import together


def statuses(explanation):
    return {verdict.id: verdict.status for verdict in explanation.verdicts if verdict.status != "absent"}


def verdict(explanation, name):
    return next(v for v in explanation.verdicts if v.id == name)


@pytest.mark.parametrize(
    ("device", "wanted", "chosen"),
    [
        ("9.0", {}, "flash/hopper"),
        ("8.0", {}, "flash/old"),
        ("10.0", {}, "flash/new"),
        ("9.0", {"sinks": True}, "flash/new"),
        ("9.0", {"alibi": "linear"}, "flash/old"),
        ("8.0", {"sinks": True}, "generic/default"),
        ("12.0", {"dtype": "float32"}, "generic/default"),
        ("9.0", {"block_size": 32}, "flash/hopper"),
        ("8.0", {"block_size": 32}, "generic/default"),
        ("10.0", {"cudagraph": "single_token_decode"}, "flash/old"),
    ],
)
def test_the_best_that_can_serve_is_chosen(both, request_of, device, wanted, chosen):
    assert attnplug.select(request_of(**wanted), Device.cuda(device)).id == chosen


def test_an_agreement_settles_what_was_left_open(both, request_of):
    terms = attnplug.select(request_of(sinks=True)).agreement

    assert (terms.block_size, terms.kv_layout, terms.kv_cache_dtype, terms.cudagraph) == (
        128,
        "NHD",
        "bfloat16",
        "never",
    )
    assert attnplug.select(request_of()).agreement.cudagraph == "always"
    assert attnplug.select(request_of(block_size=48)).agreement.block_size == 48
    assert attnplug.select(request_of(sinks=True, paged=False)).agreement.block_size is None


def test_every_candidate_has_a_verdict_with_all_reasons(both, request_of):
    explanation = attnplug.explain(request_of(alibi="linear", dtype="float32", sinks=True))

    assert explanation.chosen is None
    reasons = verdict(explanation, "flash/new").reasons
    assert [(r.code, r.field) for r in reasons] == [("unsupported", "dtype"), ("undeclared", "alibi")]
    assert reasons[0].wanted == "float32"
    assert reasons[0].supported == "bfloat16, float16"
    assert "flash/new does not" not in str(explanation)
    assert "this variant does not support dtype=float32, alibi=linear" in str(explanation)


def test_absent_plugins_are_listed_by_name(both, request_of):
    absent = verdict(attnplug.explain(request_of()), "flashinfer")

    assert absent.status == "absent"
    assert str(absent.fix) == "pip install ./plugins/flashinfer"
    assert f"    flashinfer     {absent.fix}\n" in str(attnplug.explain(request_of()))


def test_a_missing_library_is_no_refusal(world, request_of):
    world("flash", "generic", missing=("flash-hopper", "flash-new"))

    explanation = attnplug.explain(request_of(sinks=True))

    assert statuses(explanation) == {
        "generic/default": "chosen",
        "flash/new": "missing_dependency",
        "flash/hopper": "refused",
        "flash/old": "refused",
    }
    assert str(verdict(explanation, "flash/new").fix) == "pip install 'flash-new >=4'"
    assert [r.code for r in verdict(explanation, "flash/hopper").reasons] == ["undeclared", "missing"]


FROM_A_VENDOR = FLASH.replace(
    'requires = ["flash-new >=4"]',
    'requires = ["flash-new >=4", "flash-tools >=1"]\ninstall = { flash-new = "from its vendor" }',
)


def test_what_pip_does_not_install_has_the_fix_of_the_manifest(world, request_of):
    world("generic", flash=(FROM_A_VENDOR, None), missing=("flash-new",))

    found = verdict(attnplug.explain(request_of(sinks=True, cudagraph="uniform_batch")), "flash/new")

    assert [reason.field for reason in found.reasons if reason.code == "missing"] == [
        "flash-new >=4",
        "flash-tools >=1",
    ]
    assert found.fix.install == ("flash-tools >=1",)
    assert str(found.fix) == (
        "install flash-new >=4: from its vendor; pip install 'flash-tools >=1'; request cudagraph='never'"
    )
    assert Fix.from_dict(json.loads(json.dumps(found.fix.to_dict()))) == found.fix


def test_another_version_of_a_library_has_the_same_fix(world, request_of):
    world("generic", flash=(FROM_A_VENDOR.replace("new >=4", "new >=5").replace(', "flash-tools >=1"', ""), None))

    found = verdict(attnplug.explain(request_of(sinks=True)), "flash/new")

    assert [reason.code for reason in found.reasons] == ["version"]
    assert str(found.fix) == "install flash-new >=5: from its vendor"


def test_a_block_hides_no_missing_library(world, request_of):
    world("generic", flash=(FROM_A_VENDOR, None), missing=("flash-new",), settings=Settings(block=("flash",)))

    found = verdict(attnplug.explain(request_of(sinks=True)), "flash/new")

    assert "ATTNPLUG_BLOCK" in found.fix.action
    assert "install flash-new >=4: from its vendor" in found.fix.action


def test_a_rule_about_a_version_hides_no_missing_library(world, request_of):
    rule = '[[variants.new.rules]]\nwhen = {{ installed = "{}" }}\nbecause = "wrong values"\n'
    known_bad = FROM_A_VENDOR.replace("[[prefer]]", rule.format("flash-hopper <2") + "[[prefer]]", 1)
    world("generic", flash=(known_bad, None), missing=("flash-new",))

    action = verdict(attnplug.explain(request_of(sinks=True)), "flash/new").fix.action

    assert action == "install flash-new >=4: from its vendor; install another version (wrong values)"


def test_assume_installed_says_what_would_be(world, request_of):
    world("flash", "generic", missing=("flash-old", "flash-hopper", "flash-new"), device=Device.cpu())

    picks = {
        capability: attnplug.explain(request_of(), Device.cuda(capability), assume_installed=True).chosen.id
        for capability in ("8.0", "9.0", "10.0")
    }

    assert picks == {"8.0": "flash/old", "9.0": "flash/hopper", "10.0": "flash/new"}
    assert attnplug.select(request_of(), Device.cuda("9.0")).id == "generic/default"


class TestNames:
    def test_one_name_is_strict(self, both, request_of):
        with pytest.raises(NoBackendError) as caught:
            attnplug.select(request_of(sinks=True), backend="flash/hopper")

        assert isinstance(caught.value.explanation, Explanation)
        assert "does not support sinks=True" in str(caught.value)
        assert "permit others with 'auto'" in caught.value.fix

    def test_a_fix_of_what_is_not_permitted_is_no_fix(self, both, request_of):
        with pytest.raises(NoBackendError) as caught:
            attnplug.select(request_of(sinks=True), "cpu", backend="flash/hopper")

        # flash/new can serve on another device, and is not permitted.
        assert caught.value.fix == "one of these\n    permit others with 'auto' in the list"

    @pytest.mark.parametrize("name", ["flash", "FLASH", "flash/new"])
    def test_an_alias_has_the_fixes_of_its_backend(self, both, request_of, name):
        with pytest.raises(NoBackendError) as caught:
            attnplug.select(request_of(cascade=True, sliding_window=128, head_size=128), backend=name)

        found = caught.value.explanation
        assert found.named
        assert {id_.partition("/")[0] for id_ in found.named} == {"flash"}
        fixable = {verdict.id for verdict, _ in found.fixable()}
        assert fixable
        assert fixable <= set(found.named)

    def test_a_list_is_an_order(self, both, request_of):
        assert attnplug.select(request_of(), backend=["flash/new", "flash/hopper"]).id == "flash/new"
        assert attnplug.select(request_of(), backend=["generic", "auto"]).id == "generic/default"
        assert attnplug.select(request_of(sinks=True), backend=["flash/hopper", "auto"]).id == "flash/new"
        with pytest.raises(NoBackendError):
            attnplug.select(request_of(sinks=True), backend=["flash/hopper", "flash/old"])

    def test_aliases_select(self, both, request_of):
        assert attnplug.select(request_of(), backend="FLASH").id == "flash/hopper"
        assert attnplug.select(request_of(), backend="FLASH/new").id == "flash/new"

    @pytest.mark.parametrize("name", ["flsh", "flash/newer", "nothing/at/all"])
    def test_unknown_names_are_refused_with_the_nearest(self, both, request_of, name):
        with pytest.raises(UnknownBackendError) as caught:
            attnplug.select(request_of(), backend=name)
        assert repr(name) in str(caught.value)

    @pytest.mark.parametrize("value", [[], [""], [3], "", 3])
    def test_no_name_is_no_list(self, both, request_of, value):
        with pytest.raises(SettingsError, match="in order"):
            attnplug.select(request_of(), backend=value)


class TestPrecedence:
    def test_call_over_scope_over_environment_over_automatic(self, world, request_of):
        settings = Settings(backend=("generic",), sources={"backend": "environment variable ATTNPLUG_BACKEND"})
        world("flash", "generic", settings=settings)

        by_environment = attnplug.select(request_of())
        with attnplug.using(backend="flash/old"):
            by_scope = attnplug.select(request_of())
            by_call = attnplug.select(request_of(), backend="flash/new")
            with attnplug.using(backend=["flash/hopper"]):
                inner = attnplug.select(request_of())
        after = attnplug.select(request_of())

        assert [s.id for s in (by_environment, by_scope, by_call, inner, after)] == [
            "generic/default",
            "flash/old",
            "flash/new",
            "flash/hopper",
            "generic/default",
        ]
        assert by_environment.provenance["backend"] == "environment variable ATTNPLUG_BACKEND"
        assert by_scope.provenance["backend"] == "using"
        assert by_call.provenance["backend"] == "the call"

    def test_the_device_travels_the_same_way(self, both, request_of):
        with attnplug.using(device=Device.cuda("10.0")):
            assert attnplug.select(request_of()).device == Device.cuda("10.0")
            assert attnplug.select(request_of(), Device.cuda("8.0")).id == "flash/old"

    def test_options_are_validated_and_recorded(self, both, request_of):
        plain = attnplug.select(request_of())
        with attnplug.using(options={"flash": {"splits": 2}}):
            scoped = attnplug.select(request_of())
            called = attnplug.select(request_of(), options={"FLASH": {"splits": "3"}})
            again = attnplug.select(request_of(), options={"flash": {"splits": 2}})

        assert [dict(s.agreement.options) for s in (plain, scoped)] == [{"splits": 0}, {"splits": 2}]
        assert scoped.provenance["options.flash.splits"] == "using"
        assert dict(called.agreement.options) == {"splits": 3}
        assert again.agreement == scoped.agreement
        assert again.provenance["options.flash.splits"] == "the call"
        with pytest.raises(SettingsError, match="did you mean 'splits'"):
            attnplug.select(request_of(), options={"flash": {"split": 1}})
        with pytest.raises(SettingsError, match="int from 0"):
            attnplug.select(request_of(), options={"flash": {"splits": -1}})
        with pytest.raises(UnknownBackendError):
            attnplug.select(request_of(), options={"unknown": {"x": 1}})
        with pytest.raises(SettingsError, match="by backend"):
            attnplug.select(request_of(), options={"flash": 3})

    @pytest.mark.parametrize("device", ["cuda:8.0", Device.cuda("8.0")])
    def test_a_device_may_be_its_text(self, both, request_of, device):
        assert attnplug.select(request_of(), device).id == "flash/old"
        with attnplug.using(device=device):
            assert attnplug.explain(request_of()).chosen.id == "flash/old"

    @pytest.mark.parametrize("device", [3, object()])
    def test_another_device_is_refused(self, both, request_of, device):
        with pytest.raises(DeviceError, match=r"Device\.cuda"):
            attnplug.select(request_of(), device)

    def test_options_are_checked_where_their_backend_cannot_serve(self, both, request_of):
        requirements = request_of(dtype="float32")  # the flash plugin refuses it

        with pytest.raises(SettingsError, match="int from 0"):
            attnplug.select(requirements, options={"flash": {"splits": -1}})
        with pytest.raises(SettingsError, match="hold for all of its variants"):
            attnplug.select(requirements, options={"flash/new": {"splits": 1}})
        assert attnplug.select(requirements, options={"flashinfer": {"waits": 1}}).id == "generic/default"

    def test_what_is_permitted_is_said(self, both, request_of):
        with pytest.raises(NoBackendError) as caught:
            attnplug.select(request_of(), backend="flashinfer")

        assert "permitted: flashinfer ('auto' would add " in str(caught.value), str(caught.value)
        assert caught.value.fix == (
            "one of these\n    flashinfer: pip install ./plugins/flashinfer\n    permit others with 'auto' in the list"
        )

    def test_what_is_absent_is_a_fix_only_where_nothing_is_here(self, world, request_of, monkeypatch):
        impossible = request_of(dtype="float32", alibi="linear", kv_cache_dtype="int8")
        published = Known((KnownPlugin("later", (), "a later one", "attnplug-later"),))

        def fix(*names, known):
            monkeypatch.setattr(world("flash", *names), "_known", known)
            with pytest.raises(NoBackendError) as caught:
                attnplug.select(impossible if not names else request_of(kv_cache_dtype="int8"))
            return caught.value.fix

        assert fix(known=Known()) == "change the model's attention: no candidate serves these model fields"
        assert "flashinfer: pip install ./plugins/flashinfer" in fix(known=read_known())
        assert fix(known=published) == "one of these\n    later: pip install attnplug-later"
        assert "attnplug-later" not in fix("generic", known=published)


class TestRanking:
    def test_emulation_ranks_below_and_built_in_last(self, both, request_of):
        explanation = attnplug.explain(request_of())

        assert [v.id for v in explanation.verdicts if v.status in ("chosen", "eligible")] == [
            "flash/hopper",
            "flash/new",
            "flash/old",
            "generic/default",
        ]
        assert explanation.chosen.decided_by == "the plugin's preference"
        assert dict(verdict(explanation, "generic/default").emulated) == {"paged": "gathers"}

    def test_exact_lengths_are_never_read(self, both, request_of):
        agreement = attnplug.select(request_of()).agreement

        assert not agreement.reads_lengths

    @pytest.mark.parametrize("kind", ["upper_bound", "absent"])
    def test_reading_lengths_ranks_below_serving_them(self, world, request_of, kind):
        native = GENERIC.replace('"sinks"]', '"sinks", "seq_lens_cpu_kind"]').replace('"generic"', '"native"')
        native = native.replace('emulates = { paged = "gathers" }', "")
        world("flash", native=(native, None))

        chosen = attnplug.select(request_of(seq_lens_cpu_kind=kind))

        assert chosen.id == "native/default"
        assert chosen.decided_by == "fewest emulated features"
        assert not chosen.agreement.reads_lengths
        explanation = attnplug.explain(request_of(seq_lens_cpu_kind=kind))
        text = "the lengths are read from the device: one synchronization per build"
        assert verdict(explanation, "flash/hopper").emulated == {"seq_lens_cpu_kind": text}
        read = attnplug.select(request_of(seq_lens_cpu_kind=kind), backend="flash").agreement
        assert read.reads_lengths
        assert type(read).from_dict(read.to_dict()) == read
        assert type(read).from_dict({**read.to_dict(), "reads_lengths": False}) != read

    @pytest.mark.parametrize("kind", ["exact", "absent"])
    def test_query_lengths_are_read_whatever_is_declared(self, world, request_of, kind):
        native = GENERIC.replace('"sinks"]', '"sinks", "seq_lens_cpu_kind"]').replace('"generic"', '"native"')
        world("flash", native=(native, None))

        explanation = attnplug.explain(request_of(seq_lens_cpu_kind=kind, query_lens_cpu_kind="absent"))

        text = "the lengths are read from the device: one synchronization per build"
        fields = ("query_lens_cpu_kind",) if kind == "exact" else ("seq_lens_cpu_kind", "query_lens_cpu_kind")
        for name in ("flash/hopper", "native/default"):
            emulated = dict(verdict(explanation, name).emulated)
            assert {field: emulated.get(field) for field in fields} == dict.fromkeys(fields, text)
        for name in ("flash", "native"):
            chosen = attnplug.select(request_of(query_lens_cpu_kind="absent"), backend=name)
            assert chosen.agreement.reads_lengths

    def test_a_measured_profile_wins(self, world, request_of, tmp_path):
        profile = tmp_path / "profile.toml"
        profile.write_text(
            "[[measured]]\nwhen = { head_size = 64 }\n"
            'microseconds = { "flash/old" = 10, "flash/new" = 20, "generic/default" = 1 }\n'
        )
        world("flash", "generic", settings=Settings(profile=str(profile)))

        assert attnplug.select(request_of()).id == "flash/old"
        assert attnplug.select(request_of()).decided_by == "measured profile"
        assert attnplug.select(request_of(head_size=128)).id == "flash/hopper"

    @pytest.mark.parametrize(
        "text",
        [
            "x",
            "[[measured]]\nwhen = {}",
            "[[measured]]\nmicroseconds = { a = 0 }",
            "[[measured]]\nmicroseconds = { a = inf }",
            "[[measured]]\nmicroseconds = { a = nan }",
            "[[measured]]\nwhen = { hed = 1 }\nmicroseconds = {}",
        ],
    )
    def test_a_wrong_profile_is_refused(self, world, request_of, tmp_path, text):
        profile = tmp_path / "wrong.toml"
        profile.write_text(text)
        world("generic", settings=Settings(profile=str(profile)))

        with pytest.raises(SettingsError, match=r"wrong\.toml"):
            attnplug.select(request_of())

    def test_a_tie_by_name_says_how_to_settle_it(self, world, request_of, flash_manifest):
        twin = flash_manifest.replace('name = "flash", aliases = ["FLASH"]', 'name = "flush"')
        twin = twin.replace('order = ["hopper", "new", "old"]', 'order = ["hopper"]')
        world("flash", twin=(twin, None))

        explanation = attnplug.explain(request_of())

        assert (explanation.chosen.id, explanation.runner_up.id) == ("flash/hopper", "flush/hopper")
        assert explanation.chosen.decided_by == "name"  # between backends; a preference is among variants of one
        assert explanation.why_runner_up.startswith("a tie: neither is measured on this device")
        alone = attnplug.explain(request_of(), backend=["flash"])
        assert alone.chosen.decided_by == "the plugin's preference"
        assert alone.runner_up.id == "flash/new"
        tied = attnplug.explain(request_of(alibi="linear"))
        assert tied.chosen.decided_by == "name"
        assert "'flash/old' and 'flush/old' tie: neither is measured on cuda:9.0" in tied.tie
        assert "ATTNPLUG_PROFILE" in str(tied)


class TestMemory:
    def test_the_same_request_is_decided_once(self, both, request_of, caplog):
        with caplog.at_level(logging.INFO, "attnplug"):
            first = attnplug.select(request_of())
            again = attnplug.select(request_of())

        assert again is first
        records = [record for record in caplog.records if hasattr(record, "selection")]
        assert [record.selection for record in records] == [first]

    def test_a_change_of_the_registry_decides_again(self, both, request_of):
        first = attnplug.select(request_of())
        both.mark_broken("flash/hopper", attnplug.Reason("broken", "flash/hopper", None, "it failed"))

        second = attnplug.select(request_of())

        assert (first.id, second.id) == ("flash/hopper", "flash/new")
        assert verdict(attnplug.explain(request_of()), "flash/hopper").status == "broken"

    def test_this_machine_s_device_is_not_looked_up_where_one_is_given(self, world, request_of, monkeypatch):
        def look():
            raise AssertionError

        world("flash", "generic", device=None)
        monkeypatch.setattr(Device, "current", look)

        assert attnplug.select(request_of(), Device.cuda("9.0")).id == "flash/hopper"
        assert attnplug.explain(request_of(), Device.cuda("9.0")).chosen is not None

    def test_refresh_reads_everything_again(self, both, request_of, monkeypatch):
        attnplug.select(request_of())
        monkeypatch.setenv("ATTNPLUG_BLOCK", "")
        attnplug.refresh()

        assert attnplug.registry() is not both

    def test_memory_is_bounded(self, both, request_of, monkeypatch):
        monkeypatch.setattr(process, "_MOST_DECISIONS", 8)
        for window in range(1, 30):
            attnplug.select(request_of(sliding_window=window))

        state = process.current_state()
        assert len(state.decisions) <= 8
        assert len(state.hot) <= 9
        assert attnplug.select(request_of(sliding_window=1)).requirements.sliding_window == 1

    def test_a_device_that_nothing_could_see_is_looked_for_again(self, world, request_of, monkeypatch):
        world("flash", "generic", device=None)
        seen = iter([Device.cpu(), Device.cuda("9.0")])
        unseen = iter([True])
        monkeypatch.setattr(process.Device, "current", lambda: next(seen))
        monkeypatch.setattr(process, "is_unseen", lambda: next(unseen))

        first, second = attnplug.select(request_of()), attnplug.select(request_of())

        assert (first.id, second.id) == ("generic/default", "flash/hopper")
        assert attnplug.select(request_of()) is second


DEVICES = [Device.cuda("10.0"), "cuda:10.0"]


@pytest.fixture
def counted(monkeypatch):
    """The requests that are decided, and not repeated from the table of the fast path."""
    found = []
    decide = select._explain
    monkeypatch.setattr(select, "_explain", lambda *args, **kwargs: found.append(args) or decide(*args, **kwargs))
    return found


@pytest.mark.parametrize("device", DEVICES, ids=["object", "text"])
class TestRepeatedWithDevice:
    """A request with a device is repeated from the fast path, which nothing that a decision depends on outlives."""

    def test_the_same_decision_is_returned_undecided(self, both, request_of, counted, device):
        wanted = request_of()
        first = attnplug.select(wanted, device=device)

        assert attnplug.select(wanted, device) is attnplug.select(wanted, device=device) is first
        assert attnplug.select(request_of(), device=device) is first
        assert len(counted) == 1
        assert first.id == "flash/new"
        assert attnplug.select(wanted).id == "flash/hopper"  # this process's own device has another decision

    def test_a_scope_is_seen_and_leaves_nothing(self, both, request_of, device):
        wanted = request_of()
        first = attnplug.select(wanted, device=device)
        with attnplug.using(backend="flash/old"):
            assert attnplug.select(wanted, device=device).id == "flash/old"
            assert attnplug.select(request_of(sinks=True), device=device, backend=["auto"]).id == "flash/new"
        with attnplug.using(kv_layout="HND"):
            assert attnplug.select(wanted, device=device).id == "generic/default"
        with attnplug.using(device="cuda:8.0"):
            assert attnplug.select(wanted, device=device) is first

        assert attnplug.select(wanted, device=device) is first

    def test_a_scope_s_device_is_not_remembered_as_another(self, both, request_of, device):
        with attnplug.using(device=device):
            assert attnplug.select(request_of()).id == "flash/new"
        assert attnplug.select(request_of()).id == "flash/hopper"

    def test_keywords_are_seen_and_leave_nothing(self, both, request_of, device):
        wanted = request_of()
        first = attnplug.select(wanted, device=device)

        assert attnplug.select(wanted, device=device, backend="flash/old").id == "flash/old"
        splits = attnplug.select(wanted, device=device, options={"flash": {"splits": 2}})
        assert splits.agreement.options["splits"] == 2
        assert attnplug.select(wanted, device=device) is first

    def test_settings_that_are_read_again_decide_again(self, installed, request_of, monkeypatch, device):
        attnplug.refresh()
        first = attnplug.select(request_of(), device=device)
        monkeypatch.setenv("ATTNPLUG_BACKEND", "flash/old")

        assert attnplug.select(request_of(), device=device) is first  # until refresh, as without a device
        attnplug.refresh()
        assert attnplug.select(request_of(), device=device).id == "flash/old"

    def test_a_registration_decides_again(self, both, request_of, tmp_path, device):
        first = attnplug.select(request_of(), device=device)
        manifest = FLASH.replace('"flash"', '"a_new_one"', 1).replace('["FLASH"]', "[]")
        (tmp_path / "attnplug.toml").write_text(manifest)
        attnplug.register("notebook", manifest=tmp_path / "attnplug.toml")

        second = attnplug.select(request_of(), device=device)

        assert first.id == "flash/new"
        assert second.backend == "a_new_one"

    def test_a_new_generation_decides_again(self, both, request_of, device):
        first = attnplug.select(request_of(), device=device)
        both.mark_broken(first.id, attnplug.Reason("broken", first.id, None, "it failed"))

        assert attnplug.select(request_of(), device=device).id == "flash/old"

    def test_memory_is_bounded(self, both, request_of, monkeypatch, device):
        monkeypatch.setattr(process, "_MOST_DECISIONS", 8)
        for window in range(1, 30):
            attnplug.select(request_of(sliding_window=window), device=device)
            attnplug.select(request_of(sliding_window=window))

        assert len(process.current_state().hot) <= 8
        assert attnplug.select(request_of(sliding_window=1), device=device).requirements.sliding_window == 1

    def test_many_threads_get_one_decision(self, both, request_of, device):
        found = []
        wanted = [request_of(sliding_window=window) for window in range(1, 6)]

        def repeat():
            found.extend(attnplug.select(one, device=device) for _ in range(50) for one in wanted)

        together(repeat, repeat, repeat, repeat)

        assert len({id(selection) for selection in found}) == 5


def test_the_current_device_by_text_is_looked_up_each_time(world, request_of, monkeypatch):
    world("flash", "generic")
    seen = iter([Device.cuda("8.0"), Device.cuda("10.0")])
    monkeypatch.setattr(Device, "current", lambda: next(seen))
    wanted = request_of()

    assert [attnplug.select(wanted, device="current").id for _ in range(2)] == ["flash/old", "flash/new"]


@pytest.mark.parametrize("device", [["cuda:9.0"], 0, b"cpu"], ids=["list", "index", "bytes"])
def test_no_device_reaches_the_table(both, request_of, device):
    attnplug.select(request_of(), device="cuda:9.0")
    with pytest.raises(DeviceError):
        attnplug.select(request_of(), device=device)


def test_a_device_hashes_after_transport():
    device = Device.cuda("9.0", name="made up")
    hash(device)

    assert hash(pickle.loads(pickle.dumps(device))) == hash(Device.from_dict(device.to_dict())) == hash(device)
    assert hash(evolve(device, name=None)) == hash(Device.cuda("9.0"))


class TestTransport:
    def test_json_round_trip(self, both, request_of):
        selection = attnplug.select(request_of(sinks=True), options={"flash": {"splits": 2}})

        again = Selection.from_dict(json.loads(json.dumps(selection.to_dict())))

        assert again == selection
        assert again.agreement == selection.agreement
        assert [str(v.fix) for v in again.verdicts] == [str(v.fix) for v in selection.verdicts]

    def test_a_list_in_a_reason_comes_back_as_it_went(self, both, request_of):
        selection = attnplug.select(request_of(), backend=["auto"])
        reason = Reason("rule", "features", ["acme.a"], "features")
        refused = evolve(selection, verdicts=(evolve(selection.verdicts[0], reasons=(reason,)),))

        assert Selection.from_dict(json.loads(json.dumps(refused.to_dict()))) == refused

    def test_pickle_round_trip(self, both, request_of):
        selection = attnplug.select(request_of())

        assert pickle.loads(pickle.dumps(selection)) == selection

    def test_an_error_with_every_verdict_pickles(self, both, request_of):
        with pytest.raises(NoBackendError) as caught:
            attnplug.select(request_of(custom_mask=True))

        again = pickle.loads(pickle.dumps(caught.value))

        assert str(again) == str(caught.value)
        assert again.explanation.verdicts == caught.value.explanation.verdicts


def test_nothing_can_serve_says_so_for_everyone(both, request_of):
    with pytest.raises(NoBackendError) as caught:
        attnplug.select(request_of(custom_mask=True, sinks=True))

    text = str(caught.value)
    assert all(name in text for name in ("flash/old", "flash/hopper", "flash/new", "generic/default", "flashinfer"))
    assert "does not support sinks=True, custom_mask=True" in text


def test_a_selection_reads_in_a_line(both, request_of):
    terms = "block_size=128 kv_layout=NHD kv_cache_form=joint kv_cache_dtype=bfloat16 cudagraph=never"
    text = f"flash/new on cuda:9.0: {terms}"

    assert str(attnplug.select(request_of(sinks=True))) == text


def test_a_request_is_a_requirements(both):
    with pytest.raises(RequirementsError, match="a request is an"):
        attnplug.select({"head_size": 64})


def test_explanations_print_without_a_terminal(both, request_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    text = str(attnplug.explain(request_of(sinks=True)))

    assert text.splitlines()[0].startswith("requested: head_size=64")
    assert "chosen: flash/new (the only one besides the built-in)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_log_record_has_no_control_characters(world, request_of, caplog):
    world("generic")
    with caplog.at_level("INFO", logger="attnplug"):
        attnplug.select(request_of(), Device("cpu", name="\x1b[31mred"))

    assert "\x1b" not in caplog.text
    assert "red" in caplog.text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_what_is_read_is_copied_or_refused_by_name(both, copied):
    settings = Settings(options={"flash": {"splits": 3}})
    assert copied(settings) == settings
    assert copied(both.plugin("flash")) == both.plugin("flash")
    with pytest.raises(TypeError, match="only read"):
        copied(settings).options["flash"]["splits"] = 4
    with pytest.raises(RegistryError, match="a Registry was copied or pickled"):
        copied(both)
