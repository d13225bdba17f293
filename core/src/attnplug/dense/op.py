"""
Dense calls as custom ops: `torch.compile(fullgraph=True)` takes them into its graph as they are, with any shape.

Autograd differentiates `attention` and `attention_varlen`. Calls that record no gradient are `attention_forward` and
`attention_varlen_forward`: torch runs no Python code for autograd around them, which took a third of a call.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.dense.calls import lengths_of, run_packed, run_padded
from attnplug.dense.gradient import attention_gradients
from attnplug.dense.params import NO_TENSORS, CallParams, CallTensors
from attnplug.dense.prepared import find_repeated, keep_repeated
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_PARAMS: Final = (
    "bool causal, float? scale, int? sliding_window, float? logits_soft_cap, bool return_lse, str[] backend, "
    "str options"
)
_TENSORS: Final = "Tensor? mask, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes"
_STARTS: Final = "Tensor query_start, Tensor? key_start, Tensor? query_start_cpu, Tensor? key_start_cpu"
_INPUTS: Final = "Tensor query, Tensor key, Tensor value"
_RESULTS: Final = "Tensor grad_output, Tensor grad_lse, Tensor output, Tensor lse"
_GRADS: Final = "(Tensor, Tensor, Tensor, Tensor)"
_SINKS: Final = -9  # before the slopes and the seven numbers, in the arguments of every op


def tensors_of(mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None) -> CallTensors:
    """Return the tensors of a call besides queries, keys and values."""
    if mask is None and bias is None and sinks is None and slopes is None:
        return NO_TENSORS
    return CallTensors(mask, bias, sinks, slopes)


def params_of(*given: Any) -> CallParams:
    """Return the numbers of a call, from the arguments of an op."""
    causal, scale, window, cap, return_lse, backend, options = given
    return CallParams(causal, scale, window, cap, return_lse, tuple(backend), options)


def _padded(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tensors, params = tensors_of(*rest[:4]), params_of(*rest[4:])
    form, repeated = find_repeated(query, key, value, ("op", *params), tensors)
    found = None if repeated is None else repeated.run(query, key, value, tensors)
    if found is None:
        keep = None if form is None else partial(keep_repeated, form, query, key, value)
        found = run_padded(query, key, value, params, tensors, keep)
    output, lse = found
    return output, query.new_empty(0, dtype=torch.float32) if lse is None else lse


def _packed(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    starts, copies, tensors, params = rest[:2], rest[2:4], rest[4:8], rest[8:]
    output, lse = run_packed(query, key, value, starts, copies, params_of(*params), tensors_of(*tensors))
    return output, query.new_empty(0, dtype=torch.float32) if lse is None else lse


def _without_gradient(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the kernel of an op without a gradient formula: it refuses to run where gradients are recorded."""

    def checked(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        learns = query.requires_grad or key.requires_grad or value.requires_grad
        sinks = rest[_SINKS]
        if torch.is_grad_enabled() and (learns or (sinks is not None and sinks.requires_grad)):
            raise NotNegotiatedError(
                "gradients are recorded through a graph that was traced without them",
                "its inputs need none, as when it was traced",
                "trace it with inputs that require gradients, or run it in torch.no_grad()",
            )
        return kernel(query, key, value, *rest)

    return checked


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return results of the right shape; `return_lse` is the third from the end of every op's arguments."""
    del key
    output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output, query.new_empty(query.shape[:-1] if rest[-3] else (0,), dtype=torch.float32)


def _padded_backward(
    grad_output: Tensor, grad_lse: Tensor, output: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, *given = rest[:7]
    grads = attention_gradients(
        (grad_output, grad_lse), (query, key, value), (output, lse), params_of(*rest[7:]), tensors_of(*given)
    )
    return *grads[:3], query.new_empty(0) if grads[3] is None else grads[3]


def _packed_backward(
    grad_output: Tensor, grad_lse: Tensor, output: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of one sequence after another."""
    inputs: tuple[Tensor, Tensor, Tensor] = (rest[0], rest[1], rest[2])
    (starts, key_starts, copy, key_copy), tensors = rest[3:7], tensors_of(*rest[7:11])
    params, sinks = params_of(*rest[11:]), tensors.sinks
    query_lens = lengths_of("query_start_loc", starts, copy)
    key_lens = query_lens if key_starts is None else lengths_of("key_start_loc", key_starts, key_copy)
    made = (torch.zeros_like(inputs[0]), torch.zeros_like(inputs[1]), torch.zeros_like(inputs[2]))
    grad_sinks = torch.zeros_like(sinks) if sinks is not None else inputs[0].new_empty(0)
    row = column = cell = 0
    for queries, keys in zip(query_lens, key_lens, strict=True):
        rows, columns = slice(row, row + queries), slice(column, column + keys)
        cells = slice(cell, cell + queries * keys)
        mask, bias = (
            None if one is None else one[..., cells].reshape(*one.shape[:-1], queries, keys)
            for one in (tensors.mask, tensors.bias)
        )
        own = tensors_of(mask, bias, sinks, tensors.alibi_slopes)
        parts = [one[where].unsqueeze(0) for one, where in zip(inputs, (rows, columns, columns), strict=True)]
        of_rows = [one[rows].unsqueeze(0) for one in (grad_output, grad_lse, output, lse)]
        grads = attention_gradients(
            (of_rows[0], of_rows[1]), (parts[0], parts[1], parts[2]), (of_rows[2], of_rows[3]), params, own
        )
        for whole, where, part in zip(made, (rows, columns, columns), grads[:3], strict=True):
            whole[where] = part[0]
        if grads[3] is not None:
            grad_sinks += grads[3]
        row, column, cell = row + queries, column + keys, cell + queries * keys
    return *made, grad_sinks


def _fake_backward(
    grad_output: Tensor,
    grad_lse: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del grad_output, grad_lse, output, lse
    sinks = rest[_SINKS]
    grad_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), grad_sinks


_FORMULAS: Final = {"attention_backward": _padded_backward, "attention_varlen_backward": _packed_backward}


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward reads; the last seven inputs are no tensors."""
    if not inputs[-3]:
        raise NotNegotiatedError(
            "gradients are recorded through a dense call without return_lse",
            "the backward recomputes the weights from the log-sum-exp",
            "call attnplug.attention, which requests it",
        )
    ctx.save_for_backward(*output, *inputs[:-7])
    ctx.params = inputs[-7:]


def _backward_of(op: str, leading: int) -> Any:
    """Return the formula of an op: gradients of query, key, value and sinks, None for its other arguments."""

    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        # Where gradients of gradients are recorded, they are those of the operations that the formula consists of.
        formula = _FORMULAS[op] if torch.is_grad_enabled() else getattr(torch.ops.attnplug, op)
        made = formula(grad_output, grad_lse, *tensors, *ctx.params)
        sinks = made[3] if tensors[-2] is not None else None
        return (*made[:3], *(None,) * (leading + 2), sinks, None, *(None,) * len(ctx.params))

    return backward


_library: Final[Any] = torch.library.Library("attnplug", "FRAGMENT")  # type: ignore[no-untyped-call]
# A graph would read metadata that the cache has dropped since: see `refuse_capture`.
_TAGS: Final = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


def _define(name: str, schema: str, kernel: Any, fake: Any) -> None:
    _library.define(f"{name}({schema}", tags=_TAGS)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnplug::{name}", fake, lib=_library)


for _name, _given, _kernel in (
    ("attention", f"{_INPUTS}, {_TENSORS}, {_PARAMS}", _padded),
    ("attention_varlen", f"{_INPUTS}, {_STARTS}, {_TENSORS}, {_PARAMS}", _packed),
):
    _define(_name, f"{_given}) -> (Tensor, Tensor)", _kernel, _fake)
    _define(f"{_name}_forward", f"{_given}) -> (Tensor, Tensor)", _without_gradient(_kernel), _fake)
_define(
    "attention_backward",
    f"{_RESULTS}, {_INPUTS}, {_TENSORS}, {_PARAMS}) -> {_GRADS}",
    _padded_backward,
    _fake_backward,
)
_define(
    "attention_varlen_backward",
    f"{_RESULTS}, {_INPUTS}, {_STARTS}, {_TENSORS}, {_PARAMS}) -> {_GRADS}",
    _packed_backward,
    _fake_backward,
)
padded_gradients: Final = _backward_of("attention_backward", 0)
"""Returns the gradients of all arguments of `attention`, from a context and the gradients of its output and LSE."""
_packed_gradients: Final = _backward_of("attention_varlen_backward", 4)
for _name, _formula in (("attention", padded_gradients), ("attention_varlen", _packed_gradients)):
    torch.library.register_autograd(f"attnplug::{_name}", _formula, setup_context=_keep_inputs, lib=_library)
