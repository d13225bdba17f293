"""Int8 KV caches: their names in vLLM's configuration, and which one a layer has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from attnplug.errors import SettingsError
from attnplug_vllm import int8
from tests.backends.triton_on_cpu import run_interpreted


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
    with pytest.raises(SettingsError, match="its only key is 'kv_cache_dtype'"):
        int8.cache_dtype("auto", config_of(whole={"attnplug": section}))


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


@pytest.mark.needs_vllm
@pytest.mark.slow
def test_steps_in_pools_of_vllm():
    run_interpreted(Path(__file__).with_name("int8_steps.py"))
