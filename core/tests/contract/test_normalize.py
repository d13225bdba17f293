"""Lengths that are read from the device: in one copy, once per batch."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, MetadataBuilder, forward_context
from attnplug.contract.guards import normalize
from attnplug.errors import BatchError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import agree, limits, make_batch, make_layer


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a device, and counts the copies to the CPU."""

    copies = 0
    is_cpu = False

    def cpu(self):
        OnDevice.copies += 1
        return self.as_subclass(torch.Tensor)


def on_device(tensor):
    return tensor.as_subclass(OnDevice)


def test_all_lengths_come_in_one_copy():
    OnDevice.copies = 0
    batch = make_batch([1, 3], [5, 3])
    lens = torch.tensor([6, 7], dtype=torch.int32)
    fields = {"encoder_seq_lens": lens, "dcp_local_seq_lens": lens, "key_start_loc": torch.tensor([0, 5, 8])}
    absent = {f"{name}_cpu": None for name in (*fields, "seq_lens")}
    moved = {name: on_device(tensor) for name, tensor in fields.items()}
    batch = evolve(batch, seq_lens=on_device(batch.seq_lens), **moved, **absent, max_encoder_seq_len=9)

    read = normalize.with_lengths(batch)

    assert normalize.with_lengths(batch) is read
    assert normalize.with_lengths(read) is read
    assert OnDevice.copies == 1
    assert read.seq_lens_cpu.tolist() == [5, 3]
    assert read.encoder_seq_lens_cpu.tolist() == read.dcp_local_seq_lens_cpu.tolist() == [6, 7]
    assert read.key_start_loc_cpu.tolist() == [0, 5, 8]
    assert read.max_encoder_seq_len == 7


@pytest.fixture
def reads(monkeypatch):
    """Return the batches whose lengths were read."""
    found, read = [], normalize._read
    monkeypatch.setattr(normalize, "_read", lambda batch: found.append(batch) or read(batch))
    return found


def make_reader(count=1, **requested):
    selection = agree(seq_lens_cpu_kind="absent", **requested)
    backend = ToyBackend(evolve(selection.agreement, reads_lengths=True), selection.device)
    state = backend.make_state(limits())
    return [backend.make_builder([make_layer(backend, name=str(n))], state) for n in range(count)]


def test_builders_of_one_batch_read_it_once(reads):
    batch = evolve(make_batch([1, 3], [5, 3], width=4), seq_lens_cpu=None, max_seq_len=9)
    for builder in make_reader(2):
        metadata = builder.build(batch)
        assert metadata.batch.seq_lens_cpu.tolist() == [5, 3]
        assert metadata.batch.max_seq_len == 5
    assert len(reads) == 1


def test_what_follows_from_a_read_batch_is_not_read(reads):
    (builder,) = make_reader()
    batch = evolve(make_batch([1, 1, 0], [5, 7, 0], width=4), seq_lens_cpu=None, max_seq_len=9, max_query_len=2)
    metadata = builder.build(batch)
    updated = builder.update_block_table(metadata, batch.block_table, batch.slot_mapping)
    advanced = builder.advance_step(updated)

    assert len(reads) == 1
    assert advanced.batch.seq_lens_cpu.tolist() == [6, 8, 0]


def test_plugins_decide_on_captures_by_exact_counts():
    seen = []
    picky = type(
        "Picky", (MetadataBuilder,), {"supports_graphs": True, "can_capture": lambda _, b: seen.append(b) or True}
    )
    selection = agree(cudagraph="uniform_batch", agreed_graphs="uniform_batch")
    backend = type("B", (ToyBackend,), {"builder_class": picky})(selection.agreement, selection.device)
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
    batch = make_batch([1, 1, 1], [5, 7, 7])
    slots = torch.tensor([*batch.slot_mapping[:2].tolist(), 0, PAD_SLOT_ID])
    padded = evolve(batch, num_padded_reqs=1, num_actual_tokens=4, max_query_len=3)

    assert builder.can_run_in_cudagraph(evolve(padded, slot_mapping=slots, slot_mapping_cpu=slots))
    (given,) = seen
    assert (given.num_reqs, given.num_actual_tokens, given.max_query_len) == (2, 2, 1)
    assert given.slot_mapping.tolist() == batch.slot_mapping[:2].tolist()


def test_the_host_writes_prefills_behind_which_decodes_are():
    """By phase, the decode at the front is forward's, and every row behind it is the host's."""
    by_phase = {"cache_write": {"prefill": "host", "decode": "forward"}}
    written = []
    keep = {"update_kv_cache": lambda _, key, value, cache, slots: written.append((key, slots))}
    impl_class = type("ByPhase", (ToyImpl,), by_phase | keep)
    backend = type("B", (ToyBackend,), {"impl_class": impl_class})(*_of(agree()))
    impl = make_layer(backend)
    batch = make_batch([1, 3, 1], [5, 3, 6])
    metadata = backend.make_builder([impl], backend.make_state(limits())).build(batch)
    key = torch.arange(5.0)[:, None, None].expand(5, 2, 8).contiguous()
    with forward_context({impl.layer.name: metadata}):
        impl.write_kv_op(key, key, backend.make_cache(32))

    ((rows, slots),) = written
    assert rows[:, 0, 0].tolist() == [1, 2, 3, 4]
    assert slots.tolist() == batch.slot_mapping[1:].tolist()


def _of(selection):
    return selection.agreement, selection.device


def test_limits_hold_for_given_bounds(reads):
    (builder,) = make_reader()
    batch = evolve(make_batch([1], [5], width=4), seq_lens_cpu=None, max_seq_len=builder.limits.max_seq_len + 1)
    with pytest.raises(BatchError, match="max_seq_len"):
        builder.build(batch)
    assert not reads
