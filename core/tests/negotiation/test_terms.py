"""The terms of an agreement: block size, layout and form of the KV cache, graph level, and whether lengths are read."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from attnplug.errors import DecisionError
from attnplug.negotiation import common_cache, matching
from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.candidate import CACHE_TERMS, TERMS
from attnplug.negotiation.common_cache import share_terms
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.matching import Request, most_evaluations, negotiate
from attnplug.negotiation.verdict import Verdict
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements
from attnplug.selection.explanation import detail
from core.tests.negotiation.test_brute_force import (
    CONDITIONS,
    DEVICES,
    LEVELS,
    ask,
    candidate,
    manifests,
    plain_requests,
    requests,
    settled,
    tables,
)

SUPPORTS = {
    "head_size": {"min": 1},
    "dtype": "bfloat16",
    "device_type": "cpu",
    "block_size": {"multiple_of": 16},
    "kv_layout": ["NHD", "HND"],
    "cudagraph": {"max": "uniform_batch"},
    "features": ["paged"],
}
NHD_HAS_NO_GRAPHS = {"when": {"kv_layout": "NHD", "cudagraph": True}, "because": "the strides change"}
WANTED = Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16")


def terms_of(offered, **wanted):
    return negotiate(offered, Request(WANTED.evolve(**wanted), Device.cpu())).terms


def offer(*rules, **supports):
    return candidate({"supports": {**SUPPORTS, **supports}, "rules": list(rules)})


class TestLevel:
    """The graph level is as high as it goes for a layout, and a layout is as preferred as it goes for a level."""

    def test_without_a_level_the_preferred_layout_stays(self):
        terms = terms_of(offer(NHD_HAS_NO_GRAPHS))

        assert (terms["kv_layout"], terms["cudagraph"]) == ("NHD", "never")

    @pytest.mark.parametrize("level", ["single_token_decode", "uniform_batch"])
    def test_a_level_that_is_named_takes_the_layout_that_admits_it(self, level):
        terms = terms_of(offer(NHD_HAS_NO_GRAPHS), cudagraph=level)

        assert (terms["kv_layout"], terms["cudagraph"]) == ("HND", "uniform_batch")

    def test_a_preferred_layout_that_costs_the_level_says_so(self):
        found = evaluate(offer(NHD_HAS_NO_GRAPHS), Request(WANTED, Device.cpu()))

        text = "kv_layout=NHD keeps cudagraph at never: request cudagraph=uniform_batch to get kv_layout=HND"
        assert text in list(detail(found.verdict()))
        assert Verdict.from_dict(json.loads(json.dumps(found.verdict().to_dict()))).level_cost == text
        assert not evaluate(offer(), Request(WANTED, Device.cpu())).level_cost
        named = Request(WANTED.evolve(kv_layout="HND"), Device.cpu())
        assert not evaluate(offer(NHD_HAS_NO_GRAPHS), named).level_cost

    def test_lengths_are_not_read_for_a_higher_level(self):
        rule = {"when": {"cudagraph": True}, "need": {"seq_lens_cpu_kind": "exact"}, "because": "fixed sizes"}
        offered = offer(rule, seq_lens_cpu_kind="upper_bound")

        terms = terms_of(offered, seq_lens_cpu_kind="upper_bound")
        assert (terms["cudagraph"], terms["reads_lengths"]) == ("never", False)
        terms = terms_of(offered, seq_lens_cpu_kind="upper_bound", cudagraph="uniform_batch")
        assert (terms["cudagraph"], terms["reads_lengths"]) == ("uniform_batch", True)

    def test_lengths_are_not_read_for_a_preferred_layout(self):
        rule = {"when": {"kv_layout": "NHD"}, "need": {"seq_lens_cpu_kind": "exact"}, "because": "a reason"}

        terms = terms_of(offer(rule, seq_lens_cpu_kind="upper_bound"), seq_lens_cpu_kind="upper_bound")

        assert (terms["kv_layout"], terms["reads_lengths"]) == ("HND", False)

    def test_a_late_block_size_names_the_level_that_all_of_them_have(self):
        rule = {"when": {"block_size": {"max": 32}, "cudagraph": True}, "because": "small blocks"}
        request = Request(WANTED.evolve(late=("block_size",)), Device.cpu())

        agreed = evaluate(offer(rule), request).agreement

        assert (str(agreed.block_sizes), agreed.cudagraph) == ("multiples of 16 from 16 up to 1024", "never")
        assert terms_of(offer(rule), block_size=48)["cudagraph"] == "uniform_batch"
        graphs = Request(WANTED.evolve(late=("block_size",), cudagraph="uniform_batch"), Device.cpu())
        assert str(evaluate(offer(rule), graphs).agreement.block_sizes) == "multiples of 16 from 48 up to 1024"


def test_terms_that_no_rule_mentions_have_one_choice(monkeypatch):
    tried = []
    evaluated = matching._refusing
    monkeypatch.setattr(matching, "_refusing", lambda rules, *rest: tried.append(rules) or evaluated(rules, *rest))
    refused = [{"when": {"kv_layout": layout}, "because": "a reason"} for layout in ("NHD", "HND")]

    assert not terms_of(offer(*refused))

    assert len([rules for rules in tried if rules]) == 3  # two layouts, and the reasons of the first


class TestWork:
    """All choices times the rules about them are bounded, whatever the order in which they are tried."""

    RULES = tuple({"when": {"block_size": {"min": 2000 + n}}, "because": "a reason"} for n in range(10))

    @pytest.mark.parametrize("layouts", [["NHD", "HND"], ["HND", "NHD"]])
    def test_beyond_the_bound_is_a_reason_of_its_own(self, layouts):
        rules = (*self.RULES, {"when": {"kv_layout": "NHD", "block_size": 16}, "because": "a reason"})
        offered = offer(*rules, block_size={"min": 1}, kv_layout=layouts)
        assert most_evaluations(offered.manifest, offered.variant) == 2 * 1024 * 11 > matching.EVALUATIONS

        found = evaluate(offered, Request(WANTED, Device.cpu()))
        reason = found.reasons[0]

        assert (reason.code, reason.field, len(found.reasons)) == ("work", "block_size and kv_layout", 1)
        assert str(reason).startswith(
            "its rules about block_size, kv_layout need 22,528 evaluations for this request, and 20,000 are made: "
        )
        assert Verdict.from_dict(json.loads(json.dumps(found.verdict().to_dict()))).reasons == found.reasons

    def test_what_is_requested_takes_no_choice(self):
        paged = {"when": {"paged": False}, "because": "a reason"}
        offered = offer(*self.RULES * 3, paged, block_size={"min": 1})

        fix = evaluate(offered, Request(WANTED, Device.cpu())).fix

        assert dict(fix.engine) == {"block_size": 1}
        assert terms_of(offered, **fix.engine)["block_size"] == 1

    def test_what_is_negotiated_together_is_within_it_too(self, monkeypatch):
        offered = offer({"when": {"block_size": 16, "kv_layout": "NHD"}, "because": "a reason"})
        found = evaluate(offered, Request(WANTED, Device.cpu()))
        monkeypatch.setattr(common_cache, "TRIES", 3)

        assert [each.terms["block_size"] for each in share_terms([[found], [found], [found]])] == [16] * 3
        assert share_terms([[found]] * 4) is None

    def test_a_plan_that_shares_nothing_ends(self):
        """As many groups as deep: without what is known to fail, 40 groups of 2 candidates take 2**40 tries."""
        sizes = [evaluate(offer(block_size=[n], kv_layout=["NHD"]), Request(WANTED, Device.cpu())) for n in (16, 32)]
        both = evaluate(offer(block_size=[16, 32], kv_layout=["NHD"]), Request(WANTED, Device.cpu()))
        third = evaluate(offer(block_size=[48], kv_layout=["NHD"]), Request(WANTED, Device.cpu()))

        assert share_terms([*[[both, *sizes]] * 40, [third]]) is None
        assert len(share_terms([[both, *sizes]] * 2000)) == 2000


@pytest.mark.parametrize("version", [None, 1, 3, "2"])
def test_terms_of_another_version_are_refused_by_name(version):
    data = evaluate(offer(), Request(WANTED, Device.cpu())).agreement.to_dict()
    assert Agreement.from_dict(data).to_dict() == data
    changed = {**data, "version": version}
    if version is None:
        del changed["version"]  # as before there was one

    with pytest.raises(DecisionError, match=rf"terms of version {version or 1!r} was received"):
        Agreement.from_dict(changed)


# --- random manifests whose rules are about terms ---

ABOUT_TERMS = {name: CONDITIONS[name] for name in (*CACHE_TERMS, "cudagraph")}


@st.composite
def manifests_about_terms(draw):
    raw = draw(manifests())
    supports = raw["supports"]
    # So that most requests are served, and terms decide.
    supports |= {name: SUPPORTS[name] for name in ("head_size", "block_size")}
    supports |= {"device_type": ["cpu", "cuda"], "dtype": ["bfloat16", "float16", "float32"]}
    supports |= {
        "kv_layout": draw(st.permutations(["NHD", "HND"])),
        "cudagraph": {"max": draw(st.sampled_from(LEVELS))},
    }
    supports.pop("compute_capability", None)
    supports["features"] = sorted({*supports["features"], "paged"} - {"cudagraph"})
    for _ in range(draw(st.integers(1, 3))):
        rule = {"when": draw(tables(ABOUT_TERMS, 2)), "because": "a reason"}
        if draw(st.booleans()):
            rule["need"] = draw(tables(ABOUT_TERMS, 2))
        raw["rules"].append(rule)
    return raw


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(
    manifests_about_terms(),
    st.lists(plain_requests | requests, min_size=1, max_size=4),
    st.sampled_from(DEVICES),
    st.booleans(),
)
@example(
    {"supports": SUPPORTS, "rules": [NHD_HAS_NO_GRAPHS]}, [{"head_size": 64, "dtype": "bfloat16"}], Device.cpu(), False
)
def test_what_is_agreed_on_can_be_requested_by_name(raw, wanted, device, late):
    offered = candidate(raw)
    for values in wanted:
        requirements = ask(values)
        if late and requirements.paged and requirements.block_size is None:
            requirements = requirements.evolve(late=("block_size",))
        agreed = evaluate(offered, Request(requirements, device)).agreement
        event("refused" if agreed is None else agreed.cudagraph)
        if not requirements.late:
            found = agreed and {name: getattr(agreed, name) for name in TERMS}
            assert found == settled(raw, requirements, device)
        if agreed is None:
            continue
        names = [name for name in (*CACHE_TERMS, "cudagraph") if getattr(agreed, name) is not None]

        named = requirements.evolve(**{name: getattr(agreed, name) for name in names})
        again = evaluate(offered, Request(named, device)).agreement

        assert again is not None
        assert {name: getattr(again, name) for name in names} == {name: getattr(agreed, name) for name in names}
