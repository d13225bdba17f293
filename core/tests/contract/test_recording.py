"""Steps are recorded as shapes, as far as the CPU has them, and a recorded file is read back."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import GraphShape, Layer, Limits, LoadedBackend, read_steps, recording
from attnplug.contract.inputs import exact
from attnplug.errors import RequestError
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import agree, limits, make_batch, make_layer
from tests.examples import examples

REQUESTED = {"head_size": 64, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "float32", "block_size": 16}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that ATTNPLUG_RECORD names."""
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("ATTNPLUG_RECORD", str(path))
    attnplug.refresh()
    recording.recorder.cache_clear()
    yield path
    recording.recorder.cache_clear()
    attnplug.refresh()


def make_builder(**requested):
    backend = attnplug.load(Requirements(**{**REQUESTED, **requested}), Device.cpu(), backend="torch/sdpa")
    impls = [backend.make_impl(Layer(name=f"layer {number}")) for number in range(2)]
    return backend.make_builder(impls, backend.make_state(Limits(max_num_reqs=4, max_num_tokens=64, max_seq_len=256)))


def batch_of(query_lens, seq_lens, **changes):
    return make_batch(query_lens, seq_lens, block_size=16, **changes)


def shapes(steps):
    return [(each.query_lens, each.seq_lens, each.in_graph) for each in steps]


def test_each_build_is_a_step(file):
    builder, windowed = make_builder(), make_builder(sliding_window=20)
    builder.build(batch_of([3, 5], [3, 20]))
    windowed.build(batch_of([3, 5], [3, 20]))
    builder.build(batch_of([1, 1], [4, 21]))

    steps = read_steps(file).steps

    assert shapes(steps) == [((3, 5), (3, 20), False)] * 2 + [((1, 1), (4, 21), False)]
    assert [each.layer.agreement.requirements.sliding_window for each in steps] == [None, 20, None]
    assert steps[0].layer is steps[2].layer
    assert steps[0].layer.count == 2
    assert steps[0].layer.agreement.id == "torch/sdpa"
    assert steps[0].layer.agreement == builder.agreement
    assert steps[0].layer.device == Device.cpu()


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 200)), min_size=1, max_size=4))
def test_lengths_are_read_as_they_were_built(file, requests):
    """In the order of the engine, whatever the order that the builder makes of it."""
    file.unlink(missing_ok=True)
    recording.recorder.cache_clear()
    new, keys = tuple(each for each, _ in requests), tuple(map(sum, requests))
    make_builder().build(batch_of(list(new), list(keys)))

    assert shapes(read_steps(file).steps) == [(new, keys, False)]


def test_steps_that_advance_are_steps(file):
    builder = make_builder()
    builder.advance_step(builder.build(batch_of([1, 1], [4, 21])))

    assert shapes(read_steps(file).steps) == [((1, 1), (4, 21), False), ((1, 1), (5, 22), False)]


def test_replays_are_steps_and_captures_are_none(file):
    builder = make_builder(cudagraph="single_token_decode")
    with builder.state.graph_capture(4):
        graph = builder.state.graph(GraphShape(4, 4, 1, builder.graph_lengths[0]))
        builder.build(graph.dummy_batch(builder), graph=graph)
    assert not file.exists()

    metadata = builder.build(batch_of([1, 1], [4, 21]), graph=graph)

    assert shapes(read_steps(file).steps) == [((1, 1), (4, 21), True)]  # two requests pad the graph

    builder.advance_step(metadata)

    assert shapes(read_steps(file).steps)[1:] == [((1, 1), (5, 22), True)]


def test_lengths_that_only_the_device_has_are_not_read(file, monkeypatch):
    """With a copy on the CPU as the tensor, which says what a build may touch: none is given."""
    builder = make_builder()
    metadata = builder.build(batch_of([1], [4]))
    object.__setattr__(metadata.batch, "seq_lens_cpu", None)
    object.__setattr__(metadata.batch, "query_start_loc_cpu", None)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("a tensor was read"))

    builder._recorder.record(builder._layer, metadata.batch)

    assert shapes(read_steps(file).steps)[-1] == (None, None, False)


def test_lengths_that_a_build_reads_are_recorded(file, monkeypatch):
    reads, read = [], exact._read
    monkeypatch.setattr(exact, "_read", lambda batch, **how: reads.append(batch) or read(batch, **how))
    selection = agree(seq_lens_cpu_kind="absent")
    vendor = ToyBackend(evolve(selection.agreement, reads_lengths=True), selection.device)
    backend = LoadedBackend(vendor, record=str(file))
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))

    builder.build(evolve(make_batch([1, 3], [5, 3], width=4), seq_lens_cpu=None, max_seq_len=9))

    assert shapes(read_steps(file).steps) == [((1, 3), (5, 3), False)]
    assert len(reads) == 1  # by the build itself


