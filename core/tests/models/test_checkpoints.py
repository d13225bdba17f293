"""What a checkpoint says beside its architecture: the dtype of its weights, and its quantization."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

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
    assert "float32 is assumed, for the configuration names none" in note(found, "dtype")
    assert note(found, "dtype").endswith("on the command line --dtype bfloat16")
    assert dtypes(describe_model(LLAMA | {"dtype": "auto"})) == {"float32"}
    assert describe_model(without(LLAMA, "dtype"), dtype="float16").notes == ()


def test_beside_quantized_weights_a_dtype_is_a_half() -> None:
    found = describe_model(without(LLAMA, "dtype") | {"quantization_config": {"quant_method": "mxfp4"}})

    assert dtypes(found) == {"bfloat16"}
    assert "some are quantized" in note(found, "dtype")


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
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 3, "type": "int"}}, "checkpoint.int3"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "quark", "kv_cache_quant_config": {"*k_proj": {}}}, "fp8_e4m3"),
    ],
)
def test_quantization_decides_about_the_kv_cache_alone(quantization, expected: str) -> None:
    found = describe_model(LLAMA | {"quantization_config": quantization})

    assert {layer.requirements.kv_cache_dtype for layer in found.layers} == {expected}
    assert dtypes(found) == {"bfloat16"}
    assert quantization["quant_method"] in note(found, "attention requests")
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
