"""`attention` and `attention_varlen` against the oracle, and what they keep between calls."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug import attention, attention_varlen
from attnplug.contract import Attention, LoadedBackend
from attnplug.contract.guards.call import ForwardGuard
from attnplug.dense import attend_like_sdpa, backends, calls, clear_decisions
from attnplug.errors import (
    LayerError,
    NoBackendError,
    NotNegotiatedError,
    PluginContractError,
    RequirementsError,
    SettingsError,
    TensorError,
)
from attnplug.torch_backend.impl import TorchImpl
from attnplug_kit.oracle import attend
from core.tests.dense.counting import assert_costs_at_most
from tests.threads import together

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _afresh():
    clear_decisions()


@pytest.fixture
def counted(monkeypatch):
    """Count the builds and the runs of the built-in backend."""
    counts = {"build": 0, "run": 0}
    build, run = backends.BatchPlanner.build, TorchImpl.run

    def counted_build(self, *arguments):
        counts["build"] += 1
        return build(self, *arguments)

    def counted_run(self, *arguments):
        counts["run"] += 1
        return run(self, *arguments)

    monkeypatch.setattr(backends.BatchPlanner, "build", counted_build)
    monkeypatch.setattr(TorchImpl, "run", counted_run)
    return counts


def tensors(batch=2, queries=7, keys=7, heads=4, kv_heads=2, size=16, size_v=None, dtype=torch.float32):
    return (
        torch.randn(batch, queries, heads, size, dtype=dtype),
        torch.randn(batch, keys, kv_heads, size, dtype=dtype),
        torch.randn(batch, keys, kv_heads, size_v or size, dtype=dtype),
    )


def expected(
    query, key, value, *, causal=False, scale=None, sliding_window=None, mask=None, bias=None, alibi_slopes=None, **rest
):
    """Return the oracle's output and LSE of each sequence."""
    left = -1 if sliding_window is None else sliding_window - 1
    window = (left, 0 if causal and left >= 0 else left)
    results = [
        attend(
            q.double(),
            k.double(),
            v.double(),
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            causal=causal,
            window=window,
            custom_mask=None if mask is None else mask[one],
            attn_bias=None if bias is None else bias[one],
            alibi="linear" if alibi_slopes is not None else None,
            alibi_slopes=alibi_slopes,
            **rest,
        )
        for one, (q, k, v) in enumerate(zip(query, key, value, strict=True))
    ]
    return [result.output for result in results], [result.lse_with_sink for result in results]


def assert_results(found, wanted, dtype=torch.float32):
    for result, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(result.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 3},
    "causal window": {"sliding_window": 3, "causal": True},
    "soft cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]), "causal": True},
    "all": {
        "causal": True,
        "sliding_window": 4,
        "logits_soft_cap": 3.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "scale": 0.2,
    },
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_match_the_oracle(features, dtype) -> None:
    query, key, value = tensors(dtype=dtype)

    output, lse = attention(query, key, value, return_lse=True, **features)
    outputs, lses = expected(query, key, value, **features)

    assert output.shape == query.shape
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    assert_results(output, outputs, dtype)
    assert_results(lse, lses, dtype)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_packed_features_match_the_oracle(features) -> None:
    lengths = [3, 1, 0, 6]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    query, key, value = (one[0] for one in tensors(1, sum(lengths), sum(lengths)))
    split = [one.split(lengths) for one in (query, key, value)]

    output, lse = attention_varlen(query, key, value, starts, return_lse=True, **features)
    outputs, lses = expected(*split, **features)

    assert_results(output.split(lengths), outputs)
    assert_results(lse.split(lengths), lses)


@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 9),
    more=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    size_v=st.sampled_from([8, 24]),
    causal=st.booleans(),
)
def test_any_shape_matches_the_oracle(batch, queries, more, heads, size_v, causal) -> None:
    query, key, value = tensors(batch, queries, queries + more, *heads, 8, size_v)

    output = attention(query, key, value, causal=causal)

    assert_results(output, expected(query, key, value, causal=causal)[0])


