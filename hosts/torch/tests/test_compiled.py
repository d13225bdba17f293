"""Compiled graphs call the operators, and with them attnplug."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug_torch
from hosts.torch.tests.reference import counted, gradients, native, natively, served, tensors


def causal(query, key, value):
    return sdpa(query, key, value, is_causal=True) * 2


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_graph_runs_on_a_backend(backend, active) -> None:
    compiled = torch.compile(causal, backend=backend, fullgraph=True)
    for heads_first in (True, False):
        inputs = [torch.randn(2, 4, 9, 32) if heads_first else torch.randn(2, 9, 4, 32).transpose(1, 2) for _ in "qkv"]
        attnplug_torch.reset()

        found = compiled(*inputs)

        assert counted() == {("torch/sdpa", ""): 1}
        with natively():
            torch.testing.assert_close(found, causal(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_graph_has_gradients(backend, active) -> None:
    inputs = tensors((2, 4, 9, 32), (2, 4, 9, 32))
    compiled = torch.compile(causal, backend=backend, fullgraph=True)

    found = gradients(compiled, inputs)

    assert served() == 1
    with natively():
        expected = gradients(causal, inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_graph_follows_activation_and_restoration(registry) -> None:
    inputs = tensors((2, 4, 9, 32), (2, 4, 9, 32))
    compiled = torch.compile(causal, backend="aot_eager", fullgraph=True)

    results = [compiled(*inputs)]
    registry.activate_flash_attention_impl("attnplug")
    results.append(compiled(*inputs))
    registry.restore_flash_attention_impl()
    results.append(compiled(*inputs))

    assert served() == 1
    for one in results:
        torch.testing.assert_close(one, native(*inputs, is_causal=True) * 2, rtol=1e-5, atol=1e-5)


def test_shapes_may_be_dynamic(active) -> None:
    compiled = torch.compile(causal, backend="aot_eager", fullgraph=True, dynamic=True)

    for tokens in (9, 12, 31):
        inputs = tensors((2, 4, tokens, 32), (2, 4, tokens, 32))
        torch.testing.assert_close(compiled(*inputs), native(*inputs, is_causal=True) * 2, rtol=1e-5, atol=1e-5)

    assert served() == 3


def test_dropout_is_compiled_as_torchs(active) -> None:
    compiled = torch.compile(lambda one: sdpa(one, one, one, dropout_p=1.0), backend="aot_eager", fullgraph=True)

    compiled(torch.randn(1, 2, 9, 32))

    assert {backend for backend, _ in counted()} == {None}


def test_packed_sequences_compile_with_their_gradients(active) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    rows = [torch.randn(12, 4, 32) for _ in range(3)]

    def call(query, key, value):
        return varlen.varlen_attn(query, key, value, starts, starts, 7, 7, window_size=(-1, 0)) * 2

    found = gradients(torch.compile(call, backend="aot_eager", fullgraph=True), rows)

    assert served() == 2
    for one, other in zip(found, gradients(call, rows), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_an_exported_program_runs_on_a_backend(active) -> None:
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return causal(query, key, value)

    inputs = tensors((2, 4, 9, 32), (2, 4, 9, 32))
    program = torch.export.export(Model(), tuple(inputs)).module()
    attnplug_torch.reset()

    found = program(*inputs)

    assert served() == 1
    torch.testing.assert_close(found, native(*inputs, is_causal=True) * 2, rtol=1e-5, atol=1e-5)
