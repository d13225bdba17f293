"""The built-in backend against the float64 oracle, over random batches and features."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import split_kv
from attnplug.request.device import Device
from attnplug.torch_backend import builder, sdpa
from attnplug.torch_backend.builder import Sizes
from attnplug_kit.oracle import FEATURES, Case, assert_close, cases, check, limits_of, materialize, run
from core.tests.torch_backend.tiers import in_two_tiers
from tests.examples import examples

if TYPE_CHECKING:
    from attnplug.contract import Backend

pytestmark = pytest.mark.unmeasured

SELF = tuple(name for name in FEATURES if name != "attn_type")
OF_PAGES = ("latent", "kv_sharing", "kv_cache_dtype", "per_head_scales")
DENSE = tuple(name for name in FEATURES if name not in OF_PAGES)
layouts = st.sampled_from(["NHD", "HND"])


def paged_cases(**fixed: object) -> st.SearchStrategy[Case]:
    """Cases with every feature that a cache can have."""
    return cases(features=SELF, **fixed) | cases(features=SELF, attn_type="encoder_decoder", **fixed)


def load(case: Case, layout: str = "NHD", **engine: object) -> Backend:
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, **engine)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def load_dense(case: Case, **engine: object) -> Backend:
    return attnplug.load(case.requirements(paged=False, **engine), Device.cpu(), backend="torch/sdpa")


@pytest.fixture(params=["fused", "fused without LSE", "unfused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of a tile on this CPU, also those for other devices and other releases of torch."""
    if request.param == "fused without LSE":
        monkeypatch.setattr(sdpa, "fused_cpu_op", lambda: None)
    if request.param == "unfused":
        monkeypatch.setattr(builder, "choose_kernel", lambda *_: sdpa.UNFUSED)


def check_paged(case: Case, layout: str, return_lse: bool, host_writes: bool) -> None:
    check(load(case, layout, return_lse=return_lse), materialize(case), host_writes=host_writes)


def check_dense(case: Case, return_lse: bool) -> None:
    check(load_dense(case, return_lse=return_lse), materialize(case))


test_paged, test_paged_at_length = in_two_tiers(
    check_paged, paged_cases(), layouts, st.booleans(), st.booleans(), fast=60, full=200
)
test_dense, test_dense_at_length = in_two_tiers(check_dense, cases(features=DENSE), st.booleans(), fast=60, full=200)


@pytest.mark.usefixtures("kernel")
@given(case=cases(features=DENSE, attn_bias=True), return_lse=st.booleans())
@settings(max_examples=60)
def test_additive_masks(case: Case, return_lse: bool) -> None:
    check(load_dense(case, return_lse=return_lse), materialize(case))


@pytest.mark.usefixtures("kernel")
@given(
    case=cases(features=("sliding_window", "attention_chunk", "alibi", "sinks", "causal", "custom_mask")),
    layout=layouts,
)
@settings(max_examples=60)
def test_every_kernel(case: Case, layout: str) -> None:
    check(load(case, layout), materialize(case))


