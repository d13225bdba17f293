from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve
from hypothesis import given

import attnplug
from attnplug.contract import PAD_SLOT_ID, torch_dtype
from attnplug.errors import NotNegotiatedError
from attnplug_kit.oracle import (
    CANARY,
    FEATURES,
    Case,
    assert_close,
    assert_output,
    cases,
    check,
    check_replays,
    materialize,
    padded_for,
    random_case,
    tolerance,
)

if TYPE_CHECKING:
    from pathlib import Path


@given(cases(features=FEATURES))
def test_cases_are_batches_that_an_engine_could_make(case: Case) -> None:
    assert len(case.query_lens) == len(case.context_lens) >= 1
    assert case.num_q_heads % case.num_kv_heads == 0
    assert case.requirements().sinks == case.sinks
    assert case.requirements().paged == case.may_be_paged
    assert len(case.encoder_lens) == (len(case.query_lens) if case.is_cross else 0)


def test_cases_are_in_every_order() -> None:
    drawn = [random_case(random.Random(seed)) for seed in range(60)]
    decodes = ["".join("d" if length == 1 else "p" for length in case.query_lens) for case in drawn]
    mixed = [order for order in decodes if {*order} == {"d", "p"}]

    assert any(order.rstrip("p").strip("d") == "" for order in mixed)
    assert any(order.rstrip("d").strip("p") == "" for order in mixed)
    assert any("pd" in order and "dp" in order for order in mixed)


@given(cases(features=FEATURES))
def test_the_requirements_have_the_pages_of_the_case(case: Case) -> None:
    assert case.requirements().block_size == (case.block_size if case.may_be_paged else None)
    if case.may_be_paged:
        assert case.requirements(block_size=64).block_size == 64


def test_a_dense_call_requires_no_pages() -> None:
    assert Case(query_lens=(2,), context_lens=(0,)).requirements(paged=False).block_size is None


@pytest.mark.parametrize("seed", range(12))
def test_the_recipe_of_the_package_holds_for_any_seed(seed: int) -> None:
    case = random_case(random.Random(seed), sinks=True)
    scene = materialize(case)
    backend = attnplug.load(case.requirements(), "cpu", backend="torch/sdpa")

    paged = scene.paged(backend)

    assert paged.batch.num_actual_tokens == scene.expected().output.shape[0]
    check(backend, scene)


def test_the_recipe_for_replays_holds() -> None:
    case = Case(query_lens=(1, 1), context_lens=(9, 30))
    backend = attnplug.load(case.requirements(cudagraph="uniform_batch"), "cpu", backend="torch/sdpa")

    (ran,) = check_replays(backend, [materialize(padded_for(case, spare=3))], num_reqs=5, max_seq_len=64)

    assert ran.output.shape[0] == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 32}, ("block_size=16", "block_size=32")),
        ({"head_size": 32}, ("head_size=16, head_size_v=16", "head_size=32, head_size_v=32")),
        ({"kv_cache_dtype": "fp8_e4m3"}, ("kv_cache_dtype='float32'", "kv_cache_dtype='fp8_e4m3'")),
    ],
)
def test_a_scene_is_for_backends_of_its_case(fields: dict[str, Any], named: tuple[str, str]) -> None:
    case = Case(query_lens=(1,), context_lens=(9,))
    other = evolve(case, **fields)
    backend = attnplug.load(other.requirements(), "cpu", backend="torch/sdpa")

    with pytest.raises(NotNegotiatedError) as caught:
        materialize(case).paged(backend)

    assert f"a scene of {named[0]} was given to torch/sdpa" == caught.value.problem
    assert f"the agreement has {named[1]}" == caught.value.expected
    assert "scene.case.requirements" in caught.value.fix


