"""The attention function: each argument is used or refused, and the call has to match the configuration."""

from __future__ import annotations

import gc
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2MoeConfig, T5Config

import attnplug
from attnplug.dense import BatchPlanner, device_of
from attnplug.errors import LayerError, NotNegotiatedError, TensorError
from attnplug.request.device import Device
from attnplug.selection import process
from attnplug_kit.oracle import attend as attend_densely
from attnplug_transformers.attention import attend
from attnplug_transformers.binding import find_binding, layer_of_module
from attnplug_transformers.call import HARMLESS, REFUSED, AttentionCall
from attnplug_transformers.mask import make_mask
from core.tests.models.published import Phi3SmallConfig
from hosts.transformers.tests.models import config, generate, model, prompts
from kit.tests.conformance.sparse import patterned as sparse
from tests.threads import together

SIZE = 8


class Module(nn.Module):
    """The attributes of an attention module that the function reads."""

    def __init__(self, configuration=None, index=0, is_causal=True, **attributes):
        super().__init__()
        self.config = configuration
        self.layer_idx = index
        self.is_causal = is_causal
        for name, value in attributes.items():
            setattr(self, name, value)


def tensors(tokens=5, keys=None, heads=4, kv_heads=2, batch=2, dtype=torch.float32):
    source = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, tokens, SIZE, generator=source, dtype=torch.float32).to(dtype)
    key, value = (
        torch.randn(batch, kv_heads, keys or tokens, SIZE, generator=source, dtype=torch.float32).to(dtype)
        for _ in range(2)
    )
    return query, key, value


