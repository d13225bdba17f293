"""Layers that share a KV cache, cross attention, and decodes of several tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import Batch, Limits
from attnplug.errors import BatchError, CacheError
from attnplug.request.device import Device
from attnplug_kit.oracle import Case, assert_close, cases, check, limits_of, materialize, run

if TYPE_CHECKING:
    from attnplug.contract import AttentionImpl, Backend, Metadata
    from attnplug_kit.oracle import Paged, Scene

CROSS = {"attn_type": "encoder_decoder", "causal": False}


def load(case: Case, **engine: object) -> Backend:
    requested = case.requirements(block_size=case.block_size, **engine)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def prepare(backend: Backend, scene: Scene) -> tuple[AttentionImpl, Paged, Metadata]:
    impl, call = backend.make_impl(scene.layer()), scene.paged(backend)
    return impl, call, backend.make_builder([impl], backend.make_state(limits_of(scene))).build(call.batch)


@given(cases(features=("attention_chunk", "sliding_window", "sinks", "decode_query_len"), kv_sharing=True))
@settings(max_examples=40)
def test_a_layer_that_shares_a_kv_cache_ignores_given_keys(case: Case) -> None:
    scene, backend = materialize(case), load(case)
    impl, call, metadata = prepare(backend, scene)
    before = [pages.clone() for pages in (call.cache.k, call.cache.v)]
    shape = (call.query.shape[0], case.num_kv_heads, case.head_size)
    key = torch.full(shape, torch.nan, dtype=call.query.dtype)

    impl.forward(call.query, key, key, call.cache, metadata, call.output)

    got = call.output[: case.num_tokens].view(case.num_tokens, case.num_q_heads, -1)
    assert_close(got, scene.expected().output, dtype=got.dtype, scale=scene.largest_value)
    for pages, as_before in zip((call.cache.k, call.cache.v), before, strict=True):
        torch.testing.assert_close(pages, as_before, rtol=0, atol=0, equal_nan=True)


def test_a_shared_kv_cache_is_not_written() -> None:
    case = Case(query_lens=(1, 3), context_lens=(5, 0), kv_sharing=True)
    scene, backend = materialize(case), load(case)
    impl, call, _ = prepare(backend, scene)
    key = torch.zeros(4, case.num_kv_heads, case.head_size)

    assert not impl.forward_writes
    with pytest.raises(CacheError, match="nobody does"):
        impl.write_kv(key, key, call.cache, call.batch.slot_mapping)


@pytest.mark.parametrize("host_writes", [False, True])
@pytest.mark.parametrize("contexts", [(3, 0, 0), (0, 0, 0), (2, 9, 4)], ids=["mixed", "first steps", "later steps"])
def test_requests_in_different_steps_of_cross_attention(contexts: tuple[int, ...], host_writes: bool) -> None:
    case = Case(query_lens=(1, 1, 6), context_lens=contexts, encoder_lens=(40, 17, 33), num_padding_tokens=2, **CROSS)

    ran = check(load(case, return_lse=True), materialize(case), host_writes=host_writes)

    assert (ran.call.key is None) == all(contexts), "K/V come with first steps alone"


def test_later_steps_read_what_the_first_step_writes() -> None:
    case = Case(query_lens=(4, 7), context_lens=(0, 0), encoder_lens=(30, 21), **CROSS)
    scene, backend = materialize(case), load(case)
    impl, first, metadata = prepare(backend, scene)
    impl.forward(first.query, first.key, first.value, first.cache, metadata, first.output)
    later = materialize(evolve(case, query_lens=(1, 1), context_lens=(4, 7), seed=9))
    later = evolve(later, keys=scene.keys, values=scene.values, block_table=scene.block_table)
    _, call, metadata = prepare(backend, later)

    impl.forward(call.query, None, None, first.cache, metadata, call.output)

    got = call.output.view(2, case.num_q_heads, -1)
    assert_close(got, later.expected().output, dtype=got.dtype, scale=later.largest_value)


def test_an_encoder_may_be_longer_than_the_decoder() -> None:
    case = Case(query_lens=(1,), context_lens=(2,), encoder_lens=(1500,), **CROSS)
    scene, backend = materialize(case), load(case)
    check(backend, scene)
    impl, call = backend.make_impl(scene.layer()), scene.paged(backend)
    limits = Limits(max_num_reqs=1, max_num_tokens=1, max_seq_len=448)

    with pytest.raises(BatchError, match="max_seq_len=448 keys per request: here they are an encoder's"):
        backend.make_builder([impl], backend.make_state(limits)).build(call.batch)


def test_dense_cross_attention_takes_a_mask() -> None:
    case = Case(query_lens=(1, 6), context_lens=(3, 0), encoder_lens=(9, 20), custom_mask=True, sinks=True, **CROSS)
    requested = case.requirements(paged=False, return_lse=True)

    check(attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), materialize(case))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(5, 9), max_size=2), st.booleans())
@settings(max_examples=30)
def test_decodes_of_several_tokens_are_decodes(decodes: list[int], prefills: list[int], both: bool) -> None:
    prefills = prefills if both else []
    lens = (*decodes, *prefills)
    case = Case(query_lens=lens, context_lens=(20,) * len(lens), decode_query_len=4)
    scene, backend = materialize(case), load(case, phases=("prefill", "decode") if both else ("decode",))

    _, _, metadata = prepare(backend, scene)

    assert (metadata.num_decodes, metadata.num_decode_tokens) == (len(decodes), sum(decodes))
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (len(prefills), sum(prefills))
    check(backend, scene)


def test_tokens_decoded_together_give_what_they_give_one_by_one() -> None:
    case = Case(query_lens=(4,), context_lens=(30,), decode_query_len=4, attention_chunk=16, alibi="linear")
    scene, backend = materialize(case), load(case)
    together = run(backend, scene).output

    for token in range(4):
        alone = evolve(
            scene,
            case=evolve(case, query_lens=(1,), context_lens=(30 + token,)),
            queries=(scene.queries[0][token : token + 1],),
            keys=(scene.keys[0][: 31 + token],),
            values=(scene.values[0][: 31 + token],),
        )
        torch.testing.assert_close(run(backend, alone).output[0], together[token], rtol=1e-5, atol=1e-5)


def test_a_fully_masked_row_gives_zeros_and_the_sink() -> None:
    case = Case(query_lens=(1, 3), context_lens=(20, 0), custom_mask=True, sinks=True)
    fully_masked = materialize(case)
    fully_masked = evolve(fully_masked, masks=tuple(torch.zeros_like(mask) for mask in fully_masked.masks or ()))

    ran = check(load(case, return_lse=True), fully_masked)

    assert not ran.output.any()
    assert torch.equal(ran.lse, fully_masked.sinks.expand(4, -1))  # type: ignore[union-attr]


def test_a_window_of_an_encoder_has_two_sides() -> None:
    requested = attnplug.Requirements(
        head_size=16, num_q_heads=1, num_kv_heads=1, dtype="float32", attn_type="encoder_only", sliding_window=2
    )
    backend = attnplug.load(requested, Device.cpu(), backend="torch/sdpa")
    impl = backend.make_impl(attnplug.Layer(name="layer"))
    builder = backend.make_builder([impl], backend.make_state(Limits(max_num_reqs=1, max_num_tokens=4, max_seq_len=4)))
    query, output = torch.zeros(4, 1, 16), torch.empty(4, 16)
    value = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1).expand(4, 1, 16).contiguous()

    impl.forward(query, query, value, None, builder.build(Batch.from_lengths([4], causal=False)), output)

    torch.testing.assert_close(output[:, 0], torch.tensor([3 / 2, 7 / 3, 14 / 3, 12 / 2]))
