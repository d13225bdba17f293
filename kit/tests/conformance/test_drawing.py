"""What the kit draws: every field that a test leaves open varies, and what the test is about stays."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance.drawing import Draw
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.subject import find_subjects
from attnplug_kit.oracle import materialize

SDPA = find_subjects("torch/sdpa", "cpu")[0]
PLAIN = field_values_of(SDPA).spec()


def drawn(name: str, count: int = 120) -> set[object]:
    """Return what is drawn of a field by tests of many names."""
    return {Draw(SDPA, f"test_{number}")(PLAIN, many_heads=number % 2 == 0).fields.get(name) for number in range(count)}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", {"float32", "bfloat16", "float16"}),
        ("kv_layout", {"NHD", "HND"}),
        ("block_size", {16, 32, 64, 128, 256}),
        ("num_kv_heads", {1, 2, 4, 8, 32}),
        ("gqa_ratio", {1, 2, 4, 7, 8, 16}),
        ("kv_cache_dtype", {None, "fp8_e4m3", "fp8_e5m2"}),
        ("per_head_scales", {None, True}),
        ("return_lse", {None, True}),
        ("kv_in_cache", {None, True}),
        ("seq_lens_cpu_kind", {None, "upper_bound", "absent"}),
        ("kv_cache_form", {"joint", "split", "interleaved", "packed", "independent"}),
    ],
)
def test_a_free_field_gets_each_value(field, values) -> None:
    assert drawn(field) == values


def test_what_a_request_is_about_stays() -> None:
    spec = field_values_of(SDPA).spec(kv_cache_dtype="fp8_e4m3", block_size=16)

    found = [Draw(SDPA, f"test_{number}")(spec, keep=("num_kv_heads",)).fields for number in range(40)]

    assert {(one["kv_cache_dtype"], one["block_size"], one["num_kv_heads"]) for one in found} == {("fp8_e4m3", 16, 2)}


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_a_request_has_more_than_one_block(size) -> None:
    case = PLAIN.evolve(block_size=size).case(1)

    assert max(case.seq_lens) > size
    assert PLAIN.evolve(block_size=size).over_pages((0, 5, 33)) == ((0, 5, 33) if size < 33 else (0, 5, 33 + size))


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_values_exceed_the_largest_number_of_an_fp8_cache(dtype) -> None:
    cases = [field_values_of(SDPA).spec(kv_cache_dtype=dtype).case(seed) for seed in range(6)]
    scenes = [materialize(case) for case in cases]

    clipped = [
        any((rows.float().abs() > limit * scale).any() for rows in values)
        for scene in scenes
        for limit in [{"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[dtype]]
        for values, scale in ((scene.keys, scene.case.k_scale), (scene.values, scene.case.v_scale))
    ]
    assert True in clipped
    assert False in clipped
