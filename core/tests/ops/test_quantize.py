"""Rounding to FP8 and back, of rows and of queries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import CacheError, TensorError
from attnplug.ops import (
    dequantize,
    dequantize_latents,
    quantize,
    quantize_latents,
    quantize_queries,
    write_latents,
    write_pages,
)
from attnplug_kit.oracle import nearest
from tests.backends.triton_on_cpu import DIVISION, NEEDS_TRITON, compile_kernel, run_interpreted

NARROW = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
narrow = st.sampled_from(list(NARROW))
wide = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(narrow, wide, st.sampled_from([None, 0.01, 0.3, 7.0]), st.integers(0, 2**16))
def test_rounds_to_the_nearest(dtype: torch.dtype, source: torch.dtype, scale: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(5, 2, 7, generator=generator) * 10 ** torch.randn(5, 2, 7, generator=generator)).to(source)

    quantized = quantize(rows, dtype, None if scale is None else torch.tensor([scale]))

    scaled = rows.float() if scale is None else rows.float() / torch.tensor(scale)
    assert torch.equal(quantized.double(), nearest(scaled.double(), dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_values_saturate_and_nan_stays(dtype: torch.dtype) -> None:
    largest = NARROW[dtype]
    rows = torch.tensor([2 * largest, -2 * largest, largest, torch.inf, -torch.inf, torch.nan]).view(1, 1, -1)

    quantized = quantize(rows, dtype).double().flatten().tolist()
    halved = quantize(rows, dtype, torch.tensor(0.5)).double().flatten().tolist()

    assert quantized[:5] == halved[:5] == [largest, -largest, largest, largest, -largest]
    assert quantized[5] != quantized[5]
    assert halved[5] != halved[5]


@pytest.mark.parametrize("dtype", NARROW)
def test_scales_may_be_per_head(dtype: torch.dtype) -> None:
    rows = torch.full((2, 3, 4), 12.0)

    quantized = quantize(rows, dtype, torch.tensor([1.0, 2.0, 12.0]))

    assert quantized[1, :, 0].float().tolist() == [12.0, 6.0, 1.0]


@given(narrow, wide, st.booleans(), st.booleans(), st.integers(0, 3))
def test_every_code_comes_back_exactly(
    dtype: torch.dtype, target: torch.dtype, odd: bool, inside: bool, place: int
) -> None:
    codes = torch.arange(257, dtype=torch.int32).to(torch.uint8)[int(odd) : 256 + place % 2]
    rows = (codes if inside else codes.clone()).view(dtype)

    got = dequantize(rows, torch.empty(257 + place, dtype=target)[place : place + rows.shape[0]])

    torch.testing.assert_close(got, rows.to(target), rtol=0, atol=0, equal_nan=True)


@given(narrow, st.sampled_from([None, 0.25]), st.booleans())
def test_pages_take_rows_and_quantized_rows(dtype: torch.dtype, scale: float | None, heads_first: bool) -> None:
    pages = [torch.zeros(3, 4, 2, 5, dtype=torch.uint8).view(dtype) for _ in range(2)]
    if heads_first:
        pages = [page.transpose(1, 2).contiguous().transpose(1, 2) for page in pages]
    rows = torch.randn(3, 2, 5) * 300
    slots, tensor = torch.tensor([5, -1, 11]), None if scale is None else torch.tensor([scale])

    write_pages(rows, pages[0], slots, tensor)
    write_pages(quantize(rows, dtype, tensor), pages[1], slots)

    wanted = quantize(rows, dtype, tensor).float()
    for page in pages:
        assert torch.equal(page[1, 1].float(), wanted[0])
        assert torch.equal(page[2, 3].float(), wanted[2])
        assert page.float().count_nonzero() == (wanted[0] != 0).sum() + (wanted[2] != 0).sum()


def test_query_heads_use_the_scale_of_their_kv_head() -> None:
    rows = quantize_queries(torch.ones(2, 4, 8).bfloat16(), torch.tensor([0.5, 4.0]))

    assert rows.dtype == torch.float8_e4m3fn
    assert rows[1, :, 0].float().tolist() == [2.0, 2.0, 0.25, 0.25]


def test_queries_of_a_fused_projection_need_no_copy() -> None:
    fused = torch.randn(5, 8, 64).bfloat16()
    rows = quantize_queries(fused[:, :4], torch.ones(1))

    assert torch.equal(rows.float(), fused[:, :4].to(torch.float8_e4m3fn).float())
    assert quantize_queries(fused[:0], torch.ones(2)).shape == (0, 8, 64)


# --- records of latents ---


def test_a_record_is_laid_out_as_engines_have_it() -> None:
    """By hand: the bytes that FlashMLA's tests/quant.py describes."""
    row = torch.zeros(1, 1, 576, dtype=torch.bfloat16)
    row[0, 0, 0], row[0, 0, 1], row[0, 0, 130], row[0, 0, 513] = 896.0, -2.0, 1.75, -3.5

    record = quantize_latents(row)[0, 0]

    codes, scales = record[:512].view(torch.float8_e4m3fn).float(), record[512:528].view(torch.float32)
    assert record.shape == (656,)
    assert scales[:2].tolist() == [2.0, 1.75 / 448]
    assert (codes[0], codes[1], codes[130]) == (448.0, -1.0, 448.0)
    assert codes.count_nonzero() == 3
    assert torch.equal(record[528:].view(torch.bfloat16), row[0, 0, 512:])