def expected(query, key, value, scale=SIZE**-0.5, window=None, cap=None, sinks=None, is_causal=True):
    """Return ``(batch, queries, heads, size)`` attention, written out."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    distance = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None] - torch.arange(key.shape[2])
    if is_causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if window is not None:
        scores = scores.masked_fill(distance >= window, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def windowed(tokens, width, batch=2):
    from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: PLC0415 - beside its only use

    return make_mask(batch, tokens, tokens, mask_function=sliding_window_causal_mask_function(width))


def configuration(**changes):
    return config("llama", **changes)


class TestArguments:
    """The arguments of the library."""

    def test_scale_window_cap_and_sinks_are_used(self, mirror):
        query, key, value = tensors(9)
        sinks = torch.tensor([0.5, 1.0, -1.0, 2.0])
        arguments = {"scaling": 0.7, "sliding_window": 4, "softcap": 3.0, "s_aux": sinks}

        found, weights = attend(Module(), query, key, value, windowed(9, 4), **arguments)

        assert weights is None
        torch.testing.assert_close(found, expected(query, key, value, 0.7, 4, 3.0, sinks))

    def test_the_scale_is_that_of_the_head_size_where_none_is_given(self):
        query, key, value = tensors()

        found, _ = attend(Module(), query, key, value, None)

        torch.testing.assert_close(found, expected(query, key, value))

    @pytest.mark.parametrize("name", sorted(HARMLESS))
    def test_harmless_arguments_change_nothing(self, name):
        query, key, value = tensors()

        plain, _ = attend(Module(), query, key, value, None)
        found, _ = attend(Module(), query, key, value, None, **{name: torch.ones(2, 5)})

        assert torch.equal(found, plain)
        assert " " in HARMLESS[name]

    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_unsupported_arguments_are_refused(self, name):
        query, key, value = tensors()
        because, fix = REFUSED[name]

        with pytest.raises(NotNegotiatedError, match=rf"Module 0: {name}=True was given") as refused:
            attend(Module(), query, key, value, None, **{name: True})

        assert (refused.value.expected, refused.value.fix) == (because, fix)
        attend(Module(), query, key, value, None, **{name: None})
        attend(Module(), query, key, value, None, **{name: False})

    def test_unknown_arguments_are_refused(self):
        with pytest.raises(NotNegotiatedError, match=r"magic=<Tensor of shape \(3,\)> was given"):
            attend(Module(), *tensors(), None, magic=torch.ones(3))

    def test_dropout_is_refused(self):
        with pytest.raises(NotNegotiatedError, match=r"(?s)dropout=0\.1.*model\.eval"):
            attend(Module(), *tensors(), None, dropout=0.1)

    def test_gradients_are_refused(self):
        query, key, value = tensors()
        query.requires_grad_()

        with pytest.raises(NotNegotiatedError, match="gradients are recorded"):
            attend(Module(), query, key, value, None)
        with torch.no_grad():
            attend(Module(), query, key, value, None)

    @pytest.mark.parametrize(
        "shapes", [((2, 4, 5), (2, 2, 5, 8), (2, 2, 5, 8)), ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 6, 8))]
    )
    def test_tensors_of_other_shapes_are_refused(self, shapes):
        with pytest.raises(TensorError, match="they are"):
            attend(Module(), *(torch.zeros(shape) for shape in shapes), None)

    def test_a_mask_for_another_call_is_refused(self):
        with pytest.raises(TensorError, match=r"\(2, 1, 4, 4\) was made for a call of shape \(2, 1, 5, 5\)"):
            attend(Module(), *tensors(5), make_mask(2, 4, 4))

    def test_causality_of_the_caller_wins_over_the_modules(self, mirror):
        query, key, value = tensors()

        found, _ = attend(Module(is_causal=True), query, key, value, None, is_causal=False)

        torch.testing.assert_close(found, expected(query, key, value, is_causal=False))

    def test_positions_that_restart_behind_cached_keys_are_refused(self):
        mask, positions = make_mask(1, 4, 9, q_offset=5), torch.tensor([[0, 1, 0, 1]])

        with pytest.raises(NotNegotiatedError, match="position_ids of 4 queries restart at 2, and there are 9 keys"):
            attend(Module(), *tensors(4, keys=9, batch=1), mask, position_ids=positions)

    def test_sinks_of_another_shape_are_refused(self, mirror):
        with pytest.raises((LayerError, TensorError), match="sinks"):
            attend(Module(), *tensors(), None, s_aux=torch.ones(3))

    def test_a_prepared_mask_of_the_caller_is_used(self):
        query, key, value = tensors(6)
        prepared = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6).clone()
        prepared[0, :, :, :2] = False

        found, _ = attend(Module(), query, key, value, prepared)

        exact = expected(query[:1, :, 2:], key[:1, :, 2:], value[:1, :, 2:])
        torch.testing.assert_close(found[:1, 2:], exact)
        mean = value[0].mean(1).repeat_interleave(2, 0)  # eager attention's softmax over nothing but masked keys
        torch.testing.assert_close(found[0, :2], mean.expand(2, -1, -1))


class TestConfiguration:
    """The call against the model's configuration."""

    def check_refusal(self, configured, said, heads=4, kv_heads=2, **call):
        query, key, value = tensors(heads=heads, kv_heads=kv_heads)
        with pytest.raises(NotNegotiatedError, match=re.escape(said)):
            attend(Module(configured), query, key, value, None, **call)

    def test_another_window(self):
        self.check_refusal(config("mistral"), "the call has sliding_window 7", sliding_window=7)

    def test_a_window_where_there_is_none(self):
        self.check_refusal(configuration(), "the call has sliding_window 7", sliding_window=7)

    def test_a_soft_cap_that_is_missing(self):
        self.check_refusal(config("gemma2"), "the call has softcap None")

    def test_sinks_that_are_missing(self):
        self.check_refusal(config("gpt_oss"), "the call has sinks (s_aux) False")

    def test_sinks_that_are_not_configured(self):
        self.check_refusal(configuration(), "the call has sinks (s_aux) True", s_aux=torch.zeros(4))

    def test_another_head_size(self):
        self.check_refusal(configuration(head_dim=16), "the call has head_size 8")

    def test_other_heads(self):
        self.check_refusal(configuration(), "the call has query heads 3", heads=3, kv_heads=1)
        self.check_refusal(configuration(), "the call has key and value heads 4", kv_heads=4)

    def test_other_causality(self):
        self.check_refusal(configuration(), "the call has is_causal False", is_causal=False)

    def test_the_heads_of_one_rank(self):
        query, key, value = tensors(heads=2, kv_heads=1)

        attend(module := Module(configuration()), query, key, value, None)

        arguments = find_binding(module).requirements
        assert (arguments.num_q_heads, arguments.num_kv_heads) == (2, 1)

    def test_a_window_of_the_mask_alone(self, mirror):
        query, key, value = tensors(9)

        found, _ = attend(Module(config("mistral")), query, key, value, windowed(9, 6))

        torch.testing.assert_close(found, expected(query, key, value, window=6))
        with pytest.raises(NotNegotiatedError, match="a window of 6 was negotiated"):
            attend(Module(config("mistral")), query, key, value, make_mask(2, 9, 9))

    def test_a_window_of_the_call_alone_is_compared_with_the_mask(self, mirror):
        query, key, value = tensors(9)

        found, _ = attend(Module(), query, key, value, windowed(9, 6), sliding_window=6)

        torch.testing.assert_close(found, expected(query, key, value, window=6))
        with pytest.raises(NotNegotiatedError, match="causal attention was negotiated"):
            attend(Module(), query, key, value, windowed(9, 6))

    def test_another_mask_in_a_whole_model(self, host):
        made = model("llama")
        made.set_attn_implementation("attnplug")
        ids, _ = prompts(7)

        with torch.no_grad(), pytest.raises(NotNegotiatedError, match="by the mask of this call"):
            made(ids, attention_mask=torch.ones(1, 1, 7, 7, dtype=torch.bool))

    def test_a_layer_that_the_configuration_does_not_describe(self):
        hybrid = Qwen2MoeConfig(layer_types=["full_attention"] * 24)
        assert layer_of_module(Module(hybrid, index=3)).index == 3
        assert layer_of_module(Module(hybrid, index=99)) is None
        assert layer_of_module(Module(T5Config())) is None
        assert layer_of_module(Module(None)) is None
        assert layer_of_module(nn.Linear(2, 2)) is None

    def test_roles_of_an_encoder_decoder(self):
        bart = config("bart")

        roles = [
            layer_of_module(Module(bart, is_causal=True, is_decoder=True)),
            layer_of_module(Module(bart, is_causal=False, is_decoder=True)),
            layer_of_module(Module(bart, None, is_causal=False)),
        ]

        assert [layer.requirements.attn_type for layer in roles] == ["decoder", "encoder_decoder", "encoder"]

    def test_a_configuration_is_garbage_collected(self):
        own = LlamaConfig(num_hidden_layers=1)
        layer_of_module(Module(own))
        alive = weakref.ref(own)

        del own
        gc.collect()

        assert alive() is None


