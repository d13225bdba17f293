"""Whole models: the least sum of measured times under common terms, little mixing, and the layers that limit it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.errors import RequirementsError
from attnplug.evidence import MeasuredTime, ProfileEntry
from attnplug.request import Device, Requirements, Settings
from attnplug.selection.assignment import MARGIN, MIX_GAIN, Option, choose
from attnplug.selection.limits import Change, Limit, limits_of
from attnplug.selection.plan import decide as decided_on

H200 = Device("cuda", name="NVIDIA H200", compute_capability="9.0", num_multiprocessors=132)

# --- the search, compared with all combinations -----------------------------------------------------------------------


class FakeEvaluation:
    """An evaluation, as far as the search reads it: a candidate to compare, and the terms in order."""

    def __init__(self, terms: Any) -> None:
        self.candidate, self.terms = object(), terms

    def accepted_terms(self) -> Any:
        return self.terms


TERMS = [(16, "NHD", "joint"), (64, "NHD", "joint"), (64, "HND", "joint")]
GRAPHS = [(None, None), (True, None), (False, None), (True, True), (False, True)]


@st.composite
def options(draw: Any, *, paged: bool) -> Option:
    terms = draw(st.sets(st.sampled_from(TERMS), min_size=1)) if paged else ()
    first, second = draw(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")))
    return Option(
        FakeEvaluation([each for each in TERMS if each in terms]),
        (first, second if draw(st.booleans()) else first),
        float(draw(st.integers(90, 130))),
        frozenset(terms) if paged else None,
        draw(st.sampled_from([0, 0, 0, 1])),
        draw(st.sampled_from([0, 0, 0, 2])),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(GRAPHS)),
    )


kinds_of_layers = st.lists(
    st.booleans().flatmap(lambda paged: st.lists(options(paged=paged), min_size=1, max_size=4)), min_size=1, max_size=4
)


def agree(picked: tuple[Option, ...]) -> bool:
    accepted = [option.terms for option in picked if option.terms is not None]
    shares = not accepted or bool(frozenset.intersection(*accepted))
    flags = [{option.graphs[place] for option in picked} for place in (0, 1)]
    return shares and not any({True, False} <= each for each in flags)


def preference(picked: tuple[Option, ...]) -> tuple[Any, ...]:
    return tuple(option.place for option in picked), sum(option.built_in for option in picked)


def mixing(picked: tuple[Option, ...]) -> int:
    return sum(len({option.ids[role] for option in picked}) for role in (0, 1))


def cost(picked: tuple[Option, ...]) -> float:
    return sum(option.cost for option in picked)


def expected_cost(kinds: list[list[Option]]) -> tuple[float, float] | None:
    """Return the cost to choose, and the least one, by trying everything."""
    whole = [picked for picked in itertools.product(*kinds) if agree(picked)]
    best = min(map(preference, whole), default=None)
    left = [picked for picked in whole if preference(picked) == best]
    if not left:
        return None
    chosen = None
    for number in sorted(set(map(mixing, left))):
        least = min(cost(picked) for picked in left if mixing(picked) == number)
        chosen = least if chosen is None or least < chosen * (1 - MIX_GAIN) else chosen
    assert chosen is not None
    return chosen, min(map(cost, left))


@given(kinds_of_layers)
def test_the_choice_is_that_of_trying_everything(kinds: list[list[Option]]) -> None:
    found, expected = choose(kinds), expected_cost(kinds)

    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.chosen.cost, found.fastest.cost) == expected
        assert agree(found.chosen.options)
        paged = [option for option in found.chosen.options if option.terms is not None]
        assert bool(found.chosen.shared()) == bool(paged)
        assert all(terms in option.terms for terms in found.chosen.shared() for option in paged)


@given(kinds_of_layers, st.data())
def test_the_usual_choice_stays_within_the_margin(kinds: list[list[Option]], data: st.DataObject) -> None:
    usual = [data.draw(st.sampled_from(each)) for each in kinds]
    found, without = choose(kinds, [each.evaluation for each in usual]), choose(kinds)
    if found is None or without is None:
        assert found is without
        return
    is_usual = found.chosen.options == tuple(usual)
    is_like = agree(tuple(usual)) and preference(tuple(usual)) == without.chosen.preference
    near = cost(tuple(usual)) <= without.chosen.cost * (1 + MARGIN) and mixing(tuple(usual)) == without.chosen.mixing
    assert is_usual if is_like and near else found.chosen.cost == without.chosen.cost


# --- plans ------------------------------------------------------------------------------------------------------------

KERNEL = """\
api = "1.0"
backend = {{ name = "{name}", summary = "a kernel" }}
[supports]
device_type = "cuda"
compute_capability = {{ min = "7.0" }}
dtype = ["bfloat16", "float16"]
kv_cache_dtype = ["bfloat16", "float16", "fp8_e4m3"]
head_size = {{ min = 1 }}
decode_query_len = {{ min = 1 }}
block_size = {sizes}
features = ["paged", "sliding_window"{more}]
[variants.one]
requires = {requires}
supports = {{ cudagraph = {{ max = "{level}" }} }}
"""
FULL = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
WINDOW = FULL.evolve(sliding_window=1024)
SINKS = FULL.evolve(sinks=True)
ALIBI = FULL.evolve(alibi="linear")


def kernel(name: str, sizes: str = "[16, 64]", more: str = "", level: str = "always", requires: str = "[]") -> Any:
    features = "".join(f', "{each}"' for each in more.split())
    return KERNEL.format(name=name, sizes=sizes, more=features, level=level, requires=requires), None


def entry(times: dict[str, float], layer: Requirements, **changes: Any) -> ProfileEntry:
    measured = {
        f"{name}/one" if "/" not in name else name: MeasuredTime(time, 0.001, 9) for name, time in times.items()
    }
    made = ProfileEntry("2026-11-20", H200, {}, layer, "decode", 64, 4096, 1, "a/one", measured)
    return attrs.evolve(made, **changes)


@pytest.fixture
def decide(world, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Return ``decide(kernels, entries, layers)``: the plan with these entries in the user's folder."""
    monkeypatch.setattr("attnplug.evidence.times._driver", lambda: "")

    def made(kernels: dict[str, Any], entries: list[ProfileEntry], layers: Any, **keywords: Any) -> Any:
        folder = tmp_path / "profiles"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for number, each in enumerate(entries):
            (folder / f"{number}.json").write_text(json.dumps(each.to_dict()))
        world(device=H200, settings=Settings(profile=str(folder)), **kernels)
        return attnplug.plan(layers, **keywords)

    return made


