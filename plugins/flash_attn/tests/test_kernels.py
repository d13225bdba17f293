"""The adapters on the fakes of their libraries: arguments have the form of the library, results are right."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from attrs import evolve

from attnplug_flash_attn.kernels import ADAPTERS
from attnplug_flash_attn.kernels.interface import LayerParams
from plugins.flash_attn.tests.varlen_requests import HEADS, KV_HEADS, kernels, requests

pytestmark = pytest.mark.usefixtures("fakes")

PLAIN = LayerParams(softmax_scale=0.3)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
MIXED = requests((5, 1, 7), (20, 300, 7))
DECODES = requests((1, 1, 1), (20, 40, 7))
LONG = requests((1, 1, 1), (20, 300, 7))

FP8 = torch.float8_e4m3fn
same = {"rtol": 1e-2, "atol": 1e-2}
same_lse = {"rtol": 1e-5, "atol": 1e-5}


def assert_right(found, step, params, *, causal=True):
    out, lse = step.truth(params, causal=causal)
    torch.testing.assert_close(found[0].double(), out, **same)
    torch.testing.assert_close(found[1].double(), lse, **same_lse)


@pytest.mark.parametrize("variant", ADAPTERS)
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("step", [MIXED, DECODES, LONG], ids=["mixed", "decodes", "long"])
def test_output_and_lse(variant, paged, step):
    adapter = kernels(variant)
    assert_right(step.attend(adapter, step.call(adapter, paged=paged), PLAIN), step, PLAIN)


@pytest.mark.parametrize("variant", ADAPTERS)
@pytest.mark.parametrize("window", [(3, 0), (0, 0), (2, 2), (9, -1), (-1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(variant, window, causal):
    adapter, params = kernels(variant), evolve(PLAIN, window=window)
    call = MIXED.call(adapter, causal=causal)
    assert_right(MIXED.attend(adapter, call, params), MIXED, params, causal=causal)


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm"])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(
    ("window", "causal"), [((-1, -1), True), ((-1, 0), False), ((400, 0), True), ((-1, -1), False)]
)
def test_lse_with_alibi(variant, paged, window, causal):
    adapter, params = kernels(variant), evolve(PLAIN, alibi_slopes=SLOPES, window=window)
    for step in (MIXED, DECODES):
        call = step.call(adapter, paged=paged, causal=causal)
        assert_right(step.attend(adapter, call, params), step, params, causal=causal)


@pytest.mark.parametrize("variant", ADAPTERS)
def test_rows_without_keys(variant):
    step = requests((3, 2), (5, 0))
    adapter = kernels(variant)
    call = step.call(adapter, paged=variant not in {"fa2", "fa2_vllm"}, causal=False)
    assert_right(step.attend(adapter, call, PLAIN), step, PLAIN, causal=False)
    assert step.truth(PLAIN)[1][-1].tolist() == [-torch.inf] * HEADS


@pytest.mark.parametrize("variant", ADAPTERS)
def test_without_lse(variant):
    adapter = kernels(variant)
    out, lse = DECODES.attend(adapter, DECODES.call(adapter), PLAIN, lse=False)
    torch.testing.assert_close(out.double(), DECODES.truth(PLAIN)[0], **same)
    assert lse.isnan().all()


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm", "torch"])
def test_requests_without_rows(variant):
    """Where the longest request has one row, every one is taken to have its row, unless the bound is another."""
    step = requests((1, 0, 1), (20, 300, 7))
    adapter = kernels(variant)
    assert_right(step.attend(adapter, step.call(adapter), PLAIN), step, PLAIN)


@pytest.mark.parametrize(
    ("variant", "name", "value"),
    [
        ("fa2", "max_seqlen_q", 2),
        ("fa2_vllm", "num_splits", 1),
        ("fa3", "num_splits", 1),
        ("fa3_vllm", "num_splits", 1),
        ("fa3_tokenspeed", "num_splits", 1),
        ("fa4", "num_splits", 1),
        ("torch", "max_q", 2),
    ],
)
def test_keys_in_one_split(journal, variant, name, value):
    """Keys that are not split are added up in the same order in all batches."""
    adapter = kernels(variant)
    LONG.attend(adapter, LONG.call(adapter, num_splits=1), PLAIN, lse=False)
    assert journal.calls[-1].arguments[name] == value


@pytest.mark.parametrize(("variant", "passed"), [("fa2_vllm", 1), ("fa3", 8), ("fa3_vllm", 8), ("fa3_tokenspeed", 8)])
def test_split_kv_limit(journal, variant, passed):
    adapter = kernels(variant)
    LONG.attend(adapter, LONG.call(adapter, num_splits=8), PLAIN)
    assert journal.calls[-1].arguments["num_splits"] == passed


@pytest.mark.parametrize(("capability", "num_splits"), [((9, 0), 1), ((10, 0), 0), ((11, 0), 0)])
def test_fa4_splits_keys_on_blackwell_only(journal, monkeypatch, capability, num_splits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(import_module("flash_attn.cute.interface"), "CAPABILITY", capability[0])
    adapter = kernels("fa4")
    LONG.attend(adapter, LONG.call(adapter), PLAIN)
    assert journal.calls[-1].arguments["num_splits"] == num_splits


@pytest.mark.parametrize("variant", ["fa3_vllm", "fa3_tokenspeed", "fa4"])
def test_sinks(variant):
    adapter = kernels(variant)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()
    found, lse = MIXED.attend(adapter, MIXED.call(adapter), evolve(PLAIN, sinks=sinks))
    out, plain = MIXED.truth(PLAIN)
    total = torch.logaddexp(plain, sinks.double())
    torch.testing.assert_close(lse.double(), total, **same_lse)
    torch.testing.assert_close(found.double(), out * (plain - total).exp()[..., None], **same)


@pytest.mark.parametrize("variant", ["fa3", "fa3_vllm", "fa3_tokenspeed"])
@pytest.mark.parametrize("heads", [1, KV_HEADS])
def test_descales(journal, variant, heads):
    """One for all heads or one each; the library wants one for each request and head."""
    adapter = kernels(variant, kv_cache_dtype="fp8_e4m3")
    scales = {f"{letter}_descale": torch.arange(1.0, heads + 1) / 2 for letter in "qkv"}
    quantized = evolve(MIXED, query=MIXED.query.to(FP8), pages=MIXED.pages.to(FP8))
    out = torch.empty(MIXED.query.shape, dtype=torch.bfloat16)
    adapter.attend(quantized.query, *quantized.pages, out, MIXED.call(adapter), evolve(PLAIN, **scales), None)
    assert journal.calls[-1].arguments["k_descale"] == (len(MIXED.keys), KV_HEADS)
    groups = scales["q_descale"].expand(KV_HEADS)[:, None]
    exact = evolve(
        MIXED,
        query=quantized.query.float() * groups.repeat_interleave(HEADS // KV_HEADS, 0),
        packed=[each.to(FP8).float() * groups for each in MIXED.packed],
    )
    torch.testing.assert_close(out.double(), exact.truth(PLAIN)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("variant", ADAPTERS)
def test_only_op_libraries_of_fa3_schedule(variant):
    adapter = kernels(variant)
    schedule = adapter.schedule(MIXED.call(adapter), PLAIN, num_heads_q=HEADS)
    assert (schedule is not None) == adapter.schedules == (variant in {"fa3_vllm", "fa3_tokenspeed"})


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize(("variant", "softcap"), [("fa3_vllm", 2.0), ("fa3_tokenspeed", 0.0)])
def test_schedules_are_for_their_calls(variant, softcap, num_splits, window):
    adapter, params = kernels(variant), evolve(PLAIN, window=window, softcap=softcap)
    for step in (MIXED, DECODES, LONG):
        call = step.call(adapter, num_splits=num_splits)
        schedule = adapter.schedule(call, params, num_heads_q=HEADS)
        found = step.attend(adapter, evolve(call, scheduler_metadata=schedule), params)
        torch.testing.assert_close(found, step.attend(adapter, call, params))


@pytest.mark.parametrize(
    ("cache", "paged", "dtype", "page_size"),
    [
        ("auto", True, torch.bfloat16, 256),
        ("fp8_e4m3", True, torch.float8_e4m3fn, 256),
        ("fp8_e4m3", False, torch.bfloat16, None),
    ],
)
def test_a_schedule_is_for_the_dtype_of_the_keys_and_for_all_heads(journal, cache, paged, dtype, page_size):
    adapter = kernels("fa3_vllm", kv_cache_dtype=cache)
    used = {} if paged else {"seqused_k": torch.tensor(MIXED.keys, dtype=torch.int32)}
    adapter.schedule(MIXED.call(adapter, paged=paged, **used), PLAIN, num_heads_q=3 * HEADS)
    given = journal.calls[-1].arguments
    assert (given["qkv_dtype"], given["page_size"], given["num_heads"]) == (dtype, page_size, 3 * HEADS)


def test_a_dense_call_without_used_keys_has_no_schedule():
    adapter = kernels("fa3_vllm")
    assert adapter.schedule(MIXED.call(adapter, paged=False), PLAIN, num_heads_q=HEADS) is None


def test_a_schedule_of_packed_keys():
    adapter = kernels("fa3_vllm", kv_cache_dtype="fp8_e4m3")
    call = MIXED.call(adapter, paged=False, seqused_k=torch.tensor(MIXED.keys, dtype=torch.int32))
    schedule = adapter.schedule(call, PLAIN, num_heads_q=HEADS)
    assert_right(MIXED.attend(adapter, evolve(call, scheduler_metadata=schedule), PLAIN), MIXED, PLAIN)
