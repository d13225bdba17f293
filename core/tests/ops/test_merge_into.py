"""Two results are merged in place, and the kernel for it is right and compiles where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnplug.errors import TensorError
from attnplug.ops import merge_attention_states, merge_into
from tests.backends.triton_on_cpu import NEEDS_TRITON, run_interpreted


def test_the_first_result_is_overwritten() -> None:
    wide = torch.randn(3, 40)
    out, lse = wide[:, :32].unflatten(1, (4, 8)), torch.randn(3, 4)
    other, other_lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    wanted, total = merge_attention_states(out, lse, other, other_lse)
    rest = wide[:, 32:].clone()

    merge_into(out, lse, other, other_lse)

    assert torch.equal(out, wanted)
    assert torch.equal(lse, total)
    assert torch.equal(wide[:, 32:], rest)


def test_results_of_other_shapes_are_refused() -> None:
    out, lse = torch.ones(2, 4, 8), torch.zeros(2, 4)
    with pytest.raises(TensorError, match="were given"):
        merge_into(out, lse, out, lse.T)


def test_the_kernel_by_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("test_merge_into_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_where_there_is_no_gpu(
    dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from attnplug.ops.triton_merge import _kernel  # noqa: PLC0415

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = [f"*{dtype}", "*fp32", f"*{dtype}", "*fp32"] + ["i64"] * 4
    constants = {(8 + place,): value for place, value in enumerate((32, 128, 8, 8, 128))}
    signature = dict(zip(_kernel.arg_names, kinds + ["constexpr"] * len(constants), strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = ASTSource(_kernel, signature, constants, aligned)

    code = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    ).asm["ptx"]

    assert "ld.global.v4" in code  # 16 bytes at a time
    assert "st.global.v4" in code
