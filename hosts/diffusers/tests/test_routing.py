"""Which calls of diffusers' own code are on the route of a binding: all, or an error or `Binding.left` has the rest."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError, TensorError
from attnplug_kit.oracle import attend
from tests.evidence_tables import ratios_on_the_device

CALLS = ("scaled_dot_product_attention", "dispatch_attention_fn")
OF_THE_PROCESSOR = "self._attention_backend"
# A function beside the processor that calls it, which passes its backend on.
FUNCTIONS = {"diffusers.models.transformers.transformer_flux2._flux2_kv_causal_attention"}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def backends(function):
    """Return what each attention call in a syntax tree passes as its backend: source, or None for torch's function."""
    aliases = {
        ast.unparse(one.targets[0]): ast.unparse(one.value) for one in ast.walk(function) if isinstance(one, ast.Assign)
    }
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in CALLS:
            given = {one.arg: ast.unparse(one.value) for one in call.keywords}
            backend = given.get("backend", "None") if name == CALLS[1] else None
            yield aliases.get(backend, backend)


def attention_code(package):
    """Yield (module, class or None, function, backends) of every function of diffusers' models that attends."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if found.name.endswith(("attention_dispatch", "_flax")):
            continue
        module = importlib.import_module(found.name)
        try:
            source = inspect.getsource(module)
        except OSError:  # an empty file
            continue
        if not any(name in source for name in CALLS):
            continue
        for node in ast.parse(source).body:
            functions = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
            owner = getattr(module, node.name) if isinstance(node, ast.ClassDef) else None
            for function in functions:
                if isinstance(function, ast.FunctionDef) and (passed := list(backends(function))):
                    yield module, owner, function.name, passed


@pytest.mark.slow
def test_every_call_of_the_library_is_on_the_route(diffusers) -> None:
    from attnplug_diffusers.rerouting import direct_methods, dispatches  # noqa: PLC0415 - imports diffusers

    by_name, copied, functions = [], [], set()
    for module, owner, name, passed in attention_code(importlib.import_module("diffusers.models")):
        if owner is None:
            functions.add(f"{module.__name__}.{name}")
        elif set(passed) == {OF_THE_PROCESSOR}:
            assert dispatches(owner), owner
            by_name.append(owner)
        else:
            assert name in direct_methods(owner), (owner, name, passed)
            copied.append(owner)

    assert functions == FUNCTIONS
    assert len(by_name) > 50
    assert len(copied) > 30


def segments_of_qwen():
    """Return an attention with a prefill of segments, whose calls name no backend, and its inputs."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Attention  # noqa: PLC0415

    return QwenImage21Attention(32, 2, 16), (torch.randn(2, 12, 32),), {"segments": [(0, 4, True), (4, 9, False)]}, 3


def decode_of_qwen():
    """Return the same without segments: its call names the backend of the processor."""
    attention, inputs, _, _ = segments_of_qwen()
    return attention, inputs, {}, 1


def audio():
    """Return an attention whose code names the native backend."""
    from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioAttnBlock1D  # noqa: PLC0415

    return MMAudioAttnBlock1D(16), (torch.randn(2, 16, 9),), {}, 1


@pytest.mark.parametrize("make", [segments_of_qwen, decode_of_qwen, audio])
def test_calls_that_name_another_backend_run_on_the_bound_one(make, diffusers, bind, runs) -> None:
    module, inputs, arguments, calls = make()
    call = module.forward if make is audio else lambda *given, **more: module.processor(module, *given, **more)

    wanted = call(*inputs, **arguments)
    assert not runs
    with bind(module) as binding:
        found = call(*inputs, **arguments)

    assert len(runs) == calls
    assert binding.modules == ("",)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def sparse():
    """Return an attention whose code names flex, for a mask of blocks, and its arguments."""
    from diffusers.models.transformers.transformer_kandinsky6_sr import Kandinsky6SRAttention  # noqa: PLC0415

    rotary = torch.eye(2).expand(1, 128, 1, 8, 2, 2).clone()
    blocks = torch.ones(2, 2, dtype=torch.bool)
    return Kandinsky6SRAttention(32, 16), (torch.randn(1, 128, 32), rotary, {"sta_mask": blocks, "threshold": 0.9})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mask_of_blocks_is_refused_or_runs_where_it_is_made_for(diffusers, bind, runs) -> None:
    module, inputs = sparse()
    wanted = module(*inputs)

    with bind(module), pytest.raises(NotNegotiatedError, match="a mask of type BlockMask") as caught:
        module(*inputs)
    assert "native_fallback=True" in caught.value.fix
    with bind(module, native_fallback=True) as binding:
        found = module(*inputs)

    assert not runs
    assert "a mask of type BlockMask" in binding.native
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_mask_that_is_no_tensor_is_refused_by_name(fallback, dispatch) -> None:
    from attnplug_diffusers.backend import attention_for  # noqa: PLC0415 - imports diffusers

    member, rows = attention_for(None, None, native_fallback=fallback).member, torch.randn(1, 4, 2, 8)

    with pytest.raises(NotNegotiatedError, match="a mask of type list"):
        dispatch.dispatch_attention_fn(rows, rows, rows, [[True]], backend=member)


