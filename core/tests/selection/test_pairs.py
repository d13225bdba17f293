"""Routed pairs: pure decodes on one candidate, all other batches on another, decided and loaded as one."""

from __future__ import annotations

import json
import pickle
import re

import pytest
from attrs import evolve

import attnplug
from attnplug.errors import (
    DecisionError,
    NoBackendError,
    NotNegotiatedError,
    PluginLoadError,
    UnknownBackendError,
)
from attnplug.evidence import MeasuredTime, ProfileEntry, dump_entries
from attnplug.request import Device
from attnplug.request.settings import Settings
from attnplug.selection import options, process
from attnplug.selection.plan import Plan
from attnplug.selection.selection import Selection

DECODES = """\
api = "1.0"
backend = { name = "decodes", aliases = ["DECODES"], summary = "a kernel for decodes alone" }
[supports]
device_type = "cuda"
compute_capability = { min = "8.0" }
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
phases = ["decode"]
block_size = [64, 32]
kv_cache_dtype = ["bfloat16", "fp8_e4m3"]
features = ["paged", "return_lse"]
[[rules]]
when = { kv_cache_dtype = "fp8_e4m3", unquantized_queries = true }
because = "the kernel reads queries of the dtype of the KV cache"
[variants.one]
supports = { cudagraph = { max = "uniform_batch" } }
"""
WIDE = """\
api = "1.0"
backend = { name = "wide", summary = "two kernels for all batches" }
[supports]
device_type = "cuda"
compute_capability = { min = "8.0" }
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
kv_cache_dtype = ["bfloat16", "fp8_e4m3"]
features = ["paged", "return_lse", "sliding_window", "batch_invariant"]
[variants.coarse]
supports = { block_size = { multiple_of = 128 }, cudagraph = { max = "always" } }
[variants.fine]
supports = { block_size = [16, { multiple_of = 32 }], cudagraph = { max = "always" } }
[[prefer]]
order = ["coarse", "fine"]
because = "measured"
"""
PAIR = "decodes/one+wide/fine"


