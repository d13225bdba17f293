"""A model from its calibration to its tokens: level 0 observes, levels 1 and 2 generate, 16 bits are what to meet."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers

from attnplug.errors import LayerError
from attnplug_int8_ixformer.value_scales import ValueScales
from attnplug_transformers.engine import Engine
from attnplug_transformers.engine.groups import Groups
from plugins.int8_ixformer.tests.outliers import BUDGET
from tests.backends.accuracy import Accuracy, LogitRecorder, Reference
from tests.backends.models import build, prompts
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, skip_overflow_checks

pytestmark = [*MARKS, pytest.mark.usefixtures("offered")]
skip_overflow_checks()

LENGTHS = (40, 1, 57) if INTERPRETED else (900, 1, 700, 333)
SEEN = (90,) * 12 if INTERPRETED else (900,) * 12  # as few as these: values beyond the largest seen are clipped
LIMITS = {"max_num_reqs": 3, "max_seq_len": 100} if INTERPRETED else {"max_num_reqs": 3, "max_seq_len": 1000}
CHUNK = 32 if INTERPRETED else 600  # beyond 512 rows, descriptors load what a level 1 prompt attends
NEW = 4 if INTERPRETED else 8
WAYS = [(1, True), (2, False)] if INTERPRETED else [(1, True), (1, False), (2, True), (2, False)]
CACHES = {1: "int8", 2: "int8_k"}


@cache
def model():
    """
    A Llama some of whose channels are outliers: in keys and in values, made up for in queries and in the projection
    behind attention. Attention that rounds nothing is that of the model without them.
    """
    made = build("llama", device=DEVICE, small=INTERPRETED)
    size, heads, kv_heads = (
        getattr(made.config, name) for name in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    with torch.no_grad():
        for layer in made.model.layers:
            attention = layer.self_attn
            for channel in (3, 3 + size // 2):  # the rotary embedding mixes these two
                attention.k_proj.weight.view(kv_heads, size, -1)[:, channel] *= 8
                attention.q_proj.weight.view(heads, size, -1)[:, channel] /= 8
            for channel in (5, 11, 23):
                attention.v_proj.weight.view(kv_heads, size, -1)[:, channel] *= 8
                attention.o_proj.weight.view(-1, heads, size)[:, :, channel] /= 8
    return made


def wide():
    """A Llama of one layer, with heads of 128."""
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8}
    heads = {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 64, "max_position_embeddings": 8192}
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()


@pytest.fixture(scope="module", autouse=True)
def _forgotten():
    yield
    model.cache_clear()


@pytest.fixture
def calibrated(tmp_path, offered):
    """The file of a calibration."""
    with Engine(model(), features=("int8_ixformer.calibrate",), backend="int8_ixformer", **LIMITS) as engine:
        engine.generate(prompts(SEEN, seed=2), max_new_tokens=NEW, stop_tokens=())
        ValueScales.observed(engine.implementations.values()).save(tmp_path / "scales.safetensors")
    return tmp_path / "scales.safetensors"


def quantized(level, path, **how):
    """An engine on the kernels of a level."""
    options = {"int8_ixformer": {"value_scales": str(path)}} if level == 1 else None
    return Engine(
        model(), kv_cache_dtype=CACHES[level], backend="int8_ixformer/triton", options=options, max_num_tokens=CHUNK,
        **LIMITS, **how,
    )  # fmt: skip


def apart(recorder, asked, tokens):
    """How far the logits are from those of 16-bit attention, relative to their size, and how far those from float32."""
    reference, found = Reference.of(model(), asked, tokens), torch.cat(recorder.take())
    wanted, truth = torch.cat(reference.theirs), torch.cat(reference.truth)
    return float((found - wanted).norm() / wanted.norm()), float((wanted - truth).norm() / truth.norm())


def test_level_0_generates_as_the_model_alone(monkeypatch):
    recorder, asked = LogitRecorder.attach(monkeypatch), prompts(LENGTHS)

    with Engine(model(), features=("int8_ixformer.calibrate",), max_num_tokens=CHUNK, **LIMITS) as engine:
        tokens = engine.generate(asked, max_new_tokens=NEW, stop_tokens=())
        assert {selection.id for selection in engine.selections.values()} == {"int8_ixformer/calibration"}

    Accuracy.of(Reference.of(model(), asked, tokens), recorder.take(), tokens).check()


@pytest.mark.parametrize(("level", "graphs"), WAYS)
def test_logits_stay_within_the_budget(monkeypatch, record_property, calibrated, level, graphs):
    recorder, asked = LogitRecorder.attach(monkeypatch), prompts(LENGTHS)
    asked.append([*asked[0][:32], 7, 8, 9])  # its first blocks are in the cache

    with quantized(level, calibrated, graphs=graphs) as engine:
        tokens = engine.generate(asked, max_new_tokens=NEW, stop_tokens=())
        assert bool(engine.counts.replayed_steps) is graphs

    found, rounding = apart(recorder, asked, tokens)
    record_property(f"logits of level {level} apart from 16-bit attention, relative", f"{found:.4f}")
    record_property("logits of 16-bit attention apart from float32, relative", f"{rounding:.4f}")
    assert rounding < found < BUDGET


def test_the_same_memory_holds_nearly_twice_the_tokens(monkeypatch, record_property, tmp_path):
    """A token takes 1,024 bytes in 16 bits, and 520 at level 1, 776 at level 2: scales of keys included."""
    monkeypatch.setattr("attnplug_transformers.engine.engine.free_bytes", lambda *rest: 2**28)
    monkeypatch.setattr(Groups, "workspace_bytes", lambda self, limits: 0)  # caches are what is compared
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

    record_property("tokens of a cache of 256 MiB, heads of 128", str(tokens))
    assert tokens["auto"] == 2**28 // 1024
    assert tokens["int8"] / tokens["auto"] == pytest.approx(1.969, abs=0.001)
    assert tokens["int8_k"] / tokens["auto"] == pytest.approx(1.320, abs=0.001)


def test_scales_of_another_model_are_found(monkeypatch, calibrated):
    recorder, asked = LogitRecorder.attach(monkeypatch), prompts(LENGTHS[::2])
    known = ValueScales.load(calibrated).of_layers
    ValueScales({name: scales.flip(-1).contiguous() for name, scales in known.items()}).save(calibrated)

    with quantized(1, calibrated) as engine:
        tokens = engine.generate(asked, max_new_tokens=NEW, stop_tokens=())

    assert apart(recorder, asked, tokens)[0] > BUDGET


def test_without_a_calibration_there_is_no_engine(tmp_path):
    with pytest.raises(LayerError, match=r"(?s)no such file is there.*calibrate first"):
        quantized(1, tmp_path / "nowhere")
    assert model().config._attn_implementation == "eager"  # the model has its own attention back
