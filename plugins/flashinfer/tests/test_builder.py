"""The library calls of a build: which wrapper plans which rows, with which values, and how often."""

from __future__ import annotations

import pickle

import pytest
import torch

from attnplug.contract import Batch, Layer, Limits
from attnplug.errors import LayerError, LimitsError, NotNegotiatedError
from tests.backends.caches import is_clear
from tests.backends.harness import Harness

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
RAGGED, SINK = "BatchPrefillWithRaggedKVCacheWrapper", "BatchAttentionWithAttentionSinkWrapper"


def owners(calls) -> list[str]:
    return [call.owner for call in calls]


def test_single_rows_at_the_front_are_decodes_and_all_others_prefills(load_fake, journal) -> None:
    harness = Harness(load_fake)
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(harness.batch([1, 1, 5], [9, 40, 5])))

    assert owners(journal.plans) == [DECODE, PREFILL]
    assert [(part.first, part.last) for part in plan.parts] == [(0, 2), (2, 7)]
    assert plan.prefix is None


@pytest.mark.parametrize("query_lens", [[3, 3], [3, 1], [3, 2, 1]])
def test_decodes_of_several_rows_run_as_causal_prefills(load_fake, journal, query_lens) -> None:
    harness = Harness(load_fake, decode_query_len=3)
    metadata = harness.builder.build(harness.batch(query_lens, [20] * len(query_lens)))

    assert metadata.num_prefills == 0
    (plan,) = journal.plans
    assert plan.owner == PREFILL
    assert plan.arguments["causal"] is True


def test_a_decode_of_one_row_before_longer_ones_runs_as_a_decode(load_fake, journal) -> None:
    harness = Harness(load_fake, decode_query_len=3)
    harness.builder.build(harness.batch([1, 3, 3], [20, 20, 20]))

    assert owners(journal.plans) == [DECODE, PREFILL]


@pytest.mark.parametrize("query_lens", [[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 4], [1, 4, 0], [0, 4]])
def test_padded_requests_may_be_anywhere(load_fake, query_lens) -> None:
    harness = Harness(load_fake)
    seq_lens = [length and length + 9 for length in query_lens]
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(harness.batch(query_lens, seq_lens)))

    rows = [row for part in plan.parts for row in range(part.first, part.last)]
    assert rows == list(range(sum(query_lens)))
    harness.forward(harness.builder.build(harness.batch(query_lens, seq_lens)))  # the fake checks every array


def test_layers_share_a_plan_if_their_values_are_equal(load_fake, journal) -> None:
    layers = [Layer(name=f"layers.{i}", scale=scale) for i, scale in enumerate((0.1, 0.2, 0.1))]
    harness = Harness(load_fake, layers)
    metadata = harness.builder.build(harness.batch([1, 5], [9, 5]))

    first, second, third = (impl.wrapped.plan_of(metadata) for impl in harness.impls)
    assert first is third
    assert second is not first
    assert [call.arguments["sm_scale"] for call in journal.plans] == [0.1, 0.1, 0.2, 0.2]
    assert len({call.wrapper for call in journal.plans}) == 4


def test_values_with_defaults_are_passed(load_fake, journal) -> None:
    harness = Harness(load_fake, sliding_window=7, logits_soft_cap=30.0, kv_cache_dtype="fp8_e5m2")
    harness.builder.build(harness.batch([1, 5], [9, 5]))

    for call in journal.plans:
        passed = {name: call.arguments[name] for name in ("window_left", "logits_soft_cap", "sm_scale", "page_size")}
        assert passed == {"window_left": 6, "logits_soft_cap": 30.0, "sm_scale": 0.125, "page_size": 16}
        assert call.arguments["q_data_type"] is call.arguments["o_data_type"] is torch.bfloat16
        assert call.arguments["kv_data_type"] is torch.float8_e5m2


@pytest.mark.parametrize(("variant", "backend"), [("fa2", "fa2"), ("fa3", "fa3")])
def test_variants_differ_in_the_prefill_kernels_only(load_fake, journal, variant, backend) -> None:
    harness = Harness(load_fake, variant=variant)
    harness.builder.build(harness.batch([1, 5], [9, 5]))

    made = {call.owner: call.arguments["backend"] for call in journal.of("__init__")}
    assert made == {DECODE: "fa2", PREFILL: backend}