@pytest.fixture
def request_of():
    def make(**values):
        usual = {"head_size": 128, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16", "paged": True}
        return attnplug.Requirements(**{name: value for name, value in (usual | values).items() if value is not None})

    return make


@pytest.fixture
def sides(world):
    def make(*names, decodes=DECODES, wide=WIDE, **settings):
        return world(*names, decodes=(decodes, None), wide=(wide, None), **settings)

    make()
    return make


def reasons_of(requirements, backend="decodes+wide", **keywords):
    with pytest.raises(NoBackendError) as caught:
        attnplug.select(requirements, backend=backend, **keywords)
    verdict = next(each for each in caught.value.explanation.verdicts if "+" in each.id)
    assert verdict.status in {"refused", "broken"}
    return [str(reason) for reason in verdict.reasons], str(verdict.fix)


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decodes+wide", "DECODES+wide/fine", PAIR])
def test_a_pair_is_chosen_by_name(sides, request_of, name):
    """Its terms are common to both: the first variant of `wide` shares no block size with `decodes`."""
    found = attnplug.select(request_of(), backend=name)

    assert (found.id, found.backend, found.variant) == (PAIR, "decodes+wide", "one+fine")
    assert (found.agreement.block_size, found.agreement.cudagraph) == (64, "always")
    assert {role: one.id for role, one in found.roles.items()} == {"decode": "decodes/one", "rest": "wide/fine"}
    assert {one.agreement.block_size for one in found.roles.values()} == {64}
    assert [one.agreement.requirements.phases for one in found.roles.values()] == [("decode",), ("prefill", "decode")]
    assert found.roles["rest"].agreement.cudagraph == "always"
    assert found.distribution == "dist-decodes 1.0 and dist-wide 1.0"
    assert found.roles["decode"].distribution == "dist-decodes 1.0"
    assert attnplug.select(request_of(), backend="wide").roles == {}


def test_an_explanation_shows_both_and_where_the_pair_comes_from(sides, request_of):
    sides(settings=Settings(backend=(PAIR,), sources={"backend": "environment variable ATTNPLUG_BACKEND"}))
    found = attnplug.explain(request_of())

    assert found.chosen.provenance["backend"] == "environment variable ATTNPLUG_BACKEND"
    assert [(each.id, each.status) for each in found.verdicts if each.status != "absent"] == [
        (PAIR, "chosen"),
        ("decodes/one", "chosen"),
        ("wide/fine", "chosen"),
        ("wide/coarse", "eligible"),
    ]
    text = str(found)
    assert f"permitted: {PAIR}" in text
    assert "routed: pure decodes to decodes/one, all other batches to wide/fine" in text


def test_the_environment_names_a_pair(sides, request_of):
    settings = Settings.read({"ATTNPLUG_BACKEND": "decodes+wide, auto", "ATTNPLUG_CONFIG": ""}, None)
    sides(settings=settings)
    assert attnplug.select(request_of()).id == PAIR


def test_a_pair_has_a_place_in_a_list(sides, request_of):
    sides("generic")
    wanted = request_of(sliding_window=8)  # which `decodes` refuses

    assert attnplug.select(request_of(), backend=["decodes+wide", "auto"]).id == PAIR
    assert attnplug.select(wanted, backend=["decodes+wide", "wide/fine"]).id == "wide/fine"
    assert attnplug.select(request_of(), backend=["generic", "decodes+wide"]).id == "generic/default"
    with attnplug.using(backend="decodes+wide"):
        assert attnplug.select(request_of()).id == PAIR


@pytest.mark.parametrize("changes", [{"paged": False}, {"phases": ("prefill",)}])
def test_without_decodes_the_other_candidate_serves_alone(sides, request_of, changes):
    wanted = request_of(**changes)
    assert attnplug.select(wanted, backend="decodes+wide/fine").id == "wide/fine"


@pytest.mark.parametrize("name", ["decodes+", "+wide", "decodes+wide+wide", "auto+wide", "decodes+auto"])
def test_a_pair_has_two_names(sides, request_of, name):
    with pytest.raises(UnknownBackendError, match=r"write 'flashmla\+flash_attn', for example"):
        attnplug.select(request_of(), backend=name)


def test_a_name_of_a_pair_is_checked_like_any_other(sides, request_of):
    with pytest.raises(UnknownBackendError, match="'wode' was requested; did you mean 'wide'"):
        attnplug.select(request_of(), backend="decodes+wode")
    with pytest.raises(UnknownBackendError, match="'wide' has the variants coarse, fine"):
        attnplug.select(request_of(), backend="decodes+wide/fin")


def test_a_pair_of_what_is_absent_is_none(world, request_of):
    world(wide=(WIDE, None))
    with pytest.raises(NoBackendError):
        attnplug.select(request_of(), backend="flashmla/sgl+wide")


# --- what has to agree ------------------------------------------------------------------------------------------------


def test_a_term_that_differs_is_named(sides, request_of):
    reasons, fix = reasons_of(request_of(), "decodes+wide/coarse")
    assert len(reasons) == 1
    assert reasons[0].startswith(
        "no common block_size of one KV cache: decodes/one has 64, 32; wide/coarse has 128, 256, 384,"
    )
    assert fix == "name 'wide/coarse' alone"

    sides(wide=WIDE.replace("[supports]", '[supports]\nkv_layout = "HND"'))
    reasons, _ = reasons_of(request_of(), "decodes+wide/fine")
    assert reasons == ["no common kv_layout of one KV cache: decodes/one has NHD; wide/fine has HND"]


def test_combinations_that_differ_are_named(sides, request_of):
    rule = """[[rules]]
when = { block_size = %s, kv_layout = "%s" }
because = "no kernel"
"""
    layouts = '[supports]\nkv_layout = ["NHD", "HND"]\n'
    ruled = [
        text.replace("[supports]\n", layouts).replace("[variants", rules + "[variants", 1)
        for text, rules in (
            (DECODES, rule % (64, "HND") + rule % (32, "NHD")),
            (WIDE, rule % (64, "NHD") + rule % (32, "HND")),
        )
    ]
    sides(decodes=ruled[0], wide=ruled[1])
    reasons, _ = reasons_of(request_of(), "decodes+wide/fine")
    assert len(reasons) == 1
    assert reasons[0].startswith("no common block_size and kv_layout and kv_cache_form of one KV cache")


def test_batch_invariance_is_refused(sides, request_of):
    sides(decodes=DECODES.replace('"paged"', '"paged", "batch_invariant"'))
    reasons, fix = reasons_of(request_of(batch_invariant=True))
    assert "a request's result would depend on the batch" in reasons[0]
    assert fix.startswith("name 'wide/")


def test_the_dtype_of_queries_has_to_agree(sides, request_of):
    """One of them refuses requests that queries are not quantized: it quantizes them."""
    reasons, _ = reasons_of(request_of(kv_cache_dtype="fp8_e4m3"), PAIR)
    assert len(reasons) == 1
    assert reasons[0].startswith("decodes/one quantizes queries to the dtype of the KV cache, and wide/fine keeps them")
    assert attnplug.select(request_of(), backend=PAIR).id == PAIR  # a KV cache that is not quantized

    sides(decodes=DECODES.replace("unquantized_queries = true", "sinks = true"))
    assert attnplug.select(request_of(kv_cache_dtype="fp8_e4m3"), backend=PAIR).id == PAIR


def test_both_have_to_serve_the_request(sides, request_of):
    reasons, fix = reasons_of(request_of(sliding_window=8), PAIR)
    assert reasons == ["decodes/one, for pure decodes: does not support sliding_window=8"]
    assert fix == "none: this variant does not support sliding_window=8"

    reasons, _ = reasons_of(request_of(), "wide+decodes")
    assert len(reasons) == 1
    assert reasons[0].startswith("decodes/one, for all other batches: does not support phases=")


def test_a_pair_of_one_candidate_is_refused(sides, request_of):
    reasons, _ = reasons_of(request_of(), "wide/fine+wide/fine")
    assert reasons == ["wide/fine is named for both roles: name it alone"]
    assert attnplug.select(request_of(), backend="wide/fine+wide/coarse").agreement.block_size == 128


def test_what_is_missing_is_named(sides, request_of):
    sides(decodes=DECODES.replace("[variants.one]", '[variants.one]\nrequires = ["fast-decodes >=1"]'))
    with pytest.raises(NoBackendError, match="fast-decodes >=1 is required and not installed") as caught:
        attnplug.select(request_of(), backend=PAIR)
    assert "decodes/one+wide/fine: pip install 'fast-decodes >=1'" in caught.value.fix

    found = attnplug.explain(request_of(), backend=PAIR, assume_installed=True)
    assert found.chosen.id == PAIR
    assert found.needs == ("pip install 'fast-decodes >=1'",)


# --- by a profile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("microseconds", "expected"),
    [
        ({PAIR: 97, "wide/fine": 100, "wide/coarse": 120}, PAIR),
        ({PAIR: 99, "wide/fine": 100, "wide/coarse": 120}, "wide/fine"),  # within the margin
        ({PAIR: 97, "wide/coarse": 98, "wide/fine": 120}, "wide/coarse"),  # of the best, not of the pair's own two
        ({PAIR: 97}, "wide/coarse"),  # a gain over nothing
        ({"wide/fine": 100, "wide/coarse": 120}, "wide/fine"),
    ],
)
def test_a_measured_pair_wins_by_more_than_its_margin(sides, request_of, tmp_path, microseconds, expected):
    lines = [f'"{name}" = {time}' for name, time in microseconds.items()]
    (tmp_path / "times.toml").write_text("\n".join(["[[measured]]", "[measured.microseconds]", *lines]))
    sides(settings=Settings(profile=str(tmp_path / "times.toml")))

    found = attnplug.select(request_of())
    assert found.id == expected
    assert (found.decided_by == "measured profile") is ("wide/fine" in microseconds)
    assert attnplug.select(request_of(), backend="wide/coarse").id == "wide/coarse"  # an explicit choice wins


