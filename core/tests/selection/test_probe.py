"""A refusal of a probe holds as far as the code of its reason goes, and no further; and a probe is called once."""

from __future__ import annotations

import json
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st

import attnplug
from attnplug.errors import NoBackendError, PluginLoadError
from attnplug.negotiation import probe_refusals
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process

pytest.importorskip("torch", reason="torch is not installed")

from core.tests.selection.test_load import rescanned

CALLS = []
"""What the probes of these tests were called with, in order."""

FINDING = "this flash was built without kernels for heads of 96"
FIX = "build it without FLASH_SMALL"
PROBE = """{source}
from attnplug import Reason
from core.tests.selection.test_probe import CALLS

@hookimpl
def attnplug_probe({arguments}):
    CALLS.append(({arguments},))
{body}
"""


def refuses(condition, code="probe", fix=FIX):
    return f"    if {condition}:\n        return Reason({code!r}, 'flash', None, {FINDING!r}, {fix!r})"


HEADS_OF_96 = refuses("agreement.requirements.head_size == 96")


def verdict(explanation, name="flash/hopper"):
    return next(v for v in explanation.verdicts if v.id == name)


@pytest.fixture(autouse=True)
def _no_bytecode(monkeypatch):
    """Python takes bytecode for current whose source was as long, in the same second: here sources change faster."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def probed(world, flash_manifest, plugin_source):
    """Return ``make(arguments, body)``: a process where flash, whose variant hopper is here, has such a probe."""
    CALLS.clear()

    def make(arguments, body, *, manifest=flash_manifest, **more):
        code = PROBE.format(source=plugin_source, arguments=arguments, body=body)
        return world("generic", flash=(manifest, code), missing=("flash-new", "flash-old"), **more)

    return make


@pytest.fixture
def without_96(probed):
    """A process where flash's library has no kernels for heads of 96, as only its probe knows."""
    return probed("variant, agreement, device", HEADS_OF_96)


