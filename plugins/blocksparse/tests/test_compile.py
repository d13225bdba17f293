"""The kernels compile for compute capability 9.0, and to the instructions that they are written for."""

from __future__ import annotations

import pytest

from attnplug_blocksparse.tiles import HOPPER_SHARED_MEMORY, HopperTiles
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel

pytestmark = [NEEDS_TRITON, pytest.mark.slow]

SCALES = ("k_scale", "v_scale")
KINDS = {
    **dict.fromkeys(("query", "out"), "*bf16"),
    **dict.fromkeys(("lse", "parts", "part_lse", *SCALES), "*fp32"),
    **dict.fromkeys(("query_starts", "key_starts", "seq_lens", "table", "residues", "residues_below"), "*i32"),
    **dict.fromkeys(("num_reqs", "num_tiles", "num_splits", "length", "rounds", "first_head", "slide"), "i32"),
    "scale": "fp32",
}
PHI = {"block": 64, "local": 16, "stride": 8, "by_kv_head": False, "group": 4, "interpreted": False, "has_lse": True}


@pytest.mark.parametrize("page", [0, 16])
def test_prefill(page):
    from attnplug_blocksparse.triton_prefill import _prefill  # noqa: PLC0415 - needs Triton

    sizes = {"heads": 32, "size": 128, "width": 128, "page_size": page, "is_scaled": False, "is_wide": False}
    tiles = {"rows": 128, "keys": 64, "stages": 2}
    kinds = KINDS | {"key": "*bf16", "value": "*bf16"}
    code = compile_kernel(_prefill, kinds, PHI | sizes | tiles, unaligned=SCALES, num_warps=8).asm["ptx"]

    assert "wgmma.mma_async" in code
    assert "cp.async.cg.shared.global" in code


@pytest.mark.parametrize("blocks_per_tile", [1, 2])
def test_prefill_tma(blocks_per_tile):
    from attnplug_blocksparse.triton_prefill_tma import _prefill_tma  # noqa: PLC0415 - needs Triton

    keys = 64 * blocks_per_tile
    rows, blocks = f"tensordesc<bf16[{keys}, 1, 128]>", f"tensordesc<bf16[{blocks_per_tile}, 1, 64, 1, 128]>"
    kinds = KINDS | {"key": rows, "value": rows, "key_blocks": blocks, "value_blocks": blocks}
    tiles = {"heads": 32, "size": 128, "rows": 64, "keys": keys, "stages": 3}
    code = compile_kernel(_prefill_tma, kinds, PHI | tiles, num_warps=4).asm["ptx"]

    assert "wgmma.mma_async" in code
    assert "cp.async.bulk.tensor.3d" in code
    assert ("cp.async.bulk.tensor.5d" in code) is (blocks_per_tile > 1)


@pytest.mark.parametrize(("size", "dtype", "page_size"), [(128, "bf16", 0), (64, "fp16", 0), (128, "bf16", 64)])
def test_warp_specialized_prefill(size, dtype, page_size):
    from attnplug_blocksparse import prefill_single  # noqa: PLC0415 - needs Triton

    if not prefill_single.has_specialized_kernel():
        pytest.skip("the kernel is not used with the Gluon of this release of Triton")
    from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: PLC0415 - some releases lack it

    from attnplug_blocksparse.gluon_prefill import _warp_specialized_prefill  # noqa: PLC0415 - likewise

    def descriptor(*box):
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
        return f"tensordesc<{dtype}[{', '.join(map(str, box))}],{layout!r}>"

    rows = descriptor(64, 1, size)
    keys = descriptor(1, 64, 1, size) if page_size else rows
    kinds = KINDS | {"query": rows, "key": keys, "value": keys, "out": rows, "out_ptr": f"*{dtype}"}
    kinds |= dict.fromkeys(("num_items", "last", "context"), "i32")
    sizes = {"heads": 32, "size": size, "stages": HopperTiles(1).stages, "page_size": page_size}
    kernel = compile_kernel(_warp_specialized_prefill, kinds, PHI | sizes, num_warps=4)
    code, shared = kernel.asm["ptx"], kernel.metadata.shared

    assert "wgmma.mma_async" in code
    assert "setmaxnreg" in code
    assert f"cp.async.bulk.tensor.{4 if page_size else 3}d.shared" in code
    assert "cp.async.bulk.tensor.3d.global" in code
    assert shared <= HOPPER_SHARED_MEMORY


@pytest.mark.parametrize(
    ("cache", "by_kv_head"), [("bf16", False), ("bf16", True), ("fp8e4nv", False), ("fp8e5", False)]
)
def test_decode(cache, by_kv_head):
    from attnplug_blocksparse.triton_decode import _decode  # noqa: PLC0415 - needs Triton

    kinds = KINDS | {"key": f"*{cache}", "value": f"*{cache}"}
    sizes = {"kv_heads": 8, "lanes": 16, "size": 128, "width": 128, "page_size": 16, "is_scaled": cache != "bf16"}
    tiles = {"is_split": True, "keys": 64, "stages": 4, "by_kv_head": by_kv_head}
    code = compile_kernel(_decode, kinds, PHI | sizes | tiles, unaligned=SCALES, num_warps=4).asm["ptx"]

    assert "mma.sync" in code
    assert "cp.async" in code
