"""The fake refuses calls that the library leaves undefined, and reproduces the library's traps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from attnplug_kit.oracle import Case, materialize

pytestmark = pytest.mark.usefixtures("fakes")

SIZE, HEADS, KV_HEADS, HEAD = 4, 4, 2, 64
NHD = (9, 2, SIZE, KV_HEADS, HEAD)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def library() -> Any:
    """Return the fake, which is importable only while a test runs."""
    return import_module("flashinfer")


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 12, dtype=torch.uint8)


def decode(backend: str = "auto", **kwargs: Any) -> Any:
    return library().BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=backend, **kwargs)


def prefill(backend: str = "fa2", **kwargs: Any) -> Any:
    return library().BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend, **kwargs)


def plan_decode(wrapper: Any, **changed: Any) -> Any:
    """Plan two requests of 6 and 3 keys, on 2 pages and 1."""
    arguments = {
        "indptr": int32(0, 2, 3), "indices": int32(5, 2, 7), "last_page_len": int32(2, 3), "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS, "head_dim": HEAD, "page_size": SIZE, "q_data_type": torch.bfloat16,
    }  # fmt: skip
    wrapper.plan(**{**arguments, **changed})
    return wrapper


def plan_prefill(wrapper: Any, **changed: Any) -> Any:
    """Plan the same requests with 3 rows and 1."""
    arguments = {
        "qo_indptr": int32(0, 3, 4), "paged_kv_indptr": int32(0, 2, 3), "paged_kv_indices": int32(5, 2, 7),
        "paged_kv_last_page_len": int32(2, 3), "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim_qk": HEAD,
        "page_size": SIZE, "q_data_type": torch.bfloat16, "causal": True,
    }  # fmt: skip
    wrapper.plan(**{**arguments, **changed})
    return wrapper


def rows(count: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, HEADS, HEAD).to(dtype)


def cache(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(NHD).to(dtype)


def graph_buffers(rows_of: bool = False) -> dict[str, torch.Tensor]:
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    made = {name: torch.zeros(n, dtype=torch.int32) for name, n in zip(names, (3, 6, 2), strict=True)}
    if rows_of:
        return {**made, "qo_indptr_buf": int32(0, 0, 0)}
    return {f"{name}fer": buffer for name, buffer in made.items()}


PLANS = {
    "int64_indptr": ({"indptr": torch.tensor([0, 2, 3])}, "indptr is torch.int64"),
    "int64_indices": ({"indices": torch.tensor([5, 2, 7])}, "indices are torch.int64"),
    "int64_last_page_len": ({"last_page_len": torch.tensor([2, 3])}, "last_page_len is torch.int64"),
    "indptr_elsewhere": ({"indptr": int32(0, 2, 3).to("meta")}, "indptr is on meta"),
    "indices_elsewhere": ({"indices": int32(5, 2, 7).to("meta")}, "indices are on meta"),
    "indptr_strided": ({"indptr": int32(0, 9, 2, 9, 3)[::2]}, "indptr is not a flat, contiguous tensor"),
    "indptr_decreases": ({"indptr": int32(0, 3, 2)}, "indptr decreases"),
    "indptr_begins_late": ({"indptr": int32(1, 2, 3)}, "indptr begins with 1"),
    "indptr_short": ({"indptr": int32(0, 3)}, "indptr has 2 numbers, not 3"),
    "too_few_indices": ({"indices": int32(5, 2)}, "2 indices for 3 pages"),
    "empty_last_page": ({"last_page_len": int32(0, 3)}, r"last_page_len\[0\]=0 of a request with 2 pages of 4"),
    "overfull_last_page": ({"last_page_len": int32(2, 5)}, r"last_page_len\[1\]=5"),
    "keys_without_pages": ({"indptr": int32(0, 2, 2)}, r"last_page_len\[1\]=3 of a request with 0 pages"),
    "head_size": ({"head_dim": 80}, "no kernel supports head sizes 80"),
    "queries_of_fp8": ({"q_data_type": torch.float8_e4m3fn}, "kernels support queries of"),
    "float32": ({"q_data_type": torch.float32}, "kernels support queries of"),
    "alibi": ({"pos_encoding_mode": "ALIBI"}, "not modelled"),
}


@pytest.mark.parametrize("use_tensor_cores", [False, True])
@pytest.mark.parametrize("wrong", PLANS)
def test_plans(wrong, use_tensor_cores):
    changed, message = PLANS[wrong]
    with pytest.raises(AssertionError, match=message):
        plan_decode(decode(use_tensor_cores=use_tensor_cores), **changed)


def test_plans_without_requests_or_rows():
    empty = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(AssertionError, match="without requests"):
        plan_decode(decode(), indptr=int32(0), indices=empty, last_page_len=empty)
    with pytest.raises(AssertionError, match="without rows"):
        plan_prefill(prefill(), qo_indptr=int32(0, 0, 0))


@pytest.mark.parametrize("heads", [10, 12, 14])
def test_cuda_cores_support_few_group_sizes(heads):
    plan_decode(decode(use_tensor_cores=True), num_qo_heads=heads)
    with pytest.raises(RuntimeError, match=f"Unsupported group_size: {heads // 2}"):
        plan_decode(decode(), num_qo_heads=heads)


def test_fa3_reads_no_fp8_kv_cache():
    changed = {"kv_data_type": torch.float8_e5m2}
    plan_prefill(prefill("fa2"), **changed)
    plan_prefill(prefill("auto"), **changed)
    with pytest.raises(AssertionError, match=r"fa3 kernels with queries of torch\.bfloat16 support KV caches of"):
        plan_prefill(prefill("fa3"), **changed)


def test_windows_require_causal_plans():
    plan_prefill(prefill(), window_left=3)
    with pytest.raises(AssertionError, match="a window without causal=True"):
        plan_prefill(prefill(), window_left=3, causal=False)


RUNS = {
    "rows": ({"q": rows(3)}, ValueError, "does not match the 2 rows"),
    "dtype": ({"q": rows(2, torch.float16)}, ValueError, "does not match the q_data_type"),
    "cache_dtype": ({"paged_kv_cache": cache(torch.float16)}, ValueError, "does not match the kv_data_type"),
    "cache_type": ({"paged_kv_cache": [cache()]}, KeyError, "Unrecognized paged_kv_cache type"),
    "heads": ({"q": torch.randn(2, 2 * HEADS, HEAD).bfloat16()}, AssertionError, "q has shape"),
    "page_size": ({"paged_kv_cache": torch.randn(9, 2, 8, 2, 64).bfloat16()}, AssertionError, "the key cache has"),
    "few_pages": ({"paged_kv_cache": cache()[:7]}, AssertionError, r"pages \[7\], and the KV cache has 7"),
    "q_strided": ({"q": rows(2).transpose(1, 2).contiguous().transpose(1, 2)}, AssertionError, "not contiguous"),
    "q_elsewhere": ({"q": rows(2).to("meta")}, AssertionError, "q is on meta"),
    "cache_elsewhere": ({"paged_kv_cache": cache().to("meta")}, AssertionError, "the key cache is on meta"),
    "cache_strided": (
        {"paged_kv_cache": cache().transpose(3, 4).contiguous().transpose(3, 4)}, AssertionError, "axis of the key",
    ),
    "strides_differ": (
        {"paged_kv_cache": (cache()[:, 0], cache()[:, 0].contiguous())}, AssertionError, "strides differ",
    ),
    "out_shape": ({"out": rows(3)}, ValueError, "Invalid shape of out"),
    "out_dtype": ({"out": rows(2, torch.float16)}, ValueError, "Invalid dtype of out"),
    "out_strided": ({"out": rows(2).transpose(0, 1).contiguous().transpose(0, 1)}, AssertionError, "out is not contig"),
    "lse_dtype": ({"lse": torch.zeros(2, HEADS).half(), "return_lse": True}, ValueError, "Invalid dtype of lse"),
    "lse_shape": ({"lse": torch.zeros(HEADS, 2), "return_lse": True}, ValueError, "Invalid shape of lse"),
    "lse_not_requested": ({"lse": torch.zeros(2, HEADS)}, AssertionError, "lse without return_lse"),
    "window": ({"window_left": 3}, AssertionError, "window_left differs"),
    "scale_tensor": ({"k_scale": torch.tensor(0.5)}, AssertionError, "k_scale is a Tensor"),
    "output_scale_tensor": ({"v_scale": torch.tensor(0.5)}, AssertionError, "v_scale is a Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", RUNS)
def test_runs(wrong):
    changed, error, message = RUNS[wrong]
    wrapper = plan_decode(decode())
    with pytest.raises(error, match=message):
        wrapper.run(**{"q": rows(), "paged_kv_cache": cache(), **changed})


@pytest.mark.parametrize("make", [decode, prefill])
def test_run_before_plan(make):
    with pytest.raises(AssertionError, match=r"before plan\(\)"):
        make().run(rows(), cache())


def test_the_workspace_is_zero_at_its_first_use():
    make = library().BatchDecodeWithPagedKVCacheWrapper
    used = workspace()
    make(used)
    used[5] = 1
    make(used)  # not the first use
    with pytest.raises(AssertionError, match="not zero at its first use"):
        make(torch.ones(1 << 12, dtype=torch.uint8))
    with pytest.raises(AssertionError, match=r"torch\.float32"):
        make(torch.zeros(1 << 12))


def test_graphs_keep_their_batch_size_and_buffers():
    wrapper = decode(use_cuda_graph=True, **graph_buffers())
    assert wrapper.is_cuda_graph_enabled
    plan_decode(wrapper)
    with pytest.raises(ValueError, match="The batch size should be fixed"):
        plan_decode(wrapper, indptr=int32(0, 2), last_page_len=int32(2))
    with pytest.raises(ValueError, match="less than or equal to the allocated buffer"):
        plan_decode(wrapper, indices=int32(*range(7)))
    with pytest.raises(ValueError, match=r"should be a torch\.Tensor"):
        decode(use_cuda_graph=True)
    with pytest.raises(AssertionError, match="is read as int32"):
        decode(use_cuda_graph=True, **{name: buffer.long() for name, buffer in graph_buffers().items()})


def test_graphs_never_get_more_rows():
    wrapper = plan_prefill(prefill(use_cuda_graph=True, **graph_buffers(rows_of=True)))
    plan_prefill(wrapper, qo_indptr=int32(0, 2, 3))
    with pytest.raises(ValueError, match="cannot exceed the number of rows"):
        plan_prefill(wrapper, qo_indptr=int32(0, 4, 5))


def test_a_replay_reads_what_the_buffers_hold():
    """Repeating the captured call uses the plan and the pages at that time."""
    query, pages = rows(), cache()
    wrapper = plan_decode(decode(use_cuda_graph=True, **graph_buffers()))
    captured = wrapper.run(query, pages)
    plan_decode(wrapper, indptr=int32(0, 1, 3), indices=int32(3, 4, 1), last_page_len=int32(1, 4))
    replayed = wrapper.run(query, pages)
    fresh = plan_decode(decode(), indptr=int32(0, 1, 3), indices=int32(3, 4, 1), last_page_len=int32(1, 4))
    assert not torch.equal(replayed, captured)
    assert torch.equal(replayed, fresh.run(query, pages))


def test_a_replay_may_have_padded_requests():
    query, pages = rows(), cache()
    wrapper = plan_decode(decode(use_cuda_graph=True, **graph_buffers()))
    plan_decode(wrapper, indptr=int32(0, 2, 2), indices=int32(5, 2), last_page_len=int32(2, 0))
    one = plan_decode(decode(), indptr=int32(0, 2), indices=int32(5, 2), last_page_len=int32(2))
    assert torch.equal(wrapper.run(query, pages)[:1], one.run(query[:1], pages))


def test_a_replay_may_have_fewer_rows_than_its_capture():
    query, out = rows(4), torch.full((4, HEADS, HEAD), 7.0).bfloat16()
    wrapper = plan_prefill(prefill(use_cuda_graph=True, **graph_buffers(rows_of=True)))
    wrapper.run(query, cache())
    plan_prefill(wrapper, qo_indptr=int32(0, 2, 2))
    wrapper.run(query, cache(), out=out)
    assert (out[:2] != 7).any()
    assert (out[2:] == 7).all()


def test_buffers_that_changed_without_a_plan():
    buffers = graph_buffers()
    wrapper = plan_decode(decode(use_cuda_graph=True, **buffers))
    buffers["paged_kv_last_page_len_buffer"] += 1
    with pytest.raises(AssertionError, match=r"plan\(\) again"):
        wrapper.run(rows(), cache())


@pytest.mark.parametrize("make", [decode, prefill])
def test_sinks_are_ignored_by_other_wrappers(make):
    wrapper = plan_decode(make()) if make is decode else plan_prefill(make())
    query, pages = rows(2 if make is decode else 4), cache()
    without = wrapper.run(query, pages)
    assert torch.equal(wrapper.run(query, pages, sinks=torch.full((HEADS,), 9.0)), without)


SINKS = {
    "float16": (torch.zeros(HEADS).half(), "is read as float32"),
    "shape": (torch.zeros(HEADS + 1), "has shape"),
    "elsewhere": (torch.zeros(HEADS).to("meta"), "elsewhere"),
    "number": (0.5, "sink is a tensor"),
}


def sink_wrapper(**changed: Any) -> Any:
    return library().BatchAttentionWithAttentionSinkWrapper(
        workspace(), backend="fa2", **{"head_dim_qk": HEAD, "head_dim_vo": HEAD, **changed}
    )


@pytest.mark.parametrize("wrong", SINKS)
def test_sinks(wrong):
    sink, message = SINKS[wrong]
    wrapper = plan_prefill(sink_wrapper())
    with pytest.raises(AssertionError, match=message):
        wrapper.run(rows(4), cache(), sink, 0.125)


def test_sink_kernels_are_compiled_in_the_constructor():
    with pytest.raises(AssertionError, match="the wrapper is compiled for"):
        plan_prefill(sink_wrapper(), head_dim_qk=128)
    with pytest.raises(AssertionError, match="the wrapper is compiled for"):
        plan_prefill(sink_wrapper(), window_left=3)
    with pytest.raises(AssertionError, match="the wrapper is compiled for"):
        plan_prefill(sink_wrapper(), q_data_type=torch.float16)
    with pytest.raises(AssertionError, match="no soft cap"):
        plan_prefill(sink_wrapper(), logits_soft_cap=3.0)
    with pytest.raises(AssertionError, match="a KV cache of"):
        sink_wrapper(kv_data_type=torch.float8_e4m3fn)


def test_sink_kernels_ignore_key_scales():
    wrapper, sink = plan_prefill(sink_wrapper()), torch.zeros(HEADS)
    with pytest.raises(AssertionError, match="ignore q_scale and k_scale"):
        wrapper.run(rows(4), cache(), sink, 0.125, k_scale=0.5)
    with pytest.raises(AssertionError, match="got 0 arguments after the KV cache"):
        wrapper.run(rows(4), cache())


def test_sink_modules_of_different_head_sizes_collide(journal):
    """The library's module name omits the head size, and a process loads each name once."""
    sink_wrapper()
    sink_wrapper()
    sink_wrapper(window_left=3)
    assert len(journal.modules) == 2
    with pytest.raises(AssertionError, match="a wrapper needs it for"):
        sink_wrapper(head_dim_qk=128, head_dim_vo=128)


