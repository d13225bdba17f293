"""The option `decode_kernel`: kernels that there are none of are refused by name, and nobody else pays for it."""

from __future__ import annotations

import pytest

import attnplug
from attnplug import Device
from attnplug.errors import SettingsError
from attnplug_flashinfer.routes import check_decode_kernel, uses_tensor_cores
from plugins.flashinfer.tests.agreements import agreed


@pytest.mark.parametrize("kernel", ["auto", "tensor_cores"])
@pytest.mark.parametrize("num_q_heads", [8, 40, 56, 128])
def test_tensor_cores_take_every_group(kernel: str, num_q_heads: int) -> None:
    check_decode_kernel(agreed(kernel=kernel, num_q_heads=num_q_heads))
    check_decode_kernel(agreed(kernel=kernel, num_q_heads=num_q_heads, sinks=True))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_cuda_cores_take_the_groups_that_they_are_compiled_for(group: int) -> None:
    check_decode_kernel(agreed(kernel="cuda_cores", num_q_heads=8 * group))


@pytest.mark.parametrize("group", [5, 6, 7, 9, 16])
def test_another_group_is_refused_with_the_way_out(group: int) -> None:
    with pytest.raises(SettingsError) as caught:
        check_decode_kernel(agreed(kernel="cuda_cores", num_q_heads=8 * group))

    assert caught.value.problem == "decode_kernel='cuda_cores' was given to 'flashinfer/fa2'"
    assert f"{8 * group} query heads over 8 KV heads are groups of {group}" in caught.value.expected
    assert caught.value.fix == "set it to 'auto' or 'tensor_cores'"


def test_with_sinks_there_are_none_either() -> None:
    with pytest.raises(SettingsError, match="with sinks decodes run the kernels of prefills"):
        check_decode_kernel(agreed(kernel="cuda_cores", sinks=True))


def test_without_a_cache_the_option_is_about_nothing() -> None:
    check_decode_kernel(agreed(kernel="cuda_cores", num_q_heads=40, paged=False))


@pytest.mark.usefixtures("fakes")
def test_the_refusal_comes_with_the_layer_and_costs_the_variant_nothing() -> None:
    required, options = (
        agreed(kernel="auto", num_q_heads=40).requirements,
        {"flashinfer_fake": {"decode_kernel": "cuda_cores"}},
    )
    refusing = attnplug.load(required, "cpu", backend="flashinfer_fake/fa2", options=options)

    with pytest.raises(SettingsError, match="groups of 5"):
        refusing.make_impl(attnplug.Layer(name="layer", scale=1.0))

    serving = attnplug.load(required, "cpu", backend="flashinfer_fake/fa2")
    assert serving.make_impl(attnplug.Layer(name="layer", scale=1.0)).num_q_heads == 40


@pytest.mark.parametrize(
    ("device", "cache", "on_cuda_cores"),
    [
        ("8.0", "bfloat16", {1, 2, 3, 4}),
        ("8.9", "fp8_e4m3", {1, 2, 3, 4}),
        ("9.0", "bfloat16", {1, 2}),
        ("9.0", "fp8_e4m3", {1}),
        ("10.0", "bfloat16", {1, 2, 3, 4}),
        ("12.0", "bfloat16", {1, 2, 3, 4}),
    ],
)
def test_by_itself_it_is_what_was_measured_there_and_elsewhere_the_published_threshold(
    device: str, cache: str, on_cuda_cores: set[int]
) -> None:
    found = {
        group
        for group in range(1, 17)
        if not uses_tensor_cores(agreed("fa2", cache, kernel="auto", num_q_heads=8 * group), Device.cuda(device))
    }

    assert found == on_cuda_cores


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("device", [Device.cuda("8.0"), Device.cuda("9.0"), Device.cpu()])
def test_what_is_said_counts_on_every_device(group: int, device: Device) -> None:
    assert uses_tensor_cores(agreed(kernel="tensor_cores", num_q_heads=8 * group), device)
    assert not uses_tensor_cores(agreed(kernel="cuda_cores", num_q_heads=8 * group), device)