@given(seed=st.integers(0, 99), exponent=st.integers(-30, 30))
def test_latents_come_back_within_their_rounding(seed: int, exponent: int) -> None:
    rows = torch.randn(3, 1, 576, generator=torch.Generator().manual_seed(seed)).mul(2.0**exponent).bfloat16()

    back = dequantize_latents(quantize_latents(rows), torch.empty_like(rows))

    largest = rows[..., :512].float().unflatten(-1, (4, 128)).abs().amax(-1, keepdim=True)
    exact, found = (one[..., :512].float().unflatten(-1, (4, 128)) for one in (rows, back))
    # Half a unit of 3 bits, or of the smallest numbers; then a rounding to bfloat16.
    assert bool(((exact - found).abs() <= exact.abs() * (2**-4 + 2**-8) + largest / 448 * 2**-10).all())
    assert torch.equal(back[..., 512:], rows[..., 512:])


@pytest.mark.parametrize("padded", [True, False])
def test_records_are_written_into_their_slots(padded: bool) -> None:
    rows, pages = torch.randn(3, 1, 576).bfloat16(), torch.full((4, 5, 1, 656), 7, dtype=torch.uint8)

    write_latents(rows, pages, torch.tensor([6, -1 if padded else 9]), padded=padded)

    flat, written = pages.view(20, 656), {6: 0} if padded else {6: 0, 9: 1}
    assert [slot for slot in range(20) if bool((flat[slot] != 7).any())] == [*written]
    for slot, row in written.items():
        assert torch.equal(flat[slot], quantize_latents(rows)[row, 0])


def test_records_of_other_rows_and_pages_are_refused() -> None:
    """Bytes of another dtype would be written without a word."""
    rows, pages = torch.randn(2, 1, 576).bfloat16(), torch.zeros(2, 4, 1, 656, dtype=torch.uint8)
    others = [(one, pages) for one in (rows.half(), rows.float(), rows[..., :512], rows[:, 0])]
    others += [(rows, one) for one in (pages[..., :576], pages.bfloat16(), pages.view(torch.float8_e4m3fn))]
    for latents, records in others:
        with pytest.raises(TensorError, match=r"rows are \(tokens, 1, 576\) bfloat16, and pages .* uint8"):
            write_latents(latents, records, torch.tensor([4, 5]))
    assert not pages.any()
    with pytest.raises(CacheError, match="slots 0 to 7"):
        write_latents(rows, torch.zeros(2, 4, 1, 656, dtype=torch.uint8), torch.tensor([4, 8]))


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_quantize_queries_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("scales", [1, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_kernel_compiles(dtype: str, scales: int) -> None:
    from attnplug.ops.triton_quantize import _kernel  # noqa: PLC0415 - needs Triton

    kinds = {"query": f"*{dtype}", "scale": "*fp32", "out": "*u8"}
    constants = {"width": 4096, "group": 4096 // scales, "per_group": scales > 1, "unit": 8, "tile": 1024}

    code = compile_kernel(_kernel, kinds, constants, unaligned=["of_token"], num_warps=4).asm["ptx"]

    assert "ld.global.v4" in code  # 16 bytes at a time
    assert DIVISION in code
    assert ".ftz" not in code.replace(DIVISION, "")


@NEEDS_TRITON
@pytest.mark.slow
def test_the_kernel_of_records_compiles() -> None:
    from attnplug.ops.triton_quantize import _latents  # noqa: PLC0415 - needs Triton

    kinds = {"rows": "*bf16", "pages": "*u8", "slots": "*i64"}
    code = compile_kernel(
        _latents, kinds, {"block_size": 64, "of_block": 41984, "unit": 8}, unaligned=["of_token"], num_warps=1
    ).asm["ptx"]

    assert "st.global.b32" in code or "st.global.v" in code  # codes of neighbors are stored together
    assert DIVISION in code
