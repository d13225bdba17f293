"""The kernel that rounds queries is right, and compiles where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnplug.ops import quantize_queries
from tests.backends.triton_on_cpu import DIVISION, NEEDS_TRITON, run_interpreted


def test_scales_per_head_are_those_of_the_queries_that_read_the_head() -> None:
    rows = quantize_queries(torch.ones(2, 4, 8).bfloat16(), torch.tensor([0.5, 4.0]))

    assert rows.dtype == torch.float8_e4m3fn
    assert rows[1, :, 0].float().tolist() == [2.0, 2.0, 0.25, 0.25]


def test_queries_of_a_fused_projection_are_rounded_where_they_are() -> None:
    fused = torch.randn(5, 8, 64).bfloat16()
    rows = quantize_queries(fused[:, :4], torch.ones(1))

    assert torch.equal(rows.float(), fused[:, :4].to(torch.float8_e4m3fn).float())
    assert quantize_queries(fused[:0], torch.ones(2)).shape == (0, 8, 64)


def test_the_kernel_by_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("test_quantize_queries_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.parametrize("scales", [1, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_kernel_compiles_where_there_is_no_gpu(
    dtype: str, scales: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from attnplug.ops.triton_quantize import _kernel  # noqa: PLC0415

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = [f"*{dtype}", "*fp32", "*u8", "i64"]
    constants = {(4 + place,): value for place, value in enumerate((4096, 4096 // scales, scales > 1, 8, 1024))}
    signature = dict(zip(_kernel.arg_names, kinds + ["constexpr"] * len(constants), strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(_kernel, signature, constants, aligned)

    code = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    ).asm["ptx"]

    assert "ld.global.v4" in code  # 16 bytes at a time
    assert DIVISION in code
    assert ".ftz" not in code.replace(DIVISION, "")