@given(lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4), causal=st.booleans())
def test_any_lengths_match_the_oracle(lengths, causal) -> None:
    queries, keys = [one for one, _ in lengths], [one + other for one, other in lengths]
    query, key, value = (one[0] for one in tensors(1, max(sum(queries), sum(keys)), max(sum(queries), sum(keys))))
    query, key, value = query[: sum(queries)], key[: sum(keys)], value[: sum(keys)]
    starts = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (queries, keys)]

    output = attention_varlen(query, key, value, *starts, causal=causal)
    outputs, _ = expected(query.split(queries), key.split(keys), value.split(keys), causal=causal)

    assert_results(output.split(queries), outputs)


def test_more_keys_than_queries_are_cross_attention() -> None:
    query, key, value = tensors(queries=3, keys=8)

    assert_results(attention(query, key, value), expected(query, key, value)[0])


def test_causal_queries_are_the_last_ones() -> None:
    query, key, value = tensors(queries=3, keys=8, kv_heads=4)
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in (query, key[:, :3], value[:, :3])), is_causal=True
    ).transpose(1, 2)

    assert_results(attention(query, key, value, causal=True), expected(query, key, value, causal=True)[0])
    torch.testing.assert_close(attention(query, key[:, :3], value[:, :3], causal=True), by_torch)


@pytest.mark.parametrize("shape", [(5, 9), (2, 1, 9), (1, 1, 9), (2, 1, 5, 9), (2, 1, 1, 9), (1, 1, 5, 9)])
@pytest.mark.parametrize("features", [{}, {"sinks": torch.randn(4)}])
def test_masks_of_any_shape_match_the_oracle(shape, features) -> None:
    query, key, value = tensors(queries=5, keys=9)
    mask = torch.rand(shape) > 0.5
    # The axes of heads and queries were left out of some.
    wide = mask if mask.ndim == 4 else mask[None, None] if mask.ndim == 2 else mask[:, None]
    if mask.ndim == 3:
        mask = mask[:, None]

    output, lse = attention(query, key, value, attn_mask=mask, return_lse=True, **features)
    outputs, lses = expected(query, key, value, mask=wide.expand(2, 1, 5, 9)[:, 0], **features)

    assert_results(output, outputs)
    assert_results(lse, lses)


def test_packed_masks_match_the_oracle() -> None:
    query, key, value = (one[0] for one in tensors(1, 5, 9))
    masks = [torch.rand(2, 4) > 0.3, torch.rand(3, 5) > 0.3]
    starts = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)

    output = attention_varlen(query, key, value, *starts, custom_mask=torch.cat([one.flatten() for one in masks]))
    outputs, _ = expected(query.split([2, 3]), key.split([4, 5]), value.split([4, 5]), mask=masks)

    assert_results(output.split([2, 3]), outputs)


@pytest.mark.parametrize("shape", [(5, 9), (2, 1, 1, 9), (4, 5, 9), (1, 4, 1, 9), (2, 4, 5, 9)])
@pytest.mark.parametrize("features", [{}, {"sinks": torch.randn(4)}, {"logits_soft_cap": 2.0, "causal": True}])
def test_additive_masks_of_any_shape_match_the_oracle(shape, features) -> None:
    query, key, value = tensors(queries=5, keys=9)
    mask = torch.randn(shape)
    wide = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(2, -1, 5, 9)

    output, lse = attention(query, key, value, attn_mask=mask, return_lse=True, **features)
    outputs, lses = expected(query, key, value, bias=wide, **features)

    assert_results(output, outputs)
    assert_results(lse, lses)


def test_an_additive_mask_gets_the_dtype_of_the_call() -> None:
    query, key, value = tensors(dtype=torch.bfloat16)
    mask = torch.randn(7, 7).masked_fill(torch.rand(7, 7) > 0.8, -torch.inf)
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in (query, key, value)), attn_mask=mask.bfloat16(), enable_gqa=True
    )

    found = attention(query, key, value, attn_mask=mask)

    torch.testing.assert_close(found, by_torch.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_packed_additive_masks_match_the_oracle() -> None:
    query, key, value = (one[0] for one in tensors(1, 5, 9))
    biases = [torch.randn(4, 2, 4), torch.randn(4, 3, 5)]
    starts = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)

    output = attention_varlen(query, key, value, *starts, attn_bias=torch.cat([one.flatten(1) for one in biases], 1))
    outputs, _ = expected(query.split([2, 3]), key.split([4, 5]), value.split([4, 5]), bias=biases)

    assert_results(output.split([2, 3]), outputs)


