"""The models of diffusers through the dense op, beside the attention of diffusers itself."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import attnplug
from attnplug.errors import NoBackendError
from attnplug.torch_backend.impl import TorchImpl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of diffusers
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # likewise
    pytest.mark.filterwarnings("ignore::UserWarning:diffusers"),  # likewise
]

MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, 7:] = 0


def flux(diffusers):
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(12, 3),
    }


def wan(diffusers):
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 12, 16),
        "timestep": torch.tensor([1, 2]),
    }


def qwen(diffusers):
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 12, 16),
        "encoder_hidden_states_mask": MASK.bool(),
        "timestep": torch.rand(2),
        "img_shapes": [(1, 4, 4)] * 2,
    }


def hunyuan(diffusers):
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 4, 4),
        "encoder_hidden_states": torch.randn(2, 12, 16),
        "encoder_attention_mask": MASK,
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([1, 2]),
        "guidance": torch.tensor([1.0, 1.0]),
    }


MODELS = {"flux": flux, "wan": wan, "qwen": qwen, "hunyuan": hunyuan}


@pytest.fixture
def diffusers():
    """Return the package, which takes seconds to import."""
    return pytest.importorskip("diffusers", reason="diffusers is not installed; it requires Python 3.11")


@pytest.fixture
def dispatch(diffusers):
    """Return the module that dispatches attention."""
    return import_module("diffusers.models.attention_dispatch")


@pytest.fixture
def chosen(dispatch, monkeypatch):
    """Register the adapter; return a context that selects it, and the runs of the built-in backend."""
    name, runs, run = import_module("tests.hosts.diffusers_adapter").register(), [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *arguments: (runs.append(self), run(self, *arguments))[1])
    return lambda: dispatch.attention_backend(name), runs


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_model_computes_what_it_does_by_itself(make, mode, diffusers, chosen) -> None:
    context, runs = chosen
    model, inputs = make(diffusers)
    model.eval()

    with mode():
        wanted = model(**inputs, return_dict=False)[0]
        assert not runs
        with context():
            found = model(**inputs, return_dict=False)[0]

    assert runs
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_model_is_trained(diffusers, chosen) -> None:
    context, runs = chosen
    model, inputs = wan(diffusers)

    model(**inputs, return_dict=False)[0].square().sum().backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    with context():
        model(**inputs, return_dict=False)[0].square().sum().backward()
    found = {name: one.grad for name, one in model.named_parameters()}

    assert runs
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4)


def test_a_model_compiles_without_a_break(diffusers, chosen) -> None:
    context, runs = chosen
    model, inputs = wan(diffusers)
    model.eval()
    torch._dynamo.reset()

    with torch.no_grad():
        wanted = model(**inputs, return_dict=False)[0]
        with context():
            found = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs, return_dict=False)[0]

    assert runs
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_scope_is_followed_by_every_layer(diffusers, chosen) -> None:
    context, runs = chosen
    model, inputs = wan(diffusers)
    model.eval()

    with torch.no_grad(), context():
        model(**inputs)
        with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError, match="flashinfer"):
            model(**inputs)
        before = len(runs)
        with attnplug.using(backend="torch"):
            model(**inputs)

    assert len(runs) == 2 * before


CALLS = {
    "causal": ((2, 40, 4, 64), (2, 40, 4, 64), {"is_causal": True}),
    "causal with more keys": ((2, 20, 4, 64), (2, 40, 4, 64), {"is_causal": True}),
    "grouped heads": ((2, 40, 4, 64), (2, 40, 2, 64), {"enable_gqa": True}),
    "cross": ((2, 40, 4, 64), (2, 9, 4, 64), {}),
    "mask": ((2, 40, 4, 64), (2, 40, 4, 64), {"attn_mask": torch.rand(2, 1, 40, 40) > 0.3}),
    "padding": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": MASK.bool()[:, None, None, :]}),
    "additive mask": ((2, 40, 4, 64), (2, 40, 4, 64), {"attn_mask": torch.randn(2, 1, 40, 40)}),
    "additive mask of each head": ((2, 40, 4, 64), (2, 12, 4, 64), {"attn_mask": torch.randn(1, 4, 40, 12)}),
    "scale": ((2, 40, 4, 64), (2, 40, 4, 64), {"scale": 0.3}),
}


@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_computes_what_the_native_one_does(queries, keys, arguments, dtype, dispatch, chosen) -> None:
    context, runs = chosen
    query, key, value = torch.randn(queries, dtype=dtype), *(torch.randn(keys, dtype=dtype) for _ in range(2))
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        arguments = {**arguments, "attn_mask": mask.to(dtype)}

    wanted = dispatch.dispatch_attention_fn(query, key, value, **arguments)
    with context():
        found = dispatch.dispatch_attention_fn(query, key, value, **arguments)

    assert runs
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