@pytest.mark.parametrize(
    ("required", "query_lens", "backends"),
    [
        ({"decode_query_len": 3}, [1, 3, 2], ["fa2", "fa2"]),
        ({"decode_query_len": 3}, [3, 1, 2], ["fa2"]),
        ({"decode_query_len": 3}, [3, 1, 9], ["fa2", "fa3"]),
        ({"decode_query_len": 3}, [1, 3, 9], ["fa2", "fa2", "fa3"]),
        ({"decode_query_len": 3}, [1, 9, 9], ["fa2", "fa3"]),
        ({"sinks": True}, [1, 1], ["fa2"]),
        ({"sinks": True}, [1, 1, 9], ["fa2", "fa3"]),
        ({"sinks": True, "decode_query_len": 3}, [1, 3, 9], ["fa2", "fa3"]),
        ({"sinks": True}, [9, 9], ["fa3"]),
        ({"phases": ("decode",)}, [1, 0, 1], ["fa2", "fa2"]),
    ],
)
def test_few_rows_per_request_run_the_split_kv_kernels(load_fake, journal, required, query_lens, backends) -> None:
    layer = Layer(name="layers.0", sinks=torch.zeros(4) if "sinks" in required else None)
    harness = Harness(load_fake, [layer], variant="fa3", **required)
    harness.forward(harness.builder.build(harness.batch(query_lens, [bool(length) * 20 for length in query_lens])))

    assert [call.arguments["backend"] for call in journal.of("__init__")] == backends


@pytest.mark.parametrize(("query_lens", "backend"), [([1, 1], "fa2"), ([1, 9], "fa3")])
def test_a_shared_prefix_runs_the_kernels_of_the_longest_queries(load_fake, journal, query_lens, backend) -> None:
    harness = Harness(load_fake, variant="fa3", cascade=True)
    batch = harness.batch(query_lens, [40, 45])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)
    harness.builder.build(_sharing(batch, 32))

    last = journal.plans[-1]
    assert last.arguments["causal"] is False
    assert {call.arguments["backend"] for call in journal.of("__init__") if call.wrapper == last.wrapper} == {backend}


def test_the_pages_of_the_published_example(fakes) -> None:
    from attnplug_flashinfer import arrays, routes  # noqa: PLC0415 - requires the fake

    table = torch.tensor([[0, 5, 8], [1, 6, 7], [3, 4, 9]], dtype=torch.int32)
    batch = Batch.from_lengths([1, 1, 1], [40, 48, 17], block_table=table, slot_mapping=torch.zeros(3).long())
    (rows,) = arrays.rows_of_step(batch, 16, (routes.REMAINING,)).parts

    assert rows.indices.tolist() == [0, 5, 8, 1, 6, 7, 3, 4]
    assert rows.indptr.tolist() == [0, 3, 6, 8]
    assert rows.last_page_len.tolist() == [8, 16, 1]
    assert {rows.indices.dtype, rows.indptr.dtype, rows.last_page_len.dtype, rows.starts.dtype} == {torch.int32}


def test_a_layer_without_a_plan_is_refused(load_fake) -> None:
    harness = Harness(load_fake)
    other = harness.backend.make_impl(Layer(name="other", scale=0.5))

    with pytest.raises(LayerError, match="no plan for layer 'other'"):
        harness.forward(harness.builder.build(harness.batch([1, 5], [9, 5])), other)


def test_a_batch_is_pickled_without_its_wrappers(load_fake) -> None:
    sender, receiver = Harness(load_fake), Harness(load_fake)
    metadata = sender.builder.build(sender.batch([1, 5], [9, 5]))
    received = Batch(**pickle.loads(pickle.dumps(metadata.batch.to_dict())))

    assert torch.equal(receiver.forward(receiver.builder.build(received)), sender.forward(metadata))


def test_arrays_are_made_once_per_batch(load_fake, monkeypatch) -> None:
    layers = [Layer(name=f"layers.{i}", scale=0.1 * (i + 1)) for i in range(3)]
    harness = Harness(load_fake, layers)
    from attnplug_flashinfer import arrays, builder  # noqa: PLC0415 - requires the fake

    made = []
    monkeypatch.setattr(
        builder, "rows_of_step", lambda *args, **kwargs: made.append(1) or arrays.rows_of_step(*args, **kwargs)
    )
    harness.builder.build(harness.batch([1, 5], [9, 5]))

    assert made == [1]


