"""Late fields: what a selection leaves open, and binding it, compared with a selection that knew the values."""

from __future__ import annotations

import json
import pickle
import sys
from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.discovery.plugin import Plugin
from attnplug.discovery.registry import Registry
from attnplug.errors import (
    AttnplugError,
    DecisionError,
    NoBackendError,
    NotNegotiatedError,
    PluginLoadError,
    RequirementsError,
)
from attnplug.manifest.constraint import Constraint, Exact, Range
from attnplug.negotiation.probe_refusals import ProbeRefusal
from attnplug.negotiation.reason import Reason
from attnplug.request.device import Device
from attnplug.request.fields import FIELDS
from attnplug.request.settings import Settings
from attnplug.selection import binding, process, select
from attnplug.selection.selection import Selection
from core.tests.negotiation.test_brute_force import (
    DECLARATIONS,
    DEVICES,
    ENGINE,
    LEVELS,
    MODEL,
    manifest_of,
    manifests,
    requests,
    tables,
)
from tests.examples import examples

HEADS = ("num_q_heads", "num_kv_heads")
EVERYTHING = ("block_size", *HEADS)
ABOUT_HEADS = {
    "num_q_heads": st.sampled_from([{"max": 16}, {"multiple_of": 8}]),
    "num_kv_heads": st.sampled_from([{"max": 4}, 2, {"multiple_of": 4}]),
    "gqa_ratio": st.sampled_from([{"min": 4}, {"max": 8}, 1]),
    "block_size": st.sampled_from([{"max": 32}, {"min": 64}, {"multiple_of": 32}]),
    "kv_layout": st.sampled_from(["NHD", "HND"]),
    "cudagraph": st.just({"min": "uniform_batch"}),
    "sinks": st.booleans(),
}


@pytest.fixture
def late_of(request_of):
    """Return a maker of requirements with these fields late."""

    def make(*late, **values):
        counts = {} if set(HEADS) <= set(late) else {n: v for n, v in zip(HEADS, (8, 2), strict=True) if n not in late}
        return attnplug.Requirements(**{"head_size": 64, "dtype": "bfloat16", "late": late, **counts, **values})

    return make


class TestRequirements:
    def test_what_is_late_is_not_given(self, late_of):
        wanted = late_of(*reversed(EVERYTHING))

        assert wanted.late == EVERYTHING
        assert (wanted.block_size, wanted.num_q_heads, wanted.num_kv_heads, wanted.gqa_ratio) == (None,) * 4
        assert {"num_q_heads", "num_kv_heads", "late"}.isdisjoint(dict(wanted.requested()))
        assert attnplug.Requirements.from_dict(json.loads(json.dumps(wanted.to_dict()))) == wanted
        assert wanted != late_of("block_size", num_q_heads=8, num_kv_heads=2)

    @pytest.mark.parametrize(
        ("values", "text"),
        [
            ({"late": ("block_size",), "block_size": 16}, "block_size=16"),
            ({"late": ("num_q_heads",)}, "num_q_heads=8"),
            ({"late": ("head_size",)}, "late="),
            ({"late": "block_size"}, "late='block_size'"),
            ({"late": 3}, "late=3"),
            ({"late": ("block_size",), "paged": False}, "paged=False"),
            ({"late": ("block_size",), "attn_type": "encoder"}, "paged=False"),
        ],
    )
    def test_a_contradiction_is_refused(self, request_of, values, text):
        with pytest.raises(RequirementsError, match="late") as caught:
            request_of(**values)
        assert text in str(caught.value)

    def test_a_count_that_is_not_late_is_required(self):
        with pytest.raises(RequirementsError, match="no 'num_kv_heads' was given"):
            attnplug.Requirements(head_size=64, dtype="bfloat16", late=("num_q_heads",))

    def test_no_manifest_declares_it(self):
        assert "late" not in FIELDS


