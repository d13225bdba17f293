"""The kernels compile for each kind of device, to matrix instructions, and fit its shared memory."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug.manifest.reader import read_manifest
from attnplug_triton.tiles import (
    DESCRIBED_KEYS,
    TileKey,
    Tiles,
    decode_tiles,
    has_e4m3,
    latent_tiles,
    measured_tiles,
    prefill_tiles,
    shared_memory,
    value_width_of,
    width_of,
)
from tests.backends.fakes import manifest_of
from tests.backends.triton_on_cpu import DIVISION, NEEDS_TRITON, RELEASE, compile_kernel

pytestmark = [NEEDS_TRITON, pytest.mark.slow]

KINDS = {
    **dict.fromkeys(("query", "out"), "*bf16"),
    **dict.fromkeys(("lse", "slopes", "sinks", "k_scale", "v_scale", "parts", "part_lse"), "*fp32"),
    **dict.fromkeys(("query_starts", "seq_lens", "table", "spans"), "*i32"),
    "mask": "*u8",
    "mask_starts": "*i64",
    **dict.fromkeys(("mask_stride", "rank"), "i32"),
    **dict.fromkeys(("num_reqs", "left", "chunk", "num_splits", "num_tiles", "num_tokens", "num_slots"), "i32"),
    **dict.fromkeys(("scale", "soft_cap"), "fp32"),
}
SHORT = 1
FORMS = {
    **dict.fromkeys(("is_windowed", "is_chunked", "is_capped", "has_sinks", "is_per_head", "interpreted"), False),
    **dict.fromkeys(("is_latent", "is_records", "has_spans", "has_mask"), False),
    "topk": 0,
    "has_lens": True,
    "alibi": 0,
    "is_causal": True,
    "has_lse": True,
    "short": SHORT,
    "ranks": 1,
    "interleave": 1,
    "kv_heads": 8,
    "group": 4,
}
CACHES = {"bf16": ("bf16", 2), "e4m3": ("fp8e4nv", 1), "e4m3 by bits": ("u8", 1), "e5m2": ("fp8e5", 1)}
CACHES |= {"int8 by token": ("i8", 1), "e4m3 by token": ("fp8e4nv", 1), "e4m3 by token and bits": ("u8", 1)}


AMD = read_manifest(manifest_of("attnplug_triton")).variants[0].supports["arch"].choices()
"""The LLVM targets that are declared."""


def architecture_of(capability: int | str) -> str:
    """Return the architecture of ten times a compute capability, or of an LLVM target."""
    return capability if isinstance(capability, str) else f"{capability // 10}.{capability % 10}"


def compiled(
    phase: str, capability: int | str, size: int, cache: str, page: int, *, tiles: Tiles | None = None, **forms: Any
) -> Any:
    """Return a compiled kernel, by default with the tiles that follow from the device."""
    from attnplug_triton.triton_decode import _decode  # noqa: PLC0415 - needs Triton
    from attnplug_triton.triton_prefill import _prefill  # noqa: PLC0415 - needs Triton

    kind, itemsize = CACHES[cache]
    arch = architecture_of(capability)
    size_v = forms.get("size_v", size)
    if tiles is not None:
        pass
    elif forms.get("is_latent"):
        rows = forms["group"] if phase == "decode" else 64
        itemsize = None if forms.get("is_records") else itemsize
        tiles = latent_tiles(size, size_v, itemsize=itemsize, rows=rows, arch=arch)
    elif phase == "decode":
        tiles = decode_tiles(size, size, itemsize=itemsize, rows=forms.get("group", 4), arch=arch)
    else:
        tiles = prefill_tiles(
            size, size_v, arch=arch, descriptors=cache == "bf16" and page > 0 == page % DESCRIBED_KEYS
        )
    sizes = {
        "size": size,
        "size_v": size_v,
        "width": width_of(size),
        "page_size": page,
        "width_v": value_width_of(size_v),
    }
    is_by_token = "by token" in cache
    scales = {"is_scaled": kind != "bf16" and not is_by_token, "by_bits": kind == "u8", "is_split": True}
    scales["is_by_token"] = is_by_token
    sizes |= {"rows": tiles.rows, "keys": tiles.keys, "stages": tiles.stages}
    sizes |= {"joins_diagonal": tiles.joins_diagonal, "by_descriptor": tiles.descriptors}
    kinds = {"key": "*bf16" if forms.get("is_records") else f"*{kind}", "value": f"*{kind}"}
    pages = {f"{name}_pages": kind for name, kind in kinds.items()}
    if tiles.descriptors:
        widths = (sizes["width"], sizes["width_v"])
        pages = {name: f"tensordesc<bf16[1, {tiles.keys}, 1, {n}]>" for name, n in zip(pages, widths, strict=True)}
    return compile_kernel(
        _decode if phase == "decode" else _prefill,
        KINDS | kinds | pages,
        {**FORMS, **sizes, **scales, **forms},
        unaligned=("table_stride", "k_scale", "v_scale"),
        capability=capability,
        **tiles.launch_options,
    )


def check(phase: str, capability: int | str, *given: Any, is_tall: bool = False, **forms: Any) -> str:
    """Compile, check the code, and return it. Tiles of 64 rows and more, which prefills have, are tall."""
    if RELEASE is not None and RELEASE < (3, 5) and (forms.get("is_latent") or given[0] > 256):
        pytest.skip("the manifest requires Triton 3.5")
    kernel = compiled(phase, capability, *given, **forms)

    if isinstance(capability, str):
        code = str(kernel.asm["amdgcn"])
        assert ("v_mfma" if capability.startswith("gfx9") else "v_wmma") in code
    else:
        code = str(kernel.asm["ptx"])
        is_tall |= phase == "prefill" and given[0] <= 256
        tall = {90: "wgmma.mma_async", 100: "tcgen05.mma"} if is_tall else {}
        assert tall.get(capability, "mma.sync") in code
        assert "cp.async" in code
    assert kernel.metadata.shared <= shared_memory(architecture_of(capability)) * 1024
    return code


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("capability", "size", "cache", "page"),
    [
        (80, 128, "bf16", 16),
        (89, 128, "bf16", 16),
        (90, 128, "bf16", 16),
        (90, 128, "bf16", 128),
        (120, 128, "bf16", 16),
        (80, 256, "e4m3 by bits", 16),
        (89, 256, "bf16", 16),
        (90, 256, "e4m3", 16),
        (90, 80, "e5m2", 1),
        (80, 512, "bf16", 16),
        (89, 512, "e4m3", 1),
        (90, 512, "bf16", 128),
        (120, 512, "bf16", 16),
        ("gfx942", 512, "bf16", 16),
        ("gfx1201", 512, "e4m3", 16),
        *((arch, 128, "bf16", 16) for arch in AMD),
        ("gfx90a", 256, "e4m3 by bits", 16),
        ("gfx942", 256, "bf16", 1),
        ("gfx950", 256, "e4m3", 128),
        ("gfx1100", 64, "e4m3 by bits", 16),
        ("gfx1201", 256, "e4m3", 16),
        *((kind, 128, "int8 by token", 16) for kind in (80, 89, 90, 100, 120, *AMD)),
        *((kind, 256, "int8 by token", 64) for kind in (80, 89, 90, "gfx942", "gfx1201")),
        (89, 512, "int8 by token", 1),
        (80, 256, "e4m3 by token and bits", 16),
        (90, 128, "e4m3 by token", 64),
        ("gfx950", 256, "e4m3 by token", 128),
    ],
)
def test_it_fits(phase: str, capability: int | str, size: int, cache: str, page: int) -> None:
    check(phase, capability, size, cache, page)


@pytest.mark.parametrize("capability", [80, 89, 90, "gfx942", "gfx1201"])
def test_many_rows_of_large_heads_fit(capability: int | str) -> None:
    check("decode", capability, 512, "bf16", 16, group=64)


def test_turing_has_no_matrix_instructions() -> None:
    """The manifest's reason for a refusal; the rule goes once a release of Triton has them."""
    assert "mma.sync" not in compiled("decode", 75, 64, "bf16", 16).asm["ptx"]