def test_dense_calls_run_the_ragged_wrapper(load_fake, journal) -> None:
    harness = Harness(load_fake, paged=False, block_size=None)
    batch = Batch.from_lengths([3, 1, 6], [5, 1, 6])
    metadata = harness.builder.build(batch)

    assert owners(journal.plans) == [RAGGED]
    assert journal.plans[0].arguments["causal"] is True
    assert metadata.num_key_rows == 12


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_encoders_are_not_causal(load_fake, journal, attn_type) -> None:
    harness = Harness(load_fake, paged=False, block_size=None, attn_type=attn_type)
    harness.builder.build(Batch.from_lengths([3, 6], causal=False))

    assert journal.plans[0].arguments["causal"] is False


def test_with_sinks_one_wrapper_runs_all_rows(load_fake, journal) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    harness = Harness(load_fake, [Layer(name="layers.0", sinks=sinks)], sinks=True, sliding_window=7)
    harness.forward(harness.builder.build(harness.batch([1, 1, 5], [9, 40, 5])))

    assert owners(journal.plans) == owners(journal.runs) == [SINK]
    (made,) = journal.of("__init__")
    assert made.arguments["window_left"] == 6
    assert (made.arguments["head_dim_qk"], made.arguments["head_dim_vo"]) == (64, 64)
    # `run` accepts these keywords, and ignores them.
    assert not {"sinks", "k_scale", "v_scale"} & set(journal.runs[0].keywords)


def test_layers_with_different_sinks_share_a_plan(load_fake) -> None:
    layers = [Layer(name=f"layers.{i}", sinks=torch.full((4,), float(i))) for i in range(2)]
    harness = Harness(load_fake, layers, sinks=True)
    metadata = harness.builder.build(harness.batch([1, 5], [9, 5]))

    assert harness.impls[0].wrapped.plan_of(metadata) is harness.impls[1].wrapped.plan_of(metadata)
    assert not torch.equal(*(harness.forward(metadata, impl) for impl in harness.impls))


def test_scales_are_passed_to_the_kernels_as_floats(load_fake, journal) -> None:
    layers = [Layer(name="layers.0", k_scale=0.5, v_scale_tensor=torch.tensor([0.25]))]
    harness = Harness(load_fake, layers, kv_cache_dtype="fp8_e4m3")
    harness.forward(harness.builder.build(harness.batch([1, 5], [9, 5])))

    assert [(call.arguments["k_scale"], call.arguments["v_scale"]) for call in journal.runs] == [(0.5, 0.25)] * 2


@pytest.mark.parametrize(
    ("k_scale", "dtype", "passed"),
    [
        (3e-5, "bfloat16", 3e-5 * 2**16),  # hidden keys would have the score -1.5 times the softmax scale
        (0.004, "bfloat16", 0.004 * 2**8),
        (3e-5, "float16", 3e-5 * 2**11),  # more would leave a query fewer bits than its rounding does
        (0.5, "bfloat16", 0.5),  # -25,000 is low enough
        (4.0, "bfloat16", 4.0),
    ],
)
def test_a_small_scale_of_keys_is_moved_to_queries(load_fake, journal, k_scale, dtype, passed) -> None:
    layers = [Layer(name="layers.0", k_scale=k_scale, v_scale=0.5, scale=0.1)]
    harness = Harness(load_fake, layers, kv_cache_dtype="fp8_e5m2", dtype=dtype)
    harness.forward(harness.builder.build(harness.batch([1, 5], [9, 5])))

    assert [call.arguments["k_scale"] for call in journal.runs] == [passed] * 2


def test_without_an_fp8_kv_cache_no_scale_is_passed(load_fake, journal) -> None:
    harness = Harness(load_fake)
    harness.forward(harness.builder.build(harness.batch([1, 5], [9, 5])))

    assert not any({"k_scale", "v_scale"} & set(call.keywords) for call in journal.runs)


def test_a_layer_that_shares_a_kv_cache_writes_none(load_fake) -> None:
    harness = Harness(load_fake, [Layer(name="layers.1", kv_sharing_target="layers.0")], kv_sharing=True)
    batch = harness.batch([1, 1], [9, 4])
    cache = harness.backend.make_cache(8)
    output = torch.empty(2, 256, dtype=torch.bfloat16)
    query = torch.ones(2, 4, 64, dtype=torch.bfloat16)
    harness.impls[0].forward(query, None, None, cache, harness.builder.build(batch), output)

    assert is_clear(cache)
    assert not output.any()  # all values are zero