def test_heads_before_tokens_are_taken_as_views() -> None:
    query, key, value = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in tensors())
    last = torch.randn(2, 7, 16, 4).transpose(2, 3)

    assert_results(attention(query, key, value), expected(query, key, value)[0])
    assert_results(attention(last, key, value), expected(last, key, value)[0])


def test_empty_calls_have_empty_results() -> None:
    query, key, value = tensors()
    nothing = torch.zeros(1, dtype=torch.int32)

    assert attention(query[:0], key[:0], value[:0]).shape == (0, 7, 4, 16)
    assert attention(query[:, :0], key, value).shape == (2, 0, 4, 16)
    assert attention_varlen(query[0, :0], key[0, :0], value[0, :0], nothing).shape == (0, 4, 16)
    assert not attention(query, key[:, :0], value[:, :0]).any()


# --- what is kept ---


# What repeats: Python calls and operations. A bound that is exceeded is time that every call of a model pays.
COSTS = {
    "plain": ({}, {}, 26, 12),
    "causal": ({}, {"causal": True}, 26, 12),
    "many queries": ({"queries": 600}, {}, 26, 12),
    "many queries and a mask": ({"queries": 600}, {"attn_mask": torch.ones(600, 7, dtype=torch.bool)}, 40, 17),
    "grouped heads": ({"kv_heads": 2}, {}, 28, 17),
    "mask": ({}, {"attn_mask": torch.ones(7, 7, dtype=torch.bool)}, 40, 17),
    "bias": ({}, {"attn_mask": torch.zeros(7, 7)}, 40, 14),
    "sinks": ({}, {"sinks": torch.zeros(4)}, 34, 21),
    "slopes": ({}, {"causal": True, "alibi_slopes": torch.ones(4)}, 36, 42),
}


@pytest.mark.parametrize(("sizes", "features", "python_calls", "operations"), COSTS.values(), ids=COSTS)
def test_a_repeated_call_costs_the_host_little(sizes, features, python_calls, operations) -> None:
    query, key, value = tensors(1, **{"kv_heads": 4, **sizes})

    assert_costs_at_most(lambda: attention(query, key, value, **features), python_calls, operations)


@pytest.mark.parametrize(("is_added", "operations"), [(False, 36), (True, 28)])
def test_a_mask_of_a_device_is_built_in_few_operations(is_added, operations, monkeypatch) -> None:
    """Each is a launch on a GPU, where the mask of every call is built."""
    query, key, value = tensors(kv_heads=4)
    mask = torch.randn(7, 7) if is_added else torch.rand(7, 7) > 0.5
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: self.shape != (7, 7)))

    assert_costs_at_most(lambda: attention(query, key, value, attn_mask=mask), 160, operations)