TWO = {"a": kernel("a"), "b": kernel("b")}
LAYERS = {"x": FULL, "y": FULL, "w": WINDOW}


def ids(plan: Any) -> dict[str, str]:
    return {name: plan[name].backend for name in plan}


def test_the_sum_over_layers_decides_and_follows_swapped_numbers(decide) -> None:
    """Each kind has another fastest backend, and together they gain 6 % over the better single one."""
    fast, slow = {"a": 100.0, "b": 130.0}, {"a": 120.0, "b": 100.0}
    found = decide(TWO, [entry(fast, FULL), entry(slow, WINDOW)], LAYERS)
    swapped = decide(TWO, [entry({"a": 130.0, "b": 100.0}, FULL), entry({"a": 100.0, "b": 120.0}, WINDOW)], LAYERS)

    assert ids(found) == {"x": "a", "y": "a", "w": "b"}  # mixing gains 320 -> 300, 6.25 %
    assert ids(swapped) == {"x": "b", "y": "b", "w": "a"}
    assert found.notes[0] == "measured over all layers: 300 us (64 x 4k decode, local profile)"
    assert f"\n{found.notes[0]}\n" in str(found)


def test_a_mix_for_less_than_five_percent_is_not_taken(decide) -> None:
    times = [entry({"a": 100.0, "b": 130.0}, FULL), entry({"a": 110.0, "b": 100.0}, WINDOW)]

    found = decide(TWO, times, LAYERS)

    assert ids(found) == {"x": "a", "y": "a", "w": "a"}  # 310 against 300
    assert found["w"].decided_by == "measured profile, all layers"
    assert found["x"].decided_by == "measured profile"
    assert "by rank, the larger group first: 300 us (a/one, b/one)" in found.notes
    assert any(note.startswith("mixing a/one and b/one gains 3.2%: not taken") for note in found.notes)


