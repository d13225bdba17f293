"""A call of ComfyUI's attention functions: its arguments as tensors of heads, and its output as the caller gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from attrs import evolve, frozen

from attnplug.dense import autocast_like_sdpa
from attnplug.errors import NotNegotiatedError, TensorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNUSED: Final = frozenset({"transformer_options", "_inside_attn_wrapper", "low_precision_attention"})
"""
Keywords that change nothing here. The first two are ComfyUI's own: which model calls, and that its wrapper has been
passed. The third permits quantized attention, and False forbids it: no backend quantizes a dense call.
"""

_OTHER_NAMES: Final = {"query": "q", "key": "k", "value": "v"}
"""`attention_sub_quad` has these names; the others have `q`, `k` and `v`."""


@frozen(eq=False)
class AttentionCall:
    """
    One call.

    Attributes:
        query: ``(batch, queries, heads, size)``.
        key: ``(batch, keys, kv_heads, size)``.
        value: ``(batch, keys, kv_heads, size_v)``.
        mask: None, or what expands to ``(batch, heads, queries, keys)``: boolean, True where a query attends to a key,
            or floating and added to the scores.
        scale: Factor of the scores; None is ``size ** -0.5``.
        enable_gqa: Whether groups of query heads may share a key and value head.
        dtype: Of the output.
        heads_first: Whether the output is ``(batch, heads, queries, size_v)`` instead of
            ``(batch, queries, heads * size_v)``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float | None
    enable_gqa: bool
    dtype: torch.dtype
    heads_first: bool

    def in_float32(self) -> AttentionCall:
        """Return the same call with queries, keys and values cast to float32."""
        return evolve(self, query=self.query.float(), key=self.key.float(), value=self.value.float())

    def in_autocast(self) -> AttentionCall:
        """Return the same call with its tensors as ``torch.autocast`` casts them; the output is not cast back."""
        query, key, value, mask = autocast_like_sdpa(self.query, self.key, self.value, self.mask)
        is_same = query is self.query and key is self.key and value is self.value and mask is self.mask
        return self if is_same else evolve(self, query=query, key=key, value=value, mask=mask, dtype=query.dtype)

    def part(self, start: int, end: int) -> AttentionCall:
        """Return the call for some sequences of the batch."""
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[start:end]
        rows = slice(start, end)
        return evolve(self, query=self.query[rows], key=self.key[rows], value=self.value[rows], mask=mask)

    def as_comfyui(self, output: Tensor) -> Tensor:
        """
        Return an output as ComfyUI's functions do.

        Args:
            output: ``(batch, queries, heads, size_v)``.
        """
        output = output.to(self.dtype)
        return output.transpose(1, 2) if self.heads_first else output.flatten(2)


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
    """
    Return a call from the arguments of ComfyUI's functions, without `attn_precision`.

    Raises:
        TensorError: The tensors do not have the shapes that the arguments say.
        NotNegotiatedError: A keyword is not known here.
        TypeError: An argument is missing, or is passed twice.
    """
    if not _OTHER_NAMES.keys().isdisjoint(kwargs):
        kwargs = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    return _read(*args, **kwargs)


def precision_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the argument `attn_precision` of a call, or None."""
    precision: torch.dtype | None = args[5] if len(args) > 5 else kwargs.get("attn_precision")
    return precision


def _read(  # noqa: PLR0913 - the arguments of ComfyUI's functions
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,  # noqa: ARG001 - see `precision_of`
    skip_reshape: bool = False,  # noqa: FBT001, FBT002 - the order of ComfyUI's functions
    skip_output_reshape: bool = False,  # noqa: FBT001, FBT002 - likewise
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **more: Any,
) -> AttentionCall:
    unknown = sorted(name for name, value in more.items() if name not in UNUSED and value is not None)
    if unknown:
        _refuse_keyword(unknown[0])
    split = _with_heads if skip_reshape else _split
    query, key, value = split(q, k, v, heads, enable_gqa=enable_gqa)
    if mask is not None and mask.ndim == 3:  # (batch, queries, keys); two axes are those of all sequences
        mask = mask.unsqueeze(1)
    return AttentionCall(query, key, value, mask, scale, enable_gqa, q.dtype, skip_output_reshape)


def _with_heads(q: Tensor, k: Tensor, v: Tensor, heads: int, *, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors that have an axis of heads, with their tokens first."""
    del enable_gqa  # the tensors say it themselves
    if not q.ndim == k.ndim == v.ndim == 4 or q.shape[1] != heads:
        _refuse_shapes(q, k, v, f"with skip_reshape=True and heads={heads}, q is (batch, {heads}, tokens, size)")
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _split(q: Tensor, k: Tensor, v: Tensor, heads: int, *, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of `(batch, tokens, heads * size)` with an axis of heads."""
    if not q.ndim == k.ndim == v.ndim == 3 or q.shape[2] % heads:
        _refuse_shapes(q, k, v, f"each is (batch, tokens, heads * size), with {heads} heads")
    size = q.shape[2] // heads
    kv_heads = k.shape[2] // max(1, size) if enable_gqa else heads
    if not kv_heads or k.shape[2] != kv_heads * size or v.shape[2] % kv_heads:
        _refuse_shapes(q, k, v, f"the keys have {heads} heads of size {size}" + (", or fewer" if enable_gqa else ""))
    return _in_heads(q, heads), _in_heads(k, kv_heads), _in_heads(v, kv_heads)


def _in_heads(tensor: Tensor, heads: int) -> Tensor:
    batch, tokens, width = tensor.shape
    return tensor.view(batch, tokens, heads, width // heads)


def _refuse_shapes(q: Tensor, k: Tensor, v: Tensor, expected: str) -> NoReturn:
    found = ", ".join(f"{name} of {tuple(one.shape)}" for name, one in (("q", q), ("k", k), ("v", v)))
    raise TensorError(
        f"{found} were given",
        expected,
        "pass tensors of these shapes; skip_reshape=True is for those that have an axis of heads",
    )


def _refuse_keyword(name: str) -> NoReturn:
    raise NotNegotiatedError(
        f"the argument {name!r} is given to ComfyUI's attention function",
        "attnplug-comfyui knows mask, attn_precision, scale, enable_gqa, low_precision_attention and both skip flags",
        "permit ComfyUI's own function (fallback), or use a newer attnplug-comfyui",
    )
