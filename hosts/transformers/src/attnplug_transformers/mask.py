"""The masks of the library, evaluated only where a layer compares them with its pattern."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import attrs
import torch
from attrs import define, field
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug_transformers.call import uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELEMENTS_AT_ONCE: Final = 1 << 24
"""Elements of a mask, or scores of padded queries, that are computed at once: 16 MiB of booleans, 64 of scores."""


@define(eq=False)
class LazyMask:
    """
    The mask of one step and one kind of layer, as the function that the library describes it by.

    It takes the place of a mask tensor, and refuses to be computed with.

    Attributes:
        batch_size: Sequences.
        q_length: Queries per sequence, padding included.
        kv_length: Keys per sequence, padding and unused cache included.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: ``(sequence, head, query position, key position) -> bool``, padding not included.
        padding: ``(batch, positions)`` bool, False for padded tokens; None for no padding.
        use_vmap: Whether `mask_function` works on scalars only.
        device: Where the mask is evaluated.
        packings: The results of `pack`, by pattern, device and starts of samples.
        samples: The positions of the step, and where its samples begin; None before a layer has read them.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    mask_function: Callable[..., Any]
    padding: Tensor | None
    use_vmap: bool
    device: torch.device
    packings: dict[Any, Any] = field(factory=dict, repr=False)
    samples: tuple[Tensor, tuple[int, ...]] | None = field(default=None, repr=False)
    _whole: Tensor | None = field(default=None, init=False, repr=False)

    ndim = 4
    dtype = torch.bool

    @property
    def shape(self) -> torch.Size:
        """The shape that a mask tensor would have: ``(batch, 1, queries, keys)``."""
        return torch.Size((self.batch_size, 1, self.q_length, self.kv_length))

    def contiguous(self) -> LazyMask:
        """Return itself: `generate` calls this on prepared masks."""
        return self

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first query, (batch, queries, keys) bool)`` in slices of queries; True attends, padding included."""
        step = max(1, ELEMENTS_AT_ONCE // max(1, self.batch_size * self.kv_length))
        if step >= self.q_length > 0:
            self._whole = self._evaluate(0, self.q_length) if self._whole is None else self._whole
            yield 0, self._whole
            return
        for start in range(0, self.q_length, step):
            yield start, self._evaluate(start, min(step, self.q_length - start))

    def is_padding(self) -> Tensor | None:
        """Return ``(batch, queries)`` bool, True where the query itself is a padded token; None without padding."""
        if self.padding is None:
            return None
        positions = torch.arange(self.q_offset, self.q_offset + self.q_length, device=self.padding.device)
        inside = positions < self.padding.shape[1]
        real = self.padding[:, positions.clamp(max=self.padding.shape[1] - 1)] & inside
        return ~real.expand(self.batch_size, -1)

    def own_keys(self) -> Tensor | None:
        """Return ``(queries,)``: which key is the query's own token; negative before the first key of the call."""
        return torch.arange(self.q_length, device=self.device) + (self.q_offset - self.kv_offset)

    def is_causal(self) -> bool:
        """Return whether tokens attend to no later ones, by the mask of the first two."""
        if self.kv_length < 2:
            return True
        first = attrs.evolve(self, q_length=2, kv_length=2, q_offset=0, kv_offset=0, padding=None, packings={})
        _, attends = next(first.rows())
        return not bool(attends[0, 0, 1])

    def reaches(self, distance: int) -> bool:
        """Return whether the token at this distance from the first one attends to it; False for no such token."""
        if min(self.q_offset + self.q_length, self.kv_offset + self.kv_length) <= distance:
            return False
        one = attrs.evolve(self, q_length=1, kv_length=1, q_offset=distance, kv_offset=0, padding=None, packings={})
        _, attends = next(one.rows())
        return bool(attends.all())

    def _evaluate(self, start: int, length: int) -> Tensor:
        mask = sdpa_mask(
            batch_size=self.batch_size,
            q_length=length,
            kv_length=self.kv_length,
            q_offset=self.q_offset + start,
            kv_offset=self.kv_offset,
            mask_function=self.mask_function,
            attention_mask=self.padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        return cast("Tensor", mask)[:, 0]  # None only where skipping is allowed

    def _refuse(self, *_: object) -> NoReturn:
        raise _not_a_tensor()

    def __getitem__(self, index: Any) -> LazyMask | Tensor:
        """
        Return the mask of a slice of the queries, ``mask[:, :, start:stop, :]``, as Gemma 4 takes it. Or its values
        ``mask[:, 0, :, :]``, ``(batch, queries, keys)`` bool, which the indexer of a sparse layer computes with.
        """
        whole = slice(None)
        if index == (whole, 0, whole, whole):
            return torch.cat([rows for _, rows in self.rows()], 1)
        sliced = isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice)
        if not sliced or (index[0], index[1], index[3]) != (whole,) * 3 or index[2].step not in (None, 1):
            raise _not_a_tensor()
        start, stop, _ = index[2].indices(self.q_length)
        if (start, stop) == (0, self.q_length):
            return self
        return attrs.evolve(self, q_length=max(0, stop - start), q_offset=self.q_offset + start, packings={})

    __add__ = __radd__ = __mul__ = __and__ = __or__ = __invert__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Refuse any computation in place of a tensor."""
        raise _not_a_tensor()


def _not_a_tensor() -> NotNegotiatedError:
    return NotNegotiatedError(
        "the model computes with its attention mask",
        "masks reach the attention function as functions, and each layer compares them with what it negotiated",
        "use attn_implementation='eager' for this model",
    )


@define(eq=False)
class DenseMask:
    """
    A mask tensor, prepared by the caller or by the model itself.

    Attributes:
        mask: ``(batch, queries, keys)`` bool, True attends.
        packings: As for `LazyMask`.
    """

    mask: Tensor
    packings: dict[Any, Any] = field(factory=dict, repr=False)

    @classmethod
    def of(cls, given: Tensor, batch_size: int, q_length: int, kv_length: int) -> DenseMask:
        """
        Return the mask of a tensor of booleans, or of 0 and a very negative number.

        Args:
            given: ``(batch or 1, 1, queries or 1, keys)``.
            batch_size: Sequences of the call.
            q_length: Queries of the call.
            kv_length: Keys of the call.

        Raises:
            TensorError: The tensor has another shape.
            NotNegotiatedError: It differs between heads, is a bias, or is no tensor.
        """
        if not isinstance(given, Tensor):
            raise NotNegotiatedError(
                f"an attention_mask of type {type(given).__name__} was given",
                "a prepared mask is a tensor; block masks are for flex attention alone",
                "pass the two-dimensional padding mask to the model, which builds the others from it, or use"
                " attn_implementation='flex_attention'",
            )
        sizes = ((1, batch_size), tuple(given.shape[1:2]), (1, q_length), (kv_length,))
        if given.ndim != 4 or any(size not in fits for size, fits in zip(given.shape, sizes, strict=True)):
            raise TensorError(
                f"an attention_mask of shape {tuple(given.shape)} was given",
                f"a prepared mask of this call is of shape {(batch_size, 1, q_length, kv_length)}",
                "pass the two-dimensional padding mask to the model, which builds the others from it",
            )
        if given.shape[1] != 1 and given.stride(1) != 0:
            raise NotNegotiatedError(
                f"an attention_mask of shape {tuple(given.shape)} was given",
                "all heads of a layer attend to the same keys",
                "pass a mask with one head, or use attn_implementation='eager'",
            )
        return cls(_as_bool(given[:, 0]).expand(batch_size, q_length, kv_length))

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.mask.device

    @property
    def shape(self) -> torch.Size:
        """``(batch, 1, queries, keys)``."""
        return self.mask[:, None].shape

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the whole mask, as `LazyMask.rows` does."""
        yield 0, self.mask

    def is_padding(self) -> Tensor | None:
        """Return None: a dense mask does not mark padded queries."""
        return None

    def is_causal(self) -> bool:
        """Return whether queries, the last tokens of their sequences, attend to no later ones."""
        queries, keys = self.mask.shape[1:]
        return keys >= queries and not bool(self.mask.triu(keys - queries + 1).any())

    def own_keys(self) -> Tensor | None:
        """Return which key is the query's own token; None where queries and keys differ in number."""
        queries, keys = self.mask.shape[1:]
        return torch.arange(queries, device=self.device) if queries == keys else None


