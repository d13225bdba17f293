"""The kernels compile for each kind of device, to matrix instructions, and fit its shared memory."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug_triton.tiles import decode_tiles, latent_tiles, prefill_tiles, shared_memory, width_of
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel

pytestmark = [NEEDS_TRITON, pytest.mark.slow]

KINDS = {
    **dict.fromkeys(("query", "out"), "*bf16"),
    **dict.fromkeys(("lse", "slopes", "sinks", "k_scale", "v_scale", "parts", "part_lse"), "*fp32"),
    **dict.fromkeys(("query_starts", "seq_lens", "table", "spans"), "*i32"),
    "mask": "*u8",
    "mask_starts": "*i64",
    "mask_stride": "i32",
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
    "kv_heads": 8,
    "group": 4,
}
CACHES = {"bf16": ("bf16", 2), "e4m3": ("fp8e4nv", 1), "e4m3 by bits": ("u8", 1), "e5m2": ("fp8e5", 1)}


def compiled(phase: str, capability: int, size: int, cache: str, page: int, **forms: Any) -> Any:
    """Return a compiled kernel with the tiles of a device."""
    from attnplug_triton.triton_decode import _decode  # noqa: PLC0415 - needs Triton
    from attnplug_triton.triton_prefill import _prefill  # noqa: PLC0415 - needs Triton

    kind, itemsize = CACHES[cache]
    shared = shared_memory(divmod(capability, 10))
    size_v = forms.get("size_v", size)
    if forms.get("is_latent"):
        rows = forms["group"] if phase == "decode" else 64
        itemsize = None if forms.get("is_records") else itemsize
        tiles = latent_tiles(size, size_v, itemsize=itemsize, rows=rows, capability=divmod(capability, 10))
    elif phase == "decode":
        tiles = decode_tiles(size, size, itemsize=itemsize, rows=SHORT * 4, shared=shared)
    else:
        tiles = prefill_tiles(size, size, shared=shared)
    sizes = {"size": size, "size_v": size_v, "width": width_of(size), "width_v": width_of(size_v), "page_size": page}
    scales = {"is_scaled": kind != "bf16", "by_bits": kind == "u8", "is_split": True}
    values = {**FORMS, **sizes, **scales, "rows": tiles.rows, "keys": tiles.keys, "stages": tiles.stages, **forms}
    return compile_kernel(
        _decode if phase == "decode" else _prefill,
        KINDS | {"key": "*bf16" if forms.get("is_records") else f"*{kind}", "value": f"*{kind}"},
        values,
        unaligned=("table_stride", "k_scale", "v_scale"),
        capability=capability,
        num_warps=tiles.warps,
    )


def check(phase: str, capability: int, *given: Any, is_tall: bool = False, **forms: Any) -> None:
    """Compile, and check the code. Tiles of 64 rows and more, which prefills have, are tall."""
    kernel = compiled(phase, capability, *given, **forms)
    code = kernel.asm["ptx"]

    tall = {90: "wgmma.mma_async", 100: "tcgen05.mma"} if is_tall or phase == "prefill" else {}
    assert tall.get(capability, "mma.sync") in code
    assert "cp.async" in code
    assert kernel.metadata.shared <= shared_memory(divmod(capability, 10)) * 1024


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
    ],
)
def test_it_fits(phase: str, capability: int, size: int, cache: str, page: int) -> None:
    check(phase, capability, size, cache, page)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("page", [16, 0])
def test_every_feature(phase: str, page: int) -> None:
    names = ("is_windowed", "is_chunked", "is_capped", "has_sinks", "has_spans", "has_mask")

    check(phase, 89, 128, "bf16", page, alibi=2, **dict.fromkeys(names, True))


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
    ],
)
def test_latents_fit(phase: str, capability: int, size_v: int, size: int, group: int, cache: str) -> None:
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
    ],
)
def test_selected_latents_fit(capability: int, cache: str, is_records: bool) -> None:
    latent = {"is_latent": True, "size_v": 512, "kv_heads": 1, "group": 128, "is_causal": False}

    check("decode", capability, 64, cache, 64, is_tall=True, topk=2048, is_records=is_records, **latent)


def test_records_fit() -> None:
    check("prefill", 89, 64, "e4m3", 64, is_records=True, is_latent=True, size_v=512, kv_heads=1, group=128)
