"""The fakes refuse calls that the libraries refuse, and calls for which these would return wrong numbers."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from attrs import evolve

from attnplug_flash_attn.kernels import ADAPTERS
from attnplug_flash_attn.kernels.interface import LayerParams
from plugins.flash_attn.tests.varlen_requests import HEADS, KV_HEADS, SIZE, kernels, module_of, requests

pytestmark = pytest.mark.usefixtures("fakes")

PLAIN = LayerParams(softmax_scale=0.3)
MIXED = requests((5, 1, 7), (20, 300, 7))
DECODES = requests((1, 1, 1), (20, 40, 7))
GENERATION2, GENERATION3 = ("fa2", "fa2_vllm", "torch"), ("fa3", "fa3_vllm", "fa3_tokenspeed")
IN_PAGES = ("fa2", "fa2_vllm", *GENERATION3, "fa4")
INDEX_TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")


def refuse(variant, step=MIXED, *, paged=True, params=PLAIN, lse=True, match, **changed):
    """Make a call with something wrong in it; the library's own error, or the fake's."""
    adapter = kernels(variant)
    call = step.call(adapter, paged=paged)
    call = evolve(call, **{name: change(getattr(call, name)) for name, change in changed.items()})
    with pytest.raises((RuntimeError, AssertionError), match=match) as caught:
        step.attend(adapter, call, params, lse=lse)
    return type(caught.value).__name__


@pytest.mark.parametrize("variant", ADAPTERS)
def test_index_tensors_of_64_bits(variant):
    call = MIXED.call(kernels(variant))
    read = {name for name in INDEX_TENSORS if getattr(call, name) is not None}
    if variant == "fa2":
        read -= {"seqused_k"}  # it has cumulative lengths in its place

    assert "cu_seqlens_q" in read
    for name in read:
        assert refuse(variant, match="int32", **{name: torch.Tensor.long}) in {"RuntimeError", "AssertionError"}


@pytest.mark.parametrize("variant", ADAPTERS)
def test_a_bound_of_rows_that_is_too_low(variant):
    assert refuse(variant, max_seqlen_q=lambda _: 6, match="a request has 7 rows") == "MisuseError"


@pytest.mark.parametrize("variant", [each for each in ADAPTERS if each != "fa3"])
def test_a_bound_of_keys_that_is_too_low(variant):
    assert refuse(variant, max_seqlen_k=lambda _: 299, match="300 keys") == "MisuseError"


@pytest.mark.parametrize("variant", IN_PAGES)
def test_pages_that_are_not_there(variant):
    assert refuse(variant, block_table=lambda table: table + 100, match="has pages") == "MisuseError"


@pytest.mark.parametrize("variant", IN_PAGES)
def test_a_table_that_is_too_narrow(variant):
    refuse(variant, block_table=lambda table: table[:, :1].contiguous(), match="its row of the table ends|300 keys")


@pytest.mark.parametrize("variant", IN_PAGES)
def test_a_table_whose_rows_are_not_contiguous(variant):
    refuse(variant, block_table=lambda table: table.T.contiguous().T, match="contiguous")


@pytest.mark.parametrize("variant", IN_PAGES)
def test_a_table_of_other_requests(variant):
    refuse(variant, block_table=lambda table: table[:2], match="shape|batch_size_k|Error|^$|requests")


@pytest.mark.parametrize("variant", ADAPTERS)
def test_packed_keys_that_end_early(variant):
    short = evolve(MIXED, packed=[each[:-1] for each in MIXED.packed])
    assert refuse(variant, short, paged=False, match="reads past the 326 packed keys") == "MisuseError"


@pytest.mark.parametrize("variant", ADAPTERS)
def test_queries_of_another_dtype(variant):
    refuse(variant, evolve(MIXED, query=MIXED.query.half()), match="dtype")


@pytest.mark.parametrize("variant", ADAPTERS)
def test_float32(variant):
    wide = evolve(MIXED, **{name: getattr(MIXED, name).float() for name in ("query", "pages")})
    refuse(variant, evolve(wide, packed=[each.float() for each in MIXED.packed]), match="fp16|dtype|FP8")


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm"])
def test_pages_of_other_sizes(variant):
    size = {"fa2": 128, "fa2_vllm": 8}[variant]
    pages = MIXED.pages.reshape(2, -1, size, KV_HEADS, SIZE)
    refuse(variant, evolve(MIXED, pages=pages), match=f"divisible by {256 if variant == 'fa2' else 16}")


@pytest.mark.parametrize("variant", [*GENERATION2, *GENERATION3])
def test_heads_that_are_not_multiples_of_8(variant):
    odd = evolve(
        MIXED, query=MIXED.query[..., :4], pages=MIXED.pages[..., :4], packed=[each[..., :4] for each in MIXED.packed]
    )
    refuse(variant, odd, match="multiple of 8")


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm"])
def test_slopes_of_another_dtype(variant):
    refuse(variant, params=evolve(PLAIN, alibi_slopes=torch.ones(HEADS).bfloat16()), match="dtype fp32")


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm"])
def test_rows_without_keys_in_pages(variant):
    assert refuse(variant, requests((3, 2), (5, 0)), match="its LSE is written to a wrong address") == "MisuseError"


def test_sinks_of_another_dtype():
    refuse("fa3_vllm", params=evolve(PLAIN, sinks=torch.ones(HEADS)), match="only support bf16 dtype for S aux")


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ((72, 256), "only supported for head_size <= 64|V headdim is different"),
        ((64, 128), "only supported for hdim_v >= 256"),
        ((32, 520), "V headdim is different"),
    ],
)
def test_latents_of_other_sizes(sizes, match):
    adapter, call = kernels("fa3_vllm"), MIXED.call(kernels("fa3_vllm"))
    adapter._latent_size = sizes[1]
    query = torch.zeros(13, HEADS, sum(sizes)).bfloat16()
    key, value = (torch.zeros(7, 256, 1, size).bfloat16() for size in sizes)
    with pytest.raises(RuntimeError, match=match):
        adapter.attend(query, key, value, query.new_empty(13, HEADS, sizes[1]), call, PLAIN, None)


def test_the_package_index_build_has_no_soft_caps():
    refuse("fa3_tokenspeed", params=evolve(PLAIN, softcap=2.0), match="does not support tanh softcapping")


@pytest.mark.parametrize("variant", GENERATION3)
def test_quantized_keys_alone(variant):
    refuse(variant, evolve(MIXED, pages=MIXED.pages.to(torch.float8_e4m3fn)), match="same dtype")


def test_quantized_keys_and_a_float16_output():
    quantized = evolve(MIXED, query=MIXED.query.to(torch.float8_e4m3fn), pages=MIXED.pages.to(torch.float8_e4m3fn))
    adapter = kernels("fa3_vllm", kv_cache_dtype="fp8_e4m3")
    out = torch.empty(MIXED.query.shape, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="bf16 for fp8"):
        adapter.attend(quantized.query, *quantized.pages, out, MIXED.call(adapter), PLAIN, None)


def test_a_schedule_of_another_size():
    schedule = torch.zeros(3, dtype=torch.int32)
    assert refuse("fa3_vllm", scheduler_metadata=lambda _: schedule, match="scheduler_metadata") == "RuntimeError"


@pytest.mark.parametrize("other", [requests((7, 1, 5), (20, 300, 7)), requests((5, 1, 7), (20, 299, 300))])
def test_a_schedule_of_another_step(other):
    adapter = kernels("fa3_vllm")
    stale = adapter.schedule(evolve(other.call(adapter), max_seqlen_k=300), PLAIN, num_heads_q=HEADS)
    out, _ = MIXED.attend(adapter, MIXED.call(adapter, scheduler_metadata=stale), PLAIN)
    assert out.isnan().all()


def test_a_schedule_with_a_stale_tail():
    adapter = kernels("fa3_vllm")
    call = MIXED.call(adapter)
    schedule = adapter.schedule(call, PLAIN, num_heads_q=HEADS)
    schedule[3] = 7  # three requests are padded to four
    out, _ = MIXED.attend(adapter, evolve(call, scheduler_metadata=schedule), PLAIN)
    assert out.isnan().all()


def test_fa4_wants_none_for_no_window():
    fa4 = import_module("flash_attn.cute.interface")
    call = MIXED.call(kernels("fa4"))
    with pytest.raises(AssertionError, match="no bound is None"):
        fa4.flash_attn_varlen_func(
            MIXED.query, *MIXED.pages, cu_seqlens_q=call.cu_seqlens_q, max_seqlen_q=7, max_seqlen_k=300,
            seqused_k=call.seqused_k, page_table=call.block_table, window_size=(-1, -1),
        )  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 2])
def test_fa4_does_not_split_on_hopper(num_splits):
    adapter = kernels("fa4")
    adapter._splits = True
    with pytest.raises(AssertionError, match=r"SplitKV not supported on SM 9\.0"):
        MIXED.attend(adapter, MIXED.call(adapter, num_splits=num_splits), PLAIN)


@pytest.mark.parametrize("capability", [8, 12])
def test_fa4_has_pages_on_some_devices(monkeypatch, capability):
    monkeypatch.setattr(import_module("flash_attn.cute.interface"), "CAPABILITY", capability)
    assert refuse("fa4", match="paged KV not supported") == "AssertionError"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 144, 192, 256])
def test_fa4_copies_pages_in_steps_that_fill_a_tile(size, causal):
    fa4, rows = import_module("flash_attn.cute.interface"), torch.zeros(2, 16, 1, size)
    keys = import_module("flash_attn_fake.keys").Keys(key=rows, value=rows, starts=None, used=None, table=rows)
    are_whole = size in (64, 112, 128, 192, 256) or (size in (80, 96) and causal)

    with nullcontext() if are_whole else pytest.raises(AssertionError, match="those left over are not"):
        fa4._require_whole_tiles(keys, (None, None), causal=causal)


def test_fa4_reads_the_rest_of_a_page_of_a_tile():
    adapter = kernels("fa4")
    pages = torch.zeros(2, 4, 128, KV_HEADS, SIZE).bfloat16()
    call = evolve(MIXED.call(adapter), block_table=torch.tensor([[1], [2], [3]], dtype=torch.int32), max_seqlen_k=128)
    call = evolve(call, seqused_k=torch.tensor([20, 128, 7], dtype=torch.int32))
    pages[1, 1, 20:] = torch.nan
    out, _ = evolve(MIXED, pages=pages).attend(adapter, call, PLAIN)
    assert out[:5].isnan().all()
    assert out[5:].isfinite().all()


@pytest.mark.parametrize(("variant", "paged"), [("fa2", True), ("fa2_vllm", False)])
def test_folded_rows_have_an_lse_in_another_order(monkeypatch, variant, paged):
    """What `max_seqlen_q_of` is for."""
    monkeypatch.setattr(module_of(variant), "max_seqlen_q_of", lambda *_, **__: 1)
    adapter = kernels(variant)
    out, lse = DECODES.attend(adapter, DECODES.call(adapter, paged=paged), PLAIN)
    exact, sums = DECODES.truth(PLAIN)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(lse.double(), sums, rtol=1e-3)
    assert sorted(lse.flatten().tolist()) == pytest.approx(sorted(sums.flatten().tolist()), rel=1e-5)


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm"])
def test_the_lse_forgets_part_of_alibi(monkeypatch, variant):
    """What `window_size_of` is for."""
    kept = module_of(variant)
    monkeypatch.setattr(kept, "window_size_of", lambda _, params, **__: params.window)
    params, adapter = evolve(PLAIN, alibi_slopes=torch.full((HEADS,), 0.5)), kernels(variant)
    out, lse = MIXED.attend(adapter, MIXED.call(adapter), params)
    exact, sums = MIXED.truth(params)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert (lse.double() - sums)[0].tolist() == pytest.approx([0.5 * 15] * HEADS, rel=1e-3)


@pytest.mark.parametrize("variant", GENERATION2)
def test_folded_rows_must_be_one_each(monkeypatch, variant):
    monkeypatch.setattr(module_of(variant), "max_seqlen_q_of", lambda *_, **__: 1)
    assert refuse(variant, requests((1, 0, 1), (20, 300, 7)), match="invalid for 2 rows") == "RuntimeError"


def test_more_parts_than_one_in_pages_need_folded_rows():
    adapter = kernels("fa2_vllm")
    call = MIXED.call(adapter)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported for varlen paged KV"):
        adapter._varlen_fwd(
            MIXED.query, *MIXED.pages, None, call.cu_seqlens_q, call.cu_seqlens_q, call.seqused_k, None,
            call.block_table, None, 7, 300, 0.0, 0.3, False, True, -1, -1, 0.0, False, 2, None,
        )  # fmt: skip


def test_the_ops_check_where_they_write():
    adapter = kernels("fa3_vllm")
    for out, match in (
        (torch.empty(13, HEADS, SIZE), "same dtype"),
        (torch.empty(12, HEADS, SIZE).bfloat16(), "rows and heads of q"),
        (torch.empty(13, SIZE, HEADS).bfloat16().mT, "contiguous last dimension"),
    ):
        with pytest.raises(RuntimeError, match=match):
            adapter.attend(MIXED.query, *MIXED.pages, out, MIXED.call(adapter), PLAIN, None)


def test_the_ops_do_not_write_rows_of_no_request():
    for variant in ("fa2_vllm", "fa3_vllm", "fa3_tokenspeed"):
        adapter = kernels(variant)
        wide = evolve(MIXED, query=torch.cat([MIXED.query, MIXED.query[:2]]))
        out, _ = wide.attend(adapter, MIXED.call(adapter), PLAIN)
        assert out[-2:].isnan().all()
        assert out[:-2].isfinite().all()
