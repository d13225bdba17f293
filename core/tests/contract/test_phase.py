"""The two phases of a batch, as kernels take them that serve one."""

from __future__ import annotations

from itertools import accumulate

import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import Batch, GraphShape, MetadataBuilder
from core.tests.contract.test_graphs import capture, world
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import make_backend, make_batch, make_builder


def check(phase, batch, requests, lens, seqs):
    """Compare a phase with slices of plain lists."""
    if not lens:
        assert phase is None
        return
    starts = [0, *accumulate(lens)]
    assert phase.query_start_loc.tolist() == phase.query_start_loc_cpu.tolist() == starts
    assert phase.seq_lens.tolist() == phase.seq_lens_cpu.tolist() == seqs
    assert (phase.num_reqs, phase.num_tokens) == (len(lens), starts[-1])
    assert (phase.max_query_len, phase.max_seq_len) == (max(lens), max(seqs))
    assert torch.equal(phase.block_table, batch.block_table[requests])
    assert phase.block_table.data_ptr() == batch.block_table[requests].data_ptr()


@given(
    st.lists(st.integers(1, 2), max_size=4),
    st.lists(st.integers(3, 9), max_size=3),
    st.lists(st.integers(0, 9), min_size=7),
)
def test_phases_are_the_slices(decodes, prefills, contexts):
    lens = decodes + prefills
    if not lens:
        return
    seqs = [length + context for length, context in zip(lens, contexts, strict=False)]
    builder = make_builder(make_backend(decode_query_len=2))
    batch = make_batch(lens, seqs)
    metadata = builder.build(batch)
    count = len(decodes)
    check(metadata.decodes, batch, slice(0, count), decodes, seqs[:count])
    check(metadata.prefills, batch, slice(count, None), prefills, seqs[count:])
    assert metadata.decodes is metadata.decodes
    if prefills:
        assert metadata.prefills.rows == slice(sum(decodes), sum(lens))


def test_bounds_stay_bounds():
    builder = make_builder(make_backend(seq_lens_cpu_kind="upper_bound"))
    bound = torch.tensor([9, 9], dtype=torch.int32)
    metadata = builder.build(evolve(make_batch([1, 4], [3, 7], width=4), seq_lens_cpu=bound, max_seq_len=12))
    assert metadata.decodes.max_seq_len == metadata.prefills.max_seq_len == 12


def test_a_slot_is_one_phase_at_one_place():
    _, _, builder = world("uniform_batch")
    (graph,), (captured,) = capture(builder, GraphShape(4, 4, 1))
    decodes = captured.decodes
    later = builder.build(make_batch([1, 1], [5, 9]), graph=graph).decodes
    assert captured.prefills is None
    assert (later.num_reqs, later.max_seq_len) == (decodes.num_reqs, decodes.max_seq_len) == (4, 64)
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(later, name).data_ptr() == getattr(decodes, name).data_ptr()


def test_a_batch_travels_as_a_dict():
    batch = make_batch([1, 4], [3, 7])
    batch.cached("derived", lambda: 1)
    data = batch.to_dict()
    copy = Batch(**data)
    assert "derived" not in data
    assert "custom_mask" not in data
    assert not copy.derived
    assert copy.to_dict().keys() == data.keys()
    assert torch.equal(copy.block_table, batch.block_table)


def test_padding_alone_is_no_phase():
    uniform = type("Uniform", (MetadataBuilder,), {"requires_uniform_decodes": True})
    backend = make_backend(type("B", (ToyBackend,), {"builder_class": uniform}))
    metadata = make_builder(backend).build(make_batch([1, 1, 0], [4, 3, 0]))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.prefills is None
