"""The probe, which imports neither torch nor Triton, and the tiles and kernels of each device."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from attnplug import Device
from attnplug_blocksparse.plugin import probe

HOPPER = Device.cuda("9.0")


def fake_torch(*, cuda: str | None, available: bool) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


def test_a_missing_device_is_reported_with_a_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda="13.0", available=False))
    reason = probe(HOPPER)

    assert "torch 2.13.0 sees no CUDA device" in str(reason)
    assert reason.because
    assert probe(Device.cpu()) is None


def test_nothing_is_reported_otherwise(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda="13.0", available=True))
    assert probe(HOPPER) is None


@pytest.mark.parametrize(
    ("device", "kib", "has_tma"),
    [("9.0", 227, True), ("8.0", 163, False), ("8.9", 99, False), ("12.0", 99, False)],
)
def test_tiles_and_kernels_of_a_device(device, kib, has_tma):
    pytest.importorskip("triton")
    from attnplug.negotiation.agreement import Agreement  # noqa: PLC0415 - needs torch and Triton
    from attnplug.request.requirements import Requirements  # noqa: PLC0415
    from attnplug_blocksparse.backend import BlocksparseBackend  # noqa: PLC0415
    from attnplug_blocksparse.prefill_single import has_specialized_kernel  # noqa: PLC0415
    from attnplug_blocksparse.tiles import HopperTiles, PrefillTiles  # noqa: PLC0415

    requirements = Requirements(
        head_size=128,
        num_q_heads=32,
        num_kv_heads=8,
        dtype="bfloat16",
        block_size=64,
        block_sparse={"max_seqlen": 8192, "block_size": 64, "local_blocks": 16, "vert_stride": 8},
    )
    agreement = Agreement(
        backend="blocksparse",
        variant="triton",
        requirements=requirements,
        block_size=64,
        kv_layout="NHD",
        kv_cache_form="joint",
        kv_cache_dtype="bfloat16",
        cudagraph="never",
    )
    backend = BlocksparseBackend(agreement, Device.cuda(device))

    assert backend.contiguous_tiles == PrefillTiles.of(128, shared_memory=kib * 1024)
    assert backend.paged_tiles == PrefillTiles.of(128, paged=True, shared_memory=kib * 1024)
    assert backend.has_tma is has_tma
    assert backend.hopper_tiles == (HopperTiles(132) if device == "9.0" and has_specialized_kernel() else None)


def test_the_warp_specialized_kernel_needs_a_known_triton(monkeypatch):
    triton = pytest.importorskip("triton")
    from attnplug_blocksparse import prefill_single  # noqa: PLC0415 - needs torch and Triton

    for release, expected in (("3.5.1", False), ("3.6.0", True), ("3.7.1+gitabc", True), ("3.8.0", False)):
        monkeypatch.setattr(triton, "__version__", release)
        assert prefill_single.has_specialized_kernel() is expected
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(prefill_single, "INTERPRETED", True)
    assert not prefill_single.has_specialized_kernel()
