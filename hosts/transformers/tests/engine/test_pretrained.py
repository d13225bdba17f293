"""An engine of a folder, with its tokenizer; what is missing is refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

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


def test_a_backend_that_does_not_run_here(host, folder):
    with pytest.raises(NoBackendError):
        Engine.from_pretrained(folder, device="cpu", backend="torch/sdpa", block_size=4, features=("acme.none",))
