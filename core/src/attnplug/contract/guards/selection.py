"""Checks the selected tokens of a call of sparse attention: the form of the tensors, and on the CPU their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from attnplug.contract.guards._format import describe
from attnplug.contract.guards.memory import are_apart
from attnplug.errors import CacheError, NotNegotiatedError, TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class SelectionGuard:
    """
    Checks the selections of one implementation.

    Args:
        name: The layer's name.
        topk: As negotiated.
        block_size: As agreed; None without a paged KV cache.
    """

    def __init__(self, name: str, topk: int | None, block_size: int | None) -> None:
        self._name = name
        self._topk = topk
        self._block_size = block_size or 1

    def check_call(
        self, indices: Tensor | None, index_lens: Tensor | None, query: Tensor, written: Iterable[tuple[str, Tensor]]
    ) -> None:
        """
        Check the form of a selection.

        Args:
            indices: As of `Attention.forward`.
            index_lens: Likewise.
            query: The query, which is checked.
            written: What the call writes, by name.

        Raises:
            NotNegotiatedError: There is one, and none was negotiated.
            TensorError: There is none, a tensor has the wrong shape, dtype or device, or is written too.
        """
        if self._topk is None:
            raise NotNegotiatedError(
                f"layer {self._name!r} was given the slots of selected tokens",
                "topk was not requested, so the chosen backend would attend to all tokens",
                "select again with topk=... in the requirements, or pass neither indices nor index_lens",
            )
        if indices is None:
            raise TensorError(
                f"layer {self._name!r} was given no indices",
                f"topk={self._topk} was negotiated: each call has the slots of the tokens that are attended to",
                f"pass indices=..., (tokens, {self._topk}) int32, -1 where a token has fewer",
            )
        tokens, device = query.shape[0], query.device
        shape = (tokens, self._topk)
        if (
            indices.shape != shape
            or indices.dtype is not torch.int32
            or indices.device != device
            or indices.stride(1) != 1
        ):
            self._refuse("indices", indices, shape, device)
        read = [("indices", indices)]
        if index_lens is not None:
            if (
                index_lens.shape != shape[:1]
                or index_lens.dtype is not torch.int32
                or index_lens.device != device
                or not index_lens.is_contiguous()
            ):
                self._refuse("index_lens", index_lens, shape[:1], device)
            read.append(("index_lens", index_lens))
        are_apart(self._name, [(*first, *other) for first in written for other in read])

    def check_slots(self, indices: Tensor, index_lens: Tensor | None, num_blocks: int) -> None:
        """
        Check that selected slots are in a KV cache of so many blocks; on a device this waits for it.

        Raises:
            CacheError: A slot is outside.
        """
        if index_lens is not None:
            unread = torch.arange(indices.shape[1], device=indices.device) >= index_lens.unsqueeze(1)
            indices = indices.masked_fill(unread, -1)
        if not indices.numel():
            return
        low, high = map(int, torch.aminmax(indices))
        last = num_blocks * self._block_size - 1
        if low < -1 or high > last:
            raise CacheError(
                f"layer {self._name!r} was given indices from {low} to {high}",
                f"they are slots of its KV cache, 0 to {last}, or -1 for no token",
                "compute block_table[request, position // block_size] * block_size + position % block_size",
            )

    def _refuse(self, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> NoReturn:
        strides = f" with strides {tensor.stride()}" if tensor.ndim and not tensor.is_contiguous() else ""
        raise TensorError(
            f"layer {self._name!r} was given {name} of {describe(tensor)}{strides}",
            f"{name} is {shape} int32 on {device}, its last axis contiguous",
            "convert it: a row for each row of the query, -1 where it has fewer tokens",
        )
