"""What a checkpoint says beside its architecture: the dtype of its weights, and its quantization."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from attnplug.errors import RequirementsError
from attnplug.models import describe_model
from core.tests.models.test_description import LLAMA, dtypes, note, without

if TYPE_CHECKING:
    from pathlib import Path


def weights(folder: Path, tensors: dict[str, str], name: str = "model.safetensors") -> None:
    header = {key: {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]} for key, dtype in tensors.items()}
    text = json.dumps({"__metadata__": {"dtype": "F64"}, **header}).encode()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + b"\0")


def written(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# The dtype


def test_without_a_dtype_it_is_float32_and_said() -> None:
    found = describe_model(without(LLAMA, "dtype"))

    assert dtypes(found) == {"float32"}
    assert "float32 is assumed, since the configuration has no dtype" in note(found, "dtype")
    assert note(found, "dtype").endswith("on the command line --dtype bfloat16")
    assert dtypes(describe_model(LLAMA | {"dtype": "auto"})) == {"float32"}
    assert describe_model(without(LLAMA, "dtype"), dtype="float16").notes == ()


def test_beside_quantized_weights_a_dtype_is_a_half() -> None:
    found = describe_model(without(LLAMA, "dtype") | {"quantization_config": {"quant_method": "mxfp4"}})

    assert dtypes(found) == {"bfloat16"}
    assert "some of which are quantized" in note(found, "dtype")


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_the_dtype_of_weights_beside_the_file(tmp_path: Path, name: str) -> None:
    weights(tmp_path, {"scales": "U8", "embed": "BF16", "head": "F32"}, name)

    found = describe_model(written(tmp_path, without(LLAMA, "dtype")))

    assert dtypes(found) == {"bfloat16"}
    assert name in note(found, "dtype")
    assert dtypes(describe_model(written(tmp_path, LLAMA | {"dtype": "float16"}))) == {"float16"}


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b"[1, 2, 3]", b"\x04\0\0\0\0\0\0\0nope"]
)
def test_weights_that_do_not_read_are_not_asked(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    assert dtypes(describe_model(written(tmp_path, without(LLAMA, "dtype")))) == {"float32"}


# Quantized checkpoints


def quark(outputs: dict) -> dict:
    """Return the fields of files from before `kv_cache_quant_config`, such as amd/Llama-3.1-8B-Instruct-FP8-KV."""
    group = ["*k_proj", "*v_proj"]
    layers = {name: {"output_tensors": outputs, "weight": {"dtype": "fp8_e4m3"}} for name in group}
    return {"export": {"kv_cache_group": group}, "layer_quant_config": layers}


def tensors(**arguments) -> dict:
    """Return the file of compressed-tensors, as llm-compressor writes it."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {"quant_method": "compressed-tensors", "kv_cache_scheme": {**scheme, "group_size": None, **arguments}}


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, "bfloat16"),
        ({"quant_method": "awq"}, "bfloat16"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "bfloat16"),
        ({"quant_method": "mxfp4"}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, "fp8_e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": None}, "bfloat16"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "int8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NO_QUANT"}}, "bfloat16"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "quark", "kv_cache_quant_config": {"*k_proj": {}}}, "fp8_e4m3"),
        ({"quant_method": "quark", **quark({"dtype": "fp8_e5m2", "qscheme": "per_tensor"})}, "fp8_e5m2"),
        ({"quant_method": "quark", "export": {"kv_cache_group": []}, "layer_quant_config": {}}, "bfloat16"),
    ],
)
def test_quantization_decides_about_the_kv_cache_alone(quantization, expected: str) -> None:
    found = describe_model(LLAMA | {"quantization_config": quantization})

    assert {layer.requirements.kv_cache_dtype for layer in found.layers} == {expected}
    assert dtypes(found) == {"bfloat16"}
    assert quantization["quant_method"] in note(found, "about attention")
    assert any(f"kv_cache_dtype={expected}" in text for text in found.notes) == (expected != "bfloat16")


