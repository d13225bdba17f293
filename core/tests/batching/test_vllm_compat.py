"""Split, order, values of layers, and chunked-local attention as plain causal attention."""

from __future__ import annotations

from collections import deque
from itertools import groupby

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.batching import (
    Hyperparameters,
    Split,
    infer_global_hyperparameters,
    local_chunk_batch,
    make_local_attention_virtual_batches,
    max_local_chunks,
    pad_batch,
    per_layer_parameters,
    split_decodes_and_prefills,
)
from attnplug.batching import reorder_batch_to_split_decodes_and_prefills as reorder
from attnplug.contract import Batch, Layer, Limits, MetadataBuilder
from attnplug.contract.guards.batch import BatchGuard
from attnplug.errors import BatchError, LayerError
from attnplug_kit.oracle import assert_close, cases, materialize
from core.tests.contract.world import limits, make_backend, make_batch, make_layer


@st.composite
def ordered(draw: st.DrawFn) -> tuple[list[int], int]:
    threshold = draw(st.integers(1, 4))
    decodes = draw(st.lists(st.integers(1, threshold), max_size=5))
    prefills = draw(st.lists(st.integers(threshold + 1, 30), max_size=4))
    return decodes + prefills + [0] * draw(st.integers(0, 2)), threshold


@given(ordered())
def test_counts_requests_and_tokens_on_both_sides(drawn: tuple[list[int], int]) -> None:
    lens, threshold = drawn
    decodes = [n for n in lens if 0 < n <= threshold]
    prefills = [n for n in lens if n > threshold]
    padding = lens.count(0)

    split = split_decodes_and_prefills(Batch.from_lengths(lens), threshold)

    assert split.num_decodes == len(decodes) + (0 if prefills else padding)
    assert split.num_prefills == len(prefills) + (padding if prefills else 0)
    assert (split.num_decode_tokens, split.num_prefill_tokens) == (sum(decodes), sum(prefills))


@given(ordered())
def test_uniform_decodes_all_have_one_length(drawn: tuple[list[int], int]) -> None:
    lens, threshold = drawn

    split = split_decodes_and_prefills(Batch.from_lengths(lens), threshold, require_uniform=True)

    front = {n for n in lens[: split.num_decodes] if n}
    assert len(front) <= 1
    assert split.num_decode_tokens == sum(lens[: split.num_decodes])
    if split.num_prefills:
        assert lens[split.num_decodes] > threshold or lens[split.num_decodes] != lens[0]


any_order = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@pytest.mark.parametrize("uniform", [False, True])
@given(lens=any_order, threshold=st.integers(1, 4), padded=st.integers(0, 3))
def test_any_order_is_split_as_a_build_does(uniform: bool, lens: list[int], threshold: int, padded: int) -> None:
    backend = make_backend(decode_query_len=threshold)
    backend.wrapped.builder_class = type("Builder", (MetadataBuilder,), {"requires_uniform_decodes": uniform})
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits(max_num_tokens=128)))
    # Padded requests repeat the first one, with a real length, as SGLang's graphs have them.
    batch = evolve(make_batch([*lens, *[lens[0]] * padded], [6] * (len(lens) + padded)), num_padded_reqs=padded)

    found = split_decodes_and_prefills(batch, threshold, require_uniform=uniform)

    built = builder.build(batch)
    assert found == (built.num_decodes, built.num_prefills, built.num_decode_tokens, built.num_prefill_tokens)


def test_a_short_query_behind_a_prefill_is_a_prefill() -> None:
    assert split_decodes_and_prefills(Batch.from_lengths([1, 5, 1])) == Split(1, 2, 1, 6)
    assert split_decodes_and_prefills(Batch.from_lengths([5, 1])) == Split(0, 2, 0, 6)


@pytest.mark.parametrize(("lens", "decodes"), [([2, 2, 0], 3), ([2, 0, 2], 3), ([2, 0, 3], 1), ([3, 0], 0)])
def test_padding_of_uniform_decodes_as_in_vllm(lens: list[int], decodes: int) -> None:
    assert split_decodes_and_prefills(Batch.from_lengths(lens), 2, require_uniform=True).num_decodes == decodes


@pytest.mark.parametrize("padded", [-1, 2, True])
def test_an_invalid_number_of_padded_requests_is_refused(padded: int) -> None:
    with pytest.raises(BatchError, match="num_padded_reqs"):
        split_decodes_and_prefills(evolve(Batch.from_lengths([1, 5]), num_padded_reqs=padded))