class TestBinding:
    """When a decision is made again, and which layers share a plan."""

    def test_a_repeated_call_keeps_its_backend(self):
        module = Module()

        attend(module, *tensors(), None)
        first = find_binding(module)
        attend(module, *tensors(7), None)

        assert find_binding(module) is first

    def test_another_dtype_is_another_decision(self):
        module = Module()
        attend(module, *tensors(), None)
        first = find_binding(module)

        attend(module, *tensors(dtype=torch.bfloat16), None)

        assert find_binding(module) is not first
        assert find_binding(module).requirements.dtype == "bfloat16"

    def test_changed_sinks_make_a_new_binding(self, mirror):
        module, sinks = Module(), torch.zeros(4)
        query, key, value = tensors()
        attend(module, query, key, value, None, s_aux=sinks)

        sinks.add_(3)  # as loading weights does
        found, _ = attend(module, query, key, value, None, s_aux=sinks)

        torch.testing.assert_close(found, expected(query, key, value, sinks=sinks))

    def test_sinks_that_change_unseen_are_read_again(self):
        module, sinks = Module(), torch.zeros(4, dtype=torch.bfloat16)
        query, key, value = tensors(dtype=torch.bfloat16)
        attend(module, query, key, value, None, s_aux=sinks)
        first = find_binding(module)

        sinks.data.copy_(torch.ones(4))  # as weight loaders do
        found, _ = attend(module, query, key, value, None, s_aux=sinks)

        assert find_binding(module) is first
        assert torch.equal(found, attend(Module(), query, key, value, None, s_aux=sinks.clone())[0])

    def test_sinks_of_inference_mode_have_no_version(self, mirror):
        with torch.inference_mode():
            query, key, value = tensors()
            sinks = torch.ones(4)
            found, _ = attend(Module(), query, key, value, None, s_aux=sinks)

            torch.testing.assert_close(found, expected(query, key, value, sinks=sinks))

    def test_using_another_backend_applies_at_once(self):
        module = Module()
        attend(module, *tensors(), None)
        first = find_binding(module).selection

        with attnplug.using(backend=["torch/sdpa", "auto"]):
            attend(module, *tensors(), None)
            inside = find_binding(module).selection
        attend(module, *tensors(), None)

        assert inside.provenance["backend"] == "using"
        assert first.provenance["backend"] != "using"
        assert find_binding(module).selection == first

    def test_layers_with_equal_requirements_share_a_build(self, host, monkeypatch):
        built = []
        monkeypatch.setattr(BatchPlanner, "_builder", _counted(BatchPlanner._builder, built))
        made = model("gemma2")
        made.set_attn_implementation("attnplug")
        ids, mask = prompts(9, 4)

        with torch.no_grad():
            made(ids, attention_mask=mask)

        assert len(built) == len(set(built)) == 2  # two windowed layers and two full ones

    def test_uniform_layers_build_once_a_step(self, host, monkeypatch):
        built = []
        monkeypatch.setattr(BatchPlanner, "_builder", _counted(BatchPlanner._builder, built))
        made = model("llama")
        made.set_attn_implementation("attnplug")
        ids, mask = prompts(9, 4)

        generate(made, ids, mask, 6)

        assert len(built) == 6

    def test_limits_grow_with_the_batches(self):
        module = Module()

        for tokens in (3, 40, 5):
            query, key, value = tensors(tokens, batch=3)
            found, _ = attend(module, query, key, value, None)
            torch.testing.assert_close(found, expected(query, key, value))

        assert find_binding(module).planner._local.limits == (4, 128, 64)

    def test_limits_stay_within_a_sparse_pattern(self):
        attnplug.register(
            "kit.tests.conformance.sparse.patterned", manifest=Path(sparse.__file__).with_name("attnplug.toml")
        )
        module = Module(Phi3SmallConfig(hidden_size=64, max_position_embeddings=48))
        pattern = {"max_seqlen": 48, "block_size": 16, "local_blocks": 1, "vert_stride": 4, "homo_head": False}
        source = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, heads, 60, 16, generator=source) for heads in (4, 2, 2))

        with attnplug.using(backend="sparse"):
            for tokens, limit in ((33, 48), (48, 48), (60, 60)):  # a backend may refuse what is longer, by its length
                rows = [part[:, :, :tokens] for part in (query, key, value)]
                found, _ = attend(module, *rows, None)
                wanted = attend_densely(*(part[0].transpose(0, 1) for part in rows), scale=0.25, block_sparse=pattern)
                torch.testing.assert_close(found[0].double(), wanted.output, rtol=1e-5, atol=1e-5)
                assert find_binding(module).planner._local.limits[2] == limit

    def test_threads_do_not_share_plans(self):
        module = Module()
        query, key, value = tensors(33)
        attend(module, query, key, value, None)
        found = []

        def run(tokens):
            for _ in range(10):
                part = query[:, :, :tokens], key[:, :, :tokens], value[:, :, :tokens]
                found.append(torch.allclose(attend(module, *part, None)[0], expected(*part), atol=1e-5))

        together(*(partial(run, tokens) for tokens in (3, 17, 33, 8)))

        assert found == [True] * 40

    def test_a_binding_is_garbage_collected_with_its_module(self):
        module = Module()
        attend(module, *tensors(), None)
        group = weakref.ref(find_binding(module).planner)

        del module
        gc.collect()

        assert group() is None

    def test_the_device_is_that_of_the_tensors(self):
        process.current_state().own_device = Device.cuda("9.0")

        assert device_of(torch.device("cpu")) == Device.cpu()
        assert device_of(torch.device("cuda", 0)) is attnplug.current_device()  # which select() takes without a copy
        attend(module := Module(), *tensors(), None)
        assert find_binding(module).selection.device == Device.cpu()

    def test_a_device_that_appears_after_the_process_looked(self):
        process.current_state().own_device = Device.cpu()

        assert device_of(torch.device("cpu")) is attnplug.current_device()
        assert device_of(torch.device("meta")) == Device("meta")
        with attnplug.using(device=Device.cuda("9.0")):
            assert device_of(torch.device("cpu")) == Device.cpu()


def _counted(method, counts):
    def counting(self, batch):
        counts.append(id(self))
        return method(self, batch)

    return counting


def test_a_signature_has_no_tensors():
    signature = AttentionCall.of(Module(), *tensors(), None).signature

    assert signature.dtype == "float32"
    assert hash(signature) == hash(signature)
    assert signature.requirements(Module()).attn_type == "decoder"
    assert signature.requirements(Module(is_causal=False)).attn_type == "encoder_only"


def test_queries_of_another_sequence_are_cross_attention():
    module = Module(is_causal=False)

    signature = AttentionCall.of(module, *tensors(6, keys=3), None).signature

    assert signature.requirements(module).attn_type == "encoder_decoder"
