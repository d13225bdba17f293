"""
Int8 KV caches in pools of vLLM: steps with hand-made metadata, the kernels in Triton's interpreter, beside the oracle.

`test_int8.py` runs this file in a process of its own, since Triton reads at its import whether it interprets.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

import attnplug
from attnplug.contract import Batch, Layer, Limits
from attnplug.errors import CacheError, LayerError
from attnplug_int8_ixformer.value_scales import ValueScales
from attnplug_vllm import facts, int8
from hosts.vllm.tests.rig import Rig
from plugins.int8_ixformer.tests.conftest import PLUGIN
from tests.backends.triton_on_cpu import MARKS, speed_up_interpreter

pytestmark = MARKS
HAS_LAYOUTS = not hasattr(AttentionBackend, "get_kv_cache_shape")
SIZE, HEADS, KV_HEADS, TOKENS = 32, 4, 2, 16
LEVELS = {"int8": 2 * SIZE + 4, "int8_k": 3 * SIZE + 4}
"""KV cache dtype -> the bytes of a token and KV head: keys, values, and the scale of a key."""


@pytest.fixture(autouse=True)
def interpreted(own_process, monkeypatch):
    """Register the plugin for the CPU, and draw rows in bfloat16."""
    monkeypatch.setenv("ATTNPLUG_BLOCK", "")  # what `configure` sets is undone
    PLUGIN.configure()
    speed_up_interpreter()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def scales(tmp_path, monkeypatch):
    """Calibrate two layers at level 0, and name the file as everywhere."""
    requirements = attnplug.Requirements(
        head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16", block_size=TOKENS,
        features=("int8_ixformer.calibrate",),
    )  # fmt: skip
    backend = attnplug.load(requirements, attnplug.Device.cpu())
    impls = [backend.make_impl(Layer(name=f"layers.{index}")) for index in range(2)]
    builder = backend.make_builder(impls, backend.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=64)))
    table, slots = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.arange(TOKENS, TOKENS + 64)
    step = builder.build(Batch.from_lengths([64], [64], block_table=table, slot_mapping=slots))
    for impl in impls:
        rows = [4 * torch.ones(64, heads, SIZE) for heads in (HEADS, KV_HEADS)]
        values = largest(int(impl.layer.name[-1])).expand(64, KV_HEADS, SIZE).to(torch.bfloat16)
        impl.forward(*rows, values, backend.make_cache(5, impl=impl), step, torch.empty(64, HEADS * SIZE))
    ValueScales.observed(impls).save(tmp_path / "scales.safetensors")
    monkeypatch.setenv("ATTNPLUG_OPT_INT8_IXFORMER__VALUE_SCALES", str(tmp_path / "scales.safetensors"))
    PLUGIN.configure()  # settings are read once


def largest(index):
    """Return the largest values of a layer, ``(num_kv_heads, head_size)``: others for each layer and head."""
    return (4.0 + torch.arange(KV_HEADS, dtype=torch.float32).view(-1, 1) + index).expand(KV_HEADS, SIZE)


def rig_of(dtype, *, option=None, layers=({}, {}), **further):
    """
    Return a rig whose pools are as vLLM makes them.

    Args:
        dtype: The KV cache dtype.
        option: What ``--kv-cache-dtype`` is; by default the best that this version takes.
        layers: What vLLM gives to each beyond its sizes.
        further: Of the rig.
    """
    best = dtype if int8.takes_dtypes() else int8.WIDER if not HAS_LAYOUTS and dtype == "int8" else "auto"
    option = option or best
    section = {} if option == dtype else {"attnplug": {"kv_cache_dtype": dtype}}
    described = {"dtype": torch.bfloat16 if option == "auto" else torch.int8}
    if option == int8.WIDER:
        described["kv_quant_mode"] = KVQuantMode.INT8_PER_TOKEN_HEAD
    return Rig(
        list(layers), head_size=SIZE, block_size=TOKENS, choice=(), kv_cache_dtype=option, described=described,
        dtype=torch.bfloat16, cache_dtype=option, additional_config=section,
        **{"num_heads": HEADS, "num_kv_heads": KV_HEADS} | further,
    )  # fmt: skip


def walk(rig):
    """Run a prefill, decodes beside a chunk, and a prompt of one token behind a prefill; return the largest error."""
    rig.add(4)
    steps = ([(0, 20), (1, 5)], [(0, 1), (1, 1), (2, 17)], [(0, 1), (1, 4), (3, 1)])
    return max(rig.run(step) for step in steps)


@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("dtype", LEVELS)
def test_steps_beside_the_oracle(dtype):
    rig = rig_of(dtype)

    # Values are drawn from a normal distribution: an output of wrong keys, or of unscaled ones, is off by 1 and more.
    assert walk(rig) < 0.12
    assert {layer.impl.selection.id for layer in rig.layers.values()} == {"int8_ixformer/triton"}
    assert {layer.impl.selection.requirements.kv_cache_dtype for layer in rig.layers.values()} == {dtype}


@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("dtype", LEVELS)
def test_all_of_a_block_is_in_vllms_pool(dtype):
    rig = rig_of(dtype)
    walk(rig)
    for layer in rig.layers.values():
        cache, pool = layer.impl._cache, layer.kv_cache
        first, last = pool.data_ptr(), pool.untyped_storage().data_ptr() + pool.untyped_storage().nbytes()
        assert {"k", "v", "k_scale"} <= set(cache.tensors)
        assert all(first <= cache[role].data_ptr() < last for role in ("k", "v", "k_scale"))
        used = {number for request in rig.requests for number in request.blocks}
        assert all(cache["k_scale"][number].isfinite().any() for number in used)


@pytest.mark.skipif(not HAS_LAYOUTS, reason="vLLM sizes pages itself before 0.32")
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("option", ["auto", None])
@pytest.mark.parametrize("dtype", LEVELS)
def test_a_page_has_no_unused_byte(dtype, option):
    rig = rig_of(dtype, option=option)
    assert rig.spec.page_size_bytes == LEVELS[dtype] * KV_HEADS * TOKENS


@pytest.mark.skipif(not HAS_LAYOUTS, reason="orders of memory have names from 0.32 on")
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_other_orders_of_blocks(order):
    assert walk(rig_of("int8", order=order, layers=[{}])) < 0.12


@pytest.mark.skipif(not HAS_LAYOUTS, reason="orders of memory have names from 0.32 on")
@pytest.mark.usefixtures("scales")
def test_an_order_that_tears_blocks_is_refused_at_start():
    with pytest.raises(CacheError, match="vLLM lays its KV cache out as LHBNC"):
        rig_of("int8", order="LHBNC")


@pytest.mark.skipif(HAS_LAYOUTS, reason="pages are as large as needed from 0.32 on")
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize(
    ("dtype", "option", "content"), [("int8", int8.WIDER, 2 * SIZE + 8), ("int8_k", "auto", 4 * SIZE)]
)
def test_pages_that_vllm_sizes(dtype, option, content):
    rig = rig_of(dtype, option=option)
    assert rig.spec.page_size_bytes == content * KV_HEADS * TOKENS
    assert walk(rig) < 0.12


@pytest.mark.skipif(HAS_LAYOUTS, reason="pages are as large as needed from 0.32 on")
@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize(
    ("dtype", "option", "count"), [("int8", "auto", 1), ("int8", int8.WIDER, 0), ("int8_k", "auto", 0)]
)
def test_pages_with_unused_room_are_warned_of_once(dtype, option, count, monkeypatch):
    said = []
    monkeypatch.setattr(int8._log, "warning", lambda text, *values: said.append(text % values))
    int8.warn_of_unused_room.cache_clear()  # other tests have such pages
    assert walk(rig_of(dtype, option=option)) < 0.12
    assert len(said) == count
    needed, allocated = LEVELS["int8"], 4 * SIZE
    assert all(f"{needed} of the {allocated} bytes" in text for text in said)
    assert all(text.endswith("--kv-cache-dtype int8_per_token_head") for text in said)


@pytest.mark.usefixtures("scales")
def test_a_layer_reads_the_cache_that_it_shares():
    rig = rig_of("int8", layers=[{}, {"kv_sharing_target_layer_name": "layers.0"}])
    assert walk(rig) < 0.12
    first, second = (layer.impl._cache for layer in rig.layers.values())
    assert first["v_scale"].data_ptr() == second["v_scale"].data_ptr()


@pytest.mark.usefixtures("scales")
def test_scales_stay_where_graphs_read_them():
    rig = rig_of("int8", layers=[{}])
    walk(rig)
    (layer,) = rig.layers.values()
    before = layer.impl._cache["v_scale"]
    layer.impl.process_weights_after_loading(torch.bfloat16)
    rig.add(1)
    assert rig.run([(4, 3)]) < 0.12
    assert layer.impl._cache["v_scale"] is before


@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (1, 4)], ids=["a head each", "two ranks a head"])
def test_ranks_read_their_heads_of_one_file(heads, ranks, monkeypatch):
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)  # noqa: B023 - called here
        rig = rig_of("int8", num_heads=2, num_kv_heads=heads, tp_size=ranks)
        assert walk(rig) < 0.12
        for index, layer in enumerate(rig.layers.values()):
            head = rank * KV_HEADS // ranks
            assert torch.equal(layer.impl._cache["v_scale"], largest(index)[head : head + 1] / 127)


@pytest.mark.usefixtures("scales")
def test_a_file_of_other_ranks_is_refused_at_start(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    with pytest.raises(LayerError, match=rf"(?s)\({KV_HEADS}, {SIZE}\).*\(4, {SIZE}\) float32, of 2 ranks together"):
        rig_of("int8", num_kv_heads=2, tp_size=2)


@pytest.mark.skipif(not int8.takes_dtypes(), reason="layers have a KV cache dtype of this kind from 0.33 on")
@pytest.mark.usefixtures("scales")
def test_layers_of_two_page_sizes_are_refused_at_start():
    rig = rig_of("int8", layers=[{}])
    with patch.object(facts, "current_config", lambda: rig.config):
        rig.layers["layers.1"] = skipped = rig.make_layer({"kv_cache_dtype": "auto"}, {})
    assert skipped.impl.requirements.kv_cache_dtype == "bfloat16"
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.bfloat16)
    with pytest.raises(CacheError, match="leave --kv-cache-dtype-skip-layers out"):
        rig.members.customize_spec(plain)


def test_level_1_without_a_calibration_is_refused_at_start():
    with pytest.raises(LayerError, match="level 1 quantizes values with the scales of a calibration"):
        rig_of("int8", layers=[{}])


def test_a_backend_without_the_format_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("ATTNPLUG_BACKEND", "torch")
    PLUGIN.configure()
    with pytest.raises(attnplug.NoBackendError, match="does not support kv_cache_dtype=int8"):
        rig_of("int8")