class TestSet:
    """What an unbound agreement holds for."""

    def test_it_is_what_the_manifest_declares(self, both, late_of):
        new = attnplug.select(late_of("block_size", sinks=True))

        assert new.id == "flash/new"
        assert new.agreement.block_size is None
        assert new.agreement.kv_layout == "NHD"
        assert new.agreement.block_sizes.alternatives == (Exact(128), Range(multiple_of=16))
        assert str(new.agreement.block_sizes) == "128, multiples of 16"
        assert new.agreement.to_dict()["block_sizes"] == [128, {"multiple_of": 16}]
        assert str(new) == (
            "flash/new on cuda:9.0: block_size=(128, multiples of 16) kv_layout=NHD kv_cache_form=joint "
            "kv_cache_dtype=bfloat16 "
            "cudagraph=never"
        )

    def test_rules_narrow_it(self, world, flash_manifest, late_of):
        rule = '[[rules]]\nwhen = { block_size = { max = 64 } }\nneed = { kv_layout = "HND" }\nbecause = "why"\n'
        world(flash=(flash_manifest.replace("[[rules]]", f"{rule}[[rules]]", 1), None))

        found = attnplug.select(late_of("block_size"), backend="flash/hopper").agreement

        assert found.block_sizes.alternatives == (Range(80, 1024, 16),)

    def test_a_layout_that_depends_on_it_is_open(self, world, flash_manifest, late_of):
        rule = '[[rules]]\nwhen = { block_size = { max = 64 } }\nneed = { kv_layout = "HND" }\nbecause = "why"\n'
        text = flash_manifest.replace("[[rules]]", f"{rule}[[rules]]", 1)
        world(flash=(text.replace("head_size = {", 'kv_layout = ["NHD", "HND"]\nhead_size = {', 1), None))
        chosen = attnplug.select(late_of("block_size"), backend="flash/hopper")

        assert chosen.agreement.kv_layout is None
        assert chosen.agreement.block_sizes.alternatives == (Range(16, 1024, 16),)
        assert (chosen.bind(block_size=64).agreement.kv_layout, chosen.bind(block_size=80).agreement.kv_layout) == (
            "HND",
            "NHD",
        )

    def test_explain_says_what_is_left_to_bind(self, both, late_of):
        text = str(attnplug.explain(late_of(*EVERYTHING, sinks=True)))

        assert "left for the engine to set: block_size (128, multiples of 16), num_q_heads, num_kv_heads" in text
        assert "left for the engine" not in str(attnplug.explain(late_of()))
        bound = attnplug.select(late_of(*EVERYTHING, sinks=True)).bind(block_size=16)
        assert bound.late == HEADS

    def test_nothing_serves_where_no_value_does(self, world, flash_manifest, late_of):
        rule = '[[rules]]\nwhen = { block_size = { min = 1 } }\nbecause = "none works"\n'
        world(flash=(flash_manifest.replace("[[rules]]", f"{rule}[[rules]]", 1), None))

        with pytest.raises(NoBackendError, match="none works"):
            attnplug.select(late_of("block_size"))

    @given(st.sets(st.integers(1, 40)), st.sampled_from([1, 4, 16]))
    def test_runs_have_exactly_the_members(self, refused, step):
        declared = Constraint(FIELDS["block_size"].domain, (Exact(24), Range(min=2, multiple_of=step)))

        found = declared.restrict(lambda number: number not in refused, limit=64)

        wanted = {number for number in (24, *range(2, 65)) if declared.allows(number) and number not in refused}
        assert {number for number in range(1, 100) if found.allows(number)} == wanted


