"""Whatever is written into limits, ranks, layers and decisions: a valid value, or an error of this project."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import GraphShape, Layer, Limits, Parallel
from attnplug.errors import CacheError, LimitsError
from attnplug.request.requirements import Requirements
from core.tests.request.any_values import ANY, BASE, HUGE, PLAIN, valid
from tests.examples import examples


@settings(max_examples=examples(300))
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "max_num_reqs",
                "max_num_tokens",
                "max_seq_len",
                "num_blocks",
                "capture_sizes",
                "cudagraph",
                "max_num_splits",
                "batch_invariant",
            ]
        ),
        ANY,
        max_size=3,
    )
)
def test_limits_are_valid_or_refused(values):
    made = valid(lambda: Limits(**{"max_num_reqs": 4, "max_num_tokens": 8, "max_seq_len": 64, **values}))

    assert made is None or isinstance(hash(made), int)


@given(
    st.dictionaries(
        st.sampled_from(["tp_rank", "tp_size", "dcp_rank", "dcp_size", "dcp_interleave"]), ANY, min_size=1, max_size=2
    )
)
def test_ranks_are_valid_or_refused(values):
    made = valid(lambda: Parallel(**values))

    assert made is None or isinstance(hash(made), int)


@pytest.mark.parametrize(
    "values", [{"capture_sizes": 4}, {"capture_sizes": [[]]}, {"capture_sizes": ["a", 1]}, {"num_blocks": HUGE}]
)
def test_limits_of_wrong_types_are_refused(values):
    with pytest.raises(LimitsError):
        Limits(**{"max_num_reqs": 4, "max_num_tokens": 8, "max_seq_len": 64, **values})


@settings(max_examples=examples(200))
@given(st.dictionaries(st.text(max_size=2), PLAIN) | ANY)
def test_a_pattern_is_valid_in_both_or_neither(table):
    request = valid(lambda: Requirements(**BASE, block_sparse=table))
    layer = valid(lambda: Layer(name="x", block_sparse=table))

    assert (request is None) == (layer is None)
    if request is not None and table is not None:
        assert request.block_sparse == layer.block_sparse
        assert dict(request.block_sparse) == dict(table)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (True, 1.0), (0, False), (0.0, False)])
def test_equal_looking_tables_of_layers_differ(one, other):
    requested = Requirements(**BASE, block_sparse={"a": other}).block_sparse

    assert Layer(name="x", block_sparse={"a": one}).block_sparse not in (requested, {"a": other})


@pytest.mark.parametrize("value", [HUGE, 10**5000, 2**31], ids=["huge", "longer", "int64"])
def test_shapes_and_caches_have_sizes_of_int32(value):
    with pytest.raises(LimitsError, match="GraphShape"):
        GraphShape(1, value)
    with pytest.raises(CacheError, match="blocks was requested"):
        attnplug.load(Requirements(**BASE), "cpu", backend="torch/sdpa").make_cache(value)


def test_a_selection_with_a_table_hashes():
    plain = attnplug.select(Requirements(**BASE), "cpu")
    data = plain.to_dict()
    data["agreement"]["requirements"]["block_sparse"] = {"a": 1}

    decided, again = (attnplug.Selection.from_dict(json.loads(json.dumps(data))) for _ in range(2))

    assert decided == again
    assert hash(decided) == hash(again)
    assert decided != plain