@lru_cache(maxsize=64)  # layers without a mask share this one, and with it its packing and plans
def default_mask(batch_size: int, q_length: int, kv_length: int, *, causal: bool, device: torch.device) -> LazyMask:
    """
    Return the mask of a call without one: all keys, or causally those up to the query's own token.

    Raises:
        NotNegotiatedError: Keys outnumber several causal queries, whose positions are ambiguous then.
    """
    if causal and q_length not in (1, kv_length):
        raise NotNegotiatedError(
            f"{q_length} queries and {kv_length} keys were given, causal and without an attention_mask",
            "where keys outnumber queries, only a mask determines the positions of the queries",
            "pass an attention_mask, or the queries one by one",
        )
    return LazyMask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=kv_length - q_length if causal else 0,
        kv_offset=0,
        mask_function=causal_mask_function if causal else bidirectional_mask_function,
        padding=None,
        use_vmap=False,
        device=device,
    )


@uncompiled
def make_mask(  # noqa: PLR0913 - the library's signature
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | LazyMask | None = None,
    *,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **hints: object,
) -> LazyMask:
    """
    Return the mask that the library requests, unevaluated. Registered under the name ``"attnplug"``.

    Args:
        batch_size: Sequences.
        q_length: Queries per sequence.
        kv_length: Keys per sequence.
        q_offset: Position of the first query; static KV caches keep it in a tensor that they advance in place.
        kv_offset: Position of the first key.
        mask_function: Whether a query attends to a key, padding apart.
        attention_mask: ``(batch, positions)`` bool, False for padding; or a mask that this function returned before.
        use_vmap: Whether `mask_function` works on scalars only.
        device: Where the mask is evaluated.
        hints: Whether implementations may skip the mask, and its dtype: this one is not skipped, and has none.
    """
    del hints
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    # Read now: a static KV cache advances its offset before the first layer evaluates the mask.
    return LazyMask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        mask_function=mask_function,
        padding=attention_mask,
        use_vmap=use_vmap,
        device=torch.device(device),
    )


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    attends = mask == 0
    # Libraries write the most negative number of a dtype, or of a smaller one; a bias is far above it.
    if not mask.is_floating_point() or bool((~attends & (mask > -1e4)).any()):
        raise NotNegotiatedError(
            f"a {mask.dtype} attention_mask with values between 0 and the most negative number was given",
            "a mask has the keys to attend to; a bias on the scores was not negotiated",
            "use attn_implementation='eager' for this model",
        )
    return attends
