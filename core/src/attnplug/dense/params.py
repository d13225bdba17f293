"""What of a dense call is not a tensor, and the checks of its tensors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnplug.contract.guards._format import describe, dtype_name
from attnplug.errors import NotNegotiatedError, TensorError, shown
from attnplug.request.requirements import Requirements
from attnplug.selection.scope import overrides

if TYPE_CHECKING:
    from attnplug.request.settings import BackendNames, Options

NO_OPTIONS: Final = "{}"


class CallParams(NamedTuple):
    """
    The arguments of a dense call that are not tensors, hashable.

    Attributes:
        causal: Whether a token attends to no later one.
        scale: Factor of the scores; None is ``head_size ** -0.5``.
        sliding_window: Tokens that a token attends to, itself included, on the left; without `causal` as many on the
            right.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``.
        return_lse: Whether the log-sum-exp is computed.
        backend: Backends in order of preference; empty for no preference.
        options: Options by backend, as JSON.
    """

    causal: bool = False
    scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    return_lse: bool = False
    backend: tuple[str, ...] = ()
    options: str = NO_OPTIONS


# A graph cannot trace the check, and has these values as constants.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # of torch
def encode_keywords(backend: BackendNames | None, options: Options | None) -> tuple[tuple[str, ...], str]:
    """
    Return `backend` and `options` as hashable values that a graph can hold, too.

    Raises:
        SettingsError: As for `select`.
    """
    if type(backend) is str and backend and options is None:  # the path of every call with a named backend
        return (backend,), NO_OPTIONS
    keywords = overrides("the call", backend, options, None)
    return keywords.backend, json.dumps(options or {}, sort_keys=True)


class CallTensors(NamedTuple):
    """
    The tensors of a dense call besides queries, keys and values.

    Attributes:
        mask: A boolean mask, see `attention` and `attention_varlen`.
        bias: An additive mask, likewise.
        sinks: ``(heads,)``.
        alibi_slopes: ``(heads,)``.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


NO_TENSORS: Final = CallTensors()


def requirements_of(
    query: Tensor, key: Tensor, value: Tensor, params: CallParams, tensors: CallTensors, *, is_cross: bool
) -> Requirements:
    """
    Return what a dense call requires.

    Args:
        query: ``(..., num_q_heads, head_size)``.
        key: ``(..., num_kv_heads, head_size)``.
        value: ``(..., num_kv_heads, head_size_v)``.
        params: Its other arguments.
        tensors: Its other tensors.
        is_cross: Whether queries and keys are tokens of different sequences.

    Raises:
        RequirementsError: A value is outside its domain.
    """
    return Requirements(
        head_size=query.shape[-1],
        num_q_heads=query.shape[-2],
        num_kv_heads=key.shape[-2],
        dtype=dtype_name(query.dtype),
        head_size_v=value.shape[-1],
        sliding_window=params.sliding_window,
        logits_soft_cap=params.logits_soft_cap,
        alibi=None if tensors.alibi_slopes is None else "linear",
        sinks=tensors.sinks is not None,
        attn_type="decoder" if params.causal else "encoder_decoder" if is_cross else "encoder_only",
        custom_mask=tensors.mask is not None,
        attn_bias=tensors.bias is not None,
        paged=False,
        phases=("prefill",),
        return_lse=params.return_lse,
    )


def check_are_tensors(query: object, key: object, value: object, tensors: CallTensors) -> None:
    """
    Check that what should be tensors are some; it runs at every call.

    Raises:
        TensorError: One is something else.
    """
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and tensors is NO_TENSORS:
        return
    for name, one in {"query": query, "key": key, "value": value, **tensors._asdict()}.items():
        if not isinstance(one, Tensor) and (one is not None or name in {"query", "key", "value"}):
            _refuse(f"{name}={shown(one)} was given", f"{name} is a tensor", f"pass a tensor as {name}")