class TestBind:
    def test_it_is_the_selection_that_knew_the_value(self, both, late_of):
        chosen = attnplug.select(late_of("block_size", sinks=True))

        bound = chosen.bind(block_size=48)

        known = attnplug.select(late_of(sinks=True, block_size=48), backend="flash/new")
        assert bound.agreement == known.agreement
        assert bound.agreement.block_sizes is None
        assert (bound.decided_by, bound.device, bound.late) == (chosen.decided_by, chosen.device, ())
        assert [v.id for v in bound.verdicts] == [v.id for v in chosen.verdicts]
        assert (bound.verdicts[0].status, bound.verdicts[0].agreement) == ("chosen", bound.agreement)
        assert bound.verdicts[1:] == chosen.verdicts[1:]

    def test_a_refusal_has_the_reasons_and_what_would_do(self, both, late_of):
        chosen = attnplug.select(late_of("block_size", sinks=True))

        with pytest.raises(NotNegotiatedError) as caught:
            chosen.bind(block_size=40)

        assert "'flash/new' was to be bound to block_size=40" in caught.value.problem
        assert "does not support block_size=40; supported: 128, multiples of 16" in caught.value.expected
        assert "bind block_size to one of: 128, multiples of 16 from 16 up to 1024" in caught.value.fix

    def test_a_rule_about_heads_counts_then(self, world, flash_manifest, late_of):
        rule = '[[rules]]\nwhen = { gqa_ratio = { min = 8 } }\nneed = { block_size = 64 }\nbecause = "packed"\n'
        world(flash=(flash_manifest.replace("[[rules]]", f"{rule}[[rules]]", 1), None))
        chosen = attnplug.select(late_of(*EVERYTHING), backend="flash/hopper")

        assert chosen.bind(block_size=16, num_q_heads=8, num_kv_heads=2).agreement.block_size == 16
        heads = chosen.bind(num_q_heads=16, num_kv_heads=2)
        assert heads.agreement.block_sizes.alternatives == (Exact(64),)
        assert heads.bind(block_size=64).agreement.block_size == 64
        with pytest.raises(NotNegotiatedError, match="packed") as caught:
            chosen.bind(block_size=16, num_q_heads=16, num_kv_heads=2)
        assert "bind block_size to one of: 64 or bind num_q_heads to one of: " in caught.value.fix
        with pytest.raises(NotNegotiatedError, match="packed"):
            heads.bind(block_size=16)

    @pytest.mark.parametrize("order", [EVERYTHING, tuple(reversed(EVERYTHING))])
    def test_the_order_of_binding_does_not_matter(self, both, late_of, order):
        values = {"block_size": 64, "num_q_heads": 8, "num_kv_heads": 2}
        chosen = at_once = attnplug.select(late_of(*EVERYTHING, sinks=True))
        for name in order:
            chosen = chosen.bind(**{name: values[name]})

        assert chosen.agreement == at_once.bind(**values).agreement
        assert chosen.bind() is chosen

    @pytest.mark.parametrize("values", [{"num_q_heads": 8}, {"block_size": 16, "num_kv_heads": 2}])
    def test_what_is_not_late_is_not_bound(self, both, late_of, values):
        with pytest.raises(RequirementsError, match=r"late=\('block_size',\)"):
            attnplug.select(late_of("block_size")).bind(**values)

    @pytest.mark.parametrize("value", [0, -16, "16", 16.0, True, 2**31])
    def test_a_value_outside_the_domain_is_refused(self, both, late_of, value):
        with pytest.raises(RequirementsError, match="block_size="):
            attnplug.select(late_of("block_size")).bind(block_size=value)

    def test_heads_that_contradict_are_refused(self, both, late_of):
        with pytest.raises(RequirementsError, match="multiple of num_kv_heads"):
            attnplug.select(late_of(*HEADS)).bind(num_q_heads=8, num_kv_heads=3)

    def test_options_and_the_layout_of_a_setting_stay(self, world, late_of):
        where = {"kv_layout": "environment variable ATTNPLUG_KV_LAYOUT"}
        world("flash", "generic", settings=Settings(kv_layout="HND", sources=where))
        chosen = attnplug.select(late_of("block_size"), options={"flash": {"splits": 3}})
        assert chosen.id == "generic/default"
        with attnplug.using(kv_layout="NHD"):
            bound = chosen.bind(block_size=32)

        assert bound.agreement.kv_layout == "HND"
        assert bound.provenance == chosen.provenance
        splits = attnplug.select(late_of("block_size", kv_layout="NHD"), options={"flash": {"splits": 3}})
        assert splits.bind(block_size=32).agreement.options == {"splits": 3}

    def test_no_other_candidate_is_judged_and_nothing_is_imported(self, both, late_of, monkeypatch):
        chosen = attnplug.select(late_of("block_size"))
        before = set(sys.modules)
        judged = []
        evaluate = binding.evaluate
        monkeypatch.setattr(binding, "evaluate", lambda c, *rest: judged.append(c.id) or evaluate(c, *rest))
        monkeypatch.setattr(select, "evaluate", None)
        monkeypatch.setattr(select, "rank", None)

        chosen.bind(block_size=32)

        assert judged == ["flash/hopper"]
        assert not [name for name in set(sys.modules) - before if not name.startswith("attnplug")]

    def test_a_candidate_that_is_not_here_is_refused(self, world, late_of):
        world("flash", "generic")
        chosen = attnplug.select(late_of("block_size"))
        world("generic")
        with pytest.raises(PluginLoadError, match="not installed here"):
            chosen.bind(block_size=16)

    def test_what_a_probe_has_refused_is_refused(self, both, late_of):
        chosen = attnplug.select(late_of("block_size"))
        bound = chosen.bind(block_size=16)
        reason = Reason("probe", "flash/hopper", None, "built without it", "build it")
        both.mark_refused("flash/hopper", ProbeRefusal.of(reason, bound.agreement, bound.device))

        with pytest.raises(NotNegotiatedError, match="built without it"):
            chosen.bind(block_size=16)
        assert chosen.bind(block_size=32).agreement.block_size == 32
        assert attnplug.select(late_of("block_size")).id == "flash/new"  # so that a host comes to another candidate
        assert attnplug.select(late_of("block_size", sliding_window=5)).id == "flash/hopper"