def test_only_the_cpu_copy_is_read() -> None:
    batch = evolve(Batch.from_lengths([1, 5]), query_start_loc=torch.zeros(3, dtype=torch.int32, device="meta"))

    assert split_decodes_and_prefills(batch) == Split(1, 1, 1, 5)


def test_a_missing_cpu_copy_is_refused() -> None:
    batch = evolve(Batch.from_lengths([1, 5]), query_start_loc_cpu=None)

    with pytest.raises(BatchError, match="no query_start_loc_cpu"):
        split_decodes_and_prefills(batch)


def test_a_threshold_below_one_is_refused() -> None:
    with pytest.raises(BatchError, match="decode_threshold=0"):
        split_decodes_and_prefills(Batch.from_lengths([1]), 0)


scheduled = st.lists(st.integers(0, 4), max_size=6)


@given(scheduled, st.integers(1, 3))
def test_decodes_come_first_and_none_is_lost(tokens: list[int], threshold: int) -> None:
    names = [f"request-{i}" for i in range(len(tokens))]
    by_name = dict(zip(names, tokens, strict=True))

    result = reorder(names, by_name, threshold)

    kinds = [by_name[name] > threshold for name in result.order]
    assert kinds == sorted(kinds)
    assert sorted(result.order) == sorted(names)
    assert result.changed == (list(result.order) != names)


@given(scheduled)
def test_swaps_permute_a_hosts_state_the_same_way(tokens: list[int]) -> None:
    names = list(range(len(tokens)))
    state = [f"state-{name}" for name in names]

    result = reorder(names, dict(enumerate(tokens)))
    result.apply(state)

    assert state == [f"state-{name}" for name in result.order]


@given(scheduled, st.integers(1, 3))
def test_swaps_are_the_fewest(tokens: list[int], threshold: int) -> None:
    result = reorder(range(len(tokens)), dict(enumerate(tokens)), threshold)

    assert len(result.swaps) == _least_swaps(tuple(n > threshold for n in tokens))


def _least_swaps(kinds: tuple[bool, ...]) -> int:
    """Breadth first over every exchange of two positions."""
    goal = tuple(sorted(kinds))
    distance, queue = {kinds: 0}, deque([kinds])
    while goal not in distance:
        here = queue.popleft()
        for i in range(len(here)):
            for j in range(i):
                there = list(here)
                there[i], there[j] = there[j], there[i]
                if tuple(there) not in distance:
                    distance[tuple(there)] = distance[here] + 1
                    queue.append(tuple(there))
    return distance[goal]


def test_requests_without_scheduled_tokens_are_named() -> None:
    with pytest.raises(BatchError, match="'b'"):
        reorder(["a", "b"], {"a": 1})


values = st.tuples(st.integers(-1, 2), st.sampled_from([None, 30.0]), st.sampled_from([0.125, 0.25]))


def impls_of(names, scale=None, **requested):
    requirements = attnplug.Requirements(head_size=16, num_q_heads=2, num_kv_heads=2, dtype="float32", **requested)
    backend = attnplug.load(requirements, "cpu", backend="torch/sdpa")
    return [backend.make_impl(Layer(name=name, scale=scale)) for name in names]


def test_reads_window_cap_and_scale_of_each_layer():
    impls = [
        *impls_of(["local"], scale=0.5, sliding_window=8, logits_soft_cap=30.0),
        *impls_of(["full"]),
    ]

    assert per_layer_parameters(impls) == {"local": (7, 30.0, 0.5), "full": (-1, None, 0.25)}


def test_layer_names_are_unique():
    with pytest.raises(LayerError, match="two layers are called 'a'"):
        per_layer_parameters(impls_of(["a", "b", "a"]))


@given(st.lists(values, min_size=1, max_size=5))
def test_shared_values_or_the_names_of_differing_layers(per_layer):
    named = {f"layers.{index}": layer for index, layer in enumerate(per_layer)}

    if len(set(per_layer)) == 1:
        assert infer_global_hyperparameters(named) == Hyperparameters(*per_layer[0])
        return
    with pytest.raises(LayerError) as caught:
        infer_global_hyperparameters(named)
    said = caught.value.problem.partition("; ")[2]
    assert [name for name in named if f"{name!r}" in said] == [n for n, v in named.items() if v != per_layer[0]]


def test_no_layers_share_nothing():
    with pytest.raises(LayerError, match="no layers were given"):
        infer_global_hyperparameters({})


lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=5)
sizes = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4)).map(lambda pair: (pair[0] * pair[1], pair[0]))


def starts_of(query_lens):
    return torch.tensor([0, *query_lens]).cumsum(0).int()