ENTRY = ProfileEntry(
    measured_on="2026-11-20",
    device=Device("cuda", name="NVIDIA H200", compute_capability="9.0", num_multiprocessors=132),
    versions={},
    requirements=attnplug.Requirements(head_size=128, num_q_heads=8, num_kv_heads=2, dtype="bfloat16"),
    phase="decode",
    num_seqs=64,
    kv_len=4096,
    query_len=1,
    default="wide/coarse",
    times={},
)


@pytest.fixture
def tuned(sides, tmp_path, monkeypatch):
    """Return ``tuned(times, layer)``: the explanation with a shipped profile of times, by phase and candidate."""

    def make(times, layer=ENTRY.requirements):
        entries = [
            evolve(ENTRY, phase=phase, requirements=layer, times={id_: MeasuredTime(one) for id_, one in each.items()})
            for phase, each in times.items()
        ]
        (tmp_path / "nvidia-h200.json").write_text(dump_entries(entries))
        invariant = DECODES.replace('"paged"', '"paged", "batch_invariant"')
        sides(decodes=invariant, device=ENTRY.device)
        process.PROCESS.state.profile = options.Profile(None, tmp_path)
        return attnplug.explain(layer)

    return make


def times_of(decode, prefill):
    """Return the times of the pair in both phases beside those of single candidates."""
    return {
        "decode": {PAIR: decode, "wide/fine": 155, "wide/coarse": 155},
        "prefill": {PAIR: prefill, "wide/fine": 900, "wide/coarse": 1000},
    }