class TestOneRequest:
    def test_its_refusal_leaves_the_others_alone(self, without_96, request_of):
        assert attnplug.load(request_of(head_size=96)).id == "generic/default"

        assert attnplug.select(request_of(head_size=128)).id == "flash/hopper"
        assert attnplug.load(request_of(head_size=128)).id == "flash/hopper"
        assert attnplug.explain(request_of(head_size=96)).chosen.id == "generic/default"

    def test_its_refusal_is_reported_with_its_own_fix(self, without_96, request_of):
        with pytest.raises(PluginLoadError) as caught:
            attnplug.load(request_of(head_size=96), backend="flash/hopper")
        found = verdict(attnplug.explain(request_of(head_size=96)))

        request = "head_size=96 num_q_heads=8 num_kv_heads=2 dtype=bfloat16 on cuda:9.0"
        assert caught.value.problem == f"the probe of 'flash/hopper' refuses {request}: {FINDING}"
        assert caught.value.fix == FIX
        assert (found.status, [(r.code, str(r)) for r in found.reasons]) == ("refused", [("probe", FINDING)])
        assert str(found.fix) == FIX
        assert str(attnplug.explain(request_of(head_size=96))).count(FIX) == 1
        with pytest.raises(NoBackendError, match=re.escape(f"flash/hopper: {FIX}")):
            attnplug.select(request_of(head_size=96), backend="flash/hopper")

    def test_a_refusal_without_a_fix_has_the_plain_one(self, probed, request_of):
        probed("agreement", refuses("True", fix=""))
        attnplug.load(request_of())

        assert str(verdict(attnplug.explain(request_of())).fix) == "choose another backend"

    def test_what_was_refused_is_not_probed_again(self, without_96, request_of):
        decided = attnplug.select(request_of(head_size=96))
        attnplug.load(request_of(head_size=96))
        generation, wanted = without_96.generation, len(CALLS)

        for _ in range(3):
            assert attnplug.load(request_of(head_size=96)).id == "generic/default"
            with pytest.raises(PluginLoadError, match=FINDING):
                decided.load()
        assert (without_96.generation, len(CALLS), wanted) == (generation, 1, 1)

    def test_a_refresh_probes_again(self, without_96, request_of, monkeypatch):
        monkeypatch.setattr(process, "Registry", type("Scanned", (), {"scan": staticmethod(rescanned(without_96))}))
        attnplug.load(request_of(head_size=96), Device.cuda("9.0"))

        attnplug.refresh()

        assert attnplug.load(request_of(head_size=96), Device.cuda("9.0")).id == "generic/default"
        assert len(CALLS) == 2

    def test_other_options_are_another_request(self, probed, request_of):
        probed("agreement", refuses("agreement.options['splits'] == 2"))
        wanted = {"flash": {"splits": 2}}

        assert attnplug.load(request_of(), options=wanted).id == "generic/default"
        assert attnplug.select(request_of(), options={"flash": {"splits": 3}}).id == "flash/hopper"
        assert attnplug.load(request_of()).id == "flash/hopper"
        assert attnplug.select(request_of(), options=wanted).id == "generic/default"

    def test_an_option_that_equals_nothing_is_probed_once(self, probed, request_of, flash_manifest):
        manifest = f'{flash_manifest}[options.ratio]\ntype = "float"\ndefault = 1.0\nhelp = "a ratio"\n'
        probed("agreement", refuses("True"), manifest=manifest)

        with pytest.raises(PluginLoadError, match=FINDING):
            attnplug.load(request_of(), options={"flash": {"ratio": "nan"}})

    def test_under_the_strict_setting_it_is_raised(self, probed, request_of):
        probed("agreement", HEADS_OF_96, settings=Settings(strict=True))

        with pytest.raises(PluginLoadError, match=FINDING):
            attnplug.load(request_of(head_size=96))
        assert attnplug.load(request_of(head_size=128)).id == "flash/hopper"

    def test_the_decision_travels_with_the_verdict(self, without_96, request_of):
        decided = attnplug.load(request_of(head_size=96)).selection

        again = attnplug.Selection.from_dict(json.loads(json.dumps(decided.to_dict())))

        assert again == decided == pickle.loads(pickle.dumps(decided))
        assert str(verdict(again).fix) == FIX

    def test_threads_get_one_result(self, without_96, request_of):
        sizes = [96, 128, 96, 64] * 8
        with ThreadPoolExecutor(8) as pool:
            loaded = list(pool.map(lambda size: attnplug.load(request_of(head_size=size)).id, sizes))

        assert loaded == ["generic/default" if size == 96 else "flash/hopper" for size in sizes]
        assert len(list(without_96.refusals["flash/hopper"])) == 1


