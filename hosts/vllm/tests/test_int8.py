"""Int8 KV caches: their names in vLLM's configuration, and which one a layer has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnplug.errors import RequirementsError, SettingsError
from attnplug_vllm import facts, int8
from hosts.vllm.tests.engine.harness import ENVIRONMENT
from tests.backends.triton_on_cpu import run_interpreted

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "attention_backend": "ATTNPLUG",
    "block_size": 16,
}


def config_of(named=None, cache_dtype="auto", skip=(), whole=None):
    """Return what is read of vLLM's configuration."""
    section = {} if named is None else {"attnplug": {"kv_cache_dtype": named}}
    cache = SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=list(skip))
    return SimpleNamespace(additional_config=section if whole is None else whole, cache_config=cache)


@pytest.mark.parametrize("dtype", ["auto", "fp8", "int8", "int8_k", "int8_per_token_head"])
def test_without_the_section_vllm_decides(dtype):
    assert int8.cache_dtype(dtype, config_of(cache_dtype=dtype)) == dtype
    assert int8.cache_dtype(dtype, None) == dtype
    assert int8.cache_dtype(dtype, config_of(cache_dtype=dtype, whole={"other": 1})) == dtype
    assert int8.cache_dtype(dtype, config_of(cache_dtype=dtype, whole=object())) == dtype


@pytest.mark.parametrize("named", ["int8", "int8_k"])
def test_the_section_names_the_format(named):
    assert int8.cache_dtype("auto", config_of(named)) == named
    assert int8.cache_dtype(named, config_of(named, cache_dtype=named)) == named


def test_vllm_makes_room_for_level_1_under_its_own_name():
    assert int8.cache_dtype("int8_per_token_head", config_of("int8", "int8_per_token_head")) == "int8"


@pytest.mark.parametrize("given", ["int8_per_token_head", "fp8_per_token_head"])
def test_bytes_of_vllms_own_kernels_are_refused(given, monkeypatch):
    """Scales are behind each key and value in pages of vLLM, and elsewhere in KV caches of these dtypes here."""
    monkeypatch.setattr(facts, "current_config", lambda: config_of(cache_dtype=given))

    with pytest.raises(RequirementsError, match=f"{given} is a format of other kernels"):
        facts.cache_dtype(given)


@pytest.mark.parametrize("given", ["int8_per_token_head", "int8"])
def test_a_skipped_layer_stays_unquantized(given):
    assert int8.cache_dtype("auto", config_of("int8", given, skip=["0"])) == "auto"


@pytest.mark.parametrize(
    ("named", "given", "skip"),
    [
        ("int8_k", "int8_per_token_head", ()),
        ("int8", "fp8", ()),
        ("int8", "int8_k", ()),
        ("int8_k", "turboquant_k8v4", ()),
        ("int8", "auto", ("0",)),
    ],
)
def test_two_formats_at_once_are_refused(named, given, skip):
    with pytest.raises(SettingsError, match="a KV cache has one dtype") as caught:
        int8.cache_dtype(given, config_of(named, given, skip))
    assert f"--kv-cache-dtype {given}" in str(caught.value)
    assert repr(named) in str(caught.value)


@pytest.mark.parametrize("named", ["fp8", "int4", "", 8, ["int8"]])
def test_another_format_is_refused(named):
    with pytest.raises(SettingsError, match="it is one of int8, int8_k"):
        int8.cache_dtype("auto", config_of(named))


@pytest.mark.parametrize("section", [["int8"], "int8", {"kv_cache_dtyp": "int8"}, None])
def test_a_section_that_is_not_read_is_refused(section):
    with pytest.raises(SettingsError, match="a table with the keys 'kv_cache_dtype' and 'features'"):
        int8.cache_dtype("auto", config_of(whole={"attnplug": section}))


def test_the_section_requests_features():
    assert int8.features(config_of(whole={"attnplug": {"features": ["acme.a", "acme.b"]}})) == ("acme.a", "acme.b")
    assert int8.features(config_of("int8")) == int8.features(None) == ()


@pytest.mark.parametrize("named", ["acme.a", [1], None, {"acme.a": True}])
def test_features_that_are_no_names_are_refused(named):
    with pytest.raises(SettingsError, match="they are a list of names"):
        int8.features(config_of(whole={"attnplug": {"features": named}}))


@pytest.fixture
def names(monkeypatch):
    """Restore vLLM's tables afterwards."""
    from vllm.config import cache  # noqa: PLC0415 - not everywhere
    from vllm.utils import torch_utils  # noqa: PLC0415 - likewise

    monkeypatch.setattr(torch_utils, "STR_DTYPE_TO_TORCH_DTYPE", table := dict(torch_utils.STR_DTYPE_TO_TORCH_DTYPE))
    monkeypatch.setattr(cache, "STR_DTYPE_TO_TORCH_DTYPE", table, raising=False)
    for name in ("KV_CACHE_DTYPES", "_KV_CACHE_DTYPE_HANDLERS"):
        if hasattr(cache, name):
            monkeypatch.setattr(cache, name, getattr(cache, name).copy())
    return cache


