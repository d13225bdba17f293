"""The kernels compile for Hopper where there is no GPU: the compiler refuses what the interpreter takes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from attnplug_blocksparse.tiles import HOPPER_SHARED_MEMORY, HopperTiles

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

TENSORS = {"query": "*bf16", "out": "*bf16", "lse": "*fp32", "parts": "*fp32", "part_sums": "*fp32", "scale": "fp32"}
TABLES = ("query_starts", "key_starts", "seq_lens", "table", "residues", "before")
NUMBERS = ("num_reqs", "num_tiles", "num_splits", "length", "supers", "first", "step")
SCALES = ("k_scale", "v_scale")
PHI = {"block": 64, "local": 16, "stride": 8, "by_kv_head": False, "group": 4, "interpreted": False, "has_lse": True}


def compiled(kernel: Any, constants: dict[str, Any], keys: dict[str, str], **options: int) -> Any:
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415
    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415 - Triton names no other way

    kinds = TENSORS | keys | dict.fromkeys(TABLES, "*i32") | dict.fromkeys(NUMBERS, "i32")
    kinds |= dict.fromkeys(SCALES, "*fp32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i64") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name] == "i64" or (signature[name].startswith("*") and name not in SCALES)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options})


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("page", [0, 16])
def test_prompts_and_chunks(page):
    from attnplug_blocksparse.triton_prefill import _prefill  # noqa: PLC0415 - there is Triton where this runs

    sizes = {"heads": 32, "size": 128, "width": 128, "page_size": page, "is_scaled": False}
    sizes |= {"is_wide": False}
    tiles = {"rows": 128, "keys": 64, "stages": 2}
    code = compiled(_prefill, PHI | sizes | tiles, {"key": "*bf16", "value": "*bf16"}, num_warps=8).asm["ptx"]

    assert "wgmma.mma_async" in code
    assert "cp.async.cg.shared.global" in code


@pytest.mark.parametrize("at_once", [1, 2])
def test_prompts_by_descriptors(at_once):
    from attnplug_blocksparse.triton_prompt import _prompt  # noqa: PLC0415 - as above

    rows, blocks = f"tensordesc<bf16[{64 * at_once}, 1, 128]>", f"tensordesc<bf16[{at_once}, 1, 64, 1, 128]>"
    keys = {"key": rows, "value": rows, "key_blocks": blocks, "value_blocks": blocks}
    tiles = {"heads": 32, "size": 128, "rows": 64, "keys": 64 * at_once, "stages": 3}
    code = compiled(_prompt, PHI | tiles, keys, num_warps=4).asm["ptx"]

    assert "wgmma.mma_async" in code
    assert "cp.async.bulk.tensor.3d" in code
    assert ("cp.async.bulk.tensor.5d" in code) is (at_once > 1)


@pytest.mark.parametrize(("size", "kind", "page_size"), [(128, "bf16", 0), (64, "fp16", 0), (128, "bf16", 64)])
def test_prompts_and_chunks_by_roles(size, kind, page_size):
    from attnplug_blocksparse import hopper  # noqa: PLC0415 - as above

    if not hopper.is_there():
        pytest.skip("the kernel is not used with this release of Triton, whose Gluon is another")
    from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: PLC0415 - some have none

    from attnplug_blocksparse.gluon_prompt import _prompt_by_roles  # noqa: PLC0415 - likewise

    def described(*box):
        swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
        return f"tensordesc<{kind}[{', '.join(map(str, box))}],{swizzled!r}>"

    rows = described(64, 1, size)
    keys = described(1, 64, 1, size) if page_size else rows
    tensors = {"query": rows, "key": keys, "value": keys, "out": rows}
    tensors |= dict.fromkeys(("items", "last", "context"), "i32") | {"out_at": f"*{kind}"}
    constants = {name: value for name, value in PHI.items() if name != "interpreted"}
    sizes = {"heads": 32, "size": size, "stages": HopperTiles(1).stages, "page_size": page_size}
    kernel = compiled(_prompt_by_roles, constants | sizes, tensors, num_warps=4)
    code, shared = kernel.asm["ptx"], kernel.metadata.shared

    assert "wgmma.mma_async" in code
    assert "setmaxnreg" in code
    assert f"cp.async.bulk.tensor.{4 if page_size else 3}d.shared" in code
    assert "cp.async.bulk.tensor.3d.global" in code
    assert shared <= HOPPER_SHARED_MEMORY


@pytest.mark.parametrize(
    ("cache", "by_kv_head"), [("bf16", False), ("bf16", True), ("fp8e4nv", False), ("fp8e5", False)]
)
def test_decodes(cache, by_kv_head):
    from attnplug_blocksparse.triton_decode import _decode, _merge  # noqa: PLC0415 - as above

    keys = {"key": f"*{cache}", "value": f"*{cache}"}
    sizes = {"kv_heads": 8, "lanes": 16, "size": 128, "width": 128, "page_size": 16, "is_scaled": cache != "bf16"}
    tiles = {"is_split": True, "keys": 64, "stages": 4, "by_kv_head": by_kv_head}
    code = compiled(_decode, PHI | sizes | tiles, keys, num_warps=4).asm["ptx"]
    merged = {"heads": 32, "size": 128, "width": 128, "has_lse": True, "most": 8}

    assert "mma.sync" in code
    assert "cp.async" in code
    assert compiled(_merge, merged, {}, num_warps=4).asm["cubin"]
