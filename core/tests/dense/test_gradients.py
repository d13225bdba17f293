"""Gradients of dense calls against those of the same attention in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from attnplug import attention, attention_varlen
from attnplug.dense import gradient
from attnplug.torch_backend.impl import TorchImpl
from core.tests.dense.counting import assert_costs_at_most

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 3},
    "causal window": {"sliding_window": 3, "causal": True},
    "soft cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True, "causal": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "bias and more": {"bias": True, "sinks": True, "causal": True, "logits_soft_cap": 2.0},
    "all": {"sinks": True, "mask": True, "causal": True, "sliding_window": 4, "logits_soft_cap": 2.0},
}


def reference(
    query, key, value, sinks, *, mask, slopes, bias=None, causal=False, scale=None, sliding_window=None, cap=None
):
    """Attend as the definition says, in the dtype of the tensors: output and LSE, sinks included."""
    rows, keys, ratio = query.shape[1], key.shape[1], query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(ratio, 2), value.repeat_interleave(ratio, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores if bias is None else scores + bias.to(scores)
    relative = torch.arange(keys) - (torch.arange(rows) + keys - rows)[:, None]
    if slopes is not None:
        scores = scores - slopes.to(scores)[:, None, None] * relative.abs()
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if causal:
        hidden |= relative > 0
    if sliding_window is not None:
        hidden |= relative.abs() >= sliding_window
    hidden = hidden if mask is None else hidden | ~mask
    scores = scores.masked_fill(hidden, -torch.inf)
    logits = (
        scores if sinks is None else torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    )
    lse = logits.logsumexp(-1)
    weights = torch.where(hidden, 0.0, (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp())
    return torch.einsum("bhqk,bkhd->bqhd", weights, value), lse.transpose(1, 2)


def leaves(*shapes):
    """Return the same random tensors in float32 and in float64, all of which require gradients."""
    made = [torch.randn(shape) for shape in shapes]
    return [one.clone().requires_grad_() for one in made], [one.double().requires_grad_() for one in made]


def assert_gradients(ours, theirs, tolerance=2e-5):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


def arguments(case, rows, keys):
    """Return the arguments of `attention` besides sinks, and those of the reference."""
    mask = torch.rand(2, 1, rows, keys) > 0.4 if "mask" in case else None
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0]) if "alibi" in case else None
    bias = torch.randn(1, 4, rows, keys) if "bias" in case else None
    plain = {name: value for name, value in case.items() if name not in {"sinks", "mask", "bias", "alibi"}}
    cap = plain.pop("logits_soft_cap", None)
    ours = {**plain, "logits_soft_cap": cap, "attn_mask": mask if bias is None else bias, "alibi_slopes": slopes}
    return ours, {**plain, "cap": cap, "mask": mask, "bias": bias, "slopes": slopes}


@pytest.mark.parametrize("keys", [6, 9])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_float64(case, keys) -> None:
    if keys > 6 and ("causal" not in case and ("sliding_window" in case)):
        keys = 6  # a window over an encoder is undefined
    ours, theirs = leaves((2, 6, 4, 8), (2, keys, 2, 8), (2, keys, 2, 12), (4,))
    mine, other = arguments(case, 6, keys)
    grad, grad_lse = torch.randn(2, 6, 4, 12), torch.randn(2, 6, 4)
    has_sinks = "sinks" in case

    output, lse = attention(*ours[:3], sinks=ours[3] if has_sinks else None, return_lse=True, **mine)
    finite = torch.isfinite(lse)  # a row that attends to nothing
    torch.autograd.backward([output, lse.where(finite, 0.0)], [grad, grad_lse * finite])
    wanted, wanted_lse = reference(*theirs[:3], theirs[3] if has_sinks else None, **other)
    torch.autograd.backward([wanted, wanted_lse.where(finite, 0.0)], [grad.double(), grad_lse.double() * finite])

    torch.testing.assert_close(output.double(), wanted, rtol=2e-5, atol=2e-5)
    assert_gradients(ours, theirs)


@pytest.mark.parametrize("case", [CASES["causal"], CASES["sinks"], CASES["all"]], ids=["causal", "sinks", "all"])
def test_gradients_of_packed_calls_are_those_of_float64(case) -> None:
    lengths = [3, 0, 6, 1]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ours, theirs = leaves((10, 4, 8), (10, 2, 8), (10, 2, 8), (4,))
    masks = [torch.rand(one, one) > 0.4 for one in lengths]
    plain = {name: value for name, value in case.items() if name not in {"sinks", "mask", "logits_soft_cap"}}
    cap, has_sinks = case.get("logits_soft_cap"), "sinks" in case
    mask = torch.cat([one.flatten() for one in masks]) if "mask" in case else None
    grad = torch.randn(10, 4, 8)

    output = attention_varlen(
        *ours[:3], starts, sinks=ours[3] if has_sinks else None, logits_soft_cap=cap, custom_mask=mask, **plain
    )
    output.backward(grad)
    parts = zip(*(one.split(lengths) for one in theirs[:3]), masks, strict=True)
    wanted = [
        reference(
            q[None], k[None], v[None], theirs[3] if has_sinks else None, cap=cap, slopes=None,
            mask=one if mask is not None else None, **plain,
        )[0][0]
        for q, k, v, one in parts
    ]  # fmt: skip
    torch.cat(wanted).backward(grad.double())

    assert_gradients(ours, theirs)


def test_scores_are_held_in_parts(monkeypatch) -> None:
    ours, theirs = leaves((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    monkeypatch.setattr(gradient, "_SCORES_AT_ONCE", 2 * 4 * 9 * 2)  # two rows

    attention(*ours, causal=True, sliding_window=4).square().sum().backward()
    reference(*theirs, None, mask=None, slopes=None, causal=True, sliding_window=4)[0].square().sum().backward()

    assert_gradients(ours, theirs)


def test_the_forward_of_training_is_the_backends(monkeypatch) -> None:
    runs, run = [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *arguments: (runs.append(self), run(self, *arguments))[1])
    query = torch.randn(1, 5, 2, 8, requires_grad=True)

    attention(query, query, query).sum().backward()

    assert len(runs) == 1
    assert runs[0].agreement.requirements.return_lse
    assert query.grad is not None


def test_a_repeated_call_costs_the_host_little() -> None:
    """Without the backward: as an op of torch's library the call would take 98 Python calls."""
    inputs = [torch.randn(1, 5, 4, 8, requires_grad=True) for _ in range(3)]

    assert_costs_at_most(lambda: attention(*inputs), 58, 24)


