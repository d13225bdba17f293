"""The option `decode_kernel`: kernels that do not exist are refused, for that layer only."""

from __future__ import annotations

import pytest

import attnplug
from attnplug import Device
from attnplug.errors import SettingsError
from attnplug_flashinfer.routes import check_decode_kernel, uses_tensor_cores
from plugins.flashinfer.tests.agreements import agreed


@pytest.mark.parametrize("kernel", ["auto", "tensor_cores"])
@pytest.mark.parametrize("num_q_heads", [8, 40, 56, 128])
def test_tensor_cores_support_every_group(kernel: str, num_q_heads: int) -> None:
    check_decode_kernel(agreed(kernel=kernel, num_q_heads=num_q_heads))
    check_decode_kernel(agreed(kernel=kernel, num_q_heads=num_q_heads, sinks=True))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_cuda_cores_support_the_compiled_groups(group: int) -> None:
    check_decode_kernel(agreed(kernel="cuda_cores", num_q_heads=8 * group))


@pytest.mark.parametrize("group", [5, 6, 7, 9, 16])
def test_other_groups_are_refused_with_a_fix(group: int) -> None:
    with pytest.raises(SettingsError) as caught:
        check_decode_kernel(agreed(kernel="cuda_cores", num_q_heads=8 * group))

    assert caught.value.problem == (
        "decode_kernel='cuda_cores' is not available for 'flashinfer/fa2': "
        f"{8 * group} query heads over 8 KV heads are groups of {group}"
    )
    assert "groups of 1, 2, 3, 4, 8 query heads" in caught.value.expected
    assert caught.value.fix == "set it to 'auto' or 'tensor_cores'"


def test_sinks_have_no_kernels_on_cuda_cores() -> None:
    with pytest.raises(SettingsError, match="with attention sinks decodes run the prefill kernels"):
        check_decode_kernel(agreed(kernel="cuda_cores", sinks=True))


def test_without_a_kv_cache_the_option_has_no_effect() -> None:
    check_decode_kernel(agreed(kernel="cuda_cores", num_q_heads=40, paged=False))


@pytest.mark.usefixtures("fakes")
def test_a_refused_layer_leaves_the_variant_available() -> None:
    required = agreed(num_q_heads=40).requirements
    options = {"flashinfer_fake": {"decode_kernel": "cuda_cores"}}
    refused = attnplug.load(required, "cpu", backend="flashinfer_fake/fa2", options=options)

    with pytest.raises(SettingsError, match="groups of 5"):
        refused.make_impl(attnplug.Layer(name="layer", scale=1.0))

    supported = attnplug.load(required, "cpu", backend="flashinfer_fake/fa2")
    assert supported.make_impl(attnplug.Layer(name="layer", scale=1.0)).num_q_heads == 40


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "on_cuda_cores"),
    [
        ("8.0", "bfloat16", {1, 2, 3, 4}),
        ("8.9", "fp8_e4m3", {1, 2, 3, 4}),
        ("9.0", "bfloat16", {1, 2}),
        ("9.0", "fp8_e4m3", {1}),
        ("10.0", "bfloat16", {1, 2, 3, 4}),
        ("12.0", "bfloat16", {1, 2, 3, 4}),
    ],
)
def test_auto_uses_measurements_on_hopper_and_the_published_threshold_elsewhere(
    device: str, kv_cache_dtype: str, on_cuda_cores: set[int]
) -> None:
    found = {
        group
        for group in range(1, 17)
        if not uses_tensor_cores(agreed("fa2", kv_cache_dtype, num_q_heads=8 * group), Device.cuda(device))
    }

    assert found == on_cuda_cores


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("device", [Device.cuda("8.0"), Device.cuda("9.0"), Device.cpu()])
def test_an_explicit_option_decides_on_every_device(group: int, device: Device) -> None:
    assert uses_tensor_cores(agreed(kernel="tensor_cores", num_q_heads=8 * group), device)
    assert not uses_tensor_cores(agreed(kernel="cuda_cores", num_q_heads=8 * group), device)