class TestTransport:
    def test_another_process_binds_it(self, world, late_of):
        world("flash", "generic")
        chosen = attnplug.select(late_of(*EVERYTHING))
        text = json.dumps(chosen.to_dict())
        world("flash", "generic")

        again = Selection.from_dict(json.loads(text))

        values = {"block_size": 32, "num_q_heads": 8, "num_kv_heads": 2}
        assert again == chosen == pickle.loads(pickle.dumps(chosen))
        assert again.bind(**values) == chosen.bind(**values)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("block_sizes", None),
            ("block_sizes", []),
            ("block_sizes", [{}]),
            ("block_sizes", ["16"]),
            ("block_sizes", [{"multiple_of": 0}]),
            ("block_sizes", 16),
            ("block_size", 16),
        ],
    )
    def test_a_tampered_set_is_refused(self, both, late_of, name, value):
        data = attnplug.select(late_of("block_size")).to_dict()
        data["agreement"][name] = value
        with pytest.raises(DecisionError, match="block_size"):
            Selection.from_dict(data)

    def test_a_set_without_late_is_refused(self, both, late_of):
        data = attnplug.select(late_of()).to_dict()
        data["agreement"]["block_sizes"] = [16]
        with pytest.raises(DecisionError, match="block_sizes"):
            Selection.from_dict(data)


@pytest.mark.parametrize("late", [("block_size",), HEADS])
def test_what_is_unbound_is_not_loaded(both, late_of, late):
    chosen = attnplug.select(late_of(*late))

    for load in (chosen.load, lambda: attnplug.load(chosen), lambda: attnplug.load(late_of(*late))):
        with pytest.raises(NotNegotiatedError, match=r"bind\(" + f"{late[0]}="):
            load()


