"""Accuracy of int8 attention: on activations with outlier channels, and in models, from calibration to generation."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from attnplug.errors import LayerError
from attnplug_int8_ixformer.value_scales import ValueScales
from attnplug_transformers.engine import Engine
from attnplug_transformers.engine.layers import Groups
from plugins.int8_ixformer.tests.outliers import BUDGET, CONTEXTS, SIZES, table, text
from tests.backends.accuracy import Accuracy, LogitRecorder, Reference
from tests.backends.models import build, prompts
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, speed_up_interpreter

pytestmark = [*MARKS, pytest.mark.usefixtures("registered")]
speed_up_interpreter()

LENGTHS = (40, 1, 57) if INTERPRETED else (900, 1, 700, 333)
SEEN = (90,) * 12 if INTERPRETED else (900,) * 12  # few tokens suffice: larger values are clipped
LIMITS = {"max_num_reqs": 3, "max_seq_len": 100} if INTERPRETED else {"max_num_reqs": 3, "max_seq_len": 1000}
CHUNK = 32 if INTERPRETED else 600  # level 1 prefills of more than 512 tokens use TMA descriptors
NEW = 4 if INTERPRETED else 8
LEVELS = [(1, True), (2, False)] if INTERPRETED else [(1, True), (1, False), (2, True), (2, False)]
CACHES = {1: "int8", 2: "int8_k"}


@cache
def model():
    """
    Return a Llama with outlier channels in keys and values.

    Query weights and the output projection compensate for them: without quantization they change nothing.
    """
    made = build("llama", device=DEVICE, small=INTERPRETED)
    size, heads, kv_heads = (
        getattr(made.config, name) for name in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    with torch.no_grad():
        for layer in made.model.layers:
            attention = layer.self_attn
            for channel in (3, 3 + size // 2):  # a pair of the rotary embedding
                attention.k_proj.weight.view(kv_heads, size, -1)[:, channel] *= 8
                attention.q_proj.weight.view(heads, size, -1)[:, channel] /= 8
            for channel in (5, 11, 23):
                attention.v_proj.weight.view(kv_heads, size, -1)[:, channel] *= 8
                attention.o_proj.weight.view(-1, heads, size)[:, :, channel] /= 8
    return made


def wide():
    """Return a Llama of one layer, with heads of 128."""
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    heads = {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 64, "max_position_embeddings": 8192}
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()


@pytest.fixture(scope="module", autouse=True)
def _free_model():
    yield
    model.cache_clear()


@pytest.fixture
def calibrated(tmp_path, registered):
    """The file of a calibration."""
    with Engine(model(), features=("int8_ixformer.calibrate",), backend="int8_ixformer", **LIMITS) as engine:
        engine.generate(prompts(SEEN, seed=2), max_new_tokens=NEW, stop_tokens=())
        ValueScales.observed(engine.implementations.values()).save(tmp_path / "scales.safetensors")
    return tmp_path / "scales.safetensors"


def quantized(level, path, **how):
    """Return an engine on the Triton kernels of a level."""
    options = {"int8_ixformer": {"value_scales": str(path)}} if level == 1 else None
    return Engine(
        model(), kv_cache_dtype=CACHES[level], backend="int8_ixformer/triton", options=options, max_num_tokens=CHUNK,
        **LIMITS, **how,
    )  # fmt: skip


def relative_errors(recorder, requested, tokens):
    """Return the relative error of the logits against 16-bit attention, and of 16-bit attention against float32."""
    reference, found = Reference.of(model(), requested, tokens), torch.cat(recorder.take())
    native, exact = torch.cat(reference.native), torch.cat(reference.exact)
    return float((found - native).norm() / native.norm()), float((native - exact).norm() / exact.norm())


def test_outlier_channels_are_within_the_budget(record_property):
    errors = table()

    record_property("relative errors on activations with outlier channels", text(errors))
    assert len(errors) == 4 * len(SIZES) * len(CONTEXTS)
    assert [each for each in errors if not each.is_within] == []
    assert min(each.relative for each in errors) > 1e-3  # without quantization it would be smaller


def test_level_0_matches_the_model_alone(monkeypatch):
    recorder, requested = LogitRecorder.attach(monkeypatch), prompts(LENGTHS)

    with Engine(model(), features=("int8_ixformer.calibrate",), max_num_tokens=CHUNK, **LIMITS) as engine:
        tokens = engine.generate(requested, max_new_tokens=NEW, stop_tokens=())
        assert {selection.id for selection in engine.selections.values()} == {"int8_ixformer/calibration"}

    Accuracy.of(Reference.of(model(), requested, tokens), recorder.take(), tokens).check()


@pytest.mark.parametrize(("level", "graphs"), LEVELS)
def test_logits_stay_within_the_budget(monkeypatch, record_property, calibrated, level, graphs):
    recorder, requested = LogitRecorder.attach(monkeypatch), prompts(LENGTHS)
    requested.append([*requested[0][:32], 7, 8, 9])  # its first blocks are in the prefix cache

    with quantized(level, calibrated, graphs=graphs) as engine:
        tokens = engine.generate(requested, max_new_tokens=NEW, stop_tokens=())
        assert bool(engine.stats.replayed_steps) is graphs

    found, rounding = relative_errors(recorder, requested, tokens)
    record_property(f"logits of level {level} against 16-bit attention, relative error", f"{found:.4f}")
    record_property("logits of 16-bit attention against float32, relative error", f"{rounding:.4f}")
    assert rounding < found < BUDGET


def test_cache_capacity(monkeypatch, record_property, tmp_path):
    """A token takes 1,024 bytes in 16 bits, 520 at level 1 and 776 at level 2, key scales included."""
    monkeypatch.setattr("attnplug_transformers.engine.core.free_bytes", lambda *rest: 2**28)
    monkeypatch.setattr(Groups, "workspace_bytes", lambda self, limits: 0)  # only KV caches are compared
    ValueScales({"layers.0.self_attn": torch.ones(2, 128)}).save(tmp_path / "scales")
    made, limits, tokens = wide(), {"max_num_reqs": 80, "max_num_tokens": 80, "block_size": 16}, {}

    for dtype, backend in (
        ("auto", "torch/sdpa"),
        ("int8", "int8_ixformer/triton"),
        ("int8_k", "int8_ixformer/triton"),
    ):
        options = {"int8_ixformer": {"value_scales": str(tmp_path / "scales")}}
        with Engine(made, kv_cache_dtype=dtype, backend=backend, options=options, graphs=False, **limits) as engine:
            tokens[dtype] = 16 * engine.limits.num_blocks

    record_property("tokens of a KV cache of 256 MiB, head size 128", str(tokens))
    assert tokens["auto"] == 2**28 // 1024
    assert tokens["int8"] / tokens["auto"] == pytest.approx(1.969, abs=0.001)
    assert tokens["int8_k"] / tokens["auto"] == pytest.approx(1.320, abs=0.001)


def test_wrong_scales_are_detected(monkeypatch, calibrated):
    recorder, requested = LogitRecorder.attach(monkeypatch), prompts(LENGTHS[::2])
    known = ValueScales.load(calibrated).layers
    ValueScales({name: scales.flip(-1).contiguous() for name, scales in known.items()}).save(calibrated)

    with quantized(1, calibrated) as engine:
        tokens = engine.generate(requested, max_new_tokens=NEW, stop_tokens=())

    assert relative_errors(recorder, requested, tokens)[0] > BUDGET


def test_without_a_calibration_the_engine_fails(tmp_path):
    with pytest.raises(LayerError, match=r"(?s)there is no file.*calibrate first"):
        quantized(1, tmp_path / "nowhere")
    assert model().config._attn_implementation == "eager"  # the model's own attention is restored