def test_a_pair_of_a_shipped_profile_is_chosen_and_explained(tuned):
    found = tuned(times_of(121, 900))
    assert (found.chosen.id, found.chosen.decided_by) == (PAIR, "shipped profile")
    assert found.measured == (
        "decodes 121 us (64 x 4k decode, NVIDIA H200, 2026-11-20) against 155 us of wide/fine; "
        "other batches 900 us (64 x 4k prefill, NVIDIA H200, 2026-11-20), shipped profile; 2 shapes"
    )
    assert "routed: pure decodes to decodes/one, all other batches to wide/fine" in str(found)


def test_a_measured_pair_within_the_margin_is_a_note(tuned):
    found = tuned(times_of(153, 900))
    assert found.chosen.roles == {}
    assert found.profile_notes == (f"the pair {PAIR} was measured, and wins by less than 2%: nothing is routed",)


def test_a_measured_pair_is_refused_under_batch_invariance(tuned):
    found = tuned(times_of(121, 900), ENTRY.requirements.evolve(batch_invariant=True))
    assert found.chosen.roles == {}
    (pair,) = [verdict for verdict in found.verdicts if verdict.id == PAIR]
    assert pair.status == "refused"
    assert "a request's result would depend on the batch" in str(pair.reasons[0])


def test_without_a_measured_pair_nothing_is_routed(sides, request_of):
    assert attnplug.select(request_of()).roles == {}


# --- as data ----------------------------------------------------------------------------------------------------------


def test_a_pair_travels_to_other_ranks(sides, request_of):
    found = attnplug.select(request_of(), backend=PAIR)
    for copy in (Selection.from_dict(json.loads(json.dumps(found.to_dict()))), pickle.loads(pickle.dumps(found))):
        assert copy == found
        assert copy.agreement == found.agreement
        assert hash(copy.agreement) == hash(found.agreement)
        assert copy.roles["decode"].agreement == found.roles["decode"].agreement
        assert copy.distribution == found.distribution
    assert "roles" not in attnplug.select(request_of(), backend="wide").to_dict()["agreement"]


@pytest.mark.parametrize(
    "change",
    [
        lambda agreement: agreement["roles"].pop(),
        lambda agreement: agreement["roles"].append(agreement["roles"][0]),
        lambda agreement: agreement["roles"][0].update(roles=list(agreement["roles"])),
        lambda agreement: agreement.update(roles="decodes"),
        lambda agreement: agreement["roles"][0].pop("kv_layout"),
    ],
)
def test_a_damaged_pair_is_refused(sides, request_of, change):
    data = attnplug.select(request_of(), backend=PAIR).to_dict()
    change(data["agreement"])
    with pytest.raises(DecisionError):
        Selection.from_dict(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda agreement: agreement.update(cudagraph="single_token_decode"),
        lambda agreement: agreement.update(block_size=32),
        lambda agreement: agreement["roles"][0].update(block_size=32),
        lambda agreement: agreement["roles"][1]["requirements"].update(head_size=64),
        lambda agreement: agreement["roles"].reverse(),
        lambda agreement: agreement.update(reads_lengths=True),
    ],
)
def test_terms_that_do_not_follow_are_not_loaded(sides, request_of, change):
    pytest.importorskip("torch", reason="torch is not installed")
    data = attnplug.select(request_of(), backend=PAIR).to_dict()
    change(data["agreement"])
    with pytest.raises(PluginLoadError):
        Selection.from_dict(data).load()


