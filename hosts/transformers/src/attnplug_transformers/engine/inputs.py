"""What the model is given in one step: the tokens of all requests behind one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching import BatchAssembler, positions_of
from attnplug.contract import Batch, upload

if TYPE_CHECKING:
    from attnplug_transformers.engine.step import Step


@frozen(eq=False)
class Inputs:
    """
    One step as tensors.

    Attributes:
        input_ids: ``(1, tokens)`` int64.
        positions: ``(1, tokens)`` int64, of each token in its request.
        batch: Lengths, pages and slots, for the builders.
        rows: ``(requests that sample,)`` int64, the tokens whose logits choose the next ones; None for all.
    """

    input_ids: Tensor
    positions: Tensor
    batch: Batch
    rows: Tensor | None


class InputMaker:
    """
    Makes the inputs of one step after another.

    Args:
        block_size: Tokens per block.
        device: Where the tensors go.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._draft = BatchAssembler(block_size, device=device)
        self._device = device

    def make(self, step: Step) -> Inputs:
        """Return the inputs of a step."""
        self._draft.clear()  # of a step that was given up half-way
        tokens: list[int] = []
        rows: list[int] = []
        for one in step:
            request = one.request
            self._draft.add(one.num_new_tokens, one.start, request.blocks)
            tokens += request.tokens[one.start : one.stop]
            if one.samples:
                rows.append(len(tokens) - 1)
        batch = self._draft.finish()
        return Inputs(
            self._upload(tokens)[None],
            positions_of(batch)[None],
            batch,
            None if len(rows) == len(tokens) else self._upload(rows),
        )

    def _upload(self, numbers: list[int]) -> Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self._device)
