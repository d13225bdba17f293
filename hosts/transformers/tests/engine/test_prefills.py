"""Long prefills of latents run with keys and values per head, in bounded memory, to the same tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import attnplug
from attnplug.batching import BatchAssembler
from attnplug_transformers.engine import Engine, prefills
from attnplug_transformers.engine.prefills import LatentSizes, part_of
from attnplug_transformers.engine.runner import prepare
from attnplug_transformers.engine.schedule import Step
from hosts.transformers.tests.engine.reference import NEW, reference
from hosts.transformers.tests.engine.test_runner import CPU, scheduled
from hosts.transformers.tests.models import model

SIZES = LatentSizes(rank=16, nope=8, value=6)
"""Those of the tiny DeepSeek-V3."""

ABSORBED = """\
api = "1.0"
backend = { name = "absorbed", summary = "latents in pages alone" }
[supports]
device_type = "cpu"
dtype = "float32"
head_size = { min = 1 }
block_size = { multiple_of = 1 }
kv_cache_dtype = ["auto", "fp8_e4m3"]
kv_layout = ["NHD", "HND"]
features = ["paged", "latent", "head_size_v"]
[[rules]]
when = { paged = false }
because = "its kernels read pages"
[variants.sdpa]
"""


@pytest.fixture
def calls(monkeypatch):
    """Record the new and cached tokens of each call of `latent_prefill`, and the rows of each expansion."""
    found, run = [], prefills.latent_prefill

    def recorded(query, key, value, pages, batch, expand, **how):
        rows = []

        def expanded(latents):
            rows.append(len(latents))
            return expand(latents)

        query_lens = batch.query_start_loc_cpu.diff()
        found.append((query_lens.tolist(), (batch.seq_lens_cpu - query_lens).tolist(), rows, batch))
        return run(query, key, value, pages, batch, expanded, **how)

    monkeypatch.setattr(prefills, "latent_prefill", recorded)
    return found


def count_flops(query_len, context_len, rank, nope, rope, value, *, absorbed):
    """Return the operations of one head, as torch counts them: each query attends to all keys up to its own."""
    empty = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731 - one line
    with FlopCounterMode(display=False) as counter:
        if absorbed:
            empty(query_len, nope) @ empty(nope, rank)
            empty(query_len, rank) @ empty(rank, value)
        else:
            empty(context_len + query_len, rank) @ empty(rank, nope + value)
        for keys in range(context_len + 1, context_len + query_len + 1):
            empty(1, rank + rope if absorbed else nope + rope) @ empty(rank + rope if absorbed else nope + rope, keys)
            empty(1, keys) @ empty(keys, rank if absorbed else value)
    return counter.get_total_flops()


@given(
    st.integers(2, 24),
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(1, 20),
)
def test_the_form_with_fewer_operations_is_taken(query_len, context_len, rank, nope, rope, value):
    sizes = (query_len, context_len, rank, nope, rope, value)
    absorbed, expanded = (count_flops(*sizes, absorbed=flag) for flag in (True, False))

    assert LatentSizes(rank, nope, value).is_long(query_len, context_len) == (expanded < absorbed)


def test_the_threshold_of_deepseek_v3():
    sizes = LatentSizes(512, 128, 128)

    assert [sizes.is_long(170, 10**6), sizes.is_long(171, 10**6), sizes.is_long(171, 10**9)] == [False, True, True]
    assert sizes.is_long(100, 0)
    assert not sizes.is_long(1, 0)  # a decode, which a graph may replay


@pytest.mark.parametrize("how", [{}, {"block_size": 4, "num_blocks": 16, "max_num_tokens": 24, "max_num_reqs": 6}])
def test_long_prefills_are_not_absorbed(host, calls, how):
    made, prompts, expected = reference("deepseek_v3")

    with Engine(made, **how) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == expected
        assert {one.id for one in engine.prefill_selections.values()} == {"torch/sdpa"}
        assert set(engine.prefill_selections) == {"decoder", "encoder_only", "encoder_decoder"}
        assert engine.why_absorbed is None
        largest = prefills.most_rows(engine.limits)

    long = [one for queries, contexts, _, _ in calls for one in zip(queries, contexts, strict=True)]
    assert long
    assert all(SIZES.is_long(*one) for one in long)
    assert any(context for _, context in long) == bool(how)  # chunks, and recomputed requests
    for _, contexts, rows, _ in calls:
        assert sum(rows) == sum(contexts)  # each cached token is expanded once
        assert max(rows, default=0) <= largest


def test_a_long_prefix_is_expanded_in_chunks(host, calls, monkeypatch):
    made, prompts, expected = reference("deepseek_v3")
    monkeypatch.setattr(prefills, "_MAX_ROWS", 3)

    with Engine(made, max_num_tokens=16, max_num_reqs=4, block_size=4) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == expected

    chunked = [rows for _, _, rows, _ in calls if len(rows) > 1]
    assert chunked
    assert max(map(max, chunked)) == 3


def test_the_layers_of_a_step_share_its_plan(host, calls):
    made, prompts, _ = reference("deepseek_v3")

    with Engine(made) as engine:
        engine.submit(prompts[3], max_new_tokens=2)
        engine.step()

    assert len(calls) == 4
    assert len({id(batch) for *_, batch in calls}) == 1


def test_short_prefills_and_decodes_are_absorbed(host, calls):
    """A step of decodes, a long prefill, and a short one behind a cached prefix, which comes before it in the batch."""
    made, prompts, _ = reference("deepseek_v3")
    first, shared = prompts[3], prompts[0]
    with Engine(made, block_size=4) as engine:
        wanted = [engine.generate([one], max_new_tokens=4)[0] for one in (first, prompts[7], shared)]
        engine.reset_prefix_cache()
        engine.generate([shared[:17]], max_new_tokens=1)
        running = engine.submit(first, max_new_tokens=4)
        engine.step()
        calls.clear()

        found = [engine.submit(one, max_new_tokens=4) for one in (prompts[7], shared)]
        engine.step()
        assert [(queries, contexts) for queries, contexts, _, _ in calls[:1]] == [([len(prompts[7]) - 24], [24])]
        while engine.has_work:
            engine.step()

    assert [one.new_tokens for one in (running, *found)] == wanted


def test_logits_stay_in_the_order_of_the_step():
    decode, long, short = (
        scheduled([10, 11, 12, 13, 14], [3, 7], 4, 1),
        scheduled(list(range(30, 36)), [1, 4], 0, 6),
        scheduled(list(range(20, 30)), [2, 5, 6], 8, 2),
    )

    inputs = prepare(Step((decode, long, short)), BatchAssembler(4), CPU, SIZES.is_long)

    assert inputs.num_absorbed == 2
    assert inputs.input_ids.tolist() == [[14, 28, 29, *range(30, 36)]]
    assert inputs.rows.tolist() == [0, 8, 2]


def test_a_profile_run_has_a_whole_chunk_of_cached_tokens(host, calls):
    with Engine(reference("deepseek_v3")[0], max_num_tokens=9, max_num_reqs=3, max_seq_len=40) as engine:
        engine._runner.profile(9, 3, 40)

    assert [found[:3] for found in calls] == [([9], [36], [36])] * 4


@pytest.mark.parametrize(("first", "last"), [(0, 2), (1, 3), (2, 3), (0, 3)])
def test_a_part_of_a_step(first, last):
    lengths = [(3, 9), (1, 5), (4, 4)]
    assembler = BatchAssembler(4)
    for query, length in lengths:
        assembler.add(query, length - query, [1, 2, 3])
    whole = assembler.finish()

    part = part_of(whole, first, last)

    starts = whole.query_start_loc.tolist()
    assert [stop - start for start, stop in pairwise(part.query_start_loc.tolist())] == [
        query for query, _ in lengths[first:last]
    ]
    assert part.query_start_loc_cpu.tolist() == part.query_start_loc.tolist()
    assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist() == [length for _, length in lengths[first:last]]
    assert part.slot_mapping.tolist() == whole.slot_mapping[starts[first] : starts[last]].tolist()
    assert (part.num_reqs, part.num_actual_tokens) == (last - first, starts[last] - starts[first])
    assert part.max_query_len == max(query for query, _ in lengths[first:last])
    assert part.max_seq_len == max(length for _, length in lengths[first:last])


def test_a_backend_without_dense_calls_is_not_replaced_by_another(host, calls, tmp_path):
    manifest = tmp_path / "attnplug.toml"
    manifest.write_text(ABSORBED)
    attnplug.register("hosts.transformers.tests.fakes.separate_plans", manifest=manifest)
    made, prompts, expected = reference("deepseek_v3")

    with Engine(made, backend="absorbed") as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == expected
        assert engine.prefill_selections == {}
        assert "its kernels read pages" in engine.why_absorbed
    assert not calls

    with Engine(made, backend=["absorbed", "torch"]) as engine:  # as the user permits
        assert {one.id for one in engine.selections.values()} == {"absorbed/sdpa"}
        assert {one.id for one in engine.prefill_selections.values()} == {"torch/sdpa"}
        assert engine.generate(prompts, max_new_tokens=NEW) == expected
    assert calls


def test_latents_in_records(host, calls):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}
    made, prompts = model("deepseek_v3", dtype=torch.bfloat16, **sizes), reference("deepseek_v3")[1]
    found = {}
    for dtype in ("auto", "fp8_ds_mla"):
        with Engine(made, kv_cache_dtype=dtype, max_num_tokens=20, max_num_reqs=4, block_size=16) as engine:
            found[dtype] = engine.generate(prompts, max_new_tokens=1)

    assert engine._groups.bytes_per_block == 2 * 16 * 656
    assert any(any(contexts) for _, contexts, _, _ in calls[len(calls) // 2 :])
    equal = sum(one == other for one, other in zip(*found.values(), strict=True))
    assert equal >= len(prompts) - 2  # by rounding


def test_a_model_without_latents_has_no_such_prefills(host, calls):
    made, prompts, _ = reference("llama")

    with Engine(made) as engine:
        engine.generate(prompts, max_new_tokens=2)
        assert engine.prefill_selections == {}
        assert engine.why_absorbed is None
    assert not calls