@pytest.mark.parametrize("name", [*COSTS, "soft cap"])
@pytest.mark.parametrize("is_first", [True, False])
def test_autocast_changes_nothing(name, is_first) -> None:
    """Neither of a call nor of its gradients: the dtype is that of the tensors, as it was negotiated."""
    sizes, features, *_ = COSTS.get(name, ({}, {"logits_soft_cap": 5.0}))
    inputs = [one.requires_grad_() for one in tensors(**sizes)]

    def results():
        with torch.no_grad():
            alone = attention(*inputs, **features)
        output = attention(*inputs, **features)
        return alone, output, *torch.autograd.grad(output.square().sum(), inputs)

    wanted = [] if is_first else results()
    with torch.autocast("cpu", torch.bfloat16):
        found = results()
    for one, other in zip(found, wanted or results(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_calls_of_one_form_are_repeated_for_this_form_alone(monkeypatch) -> None:
    """
    Strides, dtypes, axes and gradients are part of it; tensors of another class are checked each time. The alignment
    is not: nothing is decided by it, and kernels that depend on it look at the addresses of each call. Some sum in
    another order then.
    """
    checked, check = [], ForwardGuard.check_call
    monkeypatch.setattr(ForwardGuard, "check_call", lambda *given: (checked.append(1), check(*given))[1])
    query, key, value = tensors(kv_heads=4)
    wanted = attention(query, key, value)
    forms = {
        "the same": (query.clone(), key, value),
        "the same, unaligned": [
            torch.cat((one.new_zeros(1), one.flatten()))[1:].view_as(one) for one in (query, key, value)
        ],
        "other strides": (query.transpose(1, 2).contiguous().transpose(1, 2), key, value),
        "another last axis": (query.transpose(2, 3).contiguous().transpose(2, 3), key, value),
        "no strides between batches": (query, key[:1].expand_as(key), value[:1].expand_as(value)),
        "another class": (torch.nn.Parameter(query, requires_grad=False), key, value),
    }
    counts = {}
    for name, inputs in forms.items():
        checked.clear()
        results = [attention(*inputs) for _ in range(3)]
        counts[name] = len(checked)
        assert all(torch.equal(one, results[0]) for one in results)
        if "unaligned" in name:
            torch.testing.assert_close(results[0], wanted)
        else:
            assert torch.equal(results[0], wanted) == ("between" not in name)

    assert counts == {
        name: {"the same": 0, "the same, unaligned": 0, "another class": 3}.get(name, 1) for name in forms
    }


def test_a_mask_that_requires_a_gradient_is_refused_after_a_call_without_gradients() -> None:
    query, key, value = tensors()
    mask = torch.randn(7, 7, requires_grad=True)
    with torch.no_grad():
        attention(query, key, value, attn_mask=mask)
        attention(query, key, value, attn_mask=mask)

    with pytest.raises(NotNegotiatedError, match="a mask that requires a gradient"):
        attention(query, key, value, attn_mask=mask)


def test_calls_of_one_shape_build_once(counted) -> None:
    for _ in range(3):
        query, key, value = tensors()
        assert_results(attention(query, key, value), expected(query, key, value)[0])
    attention(*tensors(queries=8, keys=8))
    attention(*tensors())

    assert counted == {"build": 2, "run": 5}


def test_what_is_kept_is_bounded() -> None:
    for queries in range(1, 100):
        attention(*tensors(queries=queries, keys=queries))
        attention(*tensors(), scale=float(queries))

    assert len(calls._calls) <= calls.MOST_CALLS
    assert len(backends._planners) <= 2 * calls.MOST_CALLS


def test_nothing_of_a_caller_is_kept() -> None:
    query, key, value = tensors(kv_heads=4)
    mask, sinks = torch.rand(7, 7) > 0.2, torch.randn(4)
    starts = torch.tensor([0, 7], dtype=torch.int32)
    attention(query, key, value, attn_mask=mask, sinks=sinks)
    attention(query, key, value)
    attention_varlen(query[0], key[0], value[0], starts)
    refs = [weakref.ref(one) for one in (query, key, value, mask, sinks, starts)]

    del query, key, value, mask, sinks, starts
    gc.collect()

    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("inference", [False, True])
def test_a_changed_mask_is_read_again(inference) -> None:
    with torch.inference_mode(inference):
        query, key, value = tensors()
        mask, sinks = torch.rand(7, 7) > 0.5, torch.randn(4)
        for _ in range(3):
            mask.logical_not_()
            sinks.add_(1)
            output = attention(query, key, value, attn_mask=mask, sinks=sinks)
            outputs, _ = expected(query, key, value, mask=mask.expand(2, 7, 7), sinks=sinks)
            assert_results(output, outputs)


def _through_the_storage(one, new) -> None:
    torch.empty(0, dtype=one.dtype, device=one.device).set_(one.untyped_storage()).copy_(new.flatten())


UNSEEN = {
    "numpy": lambda one, new: np.copyto(one.numpy(), new.numpy()),
    "DLPack": lambda one, new: np.copyto(np.from_dlpack(one), new.numpy()),
    "data": lambda one, new: one.data.copy_(new),
    "other data": lambda one, new: setattr(one, "data", new),
    "shared storage": _through_the_storage,
}


def _replay(one, new) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        one.copy_(new)
    graph.replay()


ON_GPU = {"data": UNSEEN["data"], "shared storage": UNSEEN["shared storage"], "replayed graph": _replay}
CHANGES = [pytest.param("cpu", change, id=f"cpu-{name}") for name, change in UNSEEN.items()] + [
    pytest.param("cuda", change, id=f"cuda-{name}", marks=pytest.mark.gpu) for name, change in ON_GPU.items()
]


@pytest.mark.parametrize("name", ["attn_mask", "bias", "sinks", "alibi_slopes"])
@pytest.mark.parametrize(("device", "change"), CHANGES)
@pytest.mark.parametrize("packed", [False, True])
def test_changes_that_torch_does_not_count_are_seen(name, device, change, packed) -> None:
    query, key, value = (one.to(device) for one in tensors(1))
    starts = torch.tensor([0, 7], dtype=torch.int32, device=device)
    made = {
        "attn_mask": lambda: torch.rand(7, 7, device=device) > 0.5,
        "bias": lambda: torch.randn(7, 7, device=device),
        "sinks": lambda: torch.randn(4, device=device),
        "alibi_slopes": lambda: torch.rand(4, device=device),
    }[name]

    def call(given):
        if not packed:
            return attention(query, key, value, **{"attn_mask" if name == "bias" else name: given})
        names = {"attn_mask": "custom_mask", "bias": "attn_bias"}
        return attention_varlen(query[0], key[0], value[0], starts, **{names.get(name, name): given})

    given, new = made(), made()
    if packed and name in {"attn_mask", "bias"}:  # a view is an object of its own in each call
        given = given.view({"attn_mask": (-1,), "bias": (1, -1)}[name])
        new = new.view(given.shape)
    call(given)
    change(given, new)

    assert torch.equal(call(given), call(new.clone()))


@pytest.mark.parametrize(("device", "change"), [one for one in CHANGES if "other data" not in str(one.id)])
def test_changed_start_locations_are_read_again(device, change) -> None:
    query, key, value = (one[0].to(device) for one in tensors(1, 6, 6))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    for first in (2, 3, 4):
        change(starts, torch.tensor([0, first, 6], dtype=torch.int32, device=device))
        outputs, _ = expected(*(one.cpu().split([first, 6 - first]) for one in (query, key, value)))
        assert_results(attention_varlen(query, key, value, starts).cpu().split([first, 6 - first]), outputs)


def test_layers_with_equal_masks_build_once(counted) -> None:
    mask = torch.rand(7, 7) > 0.5
    for _ in range(3):
        attention(*tensors(), attn_mask=mask.clone())

    assert counted["build"] == 1


def test_masks_of_a_device_are_built_for_each_call(counted, monkeypatch) -> None:
    """Comparing them would wait. No such tensor is kept."""
    query, key, value = tensors()
    mask = torch.rand(7, 7) > 0.5
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: self.shape != (7, 7)))
    for _ in range(3):
        mask.logical_not_()
        output = attention(query, key, value, attn_mask=mask)
        assert_results(output, expected(query, key, value, mask=mask.expand(2, 7, 7))[0])
    gone = weakref.ref(mask)
    del mask

    assert counted["build"] == 3
    assert gone() is None