def cut_token_by_token(lens, chunk):
    """``(request, chunk, query length, sequence length)`` of each run of queries in one chunk."""
    found = []
    for request, (query, computed) in enumerate(lens):
        positions = range(computed, computed + query)
        for index, run in groupby(positions, key=lambda position: position // chunk):
            *_, last = together = list(run)
            found.append((request, index, len(together), last - index * chunk + 1))
    return found


def test_the_published_example():
    virtual = make_local_attention_virtual_batches(
        4, starts_of([4, 10, 5]), torch.tensor([6, 17, 9]), torch.arange(27).view(3, 9), 2
    )

    assert virtual.query_lens.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert virtual.query_start_loc.tolist() == [0, 2, 4, 5, 9, 13, 14, 18, 19]
    assert virtual.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert virtual.block_table.tolist() == [
        [0, 1],
        [2, 3],
        [11, 12],
        [13, 14],
        [15, 16],
        [17, 17],
        [20, 21],
        [22, 23],
    ]


@given(lengths, sizes, st.integers(0, 3))
def test_virtual_requests_agree_with_a_loop_over_tokens(lens, chunk_and_block, spare):
    chunk, block_size = chunk_and_block
    seq_lens = [query + computed for query, computed in lens]
    columns = max(-(-length // block_size) for length in seq_lens) + spare
    table = torch.randint(1, 999, (len(lens), columns), dtype=torch.int32)

    virtual = make_local_attention_virtual_batches(
        chunk, starts_of([query for query, _ in lens]), torch.tensor(seq_lens, dtype=torch.int32), table, block_size
    )

    expected = cut_token_by_token(lens, chunk)
    assert virtual.query_lens.tolist() == [query for _, _, query, _ in expected]
    assert virtual.seq_lens.tolist() == [length for *_, length in expected]
    assert virtual.query_start_loc.tolist() == starts_of(virtual.query_lens.tolist()).tolist()
    assert virtual.block_table.shape == (len(expected), chunk // block_size)
    for row, (request, index, _, length) in zip(virtual.block_table.tolist(), expected, strict=True):
        used, first = -(-length // block_size), index * chunk // block_size
        assert row[:used] == table[request, first : first + used].tolist()
    assert {getattr(virtual, name).dtype for name in virtual.__slots__ if name != "__weakref__"} == {torch.int32}


@given(lengths, st.integers(1, 9), st.integers(0, 3))
def test_the_bound_holds_and_is_reached(lens, chunk, idle):
    tokens = sum(query for query, _ in lens)

    assert len(cut_token_by_token(lens, chunk)) <= max_local_chunks(len(lens) + idle, tokens, chunk)
    widest = [(2 + 3 * chunk, chunk - 1)] * len(lens)  # one token, three whole chunks, one token
    if chunk > 1:
        total = sum(query for query, _ in widest)
        assert len(cut_token_by_token(widest, chunk)) == max_local_chunks(len(lens), total, chunk)


@given(lengths.filter(lambda lens: any(query for query, _ in lens)), sizes, st.integers(0, 2))
def test_a_virtual_batch_passes_the_guards_of_a_builder(lens, chunk_and_block, more):
    chunk, block_size = chunk_and_block
    requested = attnplug.Requirements(
        head_size=16, num_q_heads=1, num_kv_heads=1, dtype="float32", block_size=block_size, phases=("prefill",)
    )
    agreed = attnplug.select(requested, "cpu", backend="torch/sdpa").agreement
    batch = pad_batch(paged(lens, block_size), len(lens) + more, sum(query for query, _ in lens) + more)

    virtual = local_chunk_batch(batch, chunk, block_size)

    limits = Limits(
        max_num_reqs=max_local_chunks(batch.num_reqs, batch.num_actual_tokens, chunk),
        max_num_tokens=batch.num_actual_tokens,
        max_seq_len=chunk,
        num_blocks=999,
    )
    facts = BatchGuard(agreed, limits, torch.device("cpu")).check(virtual)
    assert facts.num_prefill_tokens == batch.num_actual_tokens
    assert virtual.slot_mapping is batch.slot_mapping


def paged(lens, block_size):
    seq_lens = [query + computed for query, computed in lens]
    columns = max(-(-length // block_size) for length in seq_lens)
    table = torch.arange(1, 1 + columns * len(lens), dtype=torch.int32).view(len(lens), columns)
    slots = [
        int(table[request, position // block_size]) * block_size + position % block_size
        for request, (query, computed) in enumerate(lens)
        for position in range(computed, computed + query)
    ]
    return Batch.from_lengths(
        [query for query, _ in lens], seq_lens, block_table=table, slot_mapping=torch.tensor(slots, dtype=torch.int64)
    )


@given(cases(attention_chunk=None, block_size=4), st.integers(1, 4), st.sampled_from(["NHD", "HND"]))
@settings(max_examples=40)
def test_causal_attention_over_virtual_requests(case, blocks, layout):
    chunk = blocks * case.block_size
    plain = case.requirements(block_size=case.block_size, kv_layout=layout, phases=("prefill",))
    backend = attnplug.load(plain, "cpu", backend="torch/sdpa")
    scene = materialize(evolve(case, attention_chunk=chunk))
    call = scene.paged(backend)
    virtual = local_chunk_batch(call.batch, chunk, case.block_size)
    limits = Limits(
        max_num_reqs=max(1, virtual.num_reqs), max_num_tokens=case.num_tokens, max_seq_len=chunk, num_blocks=10**4
    )
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(limits))

    impl.forward(call.query, call.key, call.value, call.cache, builder.build(virtual), call.output)

    output = call.output[: case.num_tokens].view(case.num_tokens, case.num_q_heads, -1)
    assert_close(output, scene.expected().output, dtype=output.dtype, scale=scene.largest_value)


@pytest.mark.parametrize(("chunk", "block_size"), [(6, 4), (0, 4), (4, 0), (2, 4)])
def test_a_chunk_is_a_multiple_of_a_block(chunk, block_size):
    with pytest.raises(BatchError, match=f"attn_chunk_size={chunk} and block_size={block_size}"):
        make_local_attention_virtual_batches(
            chunk, starts_of([1]), torch.tensor([1]), torch.ones(1, 1, dtype=torch.int32), block_size
        )


@pytest.mark.parametrize(
    ("starts", "ends", "said"),
    [
        ([0, 3], [2], "request 0 has a sequence of 2 tokens and a query of 3"),
        ([0, 3, 2], [3, 4], "request 1 has a sequence of 4 tokens and a query of -1"),
        ([0, 3], [3, 4], "one entry more"),
        ([0, 1], [9], "1 columns of 4 slots"),
    ],
)
def test_contradicting_lengths_are_refused(starts, ends, said):
    with pytest.raises(BatchError, match=said):
        make_local_attention_virtual_batches(
            4, torch.tensor(starts), torch.tensor(ends), torch.ones(len(ends), 1, dtype=torch.int32), 4
        )


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])
def test_lengths_on_a_device_are_refused(name):
    host = {"query_start_loc": starts_of([1]), "seq_lens": torch.tensor([1])}
    given_ = {**host, name: host[name].to("meta")}

    with pytest.raises(BatchError, match=f"pass the batch's {name}_cpu"):
        make_local_attention_virtual_batches(4, **given_, block_table=torch.ones(1, 1), block_size=4)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"causal": False}, "causal=False"),
        ({"custom_mask": torch.ones(2, dtype=torch.bool)}, "a custom mask"),
        ({"encoder_seq_lens": torch.ones(1)}, "encoder lengths"),
        ({"dcp_local_seq_lens": torch.ones(1)}, "DCP-local lengths"),
        ({"key_start_loc": torch.ones(2)}, "key_start_loc"),
        ({"seq_lens_cpu": None}, "without query_start_loc_cpu, seq_lens_cpu or block_table"),
        ({"block_table": None}, "without query_start_loc_cpu, seq_lens_cpu or block_table"),
    ],
)
def test_other_batches_are_refused(fields, problem):
    with pytest.raises(BatchError, match=problem):
        local_chunk_batch(evolve(paged([(1, 1)], 4), **fields), 4, 4)


@pytest.mark.gpu
def test_on_a_gpu_the_table_follows_and_keeps_its_host_copy():
    batch = paged([(3, 5), (9, 2)], 2)
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    there = evolve(batch, **{name: getattr(batch, name).cuda() for name in names})

    virtual, here = local_chunk_batch(there, 4, 2), local_chunk_batch(batch, 4, 2)

    for name in names:
        assert getattr(virtual, name).is_cuda
        assert torch.equal(getattr(virtual, name).cpu(), getattr(here, name))
        assert torch.equal(getattr(virtual, f"{name}_cpu"), getattr(here, name))


def test_padded_requests_have_no_virtual_ones():
    batch = paged([(6, 0), (3, 0)], 2)
    virtual = local_chunk_batch(evolve(batch, num_padded_reqs=1), 4, 2)

    assert virtual.seq_lens.tolist() == [4, 2]
    assert (virtual.num_padded_reqs, virtual.num_actual_tokens) == (0, 6)
