"""What a machine lacks, found without importing anything, and what a device is taken to have."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from attnplug import Device
from attnplug_blocksparse.probe import probe

HOPPER = Device.cuda("9.0")


def fake_torch(*, cuda: str | None, available: bool) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


@pytest.mark.parametrize(
    ("torch", "told"),
    [
        (fake_torch(cuda=None, available=False), "torch 2.13.0 is built without CUDA"),
        (fake_torch(cuda="13.0", available=False), "torch 2.13.0 sees no CUDA device"),
    ],
)
def test_what_is_missing_is_told_with_a_way_out(monkeypatch, torch, told):
    monkeypatch.setitem(sys.modules, "torch", torch)
    reason = probe(HOPPER)

    assert told in str(reason)
    assert reason.because


def test_nothing_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda="13.0", available=True))
    assert probe(HOPPER) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert probe(HOPPER) is None
    assert probe(Device.cpu()) is None


@pytest.mark.parametrize(
    ("device", "kib", "by_descriptors"),
    [("9.0", 227, True), ("8.0", 163, False), ("8.9", 99, False), ("12.0", 99, False)],
)
def test_tiles_and_descriptors_follow_the_device(device, kib, by_descriptors):
    pytest.importorskip("triton")
    from attnplug.negotiation.agreement import Agreement  # noqa: PLC0415 - torch and Triton are for this test alone
    from attnplug.request.requirements import Requirements  # noqa: PLC0415
    from attnplug_blocksparse import hopper  # noqa: PLC0415
    from attnplug_blocksparse.backend import BlocksparseBackend  # noqa: PLC0415
    from attnplug_blocksparse.tiles import HopperTiles, PrefillTiles  # noqa: PLC0415

    asked = Requirements(
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
        requirements=asked,
        block_size=64,
        kv_layout="NHD",
        kv_cache_dtype="bfloat16",
        cudagraph="never",
    )
    backend = BlocksparseBackend(agreement, Device.cuda(device))

    assert backend.row_tiles == PrefillTiles.of(128, shared_memory=kib * 1024)
    assert backend.page_tiles == PrefillTiles.of(128, paged=True, shared_memory=kib * 1024)
    assert backend.has_descriptors is by_descriptors
    assert backend.hopper_tiles == (HopperTiles(132) if device == "9.0" and hopper.is_there() else None)


def test_roles_are_for_releases_of_triton_that_compile_them(monkeypatch):
    triton = pytest.importorskip("triton")
    from attnplug_blocksparse import hopper  # noqa: PLC0415 - torch and Triton are for this test alone

    for release, is_there in (("3.5.1", False), ("3.6.0", True), ("3.7.1+gitabc", True), ("3.8.0", False)):
        monkeypatch.setattr(triton, "__version__", release)
        assert hopper.is_there() is is_there
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(hopper, "INTERPRETED", True)
    assert not hopper.is_there()