@pytest.mark.parametrize("takes_late", [True, False])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_layers_with_other_sinks_have_theirs(takes_late, on_cpu, monkeypatch) -> None:
    """One implementation serves them all, unless its plugin takes sinks in `make_impl` alone."""
    made = []
    monkeypatch.setattr(Attention, "takes_parameters_late", property(lambda _: takes_late))
    make = LoadedBackend.make_impl
    monkeypatch.setattr(LoadedBackend, "make_impl", lambda self, layer: (made.append(layer), make(self, layer))[1])
    query, key, value = tensors()
    layers = [(torch.randn(4), torch.rand(4)) for _ in range(2)]
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: on_cpu or self.numel() != 4))
    for sinks, slopes in layers * 2:
        output, lse = attention(query, key, value, causal=True, sinks=sinks, alibi_slopes=slopes, return_lse=True)
        outputs, lses = expected(query, key, value, causal=True, sinks=sinks, alibi_slopes=slopes)
        assert_results(output, outputs)
        assert_results(lse, lses)

    assert len(made) == (1 if takes_late else 4)


def test_a_plugin_that_reads_pages_alone_is_named(monkeypatch) -> None:
    """Its manifest declares contiguous K/V without knowing it."""
    monkeypatch.setattr(TorchImpl, "run", lambda self, query, key, value, kv_cache, *rest: kv_cache.k)

    with pytest.raises(PluginContractError, match=r"no attribute 'k'.*in a call without a KV cache") as caught:
        attention(*tensors())
    assert "when = { paged = false }" in caught.value.fix


