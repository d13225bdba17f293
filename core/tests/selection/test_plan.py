"""A whole model: common block size and layout, least graph level, groups."""

from __future__ import annotations

import json
import pickle
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import attnplug
from attnplug.errors import NoBackendError, RequirementsError, UnknownLayerError
from attnplug.manifest.reader import parse_manifest
from attnplug.negotiation.candidate import CACHE_TERMS, make_candidate
from attnplug.negotiation.common_cache import share_terms
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.matching import Request, negotiate, passes, passing_terms
from attnplug.request.device import Device
from attnplug.selection.plan import Plan


def test_layers_with_the_same_request_form_a_group(both, request_of):
    layers = {f"layers.{i}": request_of(sliding_window=128 if i % 2 else None) for i in range(5)}

    plan = attnplug.plan(layers)

    assert [group.layers for group in plan.groups] == [("layers.0", "layers.2", "layers.4"), ("layers.1", "layers.3")]
    assert plan["layers.3"].requirements.sliding_window == 128
    assert {group.selection.id for group in plan.groups} == {"flash/hopper"}


def test_a_plan_names_its_layers_and_prints_like_an_explanation(both, request_of):
    layers = {f"layers.{i}": request_of(sliding_window=128 if i % 2 else None) for i in range(12)}
    plan = attnplug.plan(layers)

    assert (len(plan), set(plan), "layers.3" in plan, "zz" in plan) == (12, set(layers), True, False)
    with pytest.raises(UnknownLayerError, match=r"the plan is for 'layers\.0', .* and 4 more") as caught:
        plan["layers.33"]
    assert isinstance(caught.value, KeyError)
    assert "did you mean 'layers." in caught.value.problem
    found = str(plan)
    assert found.startswith(
        "layers: 12 in 2 groups\ndevice: cuda:9.0\n"
        "common: block_size=16 kv_layout=NHD kv_cache_form=joint cudagraph=always\n\n"
        "6 layers: layers.0, layers.2"
    )
    assert "\n    chosen: flash/hopper (the variant that its plugin prefers)\n    block_size=16 " in found
    assert "sliding_window=128" in found
    assert max(map(len, found.splitlines())) <= 120


def test_invalid_layers_are_reported_briefly(request_of):
    with pytest.raises(RequirementsError) as caught:
        attnplug.plan({str(i): attnplug for i in range(1000)})
    assert len(str(caught.value)) < 1000


def test_paged_layers_share_block_size_and_layout(both, request_of):
    plan = attnplug.plan({"a": request_of(), "b": request_of(sinks=True), "c": request_of()})

    assert [plan[name].id for name in "abc"] == ["flash/hopper", "flash/new", "flash/hopper"]
    assert {plan[name].agreement.block_size for name in "abc"} == {16} == {plan.block_size}
    assert plan.kv_layout == "NHD"
    assert plan.kv_cache_form == "joint"


def test_the_smaller_group_yields(world, request_of, flash_manifest):
    coarse = flash_manifest.replace("block_size = [128, { multiple_of = 16 }]", "block_size = 24")
    world("generic", flash=(coarse, None))

    plan = attnplug.plan({"a": request_of(), "b": request_of(), "c": request_of(sinks=True)})

    assert plan["a"].id == "flash/hopper"
    assert plan["c"].id == "generic/default"
    assert plan["c"].decided_by == "common block size and layout"
    assert plan.block_size == 16


def test_the_weakest_group_sets_the_graph_level(both, request_of):
    plan = attnplug.plan({"a": request_of(), "b": request_of(sinks=True)})

    assert plan.cudagraph == "never"
    assert plan.weakest.layers == ("b",)
    assert attnplug.plan({"a": request_of(), "b": request_of(alibi="linear")}).cudagraph == "uniform_batch"


def test_layers_without_a_cache_do_not_take_part(both, request_of):
    plan = attnplug.plan({"a": request_of(paged=False), "b": request_of(alibi="linear")})

    assert plan["a"].agreement.block_size is None
    assert plan.block_size == 256


def test_nothing_in_common_is_an_error_with_all_sizes(world, request_of, flash_manifest):
    world(flash=(flash_manifest.replace("block_size = [128, { multiple_of = 16 }]", "block_size = 24"), None))

    with pytest.raises(NoBackendError) as caught:
        attnplug.plan({"a": request_of(alibi="linear"), "b": request_of(sinks=True)})

    assert "a (1 layers), flash/old: blocks of 256, 512, 768, 1024; NHD" in str(caught.value)
    assert "b (1 layers), flash/new: blocks of 24; NHD" in str(caught.value)


