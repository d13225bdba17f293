"""A batch is made exact once: lengths are read from the device in one copy, and builders share what follows."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, GraphShape, LoadedBackend, MetadataBuilder, forward_context
from attnplug.contract.guards.batch import BatchGuard
from attnplug.contract.inputs import exact
from attnplug.contract.inputs.exact import LengthTerms, exact_batch, with_lengths
from attnplug.errors import BatchError, TensorError
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

    terms = LengthTerms(read=True, exact=True)
    read = with_lengths(batch, terms)

    assert with_lengths(batch, terms) is read
    seen, lengths = exact_batch(batch, terms)
    assert exact_batch(batch, terms)[0] is exact_batch(seen, terms)[0] is seen
    assert exact_batch(seen, terms)[1] is lengths
    assert OnDevice.copies == 1
    assert read.seq_lens_cpu.tolist() == [5, 3]
    assert read.encoder_seq_lens_cpu.tolist() == read.dcp_local_seq_lens_cpu.tolist() == [6, 7]
    assert read.key_start_loc_cpu.tolist() == [0, 5, 8]
    assert read.max_encoder_seq_len == 7


@pytest.fixture
def reads(monkeypatch):
    """Return the batches whose lengths were read."""
    found, read = [], exact._read
    monkeypatch.setattr(exact, "_read", lambda batch, **how: found.append(batch) or read(batch, **how))
    return found


def make_reader(count=1, cls=ToyBackend, **requested):
    selection = agree(**{"seq_lens_cpu_kind": "absent", **requested})
    backend = LoadedBackend(cls(evolve(selection.agreement, reads_lengths=True), selection.device))
    state = backend.make_state(limits())
    return [backend.make_builder([make_layer(backend, name=str(n))], state) for n in range(count)]


def test_builders_of_one_batch_read_it_once(reads):
    batch = evolve(make_batch([1, 3], [5, 3], width=4), seq_lens_cpu=None, max_seq_len=9)
    for builder in make_reader(2):
        metadata = builder.build(batch)
        assert metadata.batch.seq_lens_cpu.tolist() == [5, 3]
        assert metadata.batch.max_seq_len == 5
    assert len(reads) == 1


def test_starts_of_queries_come_in_the_same_copy():
    OnDevice.copies = 0
    given = make_batch([1, 3], [5, 3])
    moved = {name: on_device(getattr(given, name)) for name in ("seq_lens", "query_start_loc")}
    batch = evolve(given, **moved, seq_lens_cpu=None, query_start_loc_cpu=None)

    terms = LengthTerms(read=True, read_queries=True, exact=True)
    read = with_lengths(batch, terms)

    assert with_lengths(batch, terms) is read
    assert OnDevice.copies == 1
    assert (read.query_start_loc_cpu.tolist(), read.seq_lens_cpu.tolist()) == ([0, 1, 4], [5, 3])
    assert read.query_start_loc_cpu.dtype == torch.int32
    assert (
        with_lengths(batch, LengthTerms(read=True)).query_start_loc_cpu is None
    )  # of a host that has said that it has them


NO_STARTS = {"query_start_loc_cpu": None, "num_actual_tokens": 9, "max_query_len": 7}


@pytest.mark.parametrize("kind", ["exact", "upper_bound", "absent"])
def test_a_host_may_have_no_lengths_of_queries(kind, reads):
    (builder,) = make_reader(seq_lens_cpu_kind=kind, query_lens_cpu_kind="absent")
    lens = {"exact": {}, "upper_bound": {"seq_lens_cpu": torch.tensor([9, 9, 9], dtype=torch.int32)}}
    given = make_batch([1, 3, 1], [5, 3, 6], width=4)
    batch = evolve(given, **NO_STARTS, max_seq_len=9, **lens.get(kind, {"seq_lens_cpu": None}))

    metadata = builder.build(batch)

    assert metadata.batch.query_start_loc_cpu.tolist() == [0, 1, 4, 5]
    assert (metadata.batch.num_actual_tokens, metadata.batch.max_query_len, metadata.batch.max_seq_len) == (5, 3, 6)
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 2)
    builder.build(batch)
    assert len(reads) == 1


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_starts_are_read_only_where_that_was_requested(reads_lengths):
    """A variant that reads no lengths could not serve the same host."""
    selection = agree(seq_lens_cpu_kind="absent")
    backend = LoadedBackend(ToyBackend(evolve(selection.agreement, reads_lengths=reads_lengths), selection.device))
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))

    with pytest.raises(BatchError, match="no query_start_loc_cpu") as caught:
        builder.build(evolve(make_batch([1, 3], [5, 3]), query_start_loc_cpu=None))
    assert "select with query_lens_cpu_kind='absent'" in caught.value.fix


@pytest.mark.parametrize(
    "change", [{"query_start_loc": torch.tensor([0, 1, 4])}, {"query_start_loc": torch.zeros(2).int()}]
)
def test_starts_of_another_form_are_named(change):
    (builder,) = make_reader(query_lens_cpu_kind="absent")
    with pytest.raises(TensorError, match="query_start_loc of"):
        builder.build(evolve(make_batch([1, 3], [5, 3]), **NO_STARTS, **change))


def test_a_graph_is_found_by_lengths_that_are_read(reads):
    cls = type("B", (ToyBackend,), {"builder_class": type("C", (MetadataBuilder,), {"supports_graphs": True})})
    requested = {"cudagraph": "uniform_batch", "agreed_graphs": "uniform_batch", "query_lens_cpu_kind": "absent"}
    (builder,) = make_reader(cls=cls, **requested)
    state = builder.state
    with state.graph_capture(4):
        for shape in (GraphShape(2, 2, 1), GraphShape(4, 4, 1, 8), GraphShape(4, 4, 1)):
            graph = state.graph(shape)
            builder.build(graph.dummy_batch(builder), graph=graph)
    reads.clear()

    def step(query_lens, seq_lens):
        given = make_batch(query_lens, seq_lens, width=4)
        none = dict.fromkeys(("query_start_loc_cpu", "seq_lens_cpu"))
        slots = torch.full((4,), PAD_SLOT_ID)  # a row for each token of the bound
        slots[: len(given.slot_mapping)] = given.slot_mapping
        return state.begin_forward(
            {builder: evolve(given, **none, slot_mapping=slots, slot_mapping_cpu=slots, num_actual_tokens=4,
                             max_query_len=4, max_seq_len=16)}
        )  # fmt: skip

    assert step([1, 1], [5, 16]).graph.key == GraphShape(2, 2, 1)
    assert step([1, 1, 1], [5, 7, 8]).graph.key == GraphShape(4, 4, 1, 8)
    assert step([1, 1, 1], [5, 7, 9]).graph.key == GraphShape(4, 4, 1)
    assert step([1, 2], [5, 7]).graph is None
    assert len(reads) == 4


def make_graphs(host_owned_inputs=False):
    """Return a builder that has captured decodes of two and four requests."""
    cls = type("B", (ToyBackend,), {"builder_class": type("C", (MetadataBuilder,), {"supports_graphs": True})})
    selection = agree(cudagraph="uniform_batch", agreed_graphs="uniform_batch")
    backend = LoadedBackend(cls(selection.agreement, selection.device))
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
    with builder.state.graph_capture(4):
        for shape in (GraphShape(2, 2, 1), GraphShape(4, 4, 1)):
            graph = builder.state.graph(shape, host_owned_inputs=host_owned_inputs)
            batch = make_batch([1] * shape.num_reqs, [5] * shape.num_reqs, width=4, dummy=not host_owned_inputs)
            builder.build(batch, graph=graph)
    return builder, batch


def test_a_step_makes_its_batch_exact_once(monkeypatch):
    builder, _ = make_graphs()
    other = builder.backend.make_builder([make_layer(builder.backend, name="other")], builder.state)
    made, make = [], exact._make_exact
    monkeypatch.setattr(exact, "_make_exact", lambda batch, terms: made.append(batch) or make(batch, terms))
    batch = make_batch([1, 1, 1], [5, 9, 7], max_seq_len=16, max_query_len=2)

    assert builder.can_run_in_cudagraph(batch)
    builder.state.begin_forward({builder: batch})
    metadata = builder.build(batch)
    assert other.build(batch).batch is metadata.batch
    other.update_block_table(metadata, batch.block_table, batch.slot_mapping)
    assert made == [batch]


def test_a_host_may_write_its_tensors_again_under_one_batch():
    builder, batch = make_graphs(host_owned_inputs=True)
    graph = builder.state.find_graph({builder: batch})
    builder.build(batch, graph=graph)
    batch.seq_lens[3] = 99
    with pytest.raises(BatchError, match="max_seq_len=5"):
        builder.build(batch, graph=graph)


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"])
@pytest.mark.parametrize("value", [None, "2"])
@pytest.mark.parametrize("padded", [0, 1])
def test_a_step_with_a_wrong_count_is_refused_by_its_name(name, value, padded):
    builder, _ = make_graphs()
    batch = evolve(make_batch([1, 1], [5, 9]), num_padded_reqs=padded, **{name: value})
    with pytest.raises(BatchError, match=f"{name}={value!r}"):
        builder.state.begin_forward({builder: batch})


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "block_table", "slot_mapping"])
def test_a_tensor_of_a_device_is_no_cpu_copy_of_itself(name):
    guard = BatchGuard(agree().agreement, limits(), torch.device("meta"))
    batch = make_batch([1, 3], [5, 3])
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    moved = evolve(batch, **{each: getattr(batch, each).to("meta") for each in names})

    assert guard.check(moved).num_decodes == 1
    with pytest.raises(TensorError, match=f"{name}_cpu of .* on meta"):
        guard.check(evolve(moved, **{f"{name}_cpu": getattr(moved, name)}))


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
    backend = LoadedBackend(backend)
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
    backend = LoadedBackend(type("B", (ToyBackend,), {"impl_class": impl_class})(*_of(agree())))
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
