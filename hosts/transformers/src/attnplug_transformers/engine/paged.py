"""What the model is called with: it answers attention calls from paged caches, with the metadata of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from attnplug.contract import Cache, Metadata
    from attnplug_transformers.engine.attention import Asked
    from attnplug_transformers.engine.layers import PagedLayer


class PagedStep:
    """
    The attention of one step.

    Args:
        layers: The layer of each attention module.
        caches: The cache of each layer, by name; empty for a run that measures memory.
        metadata: The metadata of each group; empty for a run that measures memory.
        mask: What stands in place of a mask.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, PagedLayer],
        caches: Mapping[str, Cache],
        metadata: Sequence[Metadata],
        mask: Tensor,
    ) -> None:
        self._waiting = dict(layers)
        self._caches = caches
        self._metadata = metadata
        self._mask = mask

    def answer(self, asked: Asked) -> Tensor:
        """
        Write the keys and values of the step's tokens, and attend.

        Raises:
            NotNegotiatedError: The call is not what the engine was made for.
            ContractError: The backend refuses the tensors.
        """
        layer = self._waiting.pop(asked.module, None)
        if layer is None:
            raise _called_again(asked)
        learned = layer.learned
        learned.check(asked, self._mask)
        output = asked.query.new_empty(asked.query.shape[0], layer.impl.output_width)
        metadata = self._metadata[layer.group] if self._metadata else None
        cache = self._caches.get(learned.name)
        layer.impl.forward(asked.query, asked.key, asked.value, cache, metadata, output)
        return output

    def check_complete(self) -> None:
        """
        See that every layer has asked: another attention would have run without its cache, into wrong tokens.

        Raises:
            NotNegotiatedError: One has not.
        """
        if self._waiting:
            missing = next(iter(self._waiting.values())).learned.name
            raise NotNegotiatedError(
                f"{len(self._waiting)} attention layers, {missing!r} first, did not ask the engine",
                "while an engine is open, its model is on the attention implementation 'attnplug_engine'",
                "leave model.set_attn_implementation alone until engine.close()",
            )


def _called_again(asked: Asked) -> NotNegotiatedError:
    return NotNegotiatedError(
        f"{type(asked.module).__name__} {getattr(asked.module, 'layer_idx', '')} attends once more",
        "each attention layer that the engine knows attends once a step",
        "make a new engine after changing the model",
    )