def test_no_content_and_no_file_is_recorded(file):
    builder = make_builder()
    builder.build(batch_of([3], [9]))

    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    assert [sorted(row) for row in rows] == [
        ["format", "version", "versions"],
        ["agreement", "count", "dcp_size", "device", "layer"],
        ["in_graph", "query_lens", "seq_lens", "step"],
    ]
    assert rows[1]["agreement"]["options"] == {}
    assert "layer 0" not in file.read_text(encoding="utf-8")


def test_without_the_setting_nothing_is_in_the_way(tmp_path):
    assert type(make_builder()).__name__ == "StepBuilder"


def test_a_second_process_writes_another_file(file):
    file.write_text("of another process", encoding="utf-8")
    make_builder().build(batch_of([3], [9]))

    assert file.read_text(encoding="utf-8") == "of another process"
    assert len(read_steps(f"{file}.{os.getpid()}").steps) == 1


def test_a_name_may_have_the_number_of_the_process(tmp_path, monkeypatch, file):
    monkeypatch.setenv("ATTNPLUG_RECORD", str(tmp_path / "of-{pid}.jsonl"))
    attnplug.refresh()
    make_builder().build(batch_of([3], [9]))

    assert len(read_steps(tmp_path / f"of-{os.getpid()}.jsonl").steps) == 1


def test_a_child_begins_a_file(file):
    builder = make_builder()
    builder.build(batch_of([3], [9]))
    lock = builder._recorder._lock
    lock.acquire()  # as another thread may
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that waits for the lock ends, and has no file
        builder.build(batch_of([4], [9]))
        os._exit(0)
    lock.release()
    os.waitpid(child, 0)

    assert shapes(read_steps(file).steps) == [((3,), (9,), False)]
    assert shapes(read_steps(f"{file}.{child}").steps) == [((4,), (9,), False)]


def test_a_file_that_cannot_be_written_is_one_warning(file, monkeypatch, caplog):
    monkeypatch.setenv("ATTNPLUG_RECORD", str(file.parent / "missing" / "steps"))
    attnplug.refresh()
    builder = make_builder()
    for _ in range(3):
        builder.build(batch_of([3], [9]))

    assert len(caplog.records) == 1
    assert "no more steps are recorded: [Errno 2] No such file" in caplog.records[0].message


def test_a_file_has_a_largest_size(file, monkeypatch, caplog):
    monkeypatch.setattr(recording, "_MOST_BYTES", 3000)
    builder = make_builder()
    for _ in range(200):
        builder.build(batch_of([3], [9]))

    assert 3000 <= file.stat().st_size < 3200
    assert len(caplog.records) == 1
    assert read_steps(file).steps


def test_a_line_that_a_crash_cut_off_is_left_out(file):
    builder = make_builder()
    for _ in range(2):
        builder.build(batch_of([3], [9]))
    whole = file.read_text(encoding="utf-8")
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        file.write_text(whole[: -1 - cut], encoding="utf-8")
        assert len(read_steps(file).steps) == 1


@pytest.mark.parametrize(
    ("number", "line", "problem"),
    [
        (1, '{"format": "another"}', "first line"),
        (1, "no JSON", "first line"),
        (1, "[" * 100_000, "first line"),
        (2, '{"layer": 1}', "layer 0 was expected"),
        (2, '{"layer": 0, "count": 0, "dcp_size": 1}', "no counts"),
        (2, '{"layer": 0, "count": 1, "dcp_size": 1, "agreement": [], "device": {}}', "line 2"),
        (3, "[]", "no JSON object"),
        (3, '{"step": 7}', "layer 7"),
        (3, '{"step": 0, "query_lens": [2], "seq_lens": [1], "in_graph": true}', "more new tokens than keys"),
        (3, '{"step": 0, "query_lens": [0], "seq_lens": [1], "in_graph": true}', "no lengths"),
        (3, '{"step": 0, "query_lens": [1, 1], "seq_lens": [1], "in_graph": true}', "line 3"),
        (3, '{"step": 0, "query_lens": [1], "seq_lens": [1], "in_graph": 1}', "neither true nor false"),
        (3, '{"step": 0}', "query_lens"),
    ],
)
def test_other_files_are_refused(file, number, line, problem):
    make_builder().build(batch_of([3], [9]))
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = line
    file.write_text("\n".join([*lines, lines[2]]) + "\n", encoding="utf-8")

    with pytest.raises(RequestError, match="cannot be read") as caught:
        read_steps(file)
    assert problem in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        read_steps(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(RequestError, match="first line"):
        read_steps(tmp_path / "empty")