def test_only_what_requires_a_gradient_gets_one() -> None:
    ours, theirs = leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    for one in (*ours[1:], *theirs[1:]):
        one.requires_grad_(requires_grad=False)

    attention(*ours).square().sum().backward()
    reference(*theirs, None, mask=None, slopes=None)[0].square().sum().backward()

    assert_gradients(ours, theirs)


def test_halves_have_gradients_of_their_dtype() -> None:
    made = [torch.randn(1, 16, 2, 32) for _ in range(3)]
    ours = [one.bfloat16().requires_grad_() for one in made]
    theirs = [one.detach().double().requires_grad_() for one in ours]

    attention(*ours, causal=True).float().square().sum().backward()
    reference(*theirs, None, mask=None, slopes=None, causal=True)[0].square().sum().backward()

    assert all(one.grad.dtype == torch.bfloat16 for one in ours)
    assert_gradients(ours, theirs, tolerance=6e-2)


def test_no_gradient_is_recorded_without_grad_mode() -> None:
    query = torch.randn(1, 5, 2, 8, requires_grad=True)

    with torch.no_grad():
        output = attention(query, query, query)

    assert not output.requires_grad


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_gradients_are_those_of_a_double_computation(is_packed) -> None:
    """`attention` is differentiated again through the formula of its gradients, without a warning."""
    ours, theirs = leaves((1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    starts = torch.tensor([0, 5], dtype=torch.int32)

    def attend_once(query, key, value):
        if is_packed:
            rows = (query[0], key[0], value[0])
            return attention_varlen(*rows, starts, causal=True, logits_soft_cap=2.0).unsqueeze(0)
        return attention(query, key, value, causal=True, logits_soft_cap=2.0)

    def twice(output, inputs):
        grads = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in grads), inputs)

    found = twice(attend_once(*ours), ours)
    wanted = twice(reference(*theirs, None, mask=None, slopes=None, causal=True, cap=2.0)[0], theirs)

    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)
