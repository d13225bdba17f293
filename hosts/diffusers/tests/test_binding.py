"""What `bind` changes, and what `restore` puts back: one model, and nothing else."""

from __future__ import annotations

import gc
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import nn

import attnplug
from attnplug import torch_backend
from attnplug.errors import NoBackendError, NotNegotiatedError, RequestError, SettingsError, UnknownBackendError
from hosts.diffusers.tests.models import flux, sd3, vae, wan


@pytest.fixture
def pair(diffusers):
    """Return two models with the same weights and inputs."""
    first, second = wan(diffusers), wan(diffusers)
    second.model.load_state_dict(first.model.state_dict())
    second.inputs.update(first.inputs)
    return first, second


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def state(model):
    """Return what a binding may change: of every module its class, its processor, and that processor's backend."""
    found = []
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        found.append((name, type(module), processor, getattr(processor, "_attention_backend", None)))
    return found


def test_diffusers_own_switch_leaks_and_ours_does_not(pair, dispatch, bind, runs) -> None:
    first, second = pair
    registry = dispatch._AttentionBackendRegistry
    before, untouched = registry.get_active_backend()[0], state(second.model)

    with bind(first.model):
        assert registry.get_active_backend()[0] is before
        assert state(second.model) == untouched
        second()
        assert not runs
        first()
        assert len(runs) == first.calls

        # The same by the library: the other model, which nobody has touched, is switched with the first.
        runs.clear()
        name = next(one.processor._attention_backend for one in first.model.modules() if hasattr(one, "processor"))
        first.model.set_attention_backend(name.value)
        second()
        assert len(runs) == second.calls
    first.model.reset_attention_backend()
    second()
    assert len(runs) == 2 * second.calls, "and resetting the first does not switch the other back"


def test_two_models_have_different_backends_at_once(pair, bind, runs) -> None:
    first, second = pair
    wanted = first()

    with bind(first.model, "torch/sdpa"), bind(second.model, "torch/flex"):
        found = first()
        with pytest.raises(NoBackendError, match="torch/flex"):
            second()
        torch.testing.assert_close(first(), wanted, rtol=1e-5, atol=1e-5)
    assert len(runs) == 2 * first.calls
    assert {one.agreement.id for one in runs} == {"torch/sdpa"}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    runs.clear()
    with bind(first.model), bind(second.model, "flashinfer", native_fallback=True) as binding:
        torch.testing.assert_close(first(), second(), rtol=1e-5, atol=1e-5)
    assert len(runs) == first.calls
    assert any(reason.startswith("no backend serves head_size=16") for reason in binding.native)


def test_two_models_run_on_two_backends_at_once(pair, bind, runs, tmp_path) -> None:
    manifest = Path(torch_backend.__file__).with_name("attnplug.toml").read_text("utf-8")
    (tmp_path / "attnplug.toml").write_text(manifest.replace('name = "torch"', 'name = "second"', 1), "utf-8")
    attnplug.register("attnplug.torch_backend.plugin", manifest=tmp_path / "attnplug.toml")
    first, second = pair

    with bind(first.model, "torch"), bind(second.model, "second"):
        torch.testing.assert_close(first(), second(), rtol=1e-5, atol=1e-5)
        first()

    used = [one.agreement.id for one in runs]
    assert used == [*["torch/sdpa"] * first.calls, *["second/sdpa"] * second.calls, *["torch/sdpa"] * first.calls]


def test_a_model_that_is_bound_for_good_is_collected(diffusers, bind) -> None:
    small = wan(diffusers)
    bind(small.model)
    small()
    gone = ref(small.model)

    del small
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize("make", [wan, sd3, vae])
def test_what_was_there_is_there_again(make, diffusers, dispatch, bind) -> None:
    small = make(diffusers)
    before, keys = state(small.model), list(small.model.state_dict())

    binding = bind(small.model)

    assert state(small.model) != before
    assert list(small.model.state_dict()) == keys
    assert set(binding.modules) <= {name for name, *_ in before}
    binding.restore()
    binding.restore()
    assert state(small.model) == before
    assert "restored" in repr(binding)


def test_blocks_are_nested(diffusers, bind, runs) -> None:
    small = wan(diffusers)
    before = state(small.model)

    with bind(small.model, "torch/sdpa") as outer:
        within = state(small.model)
        with bind(small.model, "torch/flex"), pytest.raises(NoBackendError):
            small()
        assert state(small.model) == within
        small()
        assert len(runs) == small.calls
        assert "torch/sdpa" in repr(outer)

    assert state(small.model) == before


def test_an_error_restores(diffusers, bind) -> None:
    small = sd3(diffusers)
    before = state(small.model)

    def fails():
        with bind(small.model), bind(small.model, "torch"):
            raise KeyError

    with pytest.raises(KeyError):
        fails()

    assert state(small.model) == before


def test_bindings_of_a_model_are_restored_in_the_opposite_order(pair, bind) -> None:
    first, second = pair
    before = state(first.model)
    older, other, newer = bind(first.model), bind(second.model), bind(first.model, "torch")

    within = state(first.model)
    with pytest.raises(RequestError, match="opposite order"):
        older.restore()
    assert state(first.model) == within
    other.restore()
    newer.restore()
    older.restore()
    assert state(first.model) == before


