"""Attention as a function of tensors, by the backend that a selection chooses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.dense import op as _op
from attnplug.dense.calls import run_packed, run_padded
from attnplug.dense.params import NO_OPTIONS, CallParams, check_plain, encode_keywords
from attnplug.dense.prepared import find_repeated, keep_repeated
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.request.settings import BackendNames, Options


def attention(  # noqa: PLR0913 - every feature of attention is one argument
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Any:
    """
    Attend, without a KV cache, through the backend that `select` chooses for the call.

    The decision, the implementation and its metadata are kept for calls of the same shape, in this thread, as long as
    `scope_key` stays equal. Sinks and slopes are copied for each call. A new shape builds metadata, and nothing waits
    for the device, unless a backend takes sinks or slopes in `make_impl` alone: then each call makes one. It works in
    ``torch.compile(fullgraph=True)``, where it decides when the graph runs. It cannot be captured in a CUDA graph.
    ``torch.autocast`` does not affect it: tensors are computed in their dtype.

    Gradients of query, key, value and sinks are computed by torch, from the output and the log-sum-exp, which is
    requested of the backend then. The backward holds float32 copies of key, value and their gradients, and scores of up
    to 2**24 elements at once.

    Args:
        query: ``(batch, queries, num_q_heads, head_size)``.
        key: ``(batch, keys, num_kv_heads, head_size)``; query head ``h`` reads KV head
            ``h // (num_q_heads // num_kv_heads)``.
        value: ``(batch, keys, num_kv_heads, head_size_v)``.
        causal: Whether a token attends to no later one. The last query is at the position of the last key, as in
            FlashAttention; `torch.nn.functional.scaled_dot_product_attention` puts the first query at the first key
            instead. Both are the same where queries and keys are equally many.
        scale: Factor of the scores; None is ``head_size ** -0.5``.
        sliding_window: Tokens that a token attends to on the left, itself included; without `causal`, as many on the
            right.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``.
        attn_mask: Boolean, True where a query attends to a key: any shape that expands to
            ``(batch, 1, queries, keys)``. A query that attends to nothing has output 0. Or floating, and added to the
            scores in the dtype of the call: any shape that expands to ``(batch, num_q_heads, queries, keys)``; -inf
            counts as the lowest number. On the CPU, metadata is kept for equal values. On a GPU, where comparing them
            would wait, it is built for each call, from the values of then.
        sinks: ``(num_q_heads,)``, float32 or the dtype of the call: logits that join the softmax denominator.
        alibi_slopes: ``(num_q_heads,)`` float32: slope times distance is subtracted from the scores.
        return_lse: Whether the log-sum-exp of the scores is returned, sinks included.
        backend: As for `select`.
        options: As for `select`.

    Returns:
        ``(batch, queries, num_q_heads, head_size_v)``; with `return_lse` a pair of that and
        ``(batch, queries, num_q_heads)`` float32.

    Raises:
        TensorError: A tensor has the wrong shape, dtype, layout or device.
        RequirementsError: A value is invalid.
        NoBackendError: Nothing can serve the call; it carries every verdict.
        NotNegotiatedError: A CUDA graph is captured, a transform of `torch.func` runs, or gradients of a mask or of
            slopes are recorded.
    """
    mask, bias, form = attn_mask, None, None
    if isinstance(attn_mask, torch.Tensor) and attn_mask.is_floating_point():
        mask, bias = None, attn_mask
    tensors = _op.tensors_of(mask, bias, sinks, alibi_slopes)
    if options is None and not torch.compiler.is_compiling():
        call = (causal, scale, sliding_window, logits_soft_cap, return_lse, backend)
        form, repeated = find_repeated(query, key, value, call, tensors)
        if repeated is not None and (found := repeated.run(query, key, value, tensors)) is not None:
            return found if return_lse else found[0]
    check_plain(query, key, value)
    names, table = ((), NO_OPTIONS) if backend is None and options is None else encode_keywords(backend, options)
    learns = torch.is_grad_enabled() and _records_gradients(query, key, value, attn_mask, None, sinks, alibi_slopes)
    params = CallParams(causal, scale, sliding_window, logits_soft_cap, return_lse or learns, names, table)
    if _is_traced(query):
        op = torch.ops.attnplug.attention if learns else torch.ops.attnplug.attention_forward
        output, lse = op(query, key, value, mask, bias, sinks, alibi_slopes, *params)
    elif learns:
        # The op would take several times as long around the call.
        keywords = (causal, scale, sliding_window, logits_soft_cap, attn_mask, sinks, alibi_slopes, backend, options)
        output, lse = _recorded(query, key, value, mask, bias, sinks, alibi_slopes, params, keywords)
    else:
        keep = None if form is None else partial(keep_repeated, form, query, key, value)
        output, lse = run_padded(query, key, value, params, tensors, keep)
    return (output, lse) if return_lse else output


def attention_varlen(  # noqa: PLR0913 - as for `attention`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    *,
    query_start_loc_cpu: Tensor | None = None,
    key_start_loc_cpu: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    custom_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> Any:
    """
    Attend as `attention` does, in sequences of any length that are packed one after another.

    Without CPU copies each call reads the lengths from the device, which waits for it.

    Args:
        query: ``(query tokens, num_q_heads, head_size)``.
        key: ``(key tokens, num_kv_heads, head_size)``.
        value: ``(key tokens, num_kv_heads, head_size_v)``.
        query_start_loc: ``(sequences + 1,)`` int32, exclusive cumulative sum of the query lengths (``cu_seqlens_q``).
        key_start_loc: The same of the keys (``cu_seqlens_k``); None where it is `query_start_loc`.
        query_start_loc_cpu: CPU copy.
        key_start_loc_cpu: CPU copy.
        causal: As for `attention`, in each sequence.
        scale: As for `attention`.
        sliding_window: As for `attention`.
        logits_soft_cap: As for `attention`.
        custom_mask: ``(sum(query_len * key_len),)`` bool, the sequences' masks one after another, True where a query
            attends to a key.
        attn_bias: ``(1 or num_q_heads, sum(query_len * key_len))`` in the dtype of the call, added to the scores.
        sinks: As for `attention`.
        alibi_slopes: As for `attention`.
        return_lse: As for `attention`.
        backend: As for `select`.
        options: As for `select`.

    Returns:
        ``(query tokens, num_q_heads, head_size_v)``; with `return_lse` a pair of that and
        ``(query tokens, num_q_heads)`` float32.

    Raises:
        TensorError: As for `attention`; and where the start locations do not fit the tensors.
        RequirementsError: A value is invalid.
        NoBackendError: Nothing can serve the call; it carries every verdict.
        NotNegotiatedError: As for `attention`.
    """
    check_plain(query, key, value)
    names, table = ((), NO_OPTIONS) if backend is None and options is None else encode_keywords(backend, options)
    learns = torch.is_grad_enabled() and _records_gradients(
        query, key, value, custom_mask, attn_bias, sinks, alibi_slopes
    )
    params = CallParams(causal, scale, sliding_window, logits_soft_cap, return_lse or learns, names, table)
    starts, copies = (query_start_loc, key_start_loc), (query_start_loc_cpu, key_start_loc_cpu)
    if learns or _is_traced(query):
        given = (*starts, *copies, custom_mask, attn_bias, sinks, alibi_slopes)
        op = torch.ops.attnplug.attention_varlen if learns else torch.ops.attnplug.attention_varlen_forward
        output, lse = op(query, key, value, *given, *params)
    else:
        tensors = _op.tensors_of(custom_mask, attn_bias, sinks, alibi_slopes)
        output, lse = run_packed(query, key, value, starts, copies, params, tensors)
    return (output, lse) if return_lse else output


class _Recorded(torch.autograd.Function):
    """A call of `attention` that gradients are recorded through: the formula of its op, around another such call."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *inputs, params, keywords = given
        causal, scale, window, cap, attn_mask, sinks, slopes, backend, options = keywords
        output, lse = attention(
            *inputs[:3], causal=causal, scale=scale, sliding_window=window, logits_soft_cap=cap, attn_mask=attn_mask,
            sinks=sinks, alibi_slopes=slopes, return_lse=True, backend=backend, options=options,
        )  # fmt: skip
        ctx.save_for_backward(output, lse, *inputs)
        ctx.params = params
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made: tuple[Tensor | None, ...] = _op.padded_gradients(ctx, *grads)
        return (*made[:7], None, None)


_recorded: Final[Callable[..., Any]] = _Recorded.apply


def _is_traced(query: Tensor) -> bool:
    """Whether a call is recorded, or on fake tensors: then it is an op. Others do without the cost of one."""
    if type(query) is torch.Tensor:
        return query.is_meta or torch.compiler.is_compiling()
    return isinstance(query, torch.Tensor)


def _records_gradients(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None) -> bool:
    """Whether gradients are recorded through a call; a mask or slopes that require one are refused."""
    mask, bias, sinks, slopes = rest
    for name, tensor in (("a mask", mask), ("a mask", bias), ("alibi_slopes", slopes)):
        if tensor is not None and _requires_gradient(tensor):
            raise NotNegotiatedError(
                f"{name} that requires a gradient was given",
                "gradients of query, key, value and sinks are computed",
                "pass it detached, or train it with torch's own attention",
            )
    return any(map(_requires_gradient, (query, key, value, sinks)))


def _requires_gradient(tensor: object) -> bool:
    return bool(getattr(tensor, "requires_grad", False))
