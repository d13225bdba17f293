"""Direct FlashInfer calls compute the same as the plugin, and are the baseline of its benchmarks."""

from __future__ import annotations

import pytest
import torch

import benchmarks.direct_flashinfer as direct
from attnplug_kit.bench import (
    Baseline,
    Step,
    Target,
    building,
    decodes,
    first_prefills,
    forwarding,
    make_planner,
    make_rig,
    mixed,
    ragged_decodes,
)
from benchmarks.direct_flashinfer import DirectFlashInfer
from tests.backends.bench import STEPS, TINY, FakeTimer, check_second_call, use_baseline

CHOICE = Target("flashinfer_fake/fa2", "cpu")


def get_batch_indices_positions(append_indptr, seq_lens, nnz):
    """Compute what the library's function of that name does, from its documentation."""
    assert append_indptr.dtype == seq_lens.dtype == torch.int32
    counts = append_indptr.diff()
    requests = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
    assert len(requests) == nnz
    rows = torch.arange(nnz, dtype=torch.int32)
    return requests, (rows - append_indptr[requests + 1] + seq_lens[requests]).int()


def append_paged_kv_cache(  # noqa: PLR0917 - the library's signature
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    """Write rows as the library's function of that name does, from its documentation."""
    assert kv_layout == "NHD"
    for array in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert array.dtype == torch.int32
    paged_k, paged_v = paged_kv_cache
    assert paged_k.stride() == paged_v.stride()  # the library has one set of strides for both
    size = paged_k.shape[1]
    lengths = (kv_indptr.diff() - 1) * size + kv_last_page_len
    assert bool((positions < lengths[batch_indices]).all())
    pages, places = kv_indices[kv_indptr[batch_indices] + positions // size].long(), (positions % size).long()
    paged_k[pages, places], paged_v[pages, places] = append_key, append_value


def append_paged_mla_kv_cache(  # noqa: PLR0917 - the library's signature
    append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len,
):  # fmt: skip
    """Write latents as the library's function of that name does, from its documentation."""
    for rows, pages in ((append_ckv, ckv_cache), (append_kpe, kpe_cache)):
        assert rows.ndim == 2
        pages, arrays = pages.unsqueeze(2), (kv_indices, kv_indptr, kv_last_page_len)  # noqa: PLW2901 - one KV head
        append_paged_kv_cache(rows.unsqueeze(1), rows.unsqueeze(1), batch_indices, positions, (pages, pages), *arrays)


@pytest.fixture
def library(fakes, monkeypatch):
    """Add the functions that only the direct calls use to the fake, and register the baseline."""
    import flashinfer  # noqa: PLC0415 - the fake, active by now

    for function in (get_batch_indices_positions, append_paged_kv_cache, append_paged_mla_kv_cache):
        monkeypatch.setattr(flashinfer, function.__name__, function, raising=False)
    use_baseline(monkeypatch, DirectFlashInfer, "flashinfer_fake")


def test_direct_calls_are_a_baseline() -> None:
    assert isinstance(DirectFlashInfer(), Baseline)
    assert DirectFlashInfer().backend == "flashinfer"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.what)
def test_forwards_are_compared_with_direct_calls(library, step) -> None:
    found = forwarding.measure_steps([((step,), FakeTimer(), True), ((step,), FakeTimer(), False)], CHOICE, 1)

    assert not found.failures
    assert [m.budget for m in found.measurements] == [None, None, 10, 10, None, None, None, None]
    assert found.measurements[0].what.endswith("direct FlashInfer calls")


def test_a_second_call_reads_what_the_first_has_written(library) -> None:
    check_second_call(DirectFlashInfer(), CHOICE)


@pytest.mark.parametrize("step", [decodes(3, 33, **TINY), ragged_decodes(4, 2, 70, **TINY)], ids=lambda step: step.what)
def test_replays_are_compared_with_direct_calls(library, monkeypatch, step) -> None:
    monkeypatch.setattr(forwarding, "work_clock", lambda _: FakeTimer())

    found = forwarding.measure_steps([], CHOICE, 1, [step])

    assert not found.failures
    assert len(found.measurements) == 3


@pytest.mark.parametrize("variant", ["fa2", "fa3"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_latents_are_compared_with_direct_calls(library, monkeypatch, variant, query_len) -> None:
    monkeypatch.setattr(forwarding, "work_clock", lambda _: FakeTimer())
    heads = {"num_q_heads": 4, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "latent": True}
    step = Step("latents", (query_len,) * 3, (20, 3, 90), **heads)

    found = forwarding.measure_steps(
        [((step,), FakeTimer(), False)], Target(f"flashinfer_fake/{variant}", "cpu"), 1, [step]
    )

    assert not found.failures
    assert len(found.measurements) == 6


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_latents_are_planned_as_from_0_7(library, library_at, dtype) -> None:
    step = decodes(3, 33, num_q_heads=4, num_kv_heads=1, head_size=576, head_size_v=512, latent=True)
    with library_at("0.7.2"):
        rig = make_rig(step, Target("flashinfer_fake/fa3", "cpu"), kv_cache_dtype=dtype)
        torch.testing.assert_close(DirectFlashInfer().layer(rig)(), rig.forward()())


def test_contiguous_prefills_are_compared_with_direct_calls(library) -> None:
    step = first_prefills(2, 21, num_q_heads=4, num_kv_heads=4, head_size=192, head_size_v=128)

    found = forwarding.measure_step(step, CHOICE, FakeTimer(), 1, is_small=False, paged=False)

    assert not found.failures
    assert len(found.measurements) == 3


def test_builds_are_compared_with_direct_plans(library, monkeypatch) -> None:
    monkeypatch.setattr(building, "host_clock", lambda _: FakeTimer())

    found = building.measure_steps(STEPS, STEPS[1:2], CHOICE, 1)

    assert not found.failures
    over = [m.what for m in found.measurements if m.paired]
    assert len(over) == len(STEPS) + 1
    assert all(what.endswith("`build` over the direct `plan`") for what in over)


@pytest.mark.parametrize(("kernel", "expected"), [("tensor_cores", True), ("cuda_cores", False)])
def test_direct_decodes_run_the_kernels_of_the_plugin(library, load_fake, monkeypatch, kernel: str, expected) -> None:
    options = {"flashinfer_fake": {"decode_kernel": kernel}}
    monkeypatch.setattr(Target, "load", lambda _, required: load_fake(required, options=options))

    planner = make_planner(decodes(2, 5, **TINY), CHOICE)

    assert planner.backend.agreement.options["decode_kernel"] == kernel
    assert direct._Wrappers.of(planner, captured=False).decode.use_tensor_cores is expected


def test_page_arrays_are_those_of_the_step(library) -> None:
    planner = make_planner(mixed(1, 40, 1, 18, **TINY), CHOICE)
    decode, prefill = direct._Tables.of(planner).pages()

    size = planner.block_size
    assert size == 16
    assert (decode.indptr.tolist(), decode.last_page_len.tolist()) == ([0, 3], [8])
    assert (prefill.indptr.tolist(), prefill.last_page_len.tolist()) == ([0, 2], [2])
    assert [decode.indices.tolist(), prefill.indices.tolist()] == list(planner.blocks)