def test_sinks_that_are_not_finite_are_refused_at_every_call() -> None:
    query, key, value = tensors()
    sinks = torch.zeros(4)
    wanted = attention(query, key, value, sinks=sinks)
    sinks[1] = torch.inf
    for _ in range(2):
        with pytest.raises(LayerError, match="not finite"):
            attention(query, key, value, sinks=sinks)

    assert torch.equal(attention(query, key, value, sinks=torch.zeros(4)), wanted)


def test_a_change_of_scope_decides_anew() -> None:
    query, key, value = tensors()
    attention(query, key, value)
    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        attention(query, key, value)
    attention(query, key, value)


def test_what_was_kept_goes_with_a_refresh(counted) -> None:
    attention(*tensors())
    attention(*tensors(queries=3))
    attnplug.refresh()
    attention(*tensors())

    assert counted["build"] == 3
    assert len(calls._calls) == len(backends._planners) == 1


def test_backends_are_chosen_by_keyword() -> None:
    query, key, value = tensors()
    starts = torch.tensor([0, 7], dtype=torch.int32)

    assert_results(attention(query, key, value, backend=["torch/sdpa"]), expected(query, key, value)[0])
    with pytest.raises(NoBackendError, match="flashinfer"):
        attention(query, key, value, backend="flashinfer")
    with pytest.raises(NoBackendError, match="flashinfer"):
        attention_varlen(query[0], key[0], value[0], starts, backend="flashinfer")
    with pytest.raises(SettingsError, match="no_such_option"):
        attention(query, key, value, options={"torch": {"no_such_option": 1}})


def test_threads_have_the_results_of_their_own_calls() -> None:
    wrong, barrier = [], threading.Barrier(4)

    def work(queries: int) -> None:
        barrier.wait()
        for _ in range(20):
            query, key, value = tensors(queries=queries, keys=queries)
            if not torch.allclose(
                attention(query, key, value).double()[0], expected(query, key, value)[0][0], atol=1e-5
            ):
                wrong.append(queries)

    together(*(partial(work, count) for count in (3, 5, 3, 8)))

    assert wrong == []


def test_modes_share_what_is_kept(counted) -> None:
    query, key, value = tensors()
    with torch.inference_mode():
        first = attention(query, key, value, sinks=None)
    with torch.no_grad():
        second = attention(query, key, value)
    third = attention(query, key, value)

    assert counted["build"] == 1
    assert torch.equal(first, second)
    assert torch.equal(second, third)


def test_subclasses_of_tensors_are_taken() -> None:
    query, key, value = tensors()
    parameter = torch.nn.Parameter(query, requires_grad=False)

    assert_results(attention(parameter, key, value), expected(query, key, value)[0])


# --- refusals ---


