"""Bound models that are copied, hooked, fused, recomputed, entered twice, and half bound."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from torch import nn

import attnplug
from attnplug.errors import NotNegotiatedError, RequestError
from hosts.diffusers.tests.models import flux, sd3, unet, vae, wan
from hosts.diffusers.tests.test_binding import Holder, Linear, WithWeights, state


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def hook(model, kind, name="AttentionBlock"):
    """Add a hook, as offloading does, to every module of a kind; by default to those that call attention themselves."""
    from diffusers.hooks import HookRegistry, ModelHook  # noqa: PLC0415 - imports diffusers

    for module in model.modules():
        if type(module).__name__.endswith(name):
            if kind == "diffusers":
                HookRegistry.check_if_exists_or_initialize(module).register_hook(ModelHook(), "offload")
            else:  # as accelerate does
                forward = module.forward
                module.forward = lambda *given, forward=forward, **more: forward(*given, **more)


@pytest.mark.parametrize("kind", ["diffusers", "accelerate"])
def test_hooks_of_a_bound_model_call_what_is_bound_now(kind, diffusers, bind, runs) -> None:
    small = vae(diffusers)
    wanted = small()

    binding = bind(small.model)
    hook(small.model, kind)
    found = small()
    assert len(runs) == small.calls
    binding.restore()
    native = small()

    assert len(runs) == small.calls, "the hook still calls attnplug"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(native, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["diffusers", "accelerate"])
def test_hooks_that_hide_a_forward_are_refused(kind, diffusers, bind) -> None:
    small = vae(diffusers)
    hook(small.model, kind)
    before = state(small.model)

    with pytest.raises(NotNegotiatedError, match=r"attentions\.0 has a forward that is not the one of") as caught:
        bind(small.model)

    assert "bind the model first" in caught.value.fix
    assert state(small.model) == before


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", ["diffusers", "accelerate"])
def test_hooks_around_a_processor_change_nothing(kind, is_first, diffusers, bind, runs) -> None:
    small = flux(diffusers)
    wanted = small()

    if is_first:
        hook(small.model, kind, "Attention")
    with bind(small.model):
        if not is_first:
            hook(small.model, kind, "Attention")
        found = small()
    native = small()

    assert len(runs) == small.calls
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(native, wanted, rtol=0, atol=0)


def test_a_restored_binding_is_not_entered_again(diffusers, bind, runs) -> None:
    small = wan(diffusers)
    binding = bind(small.model)
    with binding:
        small()

    with pytest.raises(RequestError, match="a binding that was restored is entered"), binding:
        small()

    assert len(runs) == small.calls


def test_the_outermost_block_of_a_binding_restores(diffusers, bind, runs) -> None:
    small = wan(diffusers)

    with bind(small.model) as binding:
        with binding:
            small()
        small()
    small()

    assert len(runs) == 2 * small.calls


class Stubborn(Holder):
    """A module that refuses another processor."""

    def __setattr__(self, name, value) -> None:
        if name == "processor" and "processor" in vars(self):
            raise TypeError(name)
        super().__setattr__(name, value)


class Direct:
    """A processor that calls torch's function."""

    def __call__(self, attn, hidden_states):
        return nn.functional.scaled_dot_product_attention(*(hidden_states,) * 3)


def test_a_model_is_bound_wholly_or_not_at_all(bind) -> None:
    model = nn.Sequential(Holder(Direct()), Holder(WithWeights()), Stubborn(Direct()))
    before = state(model)

    with pytest.raises(TypeError, match="processor"):
        bind(model)

    assert state(model) == before


@pytest.mark.parametrize("make", [wan, sd3])
def test_a_deep_copy_of_a_bound_model_is_bound(make, diffusers, bind, runs) -> None:
    small = make(diffusers)
    wanted = small()

    with bind(small.model):
        copied = copy.deepcopy(small.model)
    assert not runs
    found = copied(**small.inputs, return_dict=False)[0]
    small()

    assert len(runs) == small.calls
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_bound_model_is_saved_as_it_is_without(diffusers, bind, tmp_path) -> None:
    small = sd3(diffusers)
    wanted = small()

    with bind(small.model):
        small.model.save_pretrained(tmp_path)
    loaded = type(small.model).from_pretrained(tmp_path)

    torch.testing.assert_close(loaded(**small.inputs, return_dict=False)[0], wanted, rtol=1e-5, atol=1e-5)
    assert state(loaded)[0] == state(small.model)[0]


def test_fused_projections_of_a_bound_model_stay_on_attnplug(diffusers, bind, runs) -> None:
    small = flux(diffusers)
    wanted = small()

    with bind(small.model):
        small.model.fuse_qkv_projections()
        found = small()

    assert len(runs) == small.calls
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_processors_that_others_set_are_reported(diffusers, bind, runs, caplog) -> None:
    small = unet(diffusers)
    wanted = small()

    with bind(small.model):
        small.model.fuse_qkv_projections()  # which sets other processors here
        found = small()

    assert not runs
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    (record,) = [one for one in caplog.records if one.name == "attnplug.diffusers"]
    assert record.getMessage().startswith(f"{small.calls} of {small.calls} changes of a binding were replaced")
    with bind(small.model) as binding:
        small()
    assert len(runs) == len(binding.modules) == small.calls


@pytest.mark.parametrize("make", [flux, sd3])
def test_recomputed_activations_have_the_same_gradients(make, diffusers, bind, runs) -> None:
    small = make(diffusers)

    def gradients():
        small.model.zero_grad()
        with torch.enable_grad():
            small().square().sum().backward()
        return {name: one.grad for name, one in small.model.named_parameters()}

    wanted = gradients()
    small.model.enable_gradient_checkpointing()
    small.model.train()
    with bind(small.model):
        found = gradients()

    assert len(runs) > small.calls, "nothing was computed again"
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("make", [flux, sd3, wan])
def test_autocast_is_that_of_the_native_backend(make, diffusers, bind, runs) -> None:
    small = make(diffusers)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = small()
        with bind(small.model):
            found = small()

    assert {one.agreement.requirements.dtype for one in runs} == {"bfloat16"}
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_threads_run_their_models_on_their_backends(diffusers, bind, runs) -> None:
    smalls = [wan(diffusers) for _ in range(4)]
    wanted = [one() for one in smalls]
    found = [None] * len(smalls)

    def work(index) -> None:
        with torch.no_grad():
            for _ in range(3):
                with bind(smalls[index].model, ("torch", "torch/sdpa")[index % 2]):
                    found[index] = smalls[index]()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(smalls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(runs) == 3 * sum(one.calls for one in smalls)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_runs_beside_attention_is_the_modules_own(bind, runs) -> None:
    model = nn.Sequential(Holder(Direct()), Holder(Linear()))
    rows, seen = torch.randn(1, 2, 5, 8), []
    model[0].register_forward_hook(lambda *given: seen.append(given))

    with bind(model), attnplug.using(backend="torch"):
        model(rows)

    assert len(seen) == len(runs) == 1


def test_a_copy_of_a_bound_model_is_collected(diffusers, bind) -> None:
    small = wan(diffusers)
    with bind(small.model):
        gone = weakref.ref(copy.deepcopy(small.model))

    import gc  # noqa: PLC0415 - for this test alone

    gc.collect()
    assert gone() is None