@pytest.mark.needs_vllm(">=0.33")
def test_vllm_takes_the_names_for_its_own_option(names):
    import torch  # noqa: PLC0415 - beside vLLM
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype  # noqa: PLC0415 - not everywhere
    from vllm.v1.kv_cache_interface import get_kv_quant_mode, is_quantized_kv_cache  # noqa: PLC0415 - likewise

    int8.register_dtypes()
    int8.register_dtypes()  # as a second engine of the process does
    for name in int8.DTYPES:
        assert names.CacheConfig(cache_dtype=name).cache_dtype == name
        assert names.KV_CACHE_DTYPES.count(name) == 1
        assert is_quantized_kv_cache(name)
        assert not get_kv_quant_mode(name).is_per_token_head
        assert kv_cache_dtype_str_to_dtype(name, None) == torch.int8


@pytest.mark.needs_vllm(">=0.33")
def test_the_name_of_another_plugin_stays(names):
    class Foreign:
        name = "int8"

        def torch_dtype(self):
            return "theirs"

        def quant_mode(self):
            return "theirs"

    names.register_kv_cache_dtype("int8")(Foreign)
    int8.register_dtypes()
    assert isinstance(names.get_kv_cache_dtype_handler("int8"), Foreign)
    assert names.is_known_kv_cache_dtype("int8_k")


@pytest.mark.needs_vllm("<0.33")
def test_earlier_versions_take_no_foreign_name(names):
    int8.register_dtypes()
    assert not int8.takes_dtypes()
    with pytest.raises(ValueError, match="cache_dtype"):
        names.CacheConfig(cache_dtype="int8")


@pytest.mark.feature("int8 KV cache, level 1", "int8 KV cache, level 2")
@pytest.mark.needs_vllm
@pytest.mark.slow
def test_steps_in_pools_of_vllm():
    run_interpreted(Path(__file__).with_name("int8_steps.py"))


def run_engine(folder, prompts, *, save=None, environment=None, interpreted=True, max_tokens=6, **engine):
    """Run prompts through an engine in a process, with Triton kernels interpreted or none; return what it printed."""
    given = {"engine": {"model": str(folder)} | ENGINE | engine, "prompts": prompts, "save": save}
    given |= {"interpreted": interpreted, "max_tokens": max_tokens}
    done = subprocess.run(
        [sys.executable, str(HERE / "int8_engine.py"), json.dumps(given)],
        env=os.environ
        | ENVIRONMENT
        | ({"TRITON_INTERPRET": "1"} if interpreted else {})
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # vLLM may print about its workers behind the result.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def write_model(folder):
    """Write a small model with two KV heads; return prompts."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.2, max_position_embeddings=128)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return [torch.randint(3, 128, (length,)).tolist() for length in (40, 3, 17)]


@pytest.mark.needs_engine
@pytest.mark.slow
@pytest.mark.long
def test_ranks_calibrate_one_file(tmp_path):
    from safetensors.torch import load_file  # noqa: PLC0415 - beside vLLM

    prompts, options = write_model(tmp_path / "model"), {"attnplug": {"features": ["int8_ixformer.calibrate"]}}
    found = []
    for ranks in (1, 2):
        scales = tmp_path / f"scales-{ranks}.safetensors"
        run_engine(
            tmp_path / "model", prompts, save=str(scales), interpreted=False, max_tokens=1,
            tensor_parallel_size=ranks, additional_config=options,
        )  # fmt: skip
        found.append(load_file(scales))
    alone, joined = found
    assert alone.keys() == joined.keys()
    # Ranks add in another order: a value differs by some roundings of bfloat16.
    assert all(scales.shape == (2, 32) and scales.allclose(joined[name], rtol=0.03) for name, scales in alone.items())
    assert not any(scales[0].allclose(scales[1], rtol=0.3) for scales in alone.values())


@pytest.mark.feature("int8 KV cache, level 1", "int8 KV cache, level 2")
@pytest.mark.needs_engine
@pytest.mark.slow
@pytest.mark.long
def test_an_engine_calibrates_and_runs_on_both_levels(tmp_path):
    prompts = write_model(tmp_path / "model")
    scales = str(tmp_path / "scales.safetensors")

    plain = run_engine(
        tmp_path / "model", prompts, save=scales,
        additional_config={"attnplug": {"features": ["int8_ixformer.calibrate"]}},
    )  # fmt: skip

    assert set(plain["backends"].values()) == {"int8_ixformer/calibration"}
    for level, content in (("int8", 2 * 32 + 4), ("int8_k", 3 * 32 + 4)):
        named = (
            {"kv_cache_dtype": level}
            if int8.takes_dtypes()
            else {"additional_config": {"attnplug": {"kv_cache_dtype": level}}}
        )
        environment = {"ATTNPLUG_OPT_INT8_IXFORMER__VALUE_SCALES": scales}
        found = run_engine(tmp_path / "model", prompts, environment=environment, **named)
        assert set(found["backends"].values()) == {"int8_ixformer/triton"}
        assert found["dtypes"] == ["torch.int8"]
        assert found["bytes_per_block"] == [content * 2 * 16]
        # The same memory holds more tokens: 16-bit keys and values take 4 * 32 bytes of a head.
        assert found["num_blocks"] > plain["num_blocks"] * 4 * 32 / content * 0.95
        differences = [
            abs(logprob - at[token])
            for ours, theirs in zip(found["logprobs"], plain["logprobs"], strict=True)
            for token, logprob in ours[0].items()  # the first token: later ones may follow another text
            if token in (at := theirs[0])
        ]
        assert differences
        assert 0 < max(differences) < 0.5
