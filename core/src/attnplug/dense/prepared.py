"""
Prepared calls: those of a host, which it keeps under keys of its making, and those that a model repeats.

A model repeats its calls with other tensors of the same shapes, strides, dtypes and devices. The first one of such a
form is checked, decided and planned. The others run what it has prepared, and compare nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.dense.backends import use_device
from attnplug.dense.calls import MOST_CALLS, PreparedAttention, plain_rows, prepare_packed, prepare_padded
from attnplug.dense.decisions import DecisionCache
from attnplug.dense.params import NO_TENSORS, CallParams, CallTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Rows = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of ``(batch * tokens, heads, size)``."""

# Of a thread, as the calls that they run on.
_repeated: Final[DecisionCache[Any]] = DecisionCache(MOST_CALLS, per_thread=True)
_interpreters: Final[Callable[[], object]] = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001 - has no public name


@frozen(eq=False)
class RepeatedCall:
    """
    What the calls of one form run on.

    Attributes:
        prepared: What computes them.
        rows: Query, key and value as a backend takes them; None for one that is copied.
        heads_first: Whether the heads are before the tokens, in the tensors and in the results.
    """

    prepared: PreparedAttention
    rows: tuple[Rows | None, Rows | None, Rows | None]
    heads_first: bool

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, tensors: CallTensors
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the output, and the LSE or None; no pair where the sinks or slopes need another layer."""
        prepared = self.prepared
        if tensors is not NO_TENSORS and not prepared.takes(tensors):
            return None
        of_query, of_key, of_value = self.rows
        output, lse = prepared.run_shaped(
            query.as_strided(*of_query) if of_query else self._copied(query),
            key.as_strided(*of_key) if of_key else self._copied(key),
            value.as_strided(*of_value) if of_value else self._copied(value),
            tensors,
            is_checked=True,
        )
        if self.heads_first:
            return output.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
        return output, lse

    def _copied(self, tensor: Tensor) -> Tensor:
        return plain_rows(tensor.transpose(1, 2) if self.heads_first else tensor).flatten(0, 1)


def find_repeated(
    query: Tensor, key: Tensor, value: Tensor, call: tuple[Any, ...], tensors: CallTensors
) -> tuple[Hashable, RepeatedCall | None]:
    """
    Return the form of a call, and what calls of this form run on.

    The form is None where a call is not repeated: it is part of a transform or a capture, records gradients, has
    tensors of another class or layout, or is made while another device is the current one. That of a mask, sinks and
    slopes has nothing of their values, which each call reads. Autocast and alignment are
    not part of it: calls keep the dtype of their tensors, and no decision depends on alignment.

    Args:
        query: ``(batch, tokens, heads, size)``, or with the heads before the tokens; and so are key and value.
        key: Likewise.
        value: Likewise.
        call: What else the caller's calls depend on.
        tensors: The other tensors.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or _interpreters() is not None:
        return None, None
    learns = torch.is_grad_enabled()
    if learns and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None, None
    device = query.device
    try:
        form: tuple[Any, ...] = (
            query.shape, query.stride(), query.dtype,
            key.shape, key.stride(), key.dtype, key.device,
            value.shape, value.stride(), value.dtype, value.device,
            call,
        )  # fmt: skip
        if tensors is not NO_TENSORS:
            for one in tensors:
                if one is not None and learns and one.requires_grad:
                    return None, None
                form += (None,) if one is None else (type(one), one.shape, one.dtype, one.device)
        if query.is_cuda and (device.index != torch.cuda.current_device() or torch.cuda.is_current_stream_capturing()):
            return None, None
        where = _repeated.key(form, device)
        return where, _repeated.find(where)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, no strides, or nothing hashable: refused by name
        return None, None


def keep_repeated(form: Hashable, query: Tensor, key: Tensor, value: Tensor, prepared: PreparedAttention) -> None:
    """
    Keep what a call has run on.

    Args:
        form: What `find_repeated` returned before it ran.
        query: ``(batch, tokens, heads, size)``, and so are key and value.
        key: Likewise.
        value: Likewise.
        prepared: What it has run on.
    """
    rows = (rows_of(query), rows_of(key), rows_of(value))
    _repeated.keep(form, RepeatedCall(prepared, rows, heads_first=False))


def repeat_as(form: Hashable, call: RepeatedCall | None, *, heads_first: bool) -> None:
    """Keep a call under another form: that of the function whose tensors are views, with the same memory, of its."""
    if call is not None:
        _repeated.keep(form, RepeatedCall(call.prepared, call.rows, heads_first))


def rows_of(tensor: Tensor) -> Rows | None:
    """
    Return how `PreparedAttention.run` sees a padded tensor without a copy, for calls that repeat its shape and strides.

    Args:
        tensor: ``(batch, tokens, heads, size)``.

    Returns:
        Shape and strides of ``(batch * tokens, heads, size)``, as ``Tensor.as_strided`` takes them; None where the
        tensor has to be copied.
    """
    (batch, tokens, heads, size), (of_batch, of_token, of_head, of_element) = tensor.shape, tensor.stride()
    if of_element != 1 or not (batch == 1 or tokens == 1 or of_batch == tokens * of_token):
        return None
    step = of_batch if tokens == 1 and batch > 1 else of_token
    return (batch * tokens, heads, size), (step, of_head, 1)


def prepare_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> PreparedAttention:
    """
    Decide a call of `attention`, load its backend and build its metadata, without making it.

    Args:
        query: ``(batch, queries, num_q_heads, head_size)``.
        key: ``(batch, keys, num_kv_heads, head_size)``.
        value: ``(batch, keys, num_kv_heads, head_size_v)``.
        causal: As for `attention`.
        scale: Likewise.
        return_lse: Likewise.

    Raises:
        TensorError: As for `attention`.
        RequirementsError: Likewise.
        NoBackendError: Likewise.
        NotNegotiatedError: A CUDA graph is captured.
    """
    params = CallParams(causal=causal, scale=scale, return_lse=return_lse)
    with use_device(query.device):
        return prepare_padded(query, key, value, params, NO_TENSORS)


def prepare_attention_varlen(  # noqa: PLR0913 - the arguments of `attention_varlen`
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    return_lse: bool = False,
) -> PreparedAttention:
    """
    Do for `attention_varlen` what `prepare_attention` does for `attention`.

    Args:
        query: ``(query tokens, num_q_heads, head_size)``.
        key: ``(key tokens, num_kv_heads, head_size)``.
        value: ``(key tokens, num_kv_heads, head_size_v)``.
        query_start_loc: As for `attention_varlen`: it is read.
        key_start_loc: Likewise.
        causal: As for `attention`.
        scale: Likewise.
        sliding_window: Likewise.
        return_lse: Likewise.

    Raises:
        TensorError: As for `attention_varlen`.
        RequirementsError: Likewise.
        NoBackendError: Likewise.
        NotNegotiatedError: A CUDA graph is captured.
    """
    params = CallParams(causal=causal, scale=scale, sliding_window=sliding_window, return_lse=return_lse)
    with use_device(query.device):
        return prepare_packed(query, key, value, (query_start_loc, key_start_loc), (None, None), params, NO_TENSORS)