class TestHowFarItGoes:
    """The code of the reason says what is refused, whatever the probe takes."""

    @pytest.mark.parametrize("arguments", ["variant, device", "variant, agreement, device"])
    def test_one_of_the_device_refuses_every_request_there(self, probed, request_of, arguments):
        probed(arguments, refuses("device.compute_capability.major == 9", "probe_device"))
        before = attnplug.select(request_of(sliding_window=8))

        assert attnplug.load(request_of()).id == "generic/default"
        assert attnplug.select(request_of(head_size=128)).id == "generic/default"
        found = verdict(attnplug.explain(request_of(head_size=128, alibi="linear")))
        assert [reason.code for reason in found.reasons] == ["undeclared", "probe_device"]
        with pytest.raises(PluginLoadError) as caught:
            before.load()
        assert caught.value.problem == f"the probe of 'flash/hopper' refuses cuda:9.0: {FINDING}"
        assert len(CALLS) == 1

    @pytest.mark.parametrize(("code", "elsewhere"), [("probe", "flash/hopper"), ("probe_device", "flash/hopper")])
    def test_neither_refuses_another_device(self, probed, request_of, flash_manifest, code, elsewhere):
        wide = flash_manifest.replace(
            'compute_capability = "9.0", block', 'compute_capability = { min = "8.0" }, block'
        )
        probed("agreement", refuses("agreement.requirements.head_size == 96", code), manifest=wide)
        attnplug.load(request_of(head_size=96), Device.cuda("9.0"))

        assert attnplug.select(request_of(head_size=96), Device.cuda("9.0")).id == "generic/default"
        assert attnplug.select(request_of(head_size=96), Device.cuda("8.0")).id == elsewhere

    def test_one_of_a_request_leaves_other_requests_alone(self, probed, request_of):
        probed("variant", refuses("len(CALLS) == 1"))
        attnplug.load(request_of(head_size=96))

        assert attnplug.load(request_of(head_size=128)).id == "flash/hopper"

    @pytest.mark.parametrize("arguments", ["variant", "variant, agreement, device"])
    def test_broken_refuses_everything(self, probed, request_of, arguments):
        probed(arguments, refuses("True", "broken"))
        with pytest.raises(PluginLoadError) as caught:
            attnplug.load(request_of(head_size=96), backend="flash/hopper")
        found = verdict(attnplug.explain(request_of(head_size=128), Device.cuda("8.0")))

        assert caught.value.problem == f"the probe of 'flash/hopper' refuses this machine: {FINDING}"
        assert caught.value.fix == FIX
        assert (found.status, [str(reason) for reason in found.reasons][-1]) == ("broken", FINDING)
        assert str(found.fix) == f"{FIX}, then attnplug.refresh()"

    def test_what_it_raises_is_of_everything_too(self, probed, request_of):
        probed("variant, agreement, device", "    raise OSError('no nvcc')")
        attnplug.load(request_of())

        assert verdict(attnplug.explain(request_of(head_size=128))).status == "broken"
        assert len(CALLS) == 1


class TestOthers:
    def test_a_fix_that_leads_to_a_refusal_names_its_fix_too(self, without_96, request_of):
        attnplug.load(request_of(head_size=96))

        found = verdict(attnplug.explain(request_of(head_size=96, return_lse=True)))
        other = verdict(attnplug.explain(request_of(head_size=128, return_lse=True)))

        assert str(found.fix) == f"{FIX}; request return_lse=False"
        assert str(other.fix) == "request return_lse=False"

    def test_a_plan_leaves_out_what_was_refused_on_its_terms(self, probed, request_of):
        """The first choice is common by blocks of 32, which the probe refuses; the plan after that is another one."""
        probed("agreement", refuses("agreement.block_size == 32 and agreement.requirements.sliding_window"))
        layers = {"a": request_of(block_size=32), "b": request_of(sliding_window=64)}
        with pytest.raises(PluginLoadError, match=FINDING):
            attnplug.plan(layers)["b"].load()

        second = attnplug.plan(layers)

        assert (second["a"].id, second["b"].id) == ("flash/hopper", "generic/default")
        assert second.block_size == 32
        assert attnplug.select(layers["b"]).id == "flash/hopper", "in blocks of 16, which were not refused"


def test_memory_is_bounded(without_96, request_of, monkeypatch):
    monkeypatch.setattr(probe_refusals, "_MOST", 4)
    for window in range(1, 20):
        attnplug.load(request_of(head_size=96, sliding_window=window))

    kept = without_96.refusals["flash/hopper"]

    assert [each.agreement.requirements.sliding_window for each in kept] == [16, 17, 18, 19]


REFUSED = st.sets(st.sampled_from([64, 96, 128]))


@how(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REFUSED, st.lists(st.sampled_from([64, 96, 128]), min_size=1, max_size=8))
def test_in_any_order_each_request_gets_its_probe_result(probed, request_of, refused, sizes):
    forget()
    probed("agreement", refuses(f"agreement.requirements.head_size in {refused!r}"))

    for size in sizes:
        expected = "generic/default" if size in refused else "flash/hopper"
        assert attnplug.load(request_of(head_size=size)).id == expected
        assert attnplug.select(request_of(head_size=size)).id == expected
    wanted = [agreement.requirements.head_size for (agreement,) in CALLS]
    assert all(wanted.count(size) == 1 for size in refused & set(sizes))


def forget():
    """Have the next process import the plugins anew."""
    CALLS.clear()
    for name in [name for name in sys.modules if name.startswith("scratch_")]:
        del sys.modules[name]