def test_a_mix_that_capability_forces_is_no_choice(decide) -> None:
    kernels = {"a": kernel("a"), "b": kernel("b", more="sinks")}
    times = [entry({"a": 100.0, "b": 104.0}, FULL), entry({"b": 100.0}, SINKS)]

    uniform = decide(kernels, times, {"x": FULL, "s": SINKS})
    forced = decide(
        {"a": kernel("a"), "c": kernel("c", more="sinks", sizes="64")},
        [entry({"a": 100.0, "c": 300.0}, FULL), entry({"c": 100.0}, SINKS)],
        {"x": FULL, "s": SINKS},
    )

    assert ids(uniform) == {"x": "b", "s": "b"}
    assert ids(forced) == {"x": "a", "s": "c"}
    assert forced.block_size == 64


def test_common_terms_cost_the_smaller_time_and_not_the_smaller_group(decide) -> None:
    """By rank, the kind with more layers has its best, and the other one is 400 us slower."""
    kernels = {"a": kernel("a", "16"), "b": kernel("b", "64", "sinks"), "c": kernel("c", "[16, 64]", "sinks")}
    times = [entry({"a": 100.0, "b": 110.0, "c": 200.0}, FULL), entry({"b": 100.0, "c": 500.0}, SINKS)]

    found = decide(kernels, times, {"x": FULL, "y": FULL, "s": SINKS})

    assert ids(found) == {"x": "b", "y": "b", "s": "b"}
    assert found.block_size == 64
    assert "by rank, the larger group first: 700 us (a/one, c/one)" in found.notes


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (
            [entry({"a": 100.0}, FULL), entry({"a": 120.0, "b": 100.0}, WINDOW)],
            "b/one is not measured for x (2 layers)",
        ),
        ([entry({"a": 100.0, "b": 130.0}, FULL)], "w has no times in the local profile"),
        (
            [entry({"a": 100.0, "b": 130.0}, FULL), entry({"a": 1.0, "b": 2.0}, WINDOW, kv_len=99999)],
            "decode is not measured for w on the batches of the others",
        ),
        (
            [
                entry({"a": 100.0, "b": 130.0}, FULL),
                entry({"a": 9.0, "b": 10.0}, WINDOW.evolve(num_q_heads=16, num_kv_heads=4)),
            ],
            "w: measured with 16/4 heads, the nearest to 32/8, which gives an order and no times",
        ),
    ],
)
def test_measured_is_never_compared_with_unmeasured(decide, entries, why) -> None:
    found = decide(TWO, entries, LAYERS)

    assert found.notes == (f"times are not compared over all layers: {why}",)
    ranked = {name: attnplug.select(each).backend for name, each in LAYERS.items()}
    assert ids(found) == ranked


def test_a_rejected_candidate_is_neither_chosen_nor_missed(decide) -> None:
    times = [
        entry({"a": 100.0, "b": 130.0}, FULL, rejected={"c/one": "wrong"}),
        entry({"a": 110.0, "b": 100.0}, WINDOW, rejected={"c/one": "wrong"}),
    ]
    found = decide({**TWO, "c": kernel("c")}, times, LAYERS)

    assert ids(found) == {"x": "a", "y": "a", "w": "a"}
    named = attnplug.plan(LAYERS, backend="c")
    assert set(ids(named).values()) == {"c"}
    assert named.notes == ("times are not compared over all layers: c/one is not measured for x (2 layers)",)


def test_an_explicit_choice_wins(decide) -> None:
    times = [entry({"a": 100.0, "b": 900.0}, FULL), entry({"a": 100.0, "b": 900.0}, WINDOW)]

    assert set(ids(decide(TWO, times, LAYERS, backend=["b", "auto"])).values()) == {"b"}
    assert set(ids(decide(TWO, times, LAYERS, backend="b")).values()) == {"b"}
    assert set(ids(decide(TWO, times, LAYERS)).values()) == {"a"}


def test_a_candidate_behind_the_listed_ones_needs_no_time(decide) -> None:
    times = [entry({"b": 100.0}, FULL), entry({"b": 100.0}, WINDOW)]

    found = decide(TWO, times, LAYERS, backend=["b", "auto"])

    assert found.notes == ("measured over all layers: 300 us (64 x 4k decode, local profile)",)