@given(cases())
def test_every_key_is_in_its_slot_and_other_slots_are_poisoned(case: Case) -> None:
    scene = materialize(case)
    shape = (2, scene.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    both = torch.zeros(shape, dtype=scene.keys[0].dtype)
    cache = SimpleNamespace(k=both[0], v=both[1])

    scene.fill(cache)

    used = sum(case.context_lens) * case.num_kv_heads * case.head_size
    for pages, rows in zip((cache.k, cache.v), (scene.keys, scene.values), strict=True):
        assert (~pages.isnan()).sum() == used
        assert pages[0].isnan().all()
        for request, context_len in enumerate(case.context_lens):
            for position in range(context_len):
                block = scene.block_table[request, position // case.block_size]
                assert torch.equal(pages[block, position % case.block_size], rows[request][position])


@given(cases(features=("kv_sharing", "decode_query_len"), attn_type="encoder_decoder"))
def test_encoder_keys_are_cached_after_the_first_step(case: Case) -> None:
    scene = materialize(case)
    pages = torch.zeros(2, scene.num_blocks, case.block_size, case.num_kv_heads, case.head_size)

    scene.fill(SimpleNamespace(k=pages[0], v=pages[1]))

    cached = [bool(context) for context in case.context_lens]
    lens = zip(case.encoder_lens, cached, strict=True)
    assert (~pages[0, ..., 0, 0].isnan()).sum() == sum(keys for keys, is_cached in lens if is_cached)
    new = scene.slot_mapping.shape[0] - case.num_padding_tokens
    assert new == sum(keys for keys, is_cached in zip(case.encoder_lens, cached, strict=True) if not is_cached)
    assert scene.expected().output.shape[0] == case.num_tokens


def test_masks_hide_some_keys_and_all_of_some_rows() -> None:
    scene = materialize(Case(query_lens=(1, 40), context_lens=(30, 10), custom_mask=True))

    assert scene.masks is not None
    assert [mask.shape for mask in scene.masks] == [(1, 31), (40, 50)]
    seen = scene.masks[1].float().mean(1)
    assert 0 < int((seen == 0).sum()) < 40
    assert int(((seen > 0) & (seen < 1)).sum()) > 0
    # The first rows see what their mask and their position allow: nothing where either hides it.
    lse = scene.expected().lse[1:, 0]
    causal = torch.ones(40, 50, dtype=torch.bool).tril(10)
    assert torch.equal(lse.isinf(), ~(scene.masks[1] & causal).any(1))


@given(cases())
def test_blocks_are_used_once_and_new_tokens_have_their_slots(case: Case) -> None:
    scene = materialize(case)
    counts = [-(-n // case.block_size) for n in case.seq_lens]
    used = [int(b) for row, n in zip(scene.block_table, counts, strict=True) for b in row[:n]]

    slots = scene.slot_mapping.tolist()

    assert len(set(used)) == len(used)
    assert 0 not in used
    assert all(block < scene.num_blocks for block in used)
    assert slots[case.num_tokens :] == [PAD_SLOT_ID] * case.num_padding_tokens
    assert {slot // case.block_size for slot in slots[: case.num_tokens]} <= set(used)


def test_the_same_seed_gives_the_same_case_and_tensors() -> None:
    first, second = (random_case(random.Random(5), features=FEATURES) for _ in range(2))

    assert first == second
    for a, b in zip(materialize(first).keys, materialize(second).keys, strict=True):
        assert torch.equal(a, b)


def test_dense_calls_have_all_keys_by_request() -> None:
    scene = materialize(Case(query_lens=(1, 3), context_lens=(4, -1), num_padding_tokens=2))

    dense = scene.dense()

    assert dense.batch.key_start_loc is not None
    assert dense.batch.key_start_loc.tolist() == [0, 5, 7]
    assert torch.equal(dense.key[5:7], scene.keys[1])
    assert [len(rows) for rows in (dense.query, dense.key, dense.value)] == [6, 9, 9]
    assert all(rows[-2:].isnan().all() for rows in (dense.query, dense.key, dense.value))
    inexact = materialize(evolve(scene.case, lens_on_cpu="absent")).dense()
    assert len(inexact.key) == 7  # where only the device knows how many keys there are, all rows are keys


def test_closeness_names_the_worst_element() -> None:
    exact = torch.zeros(2, 3, dtype=torch.float64)
    wrong = torch.zeros(2, 3)
    wrong[1, 2] = 0.5

    assert_close(torch.full((2, 3), tolerance(torch.float32).atol / 2), exact, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"output: 1 of 6 elements differ; at \(1, 2\) 0.5, exact 0.0"):
        assert_close(wrong, exact, dtype=torch.float32)
    with pytest.raises(AssertionError, match="nan"):
        assert_close(wrong.fill_(torch.nan), exact, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"shape \(3, 2\)"):
        assert_close(wrong.T, exact, dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("context", [3, 1100])
def test_an_output_of_zeros_is_wrong_at_any_length(dtype: str, context: int) -> None:
    scene = materialize(Case(query_lens=(1, 9), context_lens=(context, context), dtype=dtype))
    exact = scene.expected().output
    rounded = exact.to(torch_dtype(dtype))

    assert_output(rounded, scene)
    assert_output(rounded[1:], scene, rows=slice(1, None))
    with pytest.raises(AssertionError, match=r"output: (\d+) of 640 elements differ") as caught:
        assert_output(torch.zeros_like(rounded), scene)
    assert int(str(caught.value).split()[1]) > 0.9 * 640


def test_an_error_of_all_elements_is_wrong() -> None:
    """Half the tolerance of each element: no element shows it, and their mean does."""
    scene = materialize(Case(query_lens=(1, 9), context_lens=(1100, 300), dtype="bfloat16"))
    exact = scene.expected()
    error = tolerance(torch.bfloat16).spread * exact.spread / 2

    with pytest.raises(AssertionError, match=r"output: all 640 elements are within .* in the mean: more than rounding"):
        assert_output((exact.output + error).float().bfloat16(), scene)


@pytest.mark.parametrize(
    ("dtype", "interpreted", "passes"),
    [(torch.bfloat16, "", False), (torch.bfloat16, "1", True), (torch.float16, "1", False)],
)
def test_only_interpreted_bfloat16_may_be_truncated(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, interpreted: str, passes: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    exact = torch.zeros(4, 4, dtype=torch.float64)
    spread = torch.ones_like(exact)
    error = 0.13 * tolerance(dtype).spread  # of the mean tolerance, beside the smallest number
    with nullcontext() if passes else pytest.raises(AssertionError, match="in the mean"):
        assert_close(exact + error, exact, dtype=dtype, spread=(spread, spread))


TRUNCATION = """
import torch
import triton
import triton.language as tl

@triton.jit
def copy(source, target, count: tl.constexpr):
    rows = tl.arange(0, count)
    tl.store(target + rows, tl.load(source + rows))

source, target = torch.randn(4096), torch.empty(4096, dtype=torch.bfloat16)
copy[(1,)](source, target, 4096)
truncated = (source.view(torch.int32) & -65536).view(torch.float32)
assert torch.equal(target.float(), truncated)
rounded = source.bfloat16().float()
print(float((truncated - source).abs().mean() / (rounded - source).abs().mean()))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_tritons_interpreter_truncates_bfloat16(tmp_path: Path) -> None:
    """Why it has a limit for itself. Where this fails, Triton rounds, and the limit can go."""
    file = tmp_path / "truncation.py"
    file.write_text(TRUNCATION)

    done = subprocess.run(
        [sys.executable, file], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )

    assert float(done.stdout) == pytest.approx(2, rel=0.1)


def test_integer_weights_have_the_tolerance_of_their_largest() -> None:
    scene = materialize(Case(query_lens=(1,), context_lens=(1100,), kv_cache_dtype="int8", dtype="float16"))
    exact = scene.expected()
    within = exact.output + tolerance(torch.float16, byte_weights=True).peak * exact.peak * 0.1

    assert_output(within.half(), scene)
    assert_output(within.half(), scene, wider=2.0)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_output((exact.output + 0.05 * exact.peak).half(), scene)


@pytest.mark.parametrize("what", ["output", "lse"])
def test_unwritten_elements_are_reported_as_such(what: str) -> None:
    found = torch.zeros(2, 3)
    found[1, 1:] = CANARY

    with pytest.raises(AssertionError, match=rf"^{what} was not written: 2 of 6 elements, \(1, 1\) the first"):
        assert_close(found, torch.zeros(2, 3, dtype=torch.float64), dtype=torch.float32, what=what)
    assert_close(found, found.double(), dtype=torch.float32, what=what)


def test_infinities_have_to_be_equal() -> None:
    exact = torch.tensor([-torch.inf], dtype=torch.float64)

    assert_close(torch.tensor([-torch.inf]), exact, dtype=torch.float32, what="lse")
    with pytest.raises(AssertionError, match="lse"):
        assert_close(torch.tensor([-1e30]), exact, dtype=torch.float32, what="lse")