def test_a_shared_prefix_is_a_further_pass_of_all_rows(load_fake, journal) -> None:
    harness = Harness(load_fake, cascade=True)
    batch = harness.batch([1, 1, 3], [40, 36, 43])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)
    plan = harness.impls[0].wrapped.plan_of(harness.builder.build(_sharing(batch, 32)))

    assert owners(journal.plans) == [DECODE, PREFILL, PREFILL]
    assert [call.arguments.get("causal") for call in journal.plans] == [None, True, False]
    assert (plan.prefix.first, plan.prefix.last) == (0, 5)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_cascade_equals_the_flat_step(load_fake, journal, with_lse) -> None:
    harness = Harness(load_fake, cascade=True, return_lse=True)
    batch = harness.batch([1, 1, 3], [40, 36, 43])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)
    lses = [torch.zeros(5, 4) if with_lse else None for _ in range(2)]
    flat, shared = (
        harness.forward(harness.builder.build(each), lse=lse)
        for each, lse in zip((batch, _sharing(batch, 32)), lses, strict=True)
    )

    torch.testing.assert_close(shared, flat, atol=2e-2, rtol=2e-2)
    if with_lse:
        torch.testing.assert_close(lses[1], lses[0], atol=1e-4, rtol=1e-4)
    assert len(journal.of("merge_state_in_place")) == 1


def test_a_shared_prefix_is_not_read_from_a_padded_request(load_fake) -> None:
    harness = Harness(load_fake, cascade=True)
    batch = harness.batch([0, 1, 3], [0, 36, 43])
    batch.block_table[:, :2] = torch.tensor([[0, 0], [1, 2], [1, 2]], dtype=torch.int32)

    flat, shared = (harness.forward(harness.builder.build(each)) for each in (batch, _sharing(batch, 32)))
    torch.testing.assert_close(shared, flat, atol=2e-2, rtol=2e-2)


def test_a_shared_prefix_has_to_be_negotiated(load_fake) -> None:
    harness = Harness(load_fake)
    batch = harness.batch([1, 1], [40, 36])
    batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)

    with pytest.raises(NotNegotiatedError, match="cascade was not requested"):
        harness.builder.build(_sharing(batch, 32))


def test_a_non_contiguous_output_is_written_in_place(load_fake) -> None:
    harness = Harness(load_fake, return_lse=True)
    metadata = harness.builder.build(harness.batch([1, 5], [9, 5]))
    wide, sums = torch.zeros(6, 512, dtype=torch.bfloat16), torch.zeros(6, 8)
    query, rows = torch.randn(6, 4, 64).bfloat16(), torch.randn(6, 2, 64).bfloat16()
    cache, outputs = harness.backend.make_cache(8), []
    for output, lse in ((wide[:, :256], sums[:, :4]), (torch.zeros(6, 256, dtype=torch.bfloat16), torch.zeros(6, 4))):
        harness.impls[0].forward(query, rows, rows, cache, metadata, output, lse=lse)
        outputs.append((output, lse))

    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not wide[:, 256:].any()
    assert not sums[:, 4:].any()


def test_advancing_a_step_plans_the_next_lengths(load_fake, journal) -> None:
    harness = Harness(load_fake)
    metadata = harness.builder.build(harness.batch([1, 1], [15, 9]))
    advanced = harness.builder.advance_step(metadata)

    assert advanced.batch.seq_lens_cpu.tolist() == [16, 10]
    assert [call.wrapper for call in journal.plans] == [journal.plans[0].wrapper, journal.plans[0].wrapper + 1]
    harness.forward(metadata)  # the original can still run
    harness.forward(advanced)


def test_a_new_block_table_is_planned_in_another_wrapper(load_fake) -> None:
    harness = Harness(load_fake)
    batch = harness.batch([1, 1], [15, 9])
    metadata = harness.builder.build(batch)
    moved = harness.builder.update_block_table(metadata, batch.block_table + 2, batch.slot_mapping + 32)

    assert (
        harness.impls[0].wrapped.plan_of(moved).parts[0].run
        is not harness.impls[0].wrapped.plan_of(metadata).parts[0].run
    )
    assert torch.equal(harness.forward(moved), harness.forward(metadata))  # both blocks hold the same K/V


def _sharing(batch: Batch, length: int) -> Batch:
    """Return the batch with a shared prefix of `length` tokens."""
    return Batch(**{**batch.to_dict(), "common_prefix_len": length})


def test_a_split_kv_limit_is_refused(load_fake) -> None:
    backend = Harness(load_fake).backend

    with pytest.raises(LimitsError, match=r"(?s)max_num_splits=4 was given.*does not support a split-KV limit"):
        backend.make_state(Limits(max_num_reqs=1, max_num_tokens=8, max_seq_len=64, max_num_splits=4))