class Holder(nn.Module):
    """An attention module."""

    def __init__(self, processor) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, rows):
        return self.processor(self, rows)


def test_a_class_for_one_backend_of_the_library_is_left(dispatch, bind, runs) -> None:
    from diffusers.models.transformers.transformer_anyflow_far import AnyFlowCausalAttnProcessor  # noqa: PLC0415
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor  # noqa: PLC0415

    own = AnyFlowCausalAttnProcessor()
    model = nn.Sequential(Holder(FluxAttnProcessor()), Holder(own))

    with bind(model) as binding:
        assert model[1].processor is own

    assert (binding.modules, binding.left) == (("0",), ("1",))
    assert own._attention_backend == "flex"


class Direct(nn.Module):
    """A module that calls torch's function."""

    def forward(self, *given, **more):
        return nn.functional.scaled_dot_product_attention(*given, **more)


DIRECT = {
    "self": ((2, 4, 9, 16), (2, 4, 9, 16), {}),
    "cross": ((2, 4, 9, 16), (2, 4, 5, 16), {}),
    "causal": ((2, 4, 9, 16), (2, 4, 9, 16), {"is_causal": True}),
    "causal with more keys": ((2, 4, 5, 16), (2, 4, 9, 16), {"is_causal": True}),
    "scale": ((2, 4, 9, 16), (2, 4, 5, 16), {"scale": 0.7}),
    "grouped heads": ((2, 4, 9, 16), (2, 2, 5, 16), {"enable_gqa": True}),
    "by key": ((2, 4, 9, 16), (2, 4, 5, 16), {"attn_mask": torch.rand(2, 1, 1, 5) > 0.3}),
    "boolean": ((2, 4, 9, 16), (2, 4, 5, 16), {"attn_mask": torch.rand(2, 1, 9, 5) > 0.3}),
    "boolean of each head": ((2, 4, 9, 16), (2, 4, 5, 16), {"attn_mask": torch.rand(2, 4, 9, 5) > 0.3}),
    "added": ((2, 4, 9, 16), (2, 4, 5, 16), {"attn_mask": torch.randn(4, 9, 5), "scale": 0.7}),
}


@pytest.mark.parametrize(("queries", "keys", "arguments"), DIRECT.values(), ids=DIRECT)
@pytest.mark.parametrize("fallback", [False, True])
def test_direct_calls_have_the_results_of_the_oracle(queries, keys, arguments, fallback, bind, runs) -> None:
    model, inputs = Direct(), [torch.randn(shape) for shape in (queries, keys, keys)]

    with bind(model, native_fallback=fallback):
        found = model(*inputs, **arguments)

    assert len(runs) == 1
    mask, causal = arguments.get("attn_mask"), arguments.get("is_causal", False)
    if mask is not None:
        mask = mask.expand(queries[0], queries[1], queries[2], keys[2])
    if causal:  # the oracle has the last query at the last key
        inputs[1:] = [one[:, :, : queries[2]] for one in inputs[1:]]
    for one in range(queries[0]):
        boolean = mask is not None and mask.dtype == torch.bool
        bias = None
        if mask is not None:
            bias = torch.zeros(mask[one].shape).masked_fill(~mask[one], -1e30) if boolean else mask[one]
        wanted = attend(
            *(each[one].transpose(0, 1).double() for each in inputs),
            scale=arguments.get("scale", 0.25), causal=causal, attn_bias=bias,
        ).output.view(queries[2], queries[1], -1)  # fmt: skip
        if boolean:
            wanted = wanted * mask[one].any(-1).T.unsqueeze(-1)
        torch.testing.assert_close(found[one].transpose(0, 1).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "backend", "arguments", "error", "problem"),
    [
        ((2, 4, 9, 16), None, {"dropout_p": 0.2}, NotNegotiatedError, "dropout_p=0.2"),
        ((2, 2, 9, 16), None, {}, TensorError, "without enable_gqa"),
        ((2, 4, 9, 16), "torch/flex", {}, NoBackendError, "torch/flex"),
        ((2, 4, 9, 16), None, {"attn_mask": torch.ones(9, 9).double()}, NotNegotiatedError, "an added mask of"),
    ],
)
def test_direct_calls_that_nothing_serves_are_errors(keys, backend, arguments, error, problem, bind) -> None:
    model = Direct()

    with bind(model, backend), pytest.raises(error, match=problem):
        model(torch.randn(2, 4, 9, 16), torch.randn(keys), torch.randn(keys), **arguments)


