"""An engine of a folder, with its tokenizer; what is missing is refused before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from attnplug.errors import NoBackendError, RequirementsError
from attnplug_transformers.engine import Engine, SamplingParams
from hosts.transformers.tests.models import model
from hosts.transformers.tests.tokenizers import SIZE, byte_level

SIZES = {"vocab_size": SIZE, "pad_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    model("llama", **SIZES).save_pretrained(found)
    byte_level().save_pretrained(found)
    return found


def test_a_folder_with_its_tokenizer(host, folder):
    with Engine(model("llama", **SIZES), tokenizer=byte_level()) as engine:
        expected = engine.generate(["stop at", [5, 6]], max_new_tokens=5, return_requests=True)

    with Engine.from_pretrained(str(folder), device="cpu", max_num_reqs=2) as engine:
        found = engine.generate(["stop at", [5, 6]], max_new_tokens=5, return_requests=True)
        assert engine.limits.max_num_reqs == 2
        assert engine.model.dtype == torch.float32
        assert not engine.model.training
        assert engine.submit([1], max_new_tokens=1, sampling=SamplingParams(stop="x")).stop == ("x",)

    assert [request.new_tokens for request in found] == [request.new_tokens for request in expected]
    assert [request.text for request in found] == [request.text for request in expected]


def test_scales_of_the_kv_caches(host, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    layers = [f"model.layers.{number}.self_attn" for number in range(4)]
    scales = {f"{layer}.k_proj.k_scale": torch.tensor(0.5) for layer in layers}  # as ModelOpt writes them
    scales |= {f"{layer}.v_scale": torch.tensor([0.25]) for layer in layers}  # as compressed-tensors does
    save_file(scales | {"model.norm.k_scale.of": torch.ones(1)}, tmp_path / "scales.safetensors")

    with Engine.from_pretrained(tmp_path, device="cpu", kv_cache_dtype="fp8") as engine:
        found = {(impl.layer.k_scale, impl.layer.v_scale) for impl in engine.implementations.values()}
        assert len(engine.generate([[1, 2]], max_new_tokens=2)[0]) == 2

    assert found == {(0.5, 0.25)}


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_a_dtype_and_a_backend(host, folder, dtype):
    with Engine.from_pretrained(folder, dtype=dtype, device=torch.device("cpu"), backend="torch") as engine:
        assert engine.model.dtype == torch.bfloat16
        assert {selection.id for selection in engine.selections.values()} == {"torch/sdpa"}


def test_a_folder_without_a_tokenizer(host, tmp_path):
    model("llama", **SIZES).save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu") as engine:
        assert engine.tokenizer is None
    with Engine.from_pretrained(tmp_path, device="cpu", tokenizer=byte_level()) as engine:
        assert engine.tokenizer is byte_level()


@pytest.mark.parametrize("where", ["no-such-folder/at-all", "an empty folder"])
def test_a_model_that_is_not_there(host, tmp_path, where):
    name = tmp_path if where == "an empty folder" else where
    with pytest.raises(RequirementsError, match="cannot be loaded") as caught:
        Engine.from_pretrained(name, local_files_only=True)

    assert "save_pretrained" in caught.value.expected


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_num_req": 4}, "'max_num_req'; did you mean 'max_num_reqs'"),
        ({"dtyp": "float32"}, "'dtyp'; did you mean 'dtype'"),
        ({"max_model_len": 64}, "pass max_seq_len=..."),
        ({"tensor_parallel_size": 2}, "the engine runs on one device"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": "float31"}, "dtype='float31'"),
        ({"dtype": 32}, "dtype=32"),
        ({"device": "gpu"}, "device='gpu'"),
    ],
)
def test_options_are_checked_first(host, option, said):
    with pytest.raises(RequirementsError) as caught:
        Engine.from_pretrained("no-such-folder/at-all", local_files_only=True, **option)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_num_req": 4}, "Engine() was given 'max_num_req'; did you mean 'max_num_reqs'"),
        ({"gpu_memory_utilization": 0.5}, "pass memory_fraction=..."),
        ({"enable_lora": True}, "the engine has no adapters"),
        ({"dtype": "float32"}, "Engine() was given 'dtype'"),
    ],
)
def test_unknown_options_of_the_engine(host, option, said):
    with pytest.raises(RequirementsError) as caught:
        Engine(model("llama"), **option)

    assert said in str(caught.value)


def test_a_tokenizer_that_cannot_be_loaded(host, tmp_path):
    model("llama", **SIZES).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequirementsError, match=r"the tokenizer of .* cannot be loaded") as caught:
        Engine.from_pretrained(tmp_path, device="cpu")

    assert "pass tokenizer=" in caught.value.fix


HUB = """
import json, sys
from attnplug_transformers.engine import Engine
with Engine.from_pretrained("acme/tiny", device="cpu", revision="main") as engine:
    (request,) = engine.generate(["stop at"], max_new_tokens=5, return_requests=True)
print(json.dumps([request.new_tokens, request.text]))
"""


@pytest.mark.slow
def test_an_id_of_the_hub_from_its_cache(host, folder, tmp_path):
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "0123456789012345678901234567890123456789"
    shutil.copytree(folder, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "ATTNPLUG_BACKEND": "torch/sdpa"}

    done = subprocess.run(
        [sys.executable, "-c", HUB], capture_output=True, text=True, check=False, env=os.environ | offline
    )

    assert done.returncode == 0, done.stderr
    with Engine(model("llama", **SIZES), tokenizer=byte_level()) as engine:
        (request,) = engine.generate(["stop at"], max_new_tokens=5, return_requests=True)
    assert json.loads(done.stdout) == [request.new_tokens, request.text]


def test_a_backend_that_does_not_run_here(host, folder):
    with pytest.raises(NoBackendError):
        Engine.from_pretrained(folder, device="cpu", backend="torch/sdpa", block_size=4, features=("acme.none",))