class TestPlan:
    def test_all_layers_are_bound_at_once(self, both, late_of):
        wanted = {"a": late_of("block_size"), "b": late_of("block_size", sinks=True), "c": late_of(paged=False)}
        plan = attnplug.plan(wanted)

        assert plan.block_size is None
        assert plan.block_sizes.alternatives == (Range(16, 1024, 16),)
        assert "common: block_size=(multiples of 16 from 16 up to 1024) kv_layout=NHD" in str(plan)
        bound = attnplug.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))).bind(block_size=48)
        assert (bound.block_size, bound.block_sizes) == (48, None)
        assert [group.layers for group in bound.groups] == [group.layers for group in plan.groups]
        assert [group.selection.id for group in bound.groups] == [group.selection.id for group in plan.groups]
        known = attnplug.plan(
            {name: r if name == "c" else r.evolve(late=(), block_size=48) for name, r in wanted.items()}
        )
        assert [g.selection.agreement for g in bound.groups] == [g.selection.agreement for g in known.groups]
        assert bound["c"] == plan["c"]

    def test_a_size_that_a_group_refuses_is_refused(self, both, late_of):
        plan = attnplug.plan({"a": late_of("block_size"), "b": late_of("block_size", alibi="linear")})

        assert plan["b"].id == "flash/old"
        assert plan.block_sizes.alternatives == (Exact(256), Exact(512), Exact(768), Exact(1024)) or (
            plan.block_sizes.alternatives == (Range(256, 1024, 256),)
        )
        with pytest.raises(NotNegotiatedError, match="block_size=16"):
            plan.bind(block_size=16)
        assert plan.bind(block_size=512).block_size == 512

    def test_a_size_that_one_layer_has_settled_holds_for_all(self, both, late_of):
        plan = attnplug.plan({"a": late_of("block_size"), "b": late_of(sinks=True, block_size=64)})

        assert plan["a"].agreement.block_sizes.alternatives == (Exact(64),)
        assert plan.bind(block_size=64).block_size == 64
        assert plan.bind(block_size=64)["b"] == plan["b"]
        with pytest.raises(NotNegotiatedError, match="no layout and form serve all groups"):
            plan.bind(block_size=48)

    def test_a_layout_that_groups_cannot_share_is_refused(self, world, flash_manifest, late_of):
        rule = '[[rules]]\nwhen = {{ block_size = 32, sinks = {0} }}\nneed = {{ kv_layout = "{1}" }}\nbecause = "why"\n'
        rules = rule.format("true", "HND") + rule.format("false", "NHD")
        text = flash_manifest.replace("[[rules]]", f"{rules}[[rules]]", 1)
        world(flash=(text.replace("head_size = {", 'kv_layout = ["NHD", "HND"]\nhead_size = {', 1), None))
        layers = {"a": late_of("block_size"), "b": late_of("block_size", sinks=True)}
        plan = attnplug.plan(layers, backend="flash/new")

        assert not plan.block_sizes.allows(32)
        assert plan.bind(block_size=16).kv_layout == "NHD"
        with pytest.raises(NotNegotiatedError, match="no layout and form serve all groups"):
            plan.bind(block_size=32)

    def test_a_later_layout_is_taken_where_all_share_it(self, world, flash_manifest, late_of):
        rule = '[[rules]]\nwhen = { block_size = 32, sinks = true }\nneed = { kv_layout = "HND" }\nbecause = "why"\n'
        text = flash_manifest.replace("[[rules]]", f"{rule}[[rules]]", 1)
        world(flash=(text.replace("head_size = {", 'kv_layout = ["NHD", "HND"]\nhead_size = {', 1), None))
        layers = {"a": late_of("block_size"), "b": late_of("block_size", sinks=True)}
        plan = attnplug.plan(layers, backend="flash/new")

        assert plan.kv_layout is None
        assert {g.selection.agreement.kv_layout for g in plan.bind(block_size=32).groups} == {"HND"}
        assert {g.selection.agreement.kv_layout for g in plan.bind(block_size=64).groups} == {"NHD"}

    def test_parts_are_bound_in_turn(self, both, late_of):
        plan = attnplug.plan({"a": late_of(*EVERYTHING), "b": late_of("block_size", sinks=True)})

        heads = plan.bind(num_q_heads=8, num_kv_heads=2)

        assert (heads["a"].late, heads["b"].late) == (("block_size",),) * 2
        assert heads.bind(block_size=16) == plan.bind(block_size=16, num_q_heads=8, num_kv_heads=2)
        assert plan.bind() == plan
        with pytest.raises(RequirementsError, match="num_q_heads"):
            heads.bind(num_q_heads=8)

    def test_libraries_that_were_assumed_stay_so(self, world, late_of):
        world("flash", "generic", missing=("flash-hopper",))
        plan = attnplug.plan({"a": late_of("block_size")}, assume_installed=True)

        assert plan.bind(block_size=32)["a"].id == "flash/hopper"
        with pytest.raises(PluginLoadError, match="flash-hopper"):
            plan.bind(block_size=32)["a"].load()


# --- against a selection that knew the values, for random manifests and requests ---