def test_times_in_graphs_and_without_are_not_added(decide) -> None:
    def of(layer: Requirements, **graphs: bool) -> ProfileEntry:
        made = entry(dict.fromkeys(graphs, 100.0), layer)
        times = {id_: attrs.evolve(time, in_graph=graphs[id_[0]]) for id_, time in made.times.items()}
        return attrs.evolve(made, times=times)

    kernels = {"a": kernel("a"), "b": kernel("b", more="sinks", level="never")}

    together = decide(kernels, [of(FULL, a=True, b=False), of(SINKS, b=False)], {"x": FULL, "s": SINKS})
    apart = decide(kernels, [of(FULL, a=True, b=True), of(SINKS, b=False)], {"x": FULL, "s": SINKS})

    assert ids(together) == {"x": "b", "s": "b"}
    assert "CUDA graphs" in apart.notes[0]


def test_a_routed_pair_takes_part_and_is_no_mix(decide) -> None:
    decode = {"a": 200.0, "b": 100.0, "b/one+a/one": 100.0}
    prefill = {"a": 100.0, "b": 200.0, "b/one+a/one": 100.0}
    times = [
        entry(batch, layer, phase=phase)
        for layer in (FULL, WINDOW)
        for phase, batch in (("decode", decode), ("prefill", prefill))
    ]

    found = decide(TWO, times, LAYERS)

    assert {name: found[name].id for name in found} == dict.fromkeys(LAYERS, "b/one+a/one")
    assert "mixing" not in " ".join(found.notes)


def test_times_of_one_block_size_count_for_that_block_size(decide) -> None:
    times = [
        entry({"a": cost, "b": cost + 50}, layer.evolve(block_size=size))
        for layer in (FULL, WINDOW)
        for size, cost in ((16, 200.0), (64, 100.0))
    ]

    assert decide(TWO, times, LAYERS).block_size == 64


def test_layers_of_a_draft_count_once_for_each_drafted_token(decide) -> None:
    layers = {"x": FULL.evolve(decode_query_len=4)}
    draft = {"x": WINDOW.evolve(decode_query_len=4)}
    times = [
        entry({"a": 100.0, "b": 110.0}, layers["x"]),
        entry({"a": 105.0, "b": 100.0}, draft["x"]),
        entry({"a": 100.0, "b": 100.0}, layers["x"], phase="verify"),
        entry({"a": 100.0, "b": 100.0}, draft["x"], phase="verify"),
    ]

    found = decide(TWO, times, layers, draft=draft)

    assert list(found) == ["x", "draft.x"]
    assert ids(found) == {"x": "b", "draft.x": "b"}  # 110 + 300 against 100 + 315, and a tie in verification
    assert found.notes[0] == "measured over all layers: 410 us (64 x 4k decode; 2 batches, local profile)"


def test_a_draft_shares_the_kv_cache(decide) -> None:
    kernels = {"a": kernel("a", "16"), "b": kernel("b", "64", "sinks"), "c": kernel("c", "[64, 16]", "sinks")}
    found = decide(kernels, [entry({"a": 1.0}, FULL)], {"x": FULL}, draft={"x": SINKS})

    assert (ids(found), found.block_size) == ({"x": "a", "draft.x": "c"}, 16)
    with pytest.raises(
        RequirementsError, match="the KV cache of the draft is in fp8_e4m3, and that of the model in bf"
    ):
        attnplug.plan({"x": FULL}, draft={"x": FULL.evolve(kv_cache_dtype="fp8_e4m3")})
    with pytest.raises(RequirementsError, match=r"the layer 'draft\.x' was given, and a draft"):
        attnplug.plan({"draft.x": FULL}, draft={"x": FULL})
    with pytest.raises(RequirementsError, match="no layers"):
        attnplug.plan({"x": FULL}, draft={})


# --- what limits a plan -----------------------------------------------------------------------------------------------


def test_one_kind_limits_nothing(world) -> None:
    world(a=kernel("a", level="never"))

    assert limits_of(decided_on({"x": FULL, "y": FULL})) == ()
    assert limits_of(decided_on({"x": FULL, "w": WINDOW})) == ()  # both have the same level


