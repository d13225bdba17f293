from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnplug.errors import TensorError
from attnplug.ops import write_kv, write_pages
from tests.backends.triton_on_cpu import DIVISION, NEEDS_TRITON, run_interpreted


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_is_two_calls_of_write_cache(dtype: torch.dtype, padded: bool) -> None:
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 5)
    pages = [torch.zeros(2, 4, 2, size, dtype=torch.uint8).to(dtype) for size in (8, 5, 8, 5)]
    slots = torch.tensor([6, 4 if not padded else -1])
    scales = (torch.tensor(0.5), torch.tensor([0.3, 2.0]))

    write_kv(key, value, *pages[:2], slots, *scales, padded=padded)

    write_pages(key, pages[2], slots, scales[0])
    write_pages(value, pages[3], slots, scales[1])
    for got, wanted in zip(pages[:2], pages[2:], strict=True):
        assert wanted.float().any()
        assert torch.equal(got.float(), wanted.float())


def test_a_value_that_does_not_fit_leaves_the_keys_alone() -> None:
    pages = torch.zeros(2, 2, 4, 2, 8)

    with pytest.raises(TensorError, match="2 slots were given"):
        write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 7), *pages, torch.tensor([4, 5]))

    assert not pages.any()


def test_the_kernel_by_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("test_write_kv_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("rows", "pages", "mantissa", "scales"),
    [("i16", "i16", -1, 0), ("bf16", "u8", 3, 1), ("fp32", "u8", 2, 4), ("fp32", "i16", 7, 0)],
)
def test_the_kernel_compiles_where_there_is_no_gpu(
    rows: str, pages: str, mantissa: int, scales: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler refuses what the interpreter takes. Rows and slots of 16 bytes are to be moved as such."""
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from attnplug.ops.triton_write import _kernel  # noqa: PLC0415

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    half = (4, 128, True, 16, 2 * 16 * 4 * 128, 128, 16 * 128, 1, mantissa, scales)
    kinds = [f"*{rows}"] * 2 + [f"*{pages}"] * 2 + ["*i64", "*fp32", "*fp32"] + ["i64"] * 4
    constants = {(11 + place,): value for place, value in enumerate((*half, *half, 8, 512))}
    signature = dict(zip(_kernel.arg_names, kinds + ["constexpr"] * len(constants), strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
    source = ASTSource(_kernel, signature, constants, aligned)

    code = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 2, "enable_fp_fusion": True}
    ).asm["ptx"]

    assert "ld.global.v4" in code
    assert ("st.global.v2" if pages == "u8" else "st.global.v4") in code
    assert ".ftz" not in code.replace(DIVISION, "")
    assert (DIVISION in code) == bool(scales)
