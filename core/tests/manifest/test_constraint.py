"""The constraint algebra, against brute force over a small universe."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.manifest.constraint import Constraint, Exact, Range
from attnplug.request.capability import ComputeCapability, parse_capability
from attnplug.request.domains import GRAPH_LEVELS
from attnplug.request.fields import FIELDS
from tests.examples import examples

pytestmark = pytest.mark.unmeasured

INTEGER = FIELDS["block_size"].domain
LEVEL = FIELDS["cudagraph"].domain
NUMBER = FIELDS["logits_soft_cap"].domain
OPEN_NAME = FIELDS["kv_cache_dtype"].domain
NAME = FIELDS["kv_layout"].domain
CAPABILITY = FIELDS["compute_capability"].domain
UNIVERSE = range(1, 200)
NUMBERS = (0.25, 1.0, 2.0, 7.5, 30.0)
CAPABILITIES = [
    ComputeCapability(*number)
    for number in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
]


@st.composite
def integer_ranges(draw: st.DrawFn) -> Range:
    low = draw(st.none() | st.integers(1, 120))
    high = draw(st.none() | st.integers(low or 1, 180))
    return Range(low, high, draw(st.none() | st.integers(1, 40)))


@st.composite
def capability_ranges(draw: st.DrawFn) -> Range:
    low, high = sorted(
        draw(st.tuples(st.sampled_from(CAPABILITIES), st.sampled_from(CAPABILITIES))), key=lambda c: c.number
    )
    return Range(draw(st.sampled_from([None, low])), draw(st.sampled_from([None, high])))


@st.composite
def number_ranges(draw: st.DrawFn) -> Range:
    low, high = sorted(draw(st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))))
    return Range(draw(st.sampled_from([None, low])), draw(st.sampled_from([None, high])))


integers = st.lists(st.integers(1, 150).map(Exact) | integer_ranges(), max_size=3).map(
    lambda a: Constraint(INTEGER, tuple(a))
)
levels = st.lists(
    st.sampled_from(GRAPH_LEVELS).map(Exact) | st.sampled_from([None, *GRAPH_LEVELS]).map(lambda m: Range(max=m)),
    max_size=3,
).map(lambda a: Constraint(LEVEL, tuple(a)))
numbers = st.lists(st.sampled_from(NUMBERS).map(Exact) | number_ranges(), max_size=3).map(
    lambda a: Constraint(NUMBER, tuple(a))
)
open_names = st.lists(st.sampled_from([Exact("auto"), Exact("acme.packed"), Range()]), max_size=2).map(
    lambda a: Constraint(OPEN_NAME, tuple(a))
)
names = st.lists(st.sampled_from(["NHD", "HND"]).map(Exact), max_size=2).map(lambda a: Constraint(NAME, tuple(a)))
exact_capabilities = st.sampled_from(["8.0", "9.0", "9.0a", "10.0f", "10.3", "12.0f"]).map(
    lambda text: Exact(parse_capability(text))
)
capabilities = st.lists(exact_capabilities | capability_ranges(), max_size=3).map(
    lambda a: Constraint(CAPABILITY, tuple(a))
)
ordered = [(integers, UNIVERSE), (levels, GRAPH_LEVELS), (capabilities, CAPABILITIES), (numbers, NUMBERS)]
closed = st.sampled_from([*ordered, (names, ("NHD", "HND"))])
worlds = st.sampled_from([*ordered, (names, ("NHD", "HND")), (open_names, ("auto", "int8", "acme.packed", "b.c"))])


@settings(max_examples=examples(300))
@given(st.data(), worlds)
def test_intersection_allows_exactly_what_both_allow(data, world):
    strategy, universe = world
    a, b = data.draw(strategy), data.draw(strategy)

    both, swapped = a.intersect(b), b.intersect(a)

    for value in universe:
        assert both.allows(value) == (a.allows(value) and b.allows(value)) == swapped.allows(value)


@settings(max_examples=examples(300))
@given(st.data(), worlds)
def test_intersection_with_itself_changes_nothing(data, world):
    strategy, universe = world
    a = data.draw(strategy)

    assert [v for v in universe if a.intersect(a).allows(v)] == [v for v in universe if a.allows(v)]


@settings(max_examples=examples(300))
@given(st.data(), worlds)
def test_intersection_is_associative(data, world):
    strategy, universe = world
    a, b, c = data.draw(strategy), data.draw(strategy), data.draw(strategy)

    assert all(a.intersect(b).intersect(c).allows(v) == a.intersect(b.intersect(c)).allows(v) for v in universe)


@given(integers, st.integers(1, 199))
def test_nearest_whole_number_is_nearest(constraint, value):
    members = [v for v in range(1, 400) if constraint.allows(v)]

    found = constraint.nearest(value)

    if not members:
        assert found is None or found >= 400
    else:
        assert found == min(members, key=lambda v: (abs(v - value), v))


@given(levels, st.sampled_from(GRAPH_LEVELS))
def test_nearest_level_is_nearest(constraint, value):
    members = [level for level in GRAPH_LEVELS if constraint.allows(level)]

    found = constraint.nearest(value)

    distance = lambda level: abs(GRAPH_LEVELS.index(level) - GRAPH_LEVELS.index(value))  # noqa: E731
    assert (found is None) if not members else (distance(found) == min(map(distance, members)))


@settings(max_examples=examples(300))
@given(st.data(), worlds)
def test_first_choices_and_nearest_are_members(data, world):
    strategy, universe = world
    constraint = data.draw(strategy)
    value = data.draw(st.sampled_from(list(universe)))

    found = [*constraint.choices(), *constraint.members(64), constraint.first(), constraint.nearest(value)]

    assert all(constraint.allows(v) for v in found if v is not None)
    assert (constraint.first() is None) == (constraint.choices() == ())


@settings(max_examples=examples(300))
@given(st.data(), closed)
def test_every_alternative_that_allows_something_has_a_choice(data, world):
    strategy, universe = world
    constraint = data.draw(strategy)

    for alternative in constraint.alternatives:
        alone = Constraint(constraint.domain, (alternative,))
        assert len(alone.choices()) == 1 or not any(alone.allows(value) for value in universe)
        assert set(alone.choices()) <= set(constraint.choices())


@pytest.mark.parametrize("item", [item for item in FIELDS.values() if item.domain.example() is not None])
def test_a_range_without_bounds_has_a_value_of_its_domain(item):
    anything = Constraint(item.domain, (Range(),))

    (choice,) = anything.choices()

    assert item.domain.canonical(choice) == choice == anything.first()
    assert choice in anything.members()
    assert anything.nearest(choice) == choice


def test_no_open_name_is_better_known_than_others():
    anything = Constraint(OPEN_NAME, (Range(),))

    assert anything.choices() == anything.members() == ()
    assert anything.intersect(anything).allows("acme.packed")


@given(integers)
def test_members_are_all_of_them_preferred_ones_first(constraint):
    members = constraint.members(199)

    assert {m for m in members if m < 200} == {v for v in UNIVERSE if constraint.allows(v)}
    assert members[: len(constraint.choices())] == constraint.choices()


def test_alternatives_keep_their_order():
    constraint = Constraint(INTEGER, (Exact(128), Range(multiple_of=16)))

    assert constraint.first() == 128
    assert constraint.choices() == (128, 16)
    assert constraint.intersect(Constraint(INTEGER, (Range(multiple_of=32),))).choices() == (128, 32)


@pytest.mark.parametrize(
    ("declared", "hardware", "runs"),
    [
        ("9.0", "9.0", True),
        ("9.0a", "9.0", True),
        ("9.0a", "10.0", False),
        ("10.0f", "10.3", True),
        ("10.3f", "10.0", False),
        ("10.0f", "12.0", False),
    ],
)
def test_suffixes_say_which_hardware_runs_the_code(declared, hardware, runs):
    constraint = Constraint(CAPABILITY, (Exact(parse_capability(declared)),))

    assert constraint.allows(parse_capability(hardware)) is runs


def test_capabilities_have_no_order():
    with pytest.raises(TypeError):
        _ = ComputeCapability(9, 0) < ComputeCapability(10, 0)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint(INTEGER, (Exact(128), Range(multiple_of=16, max=512))), "128, multiples of 16 up to 512"),
        (Constraint(INTEGER, (Range(min=2),)), ">= 2"),
        (Constraint(INTEGER, (Range(2, 9),)), "2 to 9"),
        (Constraint(INTEGER, (Range(),)), "any"),
        (Constraint(LEVEL, (Range(max="uniform_batch"),)), "<= uniform_batch"),
        (Constraint(INTEGER, ()), "nothing"),
    ],
)
def test_reads_as_words(constraint, text):
    assert str(constraint) == text