def test_a_direct_call_with_dropout_runs_natively_where_permitted(bind, runs) -> None:
    model, rows = Direct(), torch.randn(2, 4, 9, 16)

    with bind(model, native_fallback=True) as binding:
        torch.manual_seed(0)
        found = model(rows, rows, rows, dropout_p=0.5)
    torch.manual_seed(0)

    assert not runs
    assert "dropout_p=0.5" in binding.native
    torch.testing.assert_close(found, model(rows, rows, rows, dropout_p=0.5), rtol=0, atol=0)


# --- what was measured to be faster natively ---


@pytest.fixture
def fallback(diffusers, monkeypatch):
    """Return a function that decides calls of (queries, keys) on a GPU that need not be here."""
    from attnplug_diffusers import fallback as module  # noqa: PLC0415 - imports torch

    def decide(chosen, queries, keys, *, capability="9.0", backend=None, serves_rest=False, **call):
        device = attnplug.Device("cuda", compute_capability=capability)
        monkeypatch.setattr(module, "device_of", lambda _: device)
        monkeypatch.setattr(module, "shared_backend", lambda *_, **__: SimpleNamespace(id=chosen))
        query, key = (described((1, tokens, 12, 128), **call) for tokens in (queries, keys))
        decided = module.Fallback(backend, None, serves_rest=serves_rest)
        return decided.reason(
            query, key, key, None, dropout_p=0.0, is_causal=False, tokens_first=True, by_key=False
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return decide


def described(shape, *, is_cuda=True, requires_grad=False):
    """Return what of a tensor a decision reads."""
    device = torch.device("cuda" if is_cuda else "cpu")
    return SimpleNamespace(
        dtype=torch.bfloat16, shape=shape, ndim=4, is_cuda=is_cuda, device=device, requires_grad=requires_grad
    )  # fmt: skip


FA3, FA4 = "flash_attn/fa3_vllm", "flash_attn/fa4"


@pytest.mark.parametrize("serves_rest", [False, True])
@pytest.mark.parametrize(
    ("chosen", "queries", "keys", "row"),
    [
        (FA3, 32760, 512, "Wan 1.3B, 480p, 81 frames: cross"),
        (FA3, 1536, 1536, "Flux, 512 px: joint"),
        (FA3, 2, 2, "Wan 1.3B, 480p, 81 frames: cross"),
        (FA3, 1, 1, "one token"),
        (FA4, 32760, 512, "Wan 1.3B, 480p, 81 frames: cross"),
        (FA4, 1536, 1536, ""),
        (FA3, 4608, 4608, ""),
        ("flash_attn/fa2", 32760, 512, ""),
    ],
)
def test_short_sequences_are_native_where_that_was_measured_faster(
    chosen, queries, keys, row, serves_rest, fallback
) -> None:
    reason = fallback(chosen, queries, keys, serves_rest=serves_rest)

    assert row in reason
    assert bool(row) == ("diffusers-h200.md" in reason)


def test_what_is_named_or_was_not_measured_runs_on_its_backend(fallback) -> None:
    assert not fallback(FA3, 1536, 1536, capability="10.0")
    assert not fallback(FA3, 1536, 1536, backend="flash_attn")
    assert not fallback(FA3, 1536, 1536, backend="auto")
    assert not fallback(FA3, 1536, 1536, is_cuda=False)
    with torch.enable_grad():
        assert not fallback(FA3, 1536, 1536, requires_grad=True)
    with attnplug.using(backend="flash_attn/fa3_vllm"):
        assert not fallback(FA3, 1536, 1536)
    assert fallback(FA3, 1536, 1536)


def test_a_graph_of_any_length_finds_the_rows(diffusers) -> None:
    """The route is part of a graph, which has no break."""
    from attnplug_diffusers.measured import FASTER_NATIVELY  # noqa: PLC0415 - see above

    found = torch.compile(
        lambda one: one * FASTER_NATIVELY.keys_of(one.shape[0]), fullgraph=True, dynamic=True, backend="eager"
    )

    assert [int(found(torch.ones(keys))[0]) for keys in (512, 513, 1537)] == [512, 1536, 0]


def test_every_slower_row_of_the_evidence_page_is_native(diffusers) -> None:
    """Rows of calls: those of models have other layers besides. Errors of 1 % in a ratio are within 0.97."""
    from attnplug_diffusers import measured  # noqa: PLC0415 - see above

    page = Path(__file__).parents[3] / measured.FASTER_NATIVELY.source
    slower = {
        (name, row): ratio
        for name in (FA3, FA4)
        for row, ratio in ratios_on_the_device(page, name).items()
        if ratio < 0.97 and not row.endswith("of few layers")
    }

    assert {(one.backend, one.row): one.ratio for one in measured.FASTER_NATIVELY.rows} == slower
