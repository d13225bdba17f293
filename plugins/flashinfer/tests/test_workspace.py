"""The size of the float workspace: that of the options, or more if the kernels need more."""

from __future__ import annotations

import pytest

from attnplug import Agreement, Device, Requirements
from attnplug.contract import Limits
from attnplug_flashinfer.workspace import workspace_bytes

MIB = 1 << 20
H200 = Device("cuda", compute_capability="9.0", num_multiprocessors=132)
UNKNOWN = Device.cuda("9.0")


def agreed(
    num_q_heads: int, num_kv_heads: int, cudagraph: str = "never", mib: int = 256, **required: object
) -> Agreement:
    heads = {"head_size": 128, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "dtype": "bfloat16"}
    options = {"decode_kernel": "auto", "workspace_mib": mib}
    terms = (16, "NHD", "interleaved", "bfloat16", cudagraph, options)
    return Agreement("flashinfer", "fa2", Requirements(**{**heads, **required}), *terms)


def limits(num_reqs: int = 256, **others: object) -> Limits:
    return Limits(max_num_reqs=num_reqs, max_num_tokens=8192, max_seq_len=4096, **others)


@pytest.mark.parametrize("mib", [128, 256, 512])
def test_common_models_have_the_size_of_the_options(mib: int) -> None:
    assert workspace_bytes(agreed(32, 8, "uniform_batch", mib=mib), H200, limits()) == mib * MIB


def test_a_large_group_needs_more_for_its_splits() -> None:
    needed = workspace_bytes(agreed(128, 4, mib=128), H200, limits())

    assert needed > 128 * (264 // 4) * 128 * 128 * 4 > 256 * MIB


def test_an_unknown_device_counts_as_a_large_one() -> None:
    assert workspace_bytes(agreed(128, 4), UNKNOWN, limits()) > workspace_bytes(agreed(128, 4), H200, limits())


def test_graphs_of_large_batches_have_a_tile_per_request() -> None:
    eager, captured = (
        workspace_bytes(agreed(64, 8, level), H200, limits(1024)) for level in ("never", "uniform_batch")
    )

    assert captured > 64 * 1023 * 16 * 128 * 4 > eager


def test_graphs_of_several_rows_per_request_have_large_tiles() -> None:
    agreement = agreed(32, 8, "uniform_batch", decode_query_len=4)

    assert workspace_bytes(agreement, H200, limits(512)) > 32 * 511 * 128 * 128 * 4


def test_capture_sizes_limit_the_tiles() -> None:
    agreement = agreed(64, 8, "uniform_batch")

    assert workspace_bytes(agreement, H200, limits(1024, capture_sizes=(8, 32))) == 256 * MIB


def test_fewer_rows_per_request_allow_more_requests() -> None:
    agreement = agreed(32, 8, "uniform_batch", decode_query_len=8)
    limited = limits(1024, capture_sizes=(2048,))

    assert workspace_bytes(agreement, H200, limited) > 32 * 1023 * 128 * 128 * 4  # 1024 requests of two rows


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_need_two_tiles_per_multiprocessor(heads: int) -> None:
    sizes = {"latent": True, "head_size": 576, "head_size_v": 512, "dtype": "bfloat16"}
    agreement = agreed(heads, 1, "uniform_batch", mib=1, **sizes)

    assert workspace_bytes(agreement, H200, limits()) == 2 * 132 * 64 * (2 * 512 + 4) + 64


def test_dense_calls_are_not_captured() -> None:
    agreement = agreed(64, 8, "uniform_batch", paged=False)

    assert workspace_bytes(agreement, H200, limits(1024)) == 256 * MIB


def test_head_size_256_halves_the_height_of_tiles() -> None:
    sizes = [workspace_bytes(agreed(128, 4, head_size=size), H200, limits()) for size in (128, 256)]

    assert abs(sizes[0] - sizes[1]) < sizes[0] // 100
    assert (
        workspace_bytes(agreed(16, 8, "uniform_batch", head_size=256, decode_query_len=20), H200, limits()) > 256 * MIB
    )