@given(paged_cases(), layouts, st.sampled_from([1, 2, 8]), st.sampled_from([1, 40, 300]), st.booleans())
@settings(max_examples=examples(100))
def test_tiles_and_groups_of_any_size(case: Case, layout: str, rows: int, scores: int, unfused: bool) -> None:
    sizes = Sizes(gathered=2**12, mask=10 * scores, scores=scores, rows=rows, call=scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "sizes_on", lambda _: sizes)
        if unfused:
            patch.setattr(builder, "choose_kernel", lambda *_: sdpa.UNFUSED)
        check(load(case, layout, return_lse=True), materialize(case))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4).filter(
        lambda lens: any(queries for queries, _ in lens)
    ),
    cases(features=("sliding_window", "attention_chunk", "alibi", "sinks", "logits_soft_cap"), causal=False),
)
@example([(4, 0), (2, 5), (0, 3)], Case(query_lens=(), context_lens=(), causal=False, sinks=True))
@example([(9, 3)], Case(query_lens=(), context_lens=(), causal=False, sliding_window=2))
def test_rows_without_keys_are_zero(lens: list[tuple[int, int]], case: Case) -> None:
    query_lens = tuple(queries for queries, _ in lens)
    case = evolve(case, query_lens=query_lens, context_lens=tuple(keys - queries for queries, keys in lens))

    check(load_dense(case, return_lse=True), materialize(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "requested",
    [
        {},
        {"sliding_window": 100},
        {"logits_soft_cap": 5.0},
        {"sinks": True, "sliding_window": 7},
        {"causal": False},
        {"attention_chunk": 200},
        {"alibi": "linear"},
        {"alibi": "sqrt", "sliding_window": 90},
        {"custom_mask": True},
        {"kv_sharing": True},
    ],
    ids=str,
)
def test_prompts_longer_than_a_tile(requested: dict[str, object], dtype: str) -> None:
    case = Case(
        query_lens=(1, 1, 300, 300, 520),
        context_lens=(700, 30, 150, 150, 0),
        dtype=dtype,
        num_padding_tokens=3,
        **requested,
    )

    check(load(case, return_lse=True), materialize(case))


@given(paged_cases(dtype="float32"))
@settings(max_examples=30)
def test_both_layouts_give_the_same(case: Case) -> None:
    scene = materialize(case)

    nhd, hnd = run(load(case, "NHD"), scene), run(load(case, "HND"), scene)

    torch.testing.assert_close(nhd.output, hnd.output, rtol=1e-5, atol=1e-5)


@given(paged_cases(dtype="float32"), st.integers(0, 1000))
@settings(max_examples=30)
def test_the_order_of_blocks_does_not_matter(case: Case, seed: int) -> None:
    scene = materialize(case)
    moved = evolve(scene, block_table=materialize(evolve(case, seed=seed)).block_table)

    assert torch.equal(run(load(case), scene).output, run(load(case), moved).output)


@given(
    st.integers(2, 70),
    st.lists(st.integers(1, 69), max_size=4),
    cases(features=set(SELF) - {"custom_mask", "causal", "topk", "mm_prefix"}, causal=True),
)
@settings(max_examples=40)
def test_a_prompt_in_chunks_gives_what_it_gives_in_one(length: int, cuts: list[int], case: Case) -> None:
    case = evolve(case, query_lens=(length,), context_lens=(0,), num_padding_tokens=0)
    whole, backend = materialize(case), load(case)
    exact = whole.expected().output
    ends = sorted({cut for cut in cuts if cut < length} | {length})

    for start, end in zip([0, *ends], ends, strict=False):
        chunk = evolve(
            whole,
            case=evolve(case, query_lens=(end - start,), context_lens=(start,)),
            queries=(whole.queries[0][start:end],),
            keys=(whole.keys[0][:end],),
            values=(whole.values[0][:end],),
        )
        output = run(backend, chunk).output
        assert_close(output, exact[start:end], dtype=output.dtype, scale=whole.largest_value)


@given(
    cases(features=("kv_sharing", "decode_query_len")) | cases(features=("kv_sharing",), attn_type="encoder_decoder"),
    layouts,
)
@settings(max_examples=60)
def test_the_cache_changes_in_the_given_slots_alone(case: Case, layout: str) -> None:
    scene, backend = materialize(case), load(case, layout)
    expected = backend.make_cache(scene.num_blocks)
    scene.fill(expected, written=True)

    cache = run(backend, scene).call.cache  # type: ignore[union-attr]

    for got, wanted in zip((cache.k, cache.v), (expected.k, expected.v), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@given(cases(features=("sliding_window", "logits_soft_cap", "sinks")), layouts, st.integers(0, 2))
@settings(max_examples=40)
def test_a_layer_of_a_tensor_with_all_layers(case: Case, layout: str, layer: int) -> None:
    scene, backend = materialize(case), load(case, layout)
    # The layers are inside each block: pages are not contiguous.
    heads, size = case.num_kv_heads, case.head_size
    page = (case.block_size, heads) if layout == "NHD" else (heads, case.block_size)
    layers = torch.zeros(2, scene.num_blocks, 3, *page, size, dtype=scene.keys[0].dtype)
    layers = layers.movedim(2, 0)
    call = scene.paged(backend)
    cache = backend.bind_cache(split_kv(layers[layer], "joint", layout, size))
    scene.fill(cache)
    impl = backend.make_impl(scene.layer())
    metadata = backend.make_builder([impl], backend.make_state(limits_of(scene))).build(call.batch)

    impl.forward(call.query, call.key, call.value, cache, metadata, call.output)

    got = call.output[: case.num_tokens].view(case.num_tokens, case.num_q_heads, -1)
    assert_close(got, scene.expected().output, dtype=got.dtype, scale=scene.largest_value)
    others = [other for other in range(3) if other != layer]
    assert not layers[others].any(), "the other layers' caches are not touched"


@given(cases(features=SELF), st.booleans())
@settings(max_examples=20)
def test_a_profiling_run_of_pages_succeeds(case: Case, has_cache: bool) -> None:
    backend = load(case)
    profile(backend, case, backend.make_cache(2) if has_cache else None)


@given(cases(features=set(DENSE) - {"attn_type"}))
@settings(max_examples=20)
def test_a_dense_profiling_run_succeeds(case: Case) -> None:
    profile(load_dense(case), case, None)


def profile(backend: Backend, case: Case, cache: torch.Tensor | None) -> None:
    scene = materialize(case)
    impl, call = backend.make_impl(scene.layer()), scene.dense()
    rows = min(call.key.shape[0], call.query.shape[0])
    value = None if case.latent else call.value[:rows]

    impl.forward(call.query[:rows], call.key[:rows], value, cache, None, call.output[:rows])

    assert bool((call.output[:rows] != 12288.0).any()), "it computes, so that its memory is measured"


def test_a_touched_padding_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(query_lens=(2,), context_lens=(0,), num_padding_tokens=1)
    backend, scene = load(case), materialize(case)
    ran = run(backend, scene)
    ran.call.output[-1, -1] = 0

    monkeypatch.setattr("attnplug_kit.oracle.running.run", lambda *_, **__: ran)
    with pytest.raises(AssertionError, match="output: rows beyond the batch's 2 tokens were written"):
        check(backend, scene)


def test_padded_requests_compute_nothing() -> None:
    case = Case(query_lens=(1, 4, 0, 0), context_lens=(5, 3, 0, 0))

    check(load(case, return_lse=True), materialize(case))


@pytest.mark.parametrize("requested", [{"sliding_window": 8}, {"attention_chunk": 16}], ids=str)
def test_blocks_before_the_visible_keys_may_be_freed(requested: dict[str, object]) -> None:
    case = Case(query_lens=(1, 1, 5), context_lens=(60, 40, 50), block_size=4, **requested)
    scene, backend = materialize(case), load(case)
    impl, call = backend.make_impl(scene.layer()), scene.paged(backend)
    table = scene.block_table.clone()
    for pages in (call.cache.k, call.cache.v):
        pages[table[:, :8].flatten().long()] = torch.nan
    table[:, :8] = 10**6
    batch = evolve(call.batch, block_table=table, block_table_cpu=table)

    impl.forward(
        call.query,
        call.key,
        call.value,
        call.cache,
        backend.make_builder([impl], backend.make_state(limits_of(scene))).build(batch),
        call.output,
    )

    got = call.output.view(case.num_tokens, case.num_q_heads, -1)
    assert_close(got, scene.expected().output, dtype=got.dtype, scale=scene.largest_value)