@pytest.mark.parametrize(("capability", "size"), [(90, 64), (90, 80), (90, 128), (90, 256), (100, 128), (120, 128)])
def test_descriptors_load_tiles(capability: int, size: int) -> None:
    code = check("prefill", capability, size, "bf16", 64)

    assert ("cp.async.bulk.tensor" in code) == (capability != 120)


@pytest.mark.parametrize(("group", "rows", "keys", "stages"), [(16, 16, 32, 3), (16, 16, 64, 2), (128, 64, 64, 2)])
def test_descriptors_load_tiles_of_latents(group: int, rows: int, keys: int, stages: int) -> None:
    tiles = Tiles(rows=rows, keys=keys, stages=stages, warps=8 if rows == 64 else 4, descriptors=True)
    latent = {"is_latent": True, "size_v": 512, "kv_heads": 1, "group": group}

    assert "cp.async.bulk.tensor" in check("decode", 90, 64, "bf16", 64, is_tall=rows == 64, tiles=tiles, **latent)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("capability", "page"), [(89, 16), (89, 0), ("gfx942", 16), ("gfx1201", 16)])
def test_every_feature(phase: str, capability: int | str, page: int) -> None:
    names = ("is_windowed", "is_chunked", "is_capped", "has_sinks", "has_spans", "has_mask")

    check(phase, capability, 128, "bf16", page, alibi=2, **dict.fromkeys(names, True))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("capability", "page"), [(80, 16), (90, 64), ("gfx942", 16)])