# --- a whole model, and what is left open -----------------------------------------------------------------------------


def test_layers_on_pairs_share_a_cache(sides, request_of):
    found = attnplug.plan({"a": request_of(), "b": request_of(head_size=64)}, backend="decodes+wide")
    assert [group.selection.id for group in found.groups] == [PAIR, PAIR]
    assert (found.block_size, found.cudagraph) == (64, "always")
    assert Plan.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert "routed: pure decodes to decodes/one" in str(found)


def test_a_layer_that_is_refused_by_one_may_have_the_other(sides, request_of):
    layers = {"a": request_of(), "b": request_of(sliding_window=8)}
    found = attnplug.plan(layers, backend=["decodes+wide", "wide"])
    assert {name: found[name].id for name in layers} == {"a": PAIR, "b": "wide/fine"}
    assert {found[name].agreement.block_size for name in layers} == {64}


def test_what_is_late_is_bound_for_both(sides, request_of):
    late = request_of(late=("block_size", "num_q_heads"), num_q_heads=None, block_size=None)
    found = attnplug.select(late, backend="decodes+wide")
    assert found.agreement.block_size is None
    assert set(found.agreement.block_sizes.members()) == {64, 32}

    bound = found.bind(block_size=32, num_q_heads=16)
    expected = attnplug.select(request_of(block_size=32, num_q_heads=16), backend=PAIR)
    assert bound.agreement == expected.agreement
    assert [one.agreement.block_size for one in bound.roles.values()] == [32, 32]
    with pytest.raises(NotNegotiatedError, match="decodes/one") as caught:
        found.bind(block_size=16, num_q_heads=16)
    assert "bind block_size to one of: 64, 32" in caught.value.fix

    plan = attnplug.plan({"a": late}, backend="decodes+wide").bind(block_size=32, num_q_heads=16)
    assert plan["a"].agreement == expected.agreement


# --- loading ----------------------------------------------------------------------------------------------------------

pytest.importorskip("torch", reason="torch is not installed")


def test_a_pair_is_loaded_as_one_backend(sides, request_of):
    found = attnplug.load(request_of(), backend=PAIR)
    assert (found.id, found.selection.id) == (PAIR, PAIR)
    assert [found.wrapped.decode.id, found.wrapped.rest.id] == ["decodes/one", "wide/fine"]
    assert found.wrapped.decode.agreement.cudagraph == "uniform_batch"
    assert Selection.from_dict(json.loads(json.dumps(found.selection.to_dict()))).load().agreement == found.agreement


def test_another_version_of_either_is_refused(sides, request_of):
    data = json.dumps(attnplug.select(request_of(), backend=PAIR).to_dict())
    with pytest.raises(PluginLoadError, match=r"'dist-wide 2\.0' was selected"):
        Selection.from_dict(json.loads(data.replace('"dist-wide 1.0"', '"dist-wide 2.0"'))).load()


def test_a_failure_of_either_leaves_the_pair_out(world, request_of):
    world(decodes=(DECODES, "raise ValueError('no library')"), wide=(WIDE, None))
    with pytest.raises(PluginLoadError, match="no library"):
        attnplug.load(request_of(), backend=PAIR)

    with pytest.raises(NoBackendError) as caught:
        attnplug.load(request_of(), backend=PAIR)
    assert re.search("decodes/one, for pure decodes: .*no library", " ".join(str(caught.value).split()))
    assert attnplug.load(request_of(), backend=[PAIR, "wide/fine"]).id == "wide/fine"


def test_classes_that_differ_leave_the_pair_out(world, request_of, plugin_source):
    """No manifest says who writes the KV cache."""
    world(decodes=(DECODES, plugin_source.replace('"forward"', '"host"')), wide=(WIDE, None))
    with pytest.raises(PluginLoadError, match=f"the pair '{re.escape(PAIR)}' cannot be loaded: decodes are written"):
        attnplug.load(request_of(), backend=PAIR)

    assert "decodes are written into the KV cache by the host" in reasons_of(request_of(), PAIR)[0][0]
    assert attnplug.load(request_of(), backend=[PAIR, "wide/fine"]).id == "wide/fine"