def test_the_callers_kv_cache_dtype_comes_first() -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}

    own = describe_model(config, kv_cache_dtype="auto")
    dense = describe_model(config, paged=False)

    assert {layer.requirements.kv_cache_dtype for layer in (*own.layers, *dense.layers)} == {"bfloat16"}
    assert "in place of fp8_e4m3, which the checkpoint names" in note(own, "kv_cache_dtype")
    assert "K/V are contiguous here" in note(dense, "kv_cache_dtype")


def test_modelopts_file_beside_the_configuration(tmp_path: Path) -> None:
    sidecar = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar))

    found = describe_model(written(tmp_path, LLAMA))

    assert {layer.requirements.kv_cache_dtype for layer in found.layers} == {"fp8_e4m3"}
    (tmp_path / "hf_quant_config.json").write_text("[")
    assert describe_model(tmp_path).notes == ()


def test_a_scale_per_kv_head_is_a_requirement() -> None:
    config = LLAMA | {"quantization_config": tensors(strategy="attn_head")}

    def scales(**engine) -> set[tuple[str, bool]]:
        layers = describe_model(config, **engine).layers
        return {(layer.requirements.kv_cache_dtype, layer.requirements.per_head_scales) for layer in layers}

    assert scales() == scales(kv_cache_dtype="fp8") == {("fp8_e4m3", True)}
    assert scales(kv_cache_dtype="auto") == scales(paged=False) == {("bfloat16", False)}
    assert scales(kv_cache_dtype="fp8", per_head_scales=False) == {("fp8_e4m3", False)}
    assert "with scales per KV head" in note(describe_model(config), "kv_cache_dtype")
    per_tensor = describe_model(LLAMA | {"quantization_config": tensors()})
    assert not per_tensor.layers[0].requirements.per_head_scales
    assert "with a scale per tensor" in note(per_tensor, "kv_cache_dtype")


def test_scales_per_kv_head_are_those_of_layers_with_a_kv_cache() -> None:
    whisper = {"model_type": "whisper", "dtype": "bfloat16", "quantization_config": tensors(strategy="attn_head")}

    layers = {layer.requirements.attn_type: layer.requirements for layer in describe_model(whisper).layers}

    assert {kind: one.per_head_scales for kind, one in layers.items()} == {
        "encoder": False,
        "decoder": True,
        "encoder_decoder": True,
    }


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        (tensors(num_bits=3, type="int"), "num_bits=3, type='int'"),
        (tensors(strategy="channel"), "strategy='channel'"),
        (tensors(strategy="token", dynamic=True), "strategy='token', dynamic=True"),
        (tensors(dynamic=True), "dynamic=True"),
        (tensors(type="int", symmetric=False), "symmetric=False"),
        ({"quant_method": "fp8", "kv_cache_scheme": "dynamic"}, "kv_cache_scheme='dynamic'"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4_AFFINE"}, "kv_cache_quant_algo='NVFP4_AFFINE'"),
        ({"quant_method": "quark", **quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"})}, "qscheme='per_channel'"),
        ({"quant_method": "quark", **quark({"dtype": "uint4"})}, "dtype='uint4'"),
        ({"quant_method": "quark", **quark({"is_dynamic": True})}, "dynamic"),
    ],
)
def test_another_kv_cache_is_refused_with_a_command_that_works(quantization: dict, form: str) -> None:
    config = LLAMA | {"quantization_config": quantization}

    with pytest.raises(RequirementsError) as caught:
        describe_model(config)

    assert form in str(caught.value)
    assert caught.value.fix.endswith("--kv-cache-dtype auto")
    found = describe_model(config, kv_cache_dtype="auto")
    assert {layer.requirements.kv_cache_dtype for layer in found.layers} == {"bfloat16"}
    assert form in note(found, "in place of")
