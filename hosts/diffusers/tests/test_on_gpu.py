"""Bound models and calls on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch

import attnplug
from attnplug.errors import NoBackendError, PluginLoadError
from hosts.diffusers.tests.models import MASK, MODELS, flux, qwen, sd3, wan

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FAST = ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4", "flash_attn/fa2", "flash_attn/torch")


def on_gpu(small, dtype):
    """Move a model and its inputs."""
    small.model.to("cuda", dtype)
    for name, one in small.inputs.items():
        if isinstance(one, torch.Tensor):
            small.inputs[name] = one.to("cuda", dtype if one.is_floating_point() else one.dtype)
    return small


@pytest.fixture
def forwards(monkeypatch):
    """Return the forwards of every backend, each with its candidate."""
    from attnplug.dense import PreparedAttention  # noqa: PLC0415 - imports torch

    made, attend = [], PreparedAttention._attend

    def counted(self, *given, **more):
        made.append(self.id)
        return attend(self, *given, **more)

    monkeypatch.setattr(PreparedAttention, "_attend", counted)
    return made


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_computes_what_it_does_by_itself(make, diffusers, bind, forwards) -> None:
    small = on_gpu(make(diffusers), torch.float32)

    with torch.no_grad():
        wanted = small()
        assert not forwards
        with bind(small.model, "auto"):  # by default, short sequences are native
            found = small()

    assert len(forwards) == small.calls
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("make", [flux, sd3, wan, qwen])
def test_models_run_on_flash_attention(make, backend, diffusers, bind, forwards) -> None:
    small = on_gpu(make(diffusers), torch.bfloat16)

    with torch.no_grad():
        wanted = small()
        with bind(small.model, backend):
            try:
                found = small()
            except (NoBackendError, PluginLoadError) as error:  # not installed, or not wholly
                pytest.skip(f"{backend} does not run here: {error.problem}")

    assert forwards == [backend] * small.calls
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


CALLS = {
    "self": ((2, 300, 4, 64), (2, 300, 4, 64), {}),
    "cross": ((2, 300, 4, 128), (2, 77, 4, 128), {}),
    "causal": ((2, 300, 4, 64), (2, 300, 4, 64), {"is_causal": True}),
    "causal with more keys": ((2, 30, 4, 64), (2, 300, 4, 64), {"is_causal": True}),
    "grouped heads": ((2, 300, 8, 64), (2, 300, 2, 64), {"enable_gqa": True}),
    "padding": ((2, 300, 4, 64), (2, 12, 4, 64), {"attn_mask": MASK.bool()}),
    "mask": ((2, 40, 4, 64), (2, 40, 4, 64), {"attn_mask": torch.rand(2, 1, 40, 40) > 0.3}),
    "added": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": torch.randn(1, 4, 40, 12)}),
}


@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("fallback", [False, True])
def test_calls_are_those_of_the_native_backend(queries, keys, arguments, dtype, fallback, dispatch, forwards) -> None:
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in (queries, keys, keys)]
    mask = arguments.get("attn_mask")
    if mask is not None:
        arguments = {**arguments, "attn_mask": mask.to("cuda", dtype if mask.is_floating_point() else mask.dtype)}

    member = attention_for("auto", None, native_fallback=fallback).member
    found = dispatch.dispatch_attention_fn(*inputs, **arguments, backend=member)

    assert len(forwards) == 1
    wanted = dispatch.dispatch_attention_fn(*(one.float() for one in inputs), **_as_float32(arguments))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


def _as_float32(arguments):
    mask = arguments.get("attn_mask")
    return {**arguments, "attn_mask": mask.float()} if mask is not None and mask.is_floating_point() else arguments


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")  # QwenImage has some
@pytest.mark.parametrize("make", [flux, sd3, qwen])
def test_the_inductor_compiles_a_bound_model(make, diffusers, bind, forwards) -> None:
    small = on_gpu(make(diffusers), torch.bfloat16)

    with torch.no_grad():
        wanted = small()
        with bind(small.model, "auto"):
            found = torch.compile(small.model, fullgraph=True)(**small.inputs, return_dict=False)[0]

    assert len(forwards) == small.calls
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


def test_a_captured_graph_is_native_where_that_was_requested(dispatch) -> None:
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    attention = attention_for(None, None, native_fallback=True)
    inputs = [torch.randn(1, 32, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
    dispatch.dispatch_attention_fn(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = dispatch.dispatch_attention_fn(*inputs, backend=attention.member)
    graph.replay()

    torch.testing.assert_close(found, dispatch.dispatch_attention_fn(*inputs))
    assert "a CUDA graph is captured" in attention.fallback.reasons


def test_the_device_is_that_of_the_tensors(diffusers, bind, forwards) -> None:
    small = on_gpu(flux(diffusers), torch.bfloat16)

    with torch.no_grad(), bind(small.model), attnplug.using(backend="torch"):
        small()

    assert {one.partition("/")[0] for one in forwards} == {"torch"}