def check_plain(*tensors: object) -> None:
    """
    Check that a call is no part of a transform of `torch.func`, and that its tensors have plain memory.

    Raises:
        NotNegotiatedError: `vmap`, `grad`, `jvp` or another transform runs.
        TensorError: A tensor is nested, sparse or of another layout.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001 - torch has no public name for it
        raise NotNegotiatedError(
            "attention was called inside of a transform of torch.func",
            "vmap, grad, jvp and functionalize have no rule for it",
            "make the batch an axis of the tensors; for gradients, call torch.autograd.grad or .backward() outside",
        )
    for one in tensors:
        if isinstance(one, Tensor) and (one.is_nested or one.layout is not torch.strided):
            raise TensorError(
                f"a {'nested' if one.is_nested else str(one.layout).removeprefix('torch.')} tensor was given",
                "queries, keys and values are plain tensors",
                "pass values and offsets to attention_varlen" if one.is_nested else "pass tensor.to_dense()",
            )


def check_tensors(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    """
    Check the shapes, dtypes and devices of a call.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        layout: The axes, such as ``"(batch, tokens, heads, head_size)"``.

    Raises:
        TensorError: They do not fit each other.
    """
    given = {"query": query, "key": key, "value": value}
    found = ", ".join(f"{name} of {describe(tensor)}" for name, tensor in given.items()) + " were given"
    axes = layout.count(",") + 1
    if not query.ndim == key.ndim == value.ndim == axes:
        _refuse(found, f"each is {layout}", "transpose tensors with the heads before the tokens")
    if query.dtype != key.dtype or query.dtype != value.dtype:
        _refuse(found, "all have one dtype", f"cast them, for example with .to(torch.{dtype_name(query.dtype)})")
    if query.device != key.device or query.device != value.device:
        _refuse(found, "all are on one device", f"move them, for example with .to({str(query.device)!r})")
    if query.shape[-1] != key.shape[-1]:
        _refuse(found, "queries and keys have one head size; that of values may differ", "check the projections")
    if key.shape[:-1] != value.shape[:-1] or (axes == 4 and query.shape[0] != key.shape[0]):
        _refuse(found, "there are as many values as keys, with as many heads, and one batch size", "pass such tensors")
    if not query.shape[-2] or not key.shape[-2] or not query.shape[-1] or not value.shape[-1]:
        _refuse(found, "there is at least one head, and a head has at least one element", "skip the call")
    if query.shape[-2] % key.shape[-2]:
        _refuse(
            found,
            "the query heads are a multiple of the key and value heads, which each serve a group of them",
            "pass the heads of one tensor-parallel rank",
        )


def check_causal(queries: int, keys: int, what: str) -> None:
    """
    Check that the first causal query attends to a key: the last one is at the position of the last key.

    Raises:
        TensorError: It attends to none.
    """
    if queries > keys:
        _refuse(
            f"{queries} causal queries and {keys} keys {what}",
            "the last query is at the position of the last key, so that the first would be before all keys",
            f"pass the last {keys} queries only, or causal=False",
        )


def lengths_between(name: str, starts: Tensor) -> tuple[int, ...]:
    """
    Return the lengths between cumulative starts.

    Raises:
        TensorError: They are no vector of int32 or int64, do not start at 0, or fall.
    """
    if not isinstance(starts, Tensor) or starts.ndim != 1 or starts.dtype not in (torch.int32, torch.int64):
        found = describe(starts) if isinstance(starts, Tensor) else f"type {type(starts).__name__}"
        _refuse(f"{name} of {found} was given", f"{name} is (sequences + 1,) int32", "pass the cumulative lengths")
    values: list[int] = starts.tolist()
    lengths = tuple(after - before for before, after in pairwise(values))
    if not values or values[0] != 0 or min(lengths, default=0) < 0:
        _refuse(
            f"{name}={shown(values)} was given",
            "it starts at 0 and never falls",
            "pass [0, *itertools.accumulate(lengths)]",
        )
    return lengths


def check_lengths(query_lens: tuple[int, ...], key_lens: tuple[int, ...], queries: int, keys: int) -> None:
    """
    Check that lengths fit the tensors of a packed call.

    Raises:
        TensorError: They do not.
    """
    if len(query_lens) != len(key_lens):
        _refuse(
            f"query_start_loc of {len(query_lens)} sequences and key_start_loc of {len(key_lens)} were given",
            "each sequence has queries and keys",
            "pass as many of each",
        )
    for name, tokens, lengths in (("query", queries, query_lens), ("key", keys, key_lens)):
        if sum(lengths) != tokens:
            _refuse(
                f"{name}_start_loc that ends at {sum(lengths)} was given for a {name} of {tokens} tokens",
                f"the last entry of {name}_start_loc is the number of {name} tokens",
                f"pass {name}[: {sum(lengths)}]" if sum(lengths) < tokens else f"pass the {name} of all sequences",
            )


def flat_mask(mask: Tensor, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """
    Return a mask as a `Batch` has it: ``(batch * queries * keys,)`` bool, or additive ``(1 or heads, ...)``.

    Args:
        mask: The mask.
        sizes: The batch, query heads, queries, and keys of each sequence.
        dtype: That of the call, which an additive mask gets.
        device: That of the call.

    Raises:
        TensorError: It is of another dtype, shape or device.
    """
    batch, heads, queries, keys = sizes
    heads = 1 if mask.dtype == torch.bool else heads
    wanted = (batch, heads, queries, keys)
    if mask.device != device:
        _refuse(
            f"an attn_mask on {mask.device} was given",
            f"the call is on {device}",
            f"pass it on {str(device)!r}",
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        _refuse(
            f"an attn_mask of {describe(mask)} was given",
            "attn_mask is boolean, True where a query attends to a key, or floating: then it is added to the scores",
            "pass attn_mask.bool() for a mask of 0 and 1",
        )
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if mask.ndim not in (2, 3, 4) or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
        axes = "(batch, 1, queries, keys)" if heads == 1 else "(batch, heads, queries, keys)"
        _refuse(
            f"an attn_mask of {describe(mask)} was given",
            f"it expands to {axes} = {wanted}" + (": a boolean mask is that of all heads" if heads == 1 else ""),
            "pass such a mask",
        )
    own = shape[1]
    wide = mask.detach().reshape(shape).expand(batch, own, queries, keys)
    if mask.dtype == torch.bool:
        return wide.reshape(-1)
    return wide.transpose(0, 1).reshape(own, -1).to(dtype)


def refuse_copy(name: str) -> NoReturn:
    """
    Refuse a CPU copy that has other cumulative lengths.

    Raises:
        TensorError: Always.
    """
    _refuse(f"{name} and a CPU copy of other lengths were given", "the copy has the same lengths", f"pass {name}.cpu()")


def refuse_capture() -> NoReturn:
    """
    Refuse a call while a CUDA graph is captured.

    Raises:
        NotNegotiatedError: Always.
    """
    raise NotNegotiatedError(
        "a dense attention call was made while a CUDA graph is captured",
        "its metadata is kept for a limited number of shapes, and a graph would read memory that is free by then",
        "capture a paged agreement with cudagraph=..., or leave the call out of the graph",
    )


def _refuse(problem: str, expected: str, fix: str) -> NoReturn:
    raise TensorError(problem, expected, fix)