def test_shards_of_ranks(phase: str, capability: int | str, page: int) -> None:
    check(phase, capability, 128, "bf16", page, ranks=4, interleave=16, is_windowed=True)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("capability", "is_windowed"), [(80, False), (90, True), (90, False), (100, False)])
def test_contiguous_encoders(phase: str, capability: int, is_windowed: bool) -> None:
    check(phase, capability, 128, "bf16", 0, is_causal=False, is_windowed=is_windowed)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("capability", "size_v", "size", "group", "cache"),
    [
        (80, 512, 64, 128, "e4m3 by bits"),
        (89, 512, 64, 128, "bf16"),
        (89, 264, 304, 128, "bf16"),
        (90, 512, 64, 128, "bf16"),
        (90, 512, 64, 128, "e4m3"),
        (90, 512, 64, 16, "bf16"),
        (90, 512, 0, 64, "bf16"),
        (100, 512, 64, 128, "bf16"),
        (120, 512, 64, 20, "e4m3"),
        (120, 256, 32, 40, "bf16"),
        ("gfx90a", 256, 256, 16, "bf16"),
        ("gfx942", 512, 64, 128, "bf16"),
        ("gfx950", 448, 128, 128, "e4m3"),
        ("gfx1201", 512, 64, 20, "e4m3"),
    ],
)
def test_latents_fit(phase: str, capability: int | str, size_v: int, size: int, group: int, cache: str) -> None:
    latent = {"is_latent": True, "size_v": size_v, "kv_heads": 1, "group": group}

    check(phase, capability, size, cache, 64, is_tall=group > 32, **latent)


@pytest.mark.parametrize(
    ("capability", "cache", "is_records"),
    [
        (80, "e4m3 by bits", True),
        (89, "bf16", False),
        (89, "e4m3", True),
        (90, "bf16", False),
        (90, "e4m3", True),
        (120, "e5m2", False),
        ("gfx90a", "e4m3 by bits", True),
        ("gfx942", "bf16", False),
    ],
)
def test_selected_latents_fit(capability: int | str, cache: str, is_records: bool) -> None:
    latent = {"is_latent": True, "size_v": 512, "kv_heads": 1, "group": 128, "is_causal": False}

    check("decode", capability, 64, cache, 64, is_tall=True, topk=2048, is_records=is_records, **latent)


@pytest.mark.parametrize(("key", "tiles"), measured_tiles().items(), ids=str)
def test_measured_tiles_fit(key: TileKey, tiles: Tiles) -> None:
    arch = str(key.arch)
    capability = arch if arch.startswith("gfx") else int(arch.replace(".", ""))
    caches = {"bfloat16": "bf16", "fp8_e5m2": "e5m2"}
    cache = caches.get(key.dtype, "e4m3" if has_e4m3(arch) else "e4m3 by bits")
    forms = {"size_v": key.size_v, "is_records": key.dtype == "fp8_ds_mla", "group": key.request_rows or 8}
    if key.phase not in ("decode", "prefill"):
        forms |= {"is_latent": True, "kv_heads": 1}
    if key.phase == "selected":
        forms |= {"topk": 2048, "is_causal": False}
    phase = "prefill" if "prefill" in key.phase else "decode"

    check(phase, capability, key.size, cache, key.page, is_tall=tiles.rows >= 64, tiles=tiles, **forms)


@pytest.mark.parametrize(("is_records", "operands"), [(True, "bf16.bf16"), (False, "f16.f16")])
def test_records_are_multiplied_as_bfloat16(is_records: bool, operands: str) -> None:
    """They have scales, and exceed float16; codes are exact in it."""
    latent = {"is_latent": True, "size_v": 512, "kv_heads": 1, "group": 128}
    code = check("prefill", 89, 64, "e4m3", 64, is_records=is_records, **latent)

    found = {line.partition(".f32.")[2].partition(".f32")[0] for line in code.splitlines() if "mma.sync" in line}
    assert found == {operands}


@pytest.mark.parametrize("capability", [80, 90, "gfx942", "gfx1201"])
@pytest.mark.parametrize("kind", ["i8", "u8"])
def test_rows_are_written_on_every_device(capability: int | str, kind: str) -> None:
    from attnplug_triton.triton_write import _write  # noqa: PLC0415 - needs Triton

    kinds = dict.fromkeys(("key", "value"), "*bf16") | dict.fromkeys(("key_pages", "value_pages"), f"*{kind}")
    kinds |= dict.fromkeys(("k_scale", "v_scale"), "*fp32") | {"slots": "*i64"}
    sizes = {"heads": 8, "size": 80, "size_v": 512, "width": 128, "width_v": 512, "page_size": 16}
    kernel = compile_kernel(_write, kinds, sizes, capability=capability, num_warps=1)

    if isinstance(capability, int):
        assert DIVISION in str(kernel.asm["ptx"])
