"""torch's registry of flash attention on the dense op: `scaled_dot_product_attention` and `varlen_attn`."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
from attnplug.errors import NoBackendError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_kit.oracle import attend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(nn.attention, "activate_flash_attention_impl"),
        reason="this torch has no registry of flash attention",
    ),
    pytest.mark.filterwarnings("ignore:.*[Oo]verrid.*:UserWarning"),  # replacing an operator is what is tested
]


@pytest.fixture
def active(monkeypatch):
    """Activate the adapter; return the runs of the built-in backend."""
    name, runs, run = import_module("tests.hosts.torch_registry").NAME, [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *arguments: (runs.append(self), run(self, *arguments))[1])
    nn.attention.activate_flash_attention_impl(name)
    yield runs
    if nn.attention.current_flash_attention_impl() is not None:
        nn.attention.restore_flash_attention_impl()


def by_oracle(query, key, value, **features):
    """Return the oracle's output of ``(batch, heads, tokens, size)``."""
    scale = features.pop("scale", query.shape[-1] ** -0.5)
    sequences = zip(*(one.detach().transpose(1, 2).double() for one in (query, key, value)), strict=True)
    return torch.stack([attend(*one, scale=scale, **features).output for one in sequences]).transpose(1, 2)


CALLS = {
    "plain": ((2, 4, 33, 64), (2, 4, 20, 64), {}),
    "causal": ((2, 4, 33, 64), (2, 4, 33, 64), {"is_causal": True}),
    "scale": ((2, 4, 33, 64), (2, 4, 33, 64), {"scale": 0.3}),
}


@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
def test_torchs_function_runs_through_attnplug(queries, keys, arguments, active) -> None:
    query, key, value = torch.randn(queries), torch.randn(keys), torch.randn(keys)
    features = {"causal": arguments.get("is_causal", False)}
    features |= {name: one for name, one in arguments.items() if name == "scale"}

    found = sdpa(query, key, value, **arguments)

    assert len(active) == 1
    torch.testing.assert_close(found.double(), by_oracle(query, key, value, **features), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [torch.rand(2, 1, 33, 20) > 0.3, torch.randn(1, 4, 33, 20)], ids=["boolean", "additive"]
)
def test_masks_run_through_attnplug(mask, active) -> None:
    query, key, value = torch.randn(2, 4, 33, 64), torch.randn(2, 4, 20, 64), torch.randn(2, 4, 20, 64)

    found = sdpa(query, key, value, attn_mask=mask)
    count = len(active)
    nn.attention.restore_flash_attention_impl()

    assert count == 1
    torch.testing.assert_close(found, sdpa(query, key, value, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_causal_queries_begin_with_the_first_key(active) -> None:
    query, key, value = torch.randn(2, 4, 5, 64), torch.randn(2, 4, 9, 64), torch.randn(2, 4, 9, 64)

    found, fewer = sdpa(query, key, value, is_causal=True), sdpa(key, query, query, is_causal=True)
    count = len(active)
    nn.attention.restore_flash_attention_impl()

    assert count == 1  # more queries than keys are left to torch
    torch.testing.assert_close(found, sdpa(query, key, value, is_causal=True))
    torch.testing.assert_close(fewer, sdpa(key, query, query, is_causal=True))


def test_the_backward_is_torchs_own(active) -> None:
    given = [torch.randn(2, 4, 33, 64, requires_grad=True) for _ in range(3)]

    sdpa(*given, is_causal=True).square().sum().backward()
    found = [one.grad for one in given]
    nn.attention.restore_flash_attention_impl()
    for one in given:
        one.grad = None
    sdpa(*given, is_causal=True).square().sum().backward()

    assert len(active) == 1
    for grad, one in zip(found, given, strict=True):
        torch.testing.assert_close(grad, one.grad, rtol=1e-4, atol=1e-4)


def test_the_scope_is_followed(active) -> None:
    query = torch.randn(1, 2, 8, 64)

    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        sdpa(query, query, query)
    with attnplug.using(backend="torch"):
        sdpa(query, query, query)

    assert len(active) == 1


def test_what_is_restored_is_torchs_own(active) -> None:
    query = torch.randn(1, 2, 8, 64)
    sdpa(query, query, query)

    nn.attention.restore_flash_attention_impl()
    sdpa(query, query, query)

    assert nn.attention.current_flash_attention_impl() is None
    assert len(active) == 1


@pytest.mark.parametrize(
    ("window", "features"),
    [
        ((-1, -1), {"causal": False}),
        ((-1, 0), {"causal": True}),
        ((3, 0), {"causal": True, "window": (3, 0)}),
    ],
)
def test_packed_sequences_run_through_attnplug(window, features, active) -> None:
    query, key, value = torch.randn(12, 4, 64), torch.randn(20, 4, 64), torch.randn(20, 4, 64)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 9, 20], dtype=torch.int32)

    found = import_module("torch.nn.attention.varlen").varlen_attn(
        query, key, value, *starts, 7, 11, window_size=window
    )
    parts = zip(pairwise(starts[0].tolist()), pairwise(starts[1].tolist()), strict=True)
    wanted = [attend(query[a:b], key[c:d], value[c:d], scale=64**-0.5, **features).output for (a, b), (c, d) in parts]

    assert len(active) == 1
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=1e-5, atol=1e-5)


def test_packed_sequences_end_with_a_restoration(active) -> None:
    query, starts = torch.randn(12, 4, 64), torch.tensor([0, 5, 12], dtype=torch.int32)
    nn.attention.restore_flash_attention_impl()

    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        import_module("torch.nn.attention.varlen").varlen_attn(query, query, query, starts, starts, 7, 7)