def test_a_processor_that_is_set_meanwhile_is_left(diffusers, bind) -> None:
    small = flux(diffusers)
    module = small.model.transformer_blocks[0].attn
    own = type(module.processor)()

    with bind(small.model):
        module.set_processor(own)

    assert module.processor is own


def test_processors_that_models_share_are_not_changed(pair, bind, runs) -> None:
    first, second = pair
    shared = first.model.blocks[0].attn1.processor
    for small in pair:
        for block in small.model.blocks:
            block.attn1.processor = block.attn2.processor = shared

    with bind(first.model):
        first()
        assert len(runs) == first.calls
        second()
        assert len(runs) == first.calls
        assert shared._attention_backend is None


class WithWeights(nn.Module):
    """A processor that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def __call__(self, attn, hidden_states):
        return nn.functional.scaled_dot_product_attention(*(self.weight * hidden_states,) * 3)


class Linear:
    """A processor that computes attention in another way."""

    def __call__(self, attn, hidden_states):
        return hidden_states


class Holder(nn.Module):
    """An attention module."""

    def __init__(self, processor) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, hidden_states):
        return self.processor(self, hidden_states)


class Local(nn.Module):
    """A module that takes torch's function from elsewhere than its globals."""

    def forward(self, hidden_states):
        import torch.nn.functional as F  # noqa: N812, PLC0415 - as models may have it

        return F.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states)


def test_a_processor_with_weights_keeps_them(bind, runs) -> None:
    model = nn.Sequential(Holder(WithWeights()), Holder(Linear()))
    processor, rows = model[0].processor, torch.randn(1, 2, 5, 8)
    wanted = model(rows)

    with bind(model) as binding:
        found = model(rows)
        assert list(model.state_dict()) == ["0.processor.weight"]
        assert model[0].processor.weight is processor.weight

    assert len(runs) == 1
    assert model[0].processor is processor
    assert (binding.modules, binding.left) == (("0",), ("1",))
    torch.testing.assert_close(found, wanted)


class Pipeline:
    """What a pipeline has."""

    components = {"vae": nn.Linear(1, 1), "scheduler": object(), "transformer": nn.Linear(1, 1)}  # noqa: RUF012 - as it


@pytest.mark.parametrize(
    ("model", "problem", "fix"),
    [
        (Pipeline(), "bind was called with a Pipeline", "one of vae, transformer"),
        ("flux", "bind was called with a str", "pipe.transformer"),
        (nn.Linear(1, 1), "Linear has no attention", "bind the model that attends"),
        (nn.Sequential(Holder(Linear())), "Sequential has no attention", "in another way: 0"),
    ],
)
def test_what_has_no_attention_is_refused(model, problem, fix, bind) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        bind(model)

    assert fix in caught.value.fix


def test_a_function_that_cannot_be_copied_is_refused(bind) -> None:
    model = nn.Sequential(Holder(WithWeights()), Local())
    before = state(model)

    with pytest.raises(NotNegotiatedError, match=r"Local\.forward calls attention by a name that is not global"):
        bind(model)

    assert state(model) == before


def test_context_parallelism_is_refused_by_name(diffusers, bind) -> None:
    small = wan(diffusers)
    small.model.blocks[1].attn1.processor._parallel_config = object()
    before = state(small.model)

    with pytest.raises(NotNegotiatedError, match=r"context parallelism .* blocks\.1\.attn1"):
        bind(small.model)
    assert state(small.model) == before


@pytest.mark.parametrize("name", ["no_such_backend", "torch/no_such_variant", ("auto", "no_such_backend")])
@pytest.mark.parametrize("native_fallback", [False, True])
def test_a_name_of_nothing_is_refused_at_once(name, native_fallback, diffusers, bind) -> None:
    small = wan(diffusers)
    before = state(small.model)

    with pytest.raises(UnknownBackendError, match="no_such"):
        bind(small.model, name, native_fallback=native_fallback)
    assert state(small.model) == before


LACKING = """
api = "1.0"
backend = { name = "lacking", summary = "A backend whose library no index has" }
supports = { device_type = "cpu", dtype = "float32", head_size = { max = 256 } }
[variants.kernels]
requires = ["no-such-kernels >=2"]
[variants.other]
requires = ["no-such-kernels >=3"]
"""


def test_a_name_that_cannot_run_here_is_refused_at_once(diffusers, bind, tmp_path, monkeypatch) -> None:
    (tmp_path / "attnplug.toml").write_text(LACKING, "utf-8")
    attnplug.register("attnplug.torch_backend.plugin", manifest=tmp_path / "attnplug.toml")
    small = wan(diffusers)
    before, wanted = state(small.model), small()

    for names in ("lacking", "lacking/kernels", ["lacking/other", "lacking"]):
        with pytest.raises(NoBackendError, match="no-such-kernels >=2 is required and not installed") as caught:
            bind(small.model, names)
        assert "no-such-kernels >=2" in caught.value.fix
        assert state(small.model) == before
    for names, native in ((["lacking", "auto"], False), (["lacking", "torch"], False), ("lacking", True)):
        with bind(small.model, names, native_fallback=native):
            torch.testing.assert_close(small(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [{"backend": 3}, {"options": {"torch": 3}}])
def test_settings_that_are_none_are_refused_at_once(given, diffusers, bind) -> None:
    small = wan(diffusers)
    before = state(small.model)

    with pytest.raises(SettingsError):
        bind(small.model, **given)
    assert state(small.model) == before
