"""The merge of split-KV attention: its kernel in Triton's interpreter and compiled, and views of scratch memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnplug.ops import split_bytes, split_views
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel, run_interpreted


def test_views_of_scratch_memory() -> None:
    scratch = torch.zeros(split_bytes(3 * 5, 4, 8) + 12, dtype=torch.uint8)
    parts, lse = split_views(scratch, 3, 4, 5, 8)

    parts.fill_(1.0)
    lse.fill_(2.0)

    assert (parts.shape, lse.shape) == ((3, 4, 5, 8), (3, 4, 5))
    floats = scratch[:-12].view(torch.float32)
    assert (int((floats == 1).sum()), int((floats == 2).sum())) == (3 * 4 * 5 * 8, 3 * 4 * 5)
    assert not scratch[-12:].any()


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_merge_splits_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize(("max_splits", "query_len"), [(8, 0), (64, 2)])
@pytest.mark.parametrize(("capability", "code"), [(90, "cubin"), ("gfx942", "hsaco"), ("gfx1100", "hsaco")])
def test_the_kernel_compiles(max_splits: int, query_len: int, capability: int | str, code: str) -> None:
    from attnplug.ops.triton_splits import _merge  # noqa: PLC0415 - needs Triton

    kinds = {
        **dict.fromkeys(("parts", "part_lse", "lse"), "*fp32"),
        **dict.fromkeys(("num_reqs", "num_splits"), "i32"),
        "out": "*bf16",
        "query_starts": "*i32",
    }
    sizes = {"heads": 32, "size": 512, "block": 128}
    constants = {**sizes, "has_lse": True, "max_splits": max_splits, "query_len": query_len}

    assert compile_kernel(_merge, kinds, constants, capability=capability, num_warps=4).asm[code]