def test_a_layer_that_nothing_serves_is_named(both, request_of):
    with pytest.raises(NoBackendError, match=r"of layer 'b'"):
        attnplug.plan({"a": request_of(), "b": request_of(custom_mask=True)})


def test_no_layers_are_no_plan(both):
    with pytest.raises(RequirementsError, match="no layers"):
        attnplug.plan({})


@pytest.mark.parametrize(
    "layers",
    [[1], {"a": {}}, {1: attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="bfloat16")}],
)
def test_other_objects_are_refused_as_layers(both, layers):
    with pytest.raises(RequirementsError, match="by name"):
        attnplug.plan(layers)


def test_scopes_apply(both, request_of):
    with attnplug.using(backend="flash/old"):
        plan = attnplug.plan({"a": request_of()})

    assert (plan["a"].id, plan.block_size) == ("flash/old", 256)
    assert attnplug.plan({"a": request_of()}, Device.cuda("8.0"))["a"].id == "flash/old"


def test_a_plan_travels(both, request_of):
    pytest.importorskip("torch", reason="torch is not installed")
    plan = attnplug.plan({"a": request_of(), "b": request_of(sinks=True)})

    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))

    assert again == plan == pickle.loads(pickle.dumps(plan))
    assert again["b"].load().id == "flash/new"


SIZES = [
    "{ multiple_of = 16 }",
    "[128, { multiple_of = 64 }]",
    "{ multiple_of = 48, max = 480 }",
    "[32, 96]",
    "{ min = 1 }",
    "7",
]
LAYOUTS = ['"NHD"', '["HND", "NHD"]', '"HND"']


RULES = ["", '[[rules]]\nwhen = { kv_layout = "HND" }\nneed = { block_size = { min = 64 } }\nbecause = "tiles"\n']


def candidate(name, size, layout, rule=""):
    manifest = parse_manifest(
        f'api = "1.0"\nbackend = {{ name = "{name}", summary = "s" }}\n'
        '[supports]\ndevice_type = "cpu"\ndtype = "float32"\n'
        f'head_size = 64\nfeatures = ["paged"]\nblock_size = {size}\nkv_layout = {layout}\n{rule}'
    )
    return make_candidate(manifest, manifest.variants[0], lambda _: None)


offers = st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(LAYOUTS)), min_size=1, max_size=3)


@given(st.lists(offers, min_size=1, max_size=3))
def test_shared_terms_pass_everywhere_or_none_exist(groups):
    request = Request(attnplug.Requirements(head_size=64, num_q_heads=1, num_kv_heads=1, dtype="float32"), Device.cpu())
    offered = [[candidate(f"b{i}", *offer) for i, offer in enumerate(group)] for group in groups]
    union = [{terms for c in candidates for terms in accepted_terms(c, request)} for candidates in offered]

    shared = share_terms([[evaluate(c, request) for c in candidates] for candidates in offered])

    if shared is None:
        assert not set.intersection(*union) or not _some_choice(offered, request)
    else:
        for picked in shared:
            pinned = Request(
                request.requirements.evolve(**{name: picked.terms[name] for name in CACHE_TERMS}), Device.cpu()
            )
            assert not negotiate(picked.candidate, pinned).objections
        assert len({tuple(map(picked.terms.get, CACHE_TERMS)) for picked in shared}) == 1


@given(
    st.sampled_from(SIZES),
    st.sampled_from(LAYOUTS),
    st.sampled_from(RULES),
    st.fixed_dictionaries({}, optional={"block_size": st.sampled_from([16, 64]), "kv_layout": st.just("HND")}),
)
def test_terms_pass_alone_where_they_are_among_all(size, layout, rule, given_terms):
    layer = attnplug.Requirements(head_size=64, num_q_heads=1, num_kv_heads=1, dtype="float32", **given_terms)
    one, request = candidate("b", size, layout, rule), Request(layer, Device.cpu())
    outcome = negotiate(one, request)
    assume(not outcome.objections)
    every = set(passing_terms(one, request, outcome.terms))
    sizes, forms = (1, 7, 16, 32, 48, 64, 96, 128, 240, 256), {form for _, _, form in every} | {"split"}

    passing = {each for each in product(sizes, ("NHD", "HND"), forms) if passes(one, request, outcome.terms, each)}

    assert passing == {each for each in every if each[0] in sizes}


def accepted_terms(candidate, request):
    return passing_terms(candidate, request, negotiate(candidate, request).terms)


def _some_choice(offered, request):
    """Whether any choice of candidates has common terms, by trying them all."""
    found = [set()]
    first = True
    for candidates in offered:
        allowed = [set(accepted_terms(c, request)) for c in candidates]
        found = allowed if first else [f & a for f in found for a in allowed if f & a]
        first = False
    return any(found)