def _call(**changes):
    query, key, value = tensors()
    return {"query": query, "key": key, "value": value, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(7, 4, 16)}, r"each is \(batch, tokens, heads, head_size\)"),
        ({"query": torch.zeros(2, 7, 3, 16)}, "multiple of the key and value heads"),
        ({"query": torch.zeros(2, 7, 4, 8)}, "one head size"),
        ({"query": torch.zeros(3, 7, 4, 16)}, "one batch size"),
        ({"value": torch.zeros(2, 6, 2, 16)}, "as many values as keys"),
        ({"key": torch.zeros(2, 7, 2, 16, dtype=torch.bfloat16)}, "one dtype"),
        ({"key": torch.zeros(2, 7, 2, 16, device="meta")}, "one device"),
        ({"query": torch.zeros(2, 7, 0, 16)}, "at least one head"),
        ({"key": [1]}, "a tensor"),
        ({"query": torch.zeros(2, 9, 4, 16), "causal": True}, "the last 7 queries only"),
        ({"attn_mask": torch.ones(7, 8, dtype=torch.bool)}, r"\(batch, 1, queries, keys\) = \(2, 1, 7, 7\)"),
        ({"attn_mask": torch.ones(2, 4, 7, 7, dtype=torch.bool)}, "a boolean mask is that of all heads"),
        ({"attn_mask": torch.ones(2, 3, 7, 7)}, r"\(batch, heads, queries, keys\) = \(2, 4, 7, 7\)"),
        ({"attn_mask": torch.ones(7, 7, dtype=torch.int32)}, "boolean, True where"),
        ({"attn_mask": torch.ones(7, 7, dtype=torch.bool, device="meta")}, "on meta"),
        ({"attn_mask": [True]}, "mask is a tensor"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises(TensorError, match=message):
        attention(**_call(**changes))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([torch.tensor([0, 6], dtype=torch.int32)], r"query\[: 6\]"),
        ([torch.tensor([0, 8], dtype=torch.int32)], "ends at 8"),
        ([torch.tensor([1, 7], dtype=torch.int32)], "starts at 0 and never falls"),
        ([torch.tensor([0, 5, 3, 7], dtype=torch.int32)], "starts at 0 and never falls"),
        ([torch.tensor([0.0, 7.0])], "int32"),
        ([torch.tensor([[0, 7]], dtype=torch.int32)], "int32"),
        ([[0, 7]], "type list"),
        ([torch.tensor([0, 7]), torch.tensor([0, 3, 7])], "as many of each"),
    ],
)
def test_start_locations_that_do_not_fit_are_refused(starts, message) -> None:
    query, key, value = tensors()

    with pytest.raises(TensorError, match=message):
        attention_varlen(query[0], key[0], value[0], *starts)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attn_mask": torch.zeros(7, 7, requires_grad=True)}, NotNegotiatedError, "a mask that requires a gradient"),
        ({"logits_soft_cap": -1.0}, RequirementsError, "logits_soft_cap=-1.0"),
        ({"sliding_window": 0}, RequirementsError, "sliding_window=0"),
        ({name: torch.zeros(2, 7, 2, 16).long() for name in ("query", "key", "value")}, RequirementsError, "int64"),
        ({name: torch.zeros(2, 7, 2, 16).double() for name in ("query", "key", "value")}, NoBackendError, "float64"),
    ],
)
def test_requests_that_nothing_serves_are_refused(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        attention(**_call(**changes))


def test_a_refused_call_keeps_nothing() -> None:
    with pytest.raises(TensorError):
        attention(**_call(sinks=torch.zeros(3)))

    assert len(calls._calls) == len(backends._planners) == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch's own jvp
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attend_like_sdpa"])
def test_a_transform_is_refused_by_name(transform, call):
    query, starts = torch.randn(1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)

    def attend(x):
        if call == "attention_varlen":
            return attention_varlen(x[0], x[0], x[0], starts)
        return attention(x, x, x) if call == "attention" else attend_like_sdpa(x, x, x)

    run = {
        "vmap": lambda: torch.func.vmap(attend)(query[None]),
        "grad": lambda: torch.func.grad(lambda x: attend(x).sum())(query),
        "jvp": lambda: torch.func.jvp(attend, (query,), (query,)),
        "functionalize": lambda: torch.func.functionalize(attend)(query),
    }[transform]
    with pytest.raises(NotNegotiatedError, match=r"transform of torch\.func"):
        run()
    assert attend(query).isfinite().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("form", ["nested", "jagged", "sparse"])
def test_tensors_of_other_layouts_are_refused_by_name(form):
    parts = [torch.randn(3, 2, 8), torch.randn(4, 2, 8)]
    if form == "sparse":
        odd = torch.randn(1, 4, 2, 8).to_sparse()
    else:
        layout = torch.jagged if form == "jagged" else torch.strided
        odd = torch.nested.nested_tensor(parts, layout=layout)

    with pytest.raises(TensorError, match=r"a (nested|sparse_coo) tensor was given"):
        attention(odd, odd, odd)


@pytest.mark.parametrize("dropout", [float("nan"), -1.0, 0.5, "much"])
def test_dropout_is_refused_whatever_it_is(dropout):
    query = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotNegotiatedError, match="dropout_p="):
        attend_like_sdpa(query, query, query, dropout_p=dropout)