def test_the_kind_with_the_least_graph_level_is_named_with_what_to_install(world) -> None:
    world(
        a=kernel("a"),
        b=kernel("b", more="sinks", level="never"),
        c=kernel("c", more="sinks", level="uniform_batch", requires='["flash-old >=9"]'),
        d=kernel("d", more="sinks", requires='["flash-old >=9"]'),
    )
    decided = decided_on({"x": FULL, "y": FULL, "s": SINKS})

    (limit,) = limits_of(decided)

    assert decided.plan.cudagraph == "never"
    assert limit.layers == ("s",)
    assert limit.changes == (Change("cudagraph", (), "never", "always"),)
    (step,) = limit.lifts  # that of c would not do
    assert "flash-old" in step
    assert step.endswith("(for d/one)")
    assumed = attnplug.plan({"x": FULL, "s": SINKS}, backend=["d", "a"], assume_installed=True)
    assert assumed.cudagraph == "always"


def test_several_weak_kinds_limit_together(world) -> None:
    weak = kernel("b", more="sinks", level="never")[0].replace("[variants.one]", 'alibi = "linear"\n[variants.one]')
    world(a=kernel("a"), b=(weak, None))

    layers = {"x": FULL, "y": FULL, "s": SINKS, "l": ALIBI}
    alone = limits_of(decided_on(layers))
    strong = kernel("c", requires='["flash-old >=9"]')[0].replace("[variants.one]", 'alibi = "linear"\n[variants.one]')
    world(a=kernel("a"), b=(weak, None), c=(strong, None), d=kernel("d", more="sinks", requires='["flash-old >=9"]'))
    (lifted,) = limits_of(decided_on(layers))

    assert alone == (Limit(("s", "l"), (Change("cudagraph", (), "never", "always"),)),)
    assert lifted.changes == alone[0].changes
    (step,) = lifted.lifts
    assert step.endswith("(for d/one, c/one)")  # each of them alone would not do
    world(a=kernel("a"), b=(weak, None), d=kernel("d", more="sinks", requires='["flash-old >=9"]'))
    assert limits_of(decided_on(layers)) == alone


def test_the_kind_that_forbids_the_block_size_and_another_backend(world) -> None:
    world(a=kernel("a", "16"), b=kernel("b", "64"), s=kernel("s", "64", "sinks"))

    both = limits_of(decided_on({"x": FULL, "y": FULL, "s": SINKS}))
    (listed,) = limits_of(decided_on({"x": FULL, "y": FULL, "s": SINKS}, backend=["a", "b", "s"]))

    expected = (Change("block_size", (), 64, 16), Change("backend", ("x", "y"), "b/one", "a/one"))
    assert both == (Limit(("s",), expected),)
    assert listed.changes == expected


def test_another_block_size_lifts_the_limit(world) -> None:
    rule = '[[rules]]\nwhen = { block_size = 16, cudagraph = ["uniform_batch", "always"] }\nbecause = "small pages"\n'
    manifest = kernel("s", "[16, 64]", "sinks")[0] + rule
    world(a=kernel("a", "[16, 64]"), s=(manifest, None))

    decided = decided_on({"x": FULL.evolve(block_size=16), "s": SINKS.evolve(block_size=16)})
    (limit,) = limits_of(decided)

    assert decided.plan.cudagraph in ("never", "single_token_decode")
    assert limit.layers == ("s",)
    assert limit.lifts == ("request block_size=64 kv_layout=NHD",)
    lifted = decided_on({"x": FULL.evolve(block_size=64), "s": SINKS.evolve(block_size=64)})
    assert (lifted.plan.cudagraph, limits_of(lifted)) == ("always", ())


def test_a_backend_that_is_not_permitted_lifts_the_limit(world) -> None:
    world(a=kernel("a"), s=kernel("s", more="sinks", level="never"), t=kernel("t", more="sinks"))

    (limit,) = limits_of(decided_on({"x": FULL, "s": SINKS}, backend=["a", "s"]))

    assert limit.lifts == ("permit t/one in the list of backends",)
    assert attnplug.plan({"x": FULL, "s": SINKS}, backend=["a", "t", "s"]).cudagraph == "always"


def test_a_candidate_that_is_ranked_lower_lifts_the_limit(world) -> None:
    world(a=kernel("a", level="uniform_batch"), b=kernel("b", more="sinks"))
    layers = {"x": FULL, "y": FULL, "s": SINKS}

    (limit,) = limits_of(decided_on(layers))

    assert limit == Limit(
        ("x", "y"),
        (Change("cudagraph", (), "uniform_batch", "always"),),
        ("name b/one first in the list of backends",),
    )
    preferred = decided_on(layers, backend=["b/one", "auto"])
    assert (preferred.plan.cudagraph, limits_of(preferred)) == ("always", ())
