"""The kernels compile for compute capability 9.0, and to the instructions that they are written for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel

pytestmark = [NEEDS_TRITON, pytest.mark.slow]

KINDS = {
    **dict.fromkeys(("query", "key", "value", "out"), "*bf16"),
    **dict.fromkeys(("parts", "part_lse", "key_scales", "value_scales", "slopes", "flat_scales"), "*fp32"),
    **dict.fromkeys(("query_starts", "seq_lens", "table", "key_starts"), "*i32"),
    **dict.fromkeys(("key_pages", "values_t", "flat_keys"), "*i8"),
    **dict.fromkeys(("num_reqs", "num_splits", "num_tiles", "first_req", "left"), "i32"),
    **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    "slots": "*i64",
}


def constants(size: int = 128, page: int = 16, **more: Any) -> dict[str, Any]:
    strides = {
        f"{operand}_{name}": stride
        for operand in "kv"
        for name, stride in (("page", 8 * page * size), ("slot", size), ("head", page * size))
    }
    sizes = {"kv_heads": 8, "group": 4, "size": size, "width": size, "page_size": page}
    forms = {"is_windowed": False, "is_capped": False, "alibi": 0, "interpreted": False}
    return {**sizes, **strides, "s_page": 8 * page, "s_head": page, **forms, **more}


def compiled(kernel: Any, values: dict[str, Any], level: int, warps: int, **kinds: str) -> Any:
    pages = {"value_pages": "*i8" if level == 1 else "*bf16"}
    return compile_kernel(kernel, KINDS | pages | kinds, values, unaligned=("table_stride",), num_warps=warps)


@pytest.mark.parametrize("level", [1, 2])
def test_decode(level):
    from attnplug_int8_ixformer.tiles import DecodeTiles  # noqa: PLC0415 - as below
    from attnplug_int8_ixformer.triton_decode import _decode  # noqa: PLC0415 - needs Triton

    tiles = DecodeTiles.of(128)
    forms = {"has_scales": level == 1, "writes": True, "is_split": True}
    values = constants(lanes=16, news=16, keys=tiles.keys, stages=tiles.stages, **forms)
    code = compiled(_decode, values, level, tiles.warps).asm["ptx"]

    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in code
    assert "cp.async.cg.shared.global" in code
    assert ".local .align" not in code


@pytest.mark.parametrize("level", [1, 2])
def test_prefill(level):
    from attnplug_int8_ixformer.tiles import PrefillTiles  # noqa: PLC0415 - as below
    from attnplug_int8_ixformer.triton_prefill import _prefill  # noqa: PLC0415 - needs Triton

    tiles = PrefillTiles.of(128)
    values = constants(has_scales=level == 1, rows=tiles.rows, keys=tiles.keys, stages=tiles.stages)
    code = compiled(_prefill, values, level, tiles.warps).asm["ptx"]

    lines = [line for line in code.splitlines() if "wgmma.mma_async" in line]
    assert any("s32.s8.s8" in line for line in lines)
    assert any("f32.bf16.bf16" in line for line in lines) == (level == 2)
    assert "cp.async.cg.shared.global" in code


def test_prefill_tma():
    from attnplug_int8_ixformer.tiles import PrefillTiles  # noqa: PLC0415 - as below
    from attnplug_int8_ixformer.triton_prefill_tma import _prefill_tma  # noqa: PLC0415 - needs Triton

    tiles = PrefillTiles.of(128)
    values = constants(rows=tiles.rows, keys=tiles.keys, stages=tiles.stages)
    boxes = {"key": f"tensordesc<i8[{tiles.keys}, 128]>", "values_t": f"tensordesc<i8[128, {tiles.keys}]>"}
    code = compiled(_prefill_tma, values, 1, tiles.warps, num_columns="i32", **boxes).asm["ptx"]

    assert "cp.async.bulk.tensor.2d" in code
    assert all("s32.s8.s8" in line for line in code.splitlines() if "wgmma.mma_async" in line)
    assert ".local .align" not in code


def test_gather_and_write():
    from attnplug_int8_ixformer.triton_prefill import _gather, _write  # noqa: PLC0415 - needs Triton

    values = constants(lanes=8, has_scales=True, has_keys=True, keys=128)
    for kernel in (_gather, _write):
        assert compiled(kernel, values, 1, 4).asm["cubin"]