@st.composite
def manifests_with_heads(draw):
    raw = draw(manifests())
    supports = raw["supports"]
    # So that many requests are served, and binding decides: any device, dtype and head size, and a paged KV cache.
    supports |= {"device_type": ["cpu", "cuda"], "compute_capability": {"min": "8.0"}, "head_size": {"min": 1}}
    supports |= {"dtype": ["bfloat16", "float16", "float32"]}
    supports["block_size"] = draw(DECLARATIONS["block_size"])
    supports["features"] = sorted({*supports["features"], "paged"} - {"block_size", "kv_layout"})
    for _ in range(draw(st.integers(0, 2))):
        rule = {"when": draw(tables(ABOUT_HEADS, 2)), "because": "a reason"}
        if draw(st.booleans()):
            rule["need"] = draw(tables(ABOUT_HEADS, 2))
        raw["rules"].append(rule)
    if draw(st.booleans()):
        supports["num_kv_heads"] = draw(ABOUT_HEADS["num_kv_heads"])
    return raw


@contextmanager
def process_with(raw):
    """A process with one plugin, of this manifest."""
    manifest = manifest_of(raw)
    registry = Registry([Plugin("acme", "acme", "dist-acme", "1.0", manifest)], settings=Settings())
    before = process.PROCESS.state
    process.PROCESS.state = process.ProcessState(registry, Settings(), registry.generation, own_device=Device.cpu())
    try:
        yield f"acme/{manifest.variants[0].name}"
    finally:
        process.PROCESS.state = before


def outcome_of(call):
    """Return the agreement or the plan that a call comes to, or None where it is refused."""
    try:
        found = call()
    except (NoBackendError, NotNegotiatedError):
        return None
    return found.agreement if isinstance(found, Selection) else found


few_fields = st.tuples(requests, st.sets(st.sampled_from(sorted({*MODEL, *ENGINE} - {"paged"})), max_size=2)).map(
    lambda pair: {"head_size": 64, "dtype": "bfloat16", **{name: pair[0][name] for name in pair[1]}}
)
late_sets = st.sets(st.sampled_from(EVERYTHING), min_size=1)


def check_binding(raw, wanted, late, device):
    with process_with(raw) as name:
        for values in wanted:
            heads = {n: v for n, v in zip(HEADS, (8, 2), strict=True) if n not in late}
            rest = {n: v for n, v in values.items() if n not in late}
            try:
                requirements = attnplug.Requirements(**rest, **heads, late=sorted(late))
            except AttnplugError:
                continue  # the values contradict each other
            check_bindings_of(requirements, name, device)


def check_bindings_of(requirements, name, device):
    late = requirements.late
    options = {"block_size": (16, 48, 64, 256), "num_q_heads": (8, 32), "num_kv_heads": (2, 8)}
    bindings = [dict(zip(late, values, strict=True)) for values in product(*(options[n] for n in late))]
    known = [
        outcome_of(partial(attnplug.select, requirements.evolve(late=(), **values), device, backend=name))
        for values in bindings
    ]
    try:
        chosen = attnplug.select(requirements, device, backend=name)
    except NoBackendError:
        event("refused")
        assert not any(known)
        return
    plan = attnplug.plan({"a": requirements}, device)
    event("chosen")
    for values, wanted in zip(bindings, known, strict=True):
        bound = outcome_of(partial(chosen.bind, **values))
        event("bound" if bound else "not bound")
        assert bound == wanted
        if late == ("block_size",):
            assert chosen.agreement.block_sizes.allows(values["block_size"]) == (bound is not None)
            assert not bound or LEVELS.index(bound.cudagraph) >= LEVELS.index(chosen.agreement.cudagraph)
        planned = outcome_of(partial(plan.bind, **values))
        assert (planned and planned["a"].agreement) == bound


USUAL = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much], "deadline": None}
DRAWN = (manifests_with_heads(), st.lists(few_fields, min_size=1, max_size=3), late_sets, st.sampled_from(DEVICES))


@settings(max_examples=15, **USUAL)
@given(*DRAWN)
def test_binding_is_a_selection_that_knew_the_values(raw, wanted, late, device):
    check_binding(raw, wanted, late, device)


@pytest.mark.slow
@settings(max_examples=examples(100), **USUAL)
@given(*DRAWN)
def test_binding_is_a_selection_that_knew_the_values_in_long(raw, wanted, late, device):
    check_binding(raw, wanted, late, device)
