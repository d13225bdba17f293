"""The layout as a setting: requested of all, shown with its origin, overridden by requirements, never dropped."""

from __future__ import annotations

import json
import pickle
from itertools import product

import pytest

import attnplug
from attnplug.errors import NoBackendError, SettingsError
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process

VARIABLE = "environment variable ATTNPLUG_KV_LAYOUT"
LAYOUTS = (None, "NHD", "HND")


def settings_of(layout):
    return Settings() if layout is None else Settings(kv_layout=layout, sources={"kv_layout": VARIABLE})


def verdict(explanation, name):
    return next(v for v in explanation.verdicts if v.id == name)


@pytest.fixture
def hnd(world):
    """A process where the environment requests HND, which the flash plugin does not have."""
    return world("flash", "generic", settings=settings_of("HND"))


def test_nothing_set_is_nhd_and_requests_nothing(both, request_of):
    found = attnplug.explain(request_of())

    assert attnplug.kv_cache_layout() == "NHD"
    assert found.chosen.id == "flash/hopper"
    assert found.requirements.kv_layout is None
    assert found.to_dict()["origins"] == {}
    assert "kv_layout" not in found.chosen.provenance
    assert "set:" not in str(found)


def test_the_setting_is_requested_of_all_with_its_origin(hnd, request_of):
    found = attnplug.explain(request_of())

    assert found.chosen.id == "generic/default"
    assert found.chosen.agreement.kv_layout == "HND"
    assert found.chosen.provenance["kv_layout"] == VARIABLE
    (reason,) = [r for r in verdict(found, "flash/hopper").reasons if r.field == "kv_layout"]
    assert str(reason).endswith(f"kv_layout is set by {VARIABLE}")
    fix = verdict(found, "flash/hopper").fix
    assert dict(fix.engine) == {"kv_layout": "NHD"}
    assert str(fix) == f"kv_layout='HND' is set by {VARIABLE}: change that, or override it; request kv_layout='NHD'"
    assert f"set: kv_layout=HND by {VARIABLE}" in str(found)
    assert found.to_dict()["origins"] == {"kv_layout": VARIABLE}


def test_a_fix_works_under_the_setting(hnd, request_of):
    found = attnplug.explain(request_of())
    fix = verdict(found, "flash/hopper").fix

    wanted, device = fix.apply(found.requirements, found.device)

    assert attnplug.select(wanted, device, backend="flash/hopper").agreement.kv_layout == "NHD"


def test_what_no_candidate_serves_is_refused_not_dropped(world, request_of):
    world("flash", settings=settings_of("HND"))

    with pytest.raises(NoBackendError) as caught:
        attnplug.select(request_of())

    assert f"set: kv_layout=HND by {VARIABLE}" in str(caught.value)
    assert "request kv_layout='NHD'" in caught.value.fix


def test_requirements_come_before_the_setting(hnd, request_of):
    found = attnplug.explain(request_of(kv_layout="NHD"))

    assert found.chosen.id == "flash/hopper"
    assert found.to_dict()["origins"] == {}
    assert "kv_layout" not in found.chosen.provenance


def test_a_refused_requirement_is_not_blamed_on_the_setting(hnd, request_of):
    found = attnplug.explain(request_of(kv_layout="HND"))

    assert "is set by" not in str(found)
    assert VARIABLE not in str(verdict(found, "flash/hopper").fix)


def test_dense_layers_have_no_layout(hnd, request_of):
    found = attnplug.select(request_of(paged=False))

    assert found.id == "flash/hopper"
    assert found.agreement.kv_layout is None
    assert "kv_layout" not in found.provenance


def test_scopes_nest_and_end(hnd, request_of):
    seen = []

    def look():
        seen.append((attnplug.kv_cache_layout(), attnplug.select(request_of()).agreement.kv_layout))

    look()
    with attnplug.using(kv_layout="NHD"):
        look()
        inside = attnplug.select(request_of())
        with attnplug.using(kv_layout="HND"), attnplug.using(backend=["auto"]):
            look()
    look()

    assert seen == [("HND", "HND"), ("NHD", "NHD"), ("HND", "HND"), ("HND", "HND")]
    assert (inside.id, inside.provenance["kv_layout"]) == ("flash/hopper", "using")


@pytest.mark.parametrize("setting", LAYOUTS)
def test_the_innermost_scope_counts(world, request_of, setting):
    world("flash", "generic", settings=settings_of(setting))

    for outer, inner, wanted in product(LAYOUTS, repeat=3):
        with attnplug.using(kv_layout=outer), attnplug.using(kv_layout=inner):
            in_force = attnplug.kv_cache_layout()
            found = attnplug.select(request_of(kv_layout=wanted))

        assert in_force == (inner or outer or setting or "NHD")
        assert found.agreement.kv_layout == (wanted or in_force)


@pytest.mark.parametrize("layout", ["hnd", "HDN", "", 3])
def test_another_layout_is_refused(both, layout):
    with pytest.raises(SettingsError, match="one of 'NHD', 'HND'"), attnplug.using(kv_layout=layout):
        raise AssertionError


def test_the_request_is_remembered_as_it_was_made(hnd, request_of):
    wanted = request_of()

    first = attnplug.select(wanted)

    assert process.current_state().hot[wanted] is first
    assert attnplug.select(wanted) is first


def test_layers_with_one_request_under_the_setting_are_one_group(hnd, request_of):
    layers = {"a": request_of(), "b": request_of(kv_layout="HND"), "c": request_of(kv_layout="HND", sinks=True)}

    plan = attnplug.plan(layers, backend="generic")

    assert [group.layers for group in plan.groups] == [("a", "b"), ("c",)]
    assert plan.kv_layout == "HND"
    assert plan["a"].provenance["kv_layout"] == VARIABLE
    assert "kv_layout" not in plan["c"].provenance


def test_a_decision_travels(hnd, request_of):
    pytest.importorskip("torch", reason="torch is not installed")
    decision = attnplug.select(request_of())

    again = attnplug.Selection.from_dict(json.loads(json.dumps(decision.to_dict())))

    assert again.requirements.kv_layout == "HND"
    assert again.load().agreement.kv_layout == "HND"
    explanation = pickle.loads(pickle.dumps(attnplug.explain(request_of(), Device.cpu())))
    assert explanation.origins == (("kv_layout", VARIABLE),)


def test_it_is_a_batch_utility_too():
    batching = pytest.importorskip("attnplug.batching", reason="torch is not installed")

    assert batching.kv_cache_layout is attnplug.kv_cache_layout
    with pytest.raises(AttributeError, match="kv_cache_lay0ut"):
        _ = batching.kv_cache_lay0ut