def fast_plan(wrapper: Any, **changed: Any) -> None:
    arguments = {
        "indptr": int32(0, 2, 3), "indices": int32(5, 2, 7), "last_page_len": int32(2, 3), "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS, "head_dim": HEAD, "page_size": SIZE, "q_data_type": torch.bfloat16,
        "global_override_indptr_cpu": int32(0, 2, 3),
    }  # fmt: skip
    library().decode.fast_decode_plan(wrapper, **{**arguments, **changed})


@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_a_fast_plan_copies_nothing(use_tensor_cores):
    buffers, query, pages = graph_buffers(), rows(), cache()
    wrapper = plan_decode(decode(use_cuda_graph=True, use_tensor_cores=use_tensor_cores, **buffers))
    before = wrapper.run(query, pages)
    fast_plan(wrapper)
    assert torch.equal(wrapper.run(query, pages), before)
    fast_plan(wrapper, last_page_len=int32(3, 4))
    with pytest.raises(AssertionError, match=r"plan\(\) again"):
        wrapper.run(query, pages)
    buffers["paged_kv_last_page_len_buffer"].copy_(int32(3, 4))
    fresh = plan_decode(decode(), last_page_len=int32(3, 4))
    assert torch.equal(wrapper.run(query, pages), fresh.run(query, pages))


