from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from attnplug.errors import TensorError
from attnplug.ops import write_cache, write_kv


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_is_two_calls_of_write_cache(dtype: torch.dtype, padded: bool) -> None:
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 5)
    pages = [torch.zeros(2, 4, 2, size, dtype=torch.uint8).to(dtype) for size in (8, 5, 8, 5)]
    slots = torch.tensor([6, 4 if not padded else -1])
    scales = (torch.tensor(0.5), torch.tensor([0.3, 2.0]))

    write_kv(key, value, *pages[:2], slots, *scales, padded=padded)

    write_cache(key, pages[2], slots, scales[0])
    write_cache(value, pages[3], slots, scales[1])
    for got, wanted in zip(pages[:2], pages[2:], strict=True):
        assert wanted.float().any()
        assert torch.equal(got.float(), wanted.float())


def test_a_value_that_does_not_fit_leaves_the_keys_alone() -> None:
    pages = torch.zeros(2, 2, 4, 2, 8)

    with pytest.raises(TensorError, match="2 slots were given"):
        write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 7), *pages, torch.tensor([4, 5]))

    assert not pages.any()


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_by_the_interpreter() -> None:
    file = Path(__file__).with_name("test_write_kv_on_gpu.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]

    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
