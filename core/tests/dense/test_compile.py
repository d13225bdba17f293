"""Dense calls as ops: in compiled graphs, in traces, on fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attnplug
from attnplug import attention, attention_varlen
from attnplug.dense import flash_attn_varlen_func, flash_attn_with_kvcache
from attnplug.errors import NoBackendError, NotNegotiatedError, TensorError
from core.tests.dense.counting import assert_costs_at_most
from core.tests.dense.flash_reference import HEADS, KV_HEADS, SIZE, cached, starts_of


def tensors(batch=2, queries=7, keys=7, heads=4, kv_heads=2, size=16):
    return (
        torch.randn(batch, queries, heads, size),
        torch.randn(batch, keys, kv_heads, size),
        torch.randn(batch, keys, kv_heads, size),
    )


SINKS = torch.randn(4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_has_no_break(backend) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def model(query, key, value):
        first = attention(query * 2, key, value, causal=True, sinks=SINKS, backend=["torch", "auto"])
        second, lse = attnplug.attention(first, key, value, options={"torch": {}}, return_lse=True)
        return second + 1, lse

    query, key, value = tensors()
    second, lse = model(query, key, value)
    first = attention(query * 2, key, value, causal=True, sinks=SINKS)
    wanted, wanted_lse = attention(first, key, value, return_lse=True)

    torch.testing.assert_close(second, wanted + 1)
    torch.testing.assert_close(lse, wanted_lse)


def test_packed_calls_have_no_break() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value, starts):
        return attention_varlen(query, key, value, starts, causal=True) * 2

    query, key, value = (one.flatten(0, 1) for one in tensors())
    for first in (3, 8):
        starts = torch.tensor([0, first, 14], dtype=torch.int32)
        wanted = attention_varlen(query, key, value, starts, causal=True) * 2
        torch.testing.assert_close(model(query, key, value, starts), wanted)


def test_dynamic_shapes_compile_once() -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def model(query, key, value):
        return attention(query, key, value, causal=True) + 1

    for batch, queries, keys in ((3, 5, 7), (6, 8, 9), (7, 10, 11)):  # torch takes equal sizes for one
        query, key, value = tensors(batch, queries, keys)
        torch.testing.assert_close(model(query, key, value), attention(query, key, value, causal=True) + 1)

    assert counter.frame_count == 1


def test_a_graph_decides_when_it_runs() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value):
        return attention(query, key, value)

    query, key, value = tensors()
    model(query, key, value)

    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        model(query, key, value)


def test_a_graph_computes_gradients() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value):
        return attention(query, key, value, causal=True).square()

    ours = [one.requires_grad_() for one in tensors()]
    theirs = [one.detach().clone().requires_grad_() for one in ours]

    model(*ours).sum().backward()
    attention(*theirs, causal=True).square().sum().backward()

    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_repeated_op_costs_the_host_little() -> None:
    """As `attention`, which a graph calls by it."""
    query, key, value = (torch.randn(1, 5, 4, 8) for _ in range(3))
    rest = (None, None, None, None, False, None, None, None, False, [], "{}")

    assert_costs_at_most(lambda: torch.ops.attnplug.attention_forward(query, key, value, *rest), 24, operations=1)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_graph_without_gradients_refuses_them(is_packed) -> None:
    """Autograd does not see its op, and would return none in silence."""
    given = [*(one.flatten(0, 1) if is_packed else one for one in tensors()), torch.randn(4)]

    def call(query, key, value, sinks):
        if is_packed:
            return attention_varlen(query, key, value, torch.tensor([0, 3, 14], dtype=torch.int32), sinks=sinks)
        return attention(query, key, value, sinks=sinks)

    graph = make_fx(call, tracing_mode="fake")(*given)
    torch.testing.assert_close(graph(*given), call(*given))
    for one in given:
        one.requires_grad_()
        with pytest.raises(NotNegotiatedError, match="traced without them"):
            graph(*given)
        with torch.no_grad():
            torch.testing.assert_close(graph(*given), call(*given))
        one.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_part_of_a_graph_without_gradients(backend) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def model(query, key, value):
        with torch.no_grad():
            fixed = attention(query, key, value)
        return fixed * query + attention(query.detach(), key, value)

    query, key, value = tensors()
    learned = query.clone().requires_grad_()
    fixed = attention(query, key, value)
    model(learned, key, value).sum().backward()

    torch.testing.assert_close(learned.grad, fixed)
    torch.testing.assert_close(model(query, key, value), fixed * query + fixed)


def test_fake_tensors_have_results_of_the_right_shape() -> None:
    with FakeTensorMode():
        query, key = torch.empty(2, 7, 4, 16, dtype=torch.bfloat16), torch.empty(2, 9, 2, 16, dtype=torch.bfloat16)
        value = torch.empty(2, 9, 2, 24, dtype=torch.bfloat16)
        output, lse = attention(query, key, value, return_lse=True)

    assert (output.shape, output.dtype) == ((2, 7, 4, 24), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 7, 4), torch.float32)


def test_a_graph_refuses_what_a_call_refuses() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query, key, value):
        return attention(query, key, value)

    query, key, value = tensors()
    with pytest.raises(TensorError, match="one head size"):
        model(query[..., :8], key, value)


PARAMS = (True, None, None, None, True, [], "{}")


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_the_ops_keep_the_rules_of_torch(gradient) -> None:
    given = [one.requires_grad_(gradient) for one in tensors()]
    packed = [one.detach().flatten(0, 1).requires_grad_(gradient) for one in given]
    starts = torch.tensor([0, 3, 14], dtype=torch.int32)
    none = (None, None, None, None)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

    ops = torch.ops.attnplug
    padded_ops = (ops.attention,) if gradient else (ops.attention, ops.attention_forward)
    packed_ops = (ops.attention_varlen,) if gradient else (ops.attention_varlen, ops.attention_varlen_forward)
    for op in padded_ops:
        torch.library.opcheck(op.default, (*given, *none, *PARAMS), test_utils=tests)
    for op in packed_ops:
        torch.library.opcheck(op.default, (*packed, starts, None, None, None, *none, *PARAMS), test_utils=tests)


@pytest.mark.slow
def test_inductor_compiles_a_call() -> None:
    @torch.compile(fullgraph=True)
    def model(query, key, value):
        return attention(query.sin(), key, value, causal=True).cos()

    query, key, value = tensors()

    torch.testing.assert_close(model(query, key, value), attention(query.sin(), key, value, causal=True).cos())


def test_packed_calls_are_part_of_a_full_graph():
    query, starts = torch.randn(5, HEADS, SIZE, requires_grad=True), starts_of([2, 3])

    def call(query, starts):
        return flash_attn_varlen_func(query, query, query, starts, starts, 5, 5, causal=True) + 1

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for lengths in (starts, starts[[0, 2]]):
        found, wanted = compiled(query, lengths), call(query, lengths)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), query)[0] for one in (found, wanted)))


@pytest.mark.parametrize("is_packed", [True, False])
def test_calls_with_a_kv_cache_run_beside_graphs(is_packed):
    query, keys, values = cached()
    new, table = torch.ones(2, 1, KV_HEADS, SIZE), torch.tensor([[0], [1]], dtype=torch.int32)

    def call(query, keys, values):
        if is_packed:
            starts = starts_of([1, 1]), starts_of([3, 9])
            return flash_attn_varlen_func((query * 1)[:, 0], keys, values, *starts, block_table=table) + 1
        return flash_attn_with_kvcache(query * 1, keys, values, new, new, cache_seqlens=4, block_table=table) + 1

    copies = keys.clone(), values.clone()
    found = torch.compile(call, backend="aot_eager")(query, keys, values)
    assert torch.equal(found, call(query, *copies))
    assert torch.equal(keys, copies[0])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(call, backend="aot_eager", fullgraph=True)(query, keys, values)