@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_a_fast_plan_adds_a_key_where_pages_hold_one(use_tensor_cores):
    """On tensor cores it ignores `last_page_len` then, and plans a key for a padded request without pages."""
    buffers, arrays = graph_buffers(), (int32(0, 2, 2), int32(5, 2), int32(1, 0))
    wrapper = plan_decode(
        decode(use_cuda_graph=True, use_tensor_cores=use_tensor_cores, **buffers),
        indptr=arrays[0], indices=arrays[1], last_page_len=arrays[2], page_size=1,
    )  # fmt: skip
    one = torch.randn(9, 2, 1, KV_HEADS, HEAD).bfloat16()
    wrapper.run(rows(), one)
    fast_plan(wrapper, global_override_indptr_cpu=arrays[0], indices=arrays[1], last_page_len=arrays[2], page_size=1)
    if not use_tensor_cores:
        wrapper.run(rows(), one)
        return
    with pytest.raises(AssertionError, match=r"plan\(\) again"):
        wrapper.run(rows(), one)


FAST = {
    "kernel": ({"q_data_type": torch.float16}, AssertionError, "the kernel is for"),
    "window": ({"window_left": 2}, AssertionError, "the kernel is for"),
    "default_dtype": ({"q_data_type": None}, AssertionError, "the kernel is for"),
    "no_cpu_array": ({"global_override_indptr_cpu": None}, AssertionError, "synchronizes"),
    "batch_size": ({"last_page_len": int32(2)}, ValueError, "The batch size should be fixed"),
    "indices": ({"indices": int32(*range(7))}, ValueError, "less than or equal to the allocated buffer"),
}


