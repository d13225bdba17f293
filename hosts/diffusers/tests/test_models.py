"""Models of diffusers bound to a backend, beside diffusers' native attention."""

from __future__ import annotations

import pytest
import torch

import attnplug
from attnplug.errors import NoBackendError
from hosts.diffusers.tests.models import MODELS, flux, hunyuan, sd3, vae, wan


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_model_computes_what_it_does_by_itself(make, mode, diffusers, bind, runs) -> None:
    small = make(diffusers)

    with mode():
        wanted = small()
        assert not runs
        with bind(small.model) as binding:
            found = small()
        assert len(runs) == small.calls
        small()

    assert len(runs) == small.calls, "the restored model calls attnplug"
    assert binding.left == ()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [flux, wan, hunyuan, sd3, vae])
def test_a_model_compiles_without_a_break(make, diffusers, bind, runs) -> None:
    small = make(diffusers)
    compiled = torch.compile(small.model, fullgraph=True, backend="aot_eager" if make is wan else "eager")

    with torch.no_grad():
        wanted = small()
        with bind(small.model, native_fallback=make is sd3):
            found = compiled(**small.inputs, return_dict=False)[0]
        assert len(runs) == small.calls
        native = compiled(**small.inputs, return_dict=False)[0]

    assert len(runs) == small.calls, "the compiled model calls attnplug after it is restored"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(native, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_blocks_that_are_compiled_alone_follow_a_binding(diffusers, bind, runs) -> None:
    small = flux(diffusers)

    with torch.no_grad():
        wanted = small()
        small.model.compile_repeated_blocks(fullgraph=True, backend="eager")
        with bind(small.model):
            found = small()
        native = small()

    assert len(runs) == small.calls
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(native, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_graphs_are_found_again_when_a_model_is_bound_again(diffusers, bind, runs) -> None:
    small = wan(diffusers)
    compiled, counters = torch.compile(small.model, fullgraph=True, backend="eager"), torch._dynamo.utils.counters

    with torch.no_grad():
        traced = []
        for _ in range(3):
            with bind(small.model):
                compiled(**small.inputs)
            compiled(**small.inputs)
            traced.append(counters["stats"]["unique_graphs"])

    assert traced[1:] == traced[:1] * 2
    assert len(runs) == 3 * small.calls


@pytest.mark.slow
@pytest.mark.parametrize("make", [wan, sd3])
def test_a_model_is_trained(make, diffusers, bind, runs) -> None:
    small = make(diffusers)

    small().square().sum().backward()
    wanted = {name: one.grad for name, one in small.model.named_parameters()}
    small.model.zero_grad()
    with bind(small.model):
        small().square().sum().backward()

    assert len(runs) == small.calls
    for name, one in small.model.named_parameters():
        torch.testing.assert_close(one.grad, wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_scope_is_followed_by_every_layer(diffusers, bind, runs) -> None:
    small = wan(diffusers)

    with torch.no_grad(), bind(small.model):
        small()
        with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError, match="flashinfer"):
            small()
        with attnplug.using(backend="torch"):
            small()

    assert len(runs) == 2 * small.calls


@pytest.mark.slow
def test_a_pipeline_runs_with_its_parts_bound(diffusers, bind, runs) -> None:
    small, latents = flux(diffusers), torch.randn(1, 16, 4)
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None, tokenizer=None,
        text_encoder_2=None, tokenizer_2=None, transformer=small.model,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    arguments = {
        "prompt_embeds": torch.randn(1, 12, 32),
        "pooled_prompt_embeds": torch.randn(1, 32),
        "height": 64,
        "width": 64,
        "num_inference_steps": 3,
        "output_type": "latent",
    }

    wanted = pipe(**arguments, latents=latents.clone()).images
    assert not runs
    with bind(pipe.transformer):
        found = pipe(**arguments, latents=latents.clone()).images

    assert len(runs) == 3 * small.calls
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
