"""The kernel that rounds queries is right, and compiles where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_the_kernel_by_the_interpreter() -> None:
    file = Path(__file__).with_name("test_quantizing_on_gpu.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]

    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@needs_triton
@pytest.mark.parametrize("scales", [1, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_kernel_compiles_where_there_is_no_gpu(
    dtype: str, scales: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from attnplug_flash_attn.triton_quantize import _kernel  # noqa: PLC0415

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = [f"*{dtype}", "*fp32", "*u8", "i64"]
    constants = {(4 + place,): value for place, value in enumerate((4096, 4096 // scales, scales > 1, 8, 1024))}
    signature = dict(zip(_kernel.arg_names, kinds + ["constexpr"] * len(constants), strict=True))
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = ASTSource(_kernel, signature, constants, aligned)

    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

    assert "ld.global.v4" in code  # 16 bytes at a time
    assert "div.rn.f32" in code
    assert ".ftz" not in code
