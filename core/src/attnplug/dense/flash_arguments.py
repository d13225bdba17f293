"""Arguments of FlashAttention's functions in attnplug's terms, and those that no backend takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from attnplug.errors import NotNegotiatedError, TensorError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_Function = TypeVar("_Function", bound=Callable[..., Any])

_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "dropout_p": ("backends of attnplug drop no weights", "pass dropout_p=0.0, which inference uses"),
    "return_attn_probs": (
        "no backend returns the attention weights",
        "pass return_softmax_lse=True for the log-sum-exp, or compute the weights with torch",
    ),
    "rotary_cos": (
        "rotary embeddings are applied before the call",
        "rotate q and k first, and pass neither rotary_cos nor rotary_sin",
    ),
    "cache_leftpad": (
        "the keys of a sequence start at the beginning of its KV cache",
        "move the keys to the front, or leave the padding out by a block_table",
    ),
}
"""Argument -> why it is refused where it is set, and the fix."""


class Visibility(NamedTuple):
    """
    What a query attends to.

    Attributes:
        causal: No later key; the last query is at the last key.
        window: Keys on the left, itself included; without `causal` as many on the right. None for all.
    """

    causal: bool
    window: int | None


def visibility_of(window_size: Any, *, causal: bool, paged: bool) -> Visibility:
    """
    Return what ``window_size=(left, right)`` and `causal` mean together: `causal` closes the right side.

    Raises:
        TensorError: The window is no pair of whole numbers.
        NotNegotiatedError: Its sides are different, and the right one is open; or equal, over a KV cache.
    """
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise TensorError(
            f"window_size={shown(window_size)} was given",
            "it is (left, right), whole numbers of keys besides the query's own; -1 is no limit",
            "pass (-1, -1) for no window, or (window - 1, 0) for a causal one",
        )
    left, right = (None if side < 0 else side for side in sides)
    right = 0 if causal else right
    if right == 0 or (left == right and not (paged and right is not None)):
        return Visibility(right == 0, None if left is None else left + 1)
    raise NotNegotiatedError(
        f"window_size={tuple(window_size)} was given",
        "a window ends at its query" + ("" if paged else ", or has equal sides"),
        "pass window_size=(left, 0)" if paged else "pass attnplug.attention_varlen a custom_mask for another shape",
    )


def soft_cap_of(softcap: float) -> float | None:
    """Return the soft cap of the scores: None for FlashAttention's 0, without a cap."""
    return None if softcap == 0.0 else softcap


def refuse(**given: object) -> None:
    """
    Refuse arguments that are set, each with its reason.

    Args:
        given: Arguments by name; None, False and 0 are not set.

    Raises:
        NotNegotiatedError: One is set.
    """
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            reason, fix = _REFUSED[name]
            raise NotNegotiatedError(f"{name}={_brief(value)} was given", reason, fix)


def one_sink(s_aux: Tensor | None, learnable_sink: Tensor | None) -> Tensor | None:
    """
    Return the sinks, which FlashAttention 3 and 4 name differently.

    Raises:
        TensorError: Both are given.
    """
    if s_aux is not None and learnable_sink is not None:
        raise TensorError("s_aux and learnable_sink were given", "they are two names of the sinks", "pass one of them")
    return learnable_sink if s_aux is None else s_aux


def check_slopes(alibi_slopes: Tensor | None) -> None:
    """
    Refuse ALiBi slopes that differ from one sequence to the next.

    Raises:
        NotNegotiatedError: They have a batch axis.
    """
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.ndim != 1:
        raise NotNegotiatedError(
            f"alibi_slopes of shape {tuple(alibi_slopes.shape)} were given",
            "all sequences of a call have the same slopes, (num_q_heads,)",
            "call once for the sequences of each set of slopes",
        )


def check_no_gradients(*tensors: Tensor | None, what: str) -> None:
    """
    Refuse to record gradients where none are computed.

    Raises:
        NotNegotiatedError: Gradients are enabled, and a tensor requires one.
    """
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        raise NotNegotiatedError(
            f"{what} would record gradients",
            "none are computed through a KV cache",
            "call it under torch.no_grad(), or pass keys and values without a cache",
        )


def uncompiled(function: _Function) -> _Function:
    """Exclude a function from torch.compile, with a reason for fullgraph=True where this torch takes one."""
    disable: Any = torch.compiler.disable
    takes_reason = "reason" in inspect.signature(disable).parameters
    reason = {"reason": "calls with a KV cache are planned each, outside of graphs"} if takes_reason else {}
    excluded: _Function = disable(function, **reason)
    return excluded


def check_queries(q: Tensor, query_lens: tuple[int, ...]) -> None:
    """
    Check that packed queries are those of the sequences.

    Raises:
        TensorError: There are more or fewer.
    """
    if q.shape[0] != sum(query_lens):
        _wrong(
            f"cu_seqlens_q that ends at {sum(query_lens)} was given for q of {q.shape[0]} tokens",
            "its last entry is the number of query tokens",
            f"q[: {sum(query_lens)}]" if sum(query_lens) < q.shape[0] else "the q of all sequences",
        )


def check_deterministic(*tensors: Tensor | None, deterministic: bool) -> None:
    """
    Refuse `deterministic` where a backward pass would have to keep it: every forward pass is deterministic.

    Raises:
        NotNegotiatedError: Gradients are recorded.
    """
    if deterministic and torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        raise NotNegotiatedError(
            "deterministic=True was given, and gradients are recorded",
            "the backward pass is torch's, whose settings decide its order of summation",
            "pass deterministic=False, and call torch.use_deterministic_algorithms(True)",
        )


def check_longest(name: str, longest: int, bound: Any) -> None:
    """
    Check that no sequence is longer than the call says.

    Raises:
        TensorError: One is, or the bound is no whole number.
    """
    if bound is None:
        return
    value = bound_of(name, bound)
    if longest > value:
        _wrong(f"{name}={value} was given, and a sequence has {longest} tokens", "it is an upper bound", f"{longest}")


def bound_of(name: str, bound: Any) -> int:
    """
    Return an upper bound as a number.

    Raises:
        TensorError: It is not a whole number from 0.
    """
    if isinstance(bound, Tensor) and bound.numel() == 1:
        bound = bound.item()
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        _wrong(f"{name}={shown(bound)} was given", "it is a whole number of tokens", "the longest sequence")
    return bound


def _wrong(problem: str, expected: str, passed: str) -> NoReturn:
    raise TensorError(problem, expected, f"pass {passed}")


def _brief(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
