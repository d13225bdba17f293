"""What the tests compare with: torch's own operators, and the float64 oracle of the kit."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch.nn import attention as registry
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug_torch
from attnplug_kit.oracle import attend

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@contextmanager
def natively():
    """Let torch's own operators be in force for a while."""
    name = registry.current_flash_attention_impl()
    if name is not None:
        registry.restore_flash_attention_impl()
    try:
        yield
    finally:
        if name is not None:
            registry.activate_flash_attention_impl(name)


def native(*args, **kwargs):
    """Return the result of torch's own `scaled_dot_product_attention`."""
    with natively():
        return sdpa(*args, **kwargs)


def natively_in_double(*args, **kwargs):
    """Return the result of torch's own function, computed in float64."""
    args = [one.double() for one in args]
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        kwargs["attn_mask"] = mask.double()
    return native(*args, **kwargs)


def tensors(queries, keys, dtype=torch.float32, device="cpu", **more):
    """Return query, key and value of these shapes."""
    query, key, value = (torch.randn(shape, device=device).to(dtype) for shape in (queries, keys, keys))
    return [one.requires_grad_(**more) if more else one for one in (query, key, value)]


def varlen_attn(*args, **kwargs):
    """Call torch's `varlen_attn`, or skip the test where that of this torch lacks an argument."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
    known = inspect.signature(varlen.varlen_attn).parameters
    if "enable_gqa" not in known:  # grouped heads are taken as they are
        kwargs.pop("enable_gqa", None)
    given = {name: value for name, value in kwargs.items() if name in known or value is not None}
    if unknown := sorted(given.keys() - known.keys()):
        pytest.skip(f"the varlen_attn of torch {torch.__version__} has no {unknown[0]}")
    return varlen.varlen_attn(*args, **given)


def gradients(call, inputs, **kwargs):
    """Return the gradients of the sum of squares of a call's output."""
    copies = [one.detach().clone(memory_format=torch.preserve_format).requires_grad_() for one in inputs]
    return torch.autograd.grad(call(*copies, **kwargs).float().square().sum(), copies)


def counted():
    """Return (backend, reason) -> calls, of all operators."""
    found = {}
    for route in attnplug_torch.report():
        key = (route.backend, route.reason)
        found[key] = found.get(key, 0) + route.calls
    return found


def served():
    """Return how many calls a backend has served."""
    return sum(calls for (backend, _), calls in counted().items() if backend is not None)


def by_sequence(query, key, value, starts, key_starts, used=None, **features):
    """Return the oracle's output and LSE of packed sequences, one after another."""
    features = {"scale": query.shape[-1] ** -0.5, **features}
    spans = zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    results = []
    for index, ((a, b), (c, d)) in enumerate(spans):
        end = d if used is None else c + int(used[index])
        parts = (query[a:b], key[c:end], value[c:end])
        results.append(attend(*(one.detach().double().cpu() for one in parts), **features))
    return torch.cat([one.output for one in results]), torch.cat([one.lse for one in results])