@pytest.mark.parametrize("wrong", FAST)
def test_fast_plans(wrong):
    changed, error, message = FAST[wrong]
    wrapper = plan_decode(decode(use_cuda_graph=True, **graph_buffers()))
    with pytest.raises(error, match=message):
        fast_plan(wrapper, **changed)


def test_a_fast_plan_follows_a_plain_one():
    with pytest.raises(AssertionError, match=r"before plan\(\)"):
        fast_plan(decode(use_cuda_graph=True, **graph_buffers()))
    with pytest.raises(AssertionError, match="outside a graph"):
        fast_plan(plan_decode(decode()))


def test_queries_default_to_float16():
    wrapper = decode()
    wrapper.plan(int32(0, 2, 3), int32(5, 2, 7), int32(2, 3), HEADS, KV_HEADS, HEAD, SIZE)
    with pytest.raises(ValueError, match=r"does not match the q_data_type torch\.float16"):
        wrapper.run(rows(), cache())


def test_plans_default_to_non_causal():
    query, pages = rows(4), cache()
    plain = prefill()
    plain.plan(
        int32(0, 3, 4), int32(0, 2, 3), int32(5, 2, 7), int32(2, 3), HEADS, KV_HEADS, HEAD, SIZE,
        q_data_type=torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(plain.run(query, pages), plan_prefill(prefill(), causal=False).run(query, pages))
    assert not torch.equal(plain.run(query, pages), plan_prefill(prefill()).run(query, pages))


@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_decodes_of_several_rows_skip_rows(use_tensor_cores):
    wrapper = plan_decode(decode(use_tensor_cores=use_tensor_cores))
    out = torch.full((4, HEADS, HEAD), 7.0).bfloat16()
    wrapper.run(rows(4), cache(), out=out, q_len_per_req=2)
    assert (out[:2] != 7).any()
    assert (out[2:] == 7).all()


def test_ragged_scales_are_ignored():
    wrapper = library().BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa2")
    wrapper.plan(int32(0, 3), int32(0, 5), HEADS, KV_HEADS, HEAD, causal=True)
    operands = [torch.randn(n, heads, HEAD).half() for n, heads in ((3, HEADS), (5, KV_HEADS), (5, KV_HEADS))]
    assert torch.equal(wrapper.run(*operands, k_scale=2.0, v_scale=3.0), wrapper.run(*operands))


def test_device_arrays_are_not_copied():
    """Outside a graph the wrapper reads the indices in place, so overwriting them changes the planned step."""
    indices, query, pages = int32(5, 2, 7), rows(), cache()
    wrapper = plan_decode(decode(), indices=indices)
    before = wrapper.run(query, pages)
    indices.fill_(1)
    assert not torch.equal(wrapper.run(query, pages), before)


def test_a_plan_overwrites_staging_memory_being_copied(journal):
    first, second = decode(), decode()
    plan_decode(first)
    with journal.pending_copies():
        plan_decode(first)
        plan_decode(second)
        assert journal.pending == {first.number, second.number}
        with pytest.raises(AssertionError, match="overwrites the staging memory"):
            plan_decode(first)
        journal.complete(first.number)
        plan_decode(first)
    plan_decode(first)


def test_the_journal_records_calls(journal):
    wrapper = plan_decode(decode())
    wrapper.run(rows(), cache(), return_lse=True)
    made, planned, ran = journal.calls
    assert [call.kind for call in (made, planned, ran)] == ["__init__", "plan", "run"]
    assert {call.wrapper for call in journal.calls} == {wrapper.number}
    assert made.callable == "BatchDecodeWithPagedKVCacheWrapper.__init__"
    assert planned.arguments["page_size"] == SIZE
    assert (ran.num_positional, ran.keywords) == (2, ("return_lse",))
    assert journal.plans == [planned]
    assert journal.runs == [ran]


def test_a_sink_wrapper_is_recorded_once(journal):
    sink_wrapper()
    assert [call.callable for call in journal.calls] == ["BatchAttentionWithAttentionSinkWrapper.__init__"]


def test_merging_checks_its_states():
    scene = materialize(Case(query_lens=(2,), context_lens=(3,), head_size=64))
    v, s = scene.queries[0], torch.zeros(2, 4)
    library().merge_state_in_place(v.clone(), s.clone(), v, s)
    for wrong in ((v, s.half(), v, s), (v, s, v.half(), s), (v, s[:1], v, s), (v, s, v, s.T.contiguous().T)):
        with pytest.raises(AssertionError):
            library().merge_state_in_place(*wrong)
    empty = torch.full_like(s, -torch.inf)
    library().merge_state_in_place(v, empty, v.clone(), empty.clone())
    assert v.isnan().all()
