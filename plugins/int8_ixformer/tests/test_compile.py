"""The kernels compile for Hopper where there is no GPU: the interpreter takes what a compiler refuses."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

HALVES = dict.fromkeys(("query", "key", "value", "out"), "*bf16")
FLOATS = dict.fromkeys(("parts", "part_sums", "key_scales", "value_scales", "slopes"), "*fp32")
TABLES = dict.fromkeys(("query_starts", "seq_lens", "table", "key_starts"), "*i32")
NUMBERS = dict.fromkeys(("num_reqs", "num_splits", "num_tiles", "first_req", "left"), "i32")
KINDS = (
    HALVES
    | FLOATS
    | TABLES
    | NUMBERS
    | {"slots": "*i64", "scale": "fp32", "soft_cap": "fp32", "turned": "*i8", "lined": "*i8", "lined_scales": "*fp32"}
)


def constants(size: int = 128, page: int = 16, **more: Any) -> dict[str, Any]:
    strides = {f"{kind}_{name}": step for kind in "kv" for name, step in
               (("page", 8 * page * size), ("slot", size), ("head", page * size))}  # fmt: skip
    terms = {"is_windowed": False, "is_capped": False, "alibi": 0, "interpreted": False}
    return {"kv_heads": 8, "group": 4, "size": size, "width": size, "page_size": page, "s_page": 8 * page,
            "s_head": page, **strides, **terms, **more}  # fmt: skip


def compiled(kernel: Any, given: dict[str, Any], level: int, warps: int, more: dict[str, str] | None = None) -> Any:
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    names = kernel.arg_names
    kinds = KINDS | {"key_pages": "*i8", "value_pages": "*i8" if level == 1 else "*bf16"} | (more or {})
    signature = {name: "constexpr" if name in given else kinds.get(name, "i64") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i64" and name != "of_request")
    }
    values = {(names.index(name),): value for name, value in given.items() if name in names}
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True}
    )


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("level", [1, 2])
def test_decodes(level):
    from attnplug_int8_ixformer.tiles import DecodeTiles  # noqa: PLC0415 - beside what there may not be
    from attnplug_int8_ixformer.triton_decode import _decode  # noqa: PLC0415 - there is Triton where this runs

    tiles = DecodeTiles.of(128)
    given = constants(lanes=16, news=16, has_scales=level == 1, writes=True, is_split=True, keys=tiles.keys,
                      stages=tiles.stages)  # fmt: skip
    code = compiled(_decode, given, level, tiles.warps).asm["ptx"]

    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in code
    assert "cp.async.cg.shared.global" in code
    assert ".local .align" not in code


@pytest.mark.parametrize("level", [1, 2])
def test_prompts(level):
    from attnplug_int8_ixformer.tiles import PrefillTiles  # noqa: PLC0415 - as above
    from attnplug_int8_ixformer.triton_prefill import _prefill  # noqa: PLC0415 - as above

    tiles = PrefillTiles.of(128)
    given = constants(has_scales=level == 1, rows=tiles.rows, keys=tiles.keys, stages=tiles.stages)
    code = compiled(_prefill, given, level, tiles.warps).asm["ptx"]

    lines = [line for line in code.splitlines() if "wgmma.mma_async" in line]
    assert any("s32.s8.s8" in line for line in lines)
    assert any("f32.bf16.bf16" in line for line in lines) == (level == 2)
    assert "cp.async.cg.shared.global" in code


def test_prompts_by_descriptors():
    from attnplug_int8_ixformer.tiles import PrefillTiles  # noqa: PLC0415 - as above
    from attnplug_int8_ixformer.triton_prompt import _prompt  # noqa: PLC0415 - as above

    tiles = PrefillTiles.of(128)
    known = constants(rows=tiles.rows, keys=tiles.keys, stages=tiles.stages)
    given = {name: value for name, value in known.items() if name in _prompt.arg_names}
    boxes = {"key": f"tensordesc<i8[{tiles.keys}, 128]>", "turned": f"tensordesc<i8[128, {tiles.keys}]>"}
    code = compiled(_prompt, given, 1, tiles.warps, boxes | {"num_columns": "i32"}).asm["ptx"]

    assert "cp.async.bulk.tensor.2d" in code
    assert all("s32.s8.s8" in line for line in code.splitlines() if "wgmma.mma_async" in line)
    assert ".local .align" not in code


def test_the_others():
    from attnplug_int8_ixformer.triton_decode import _merge  # noqa: PLC0415 - as above
    from attnplug_int8_ixformer.triton_prefill import _gather, _write  # noqa: PLC0415 - as above

    known = constants(lanes=8, has_scales=True, has_keys=True, keys=128, heads=32, most=8)
    for kernel in (_merge, _gather, _write):
        given = {name: value for name, value in known.items() if name in kernel.arg_names}

        assert compiled(kernel, given, 1, 4).asm["cubin"]
