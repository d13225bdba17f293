"""A trial run of the model: which modules attend, with what, and that engines may pack requests behind one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor, nn

from attnplug.errors import NotNegotiatedError, RequirementsError
from attnplug_transformers.engine.layers import Learned
from attnplug_transformers.mask import AskedMask
from attnplug_transformers.pattern import Pattern
from attnplug_transformers.versions import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.models import ModelLayer
    from attnplug_transformers.engine.attention import Asked

_TOKENS: Final = 5
"""Tokens of the sequences that are tried."""

_ROWS: Final = 64
"""Queries whose row of the mask is looked at."""

_ALIKE: Final = 0.05
"""Same token, same position: so far, of the largest value, may rows differ by the rounding of a narrow dtype."""


def learn(model: Any, layers: Sequence[ModelLayer], kv_cache_dtype: str) -> tuple[Learned, ...]:
    """
    Run the model twice on a few tokens, without attending, and return what its attention calls brought.

    The first run looks at the masks that the model asks for. The second has the same sequence twice in one row, as a
    step of the engine has several requests: whatever of a module depends on more than token and position shows.

    Args:
        model: The model, on the engine's attention implementation.
        layers: Its attention layers, as the configuration describes them for paged caches.
        kv_cache_dtype: Dtype of the caches.

    Raises:
        RequirementsError: A layer was not called, or the model's computation depends on where in a row a token stands.
        NotNegotiatedError: A call brings what the configuration does not say.
    """
    looking = _Looking(layers, kv_cache_dtype)
    ids = torch.arange(1, _TOKENS + 1, device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.arange(_TOKENS, device=model.device)
    mask = no_mask(model.device)
    packed = _Packed(mask)
    with torch.inference_mode():
        _call(model, ids, positions, looking, None)
        looking.check_complete()
        _call(model, ids.repeat(2), positions.repeat(2), packed, mask)
    return tuple(attrs.evolve(found, takes_mask=packed.masked[found.module]) for found in looking.found.values())


def no_mask(device: torch.device) -> Tensor:
    """Return what goes in place of a mask: four axes let the library take it for a prepared one, and make none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _call(model: Any, ids: Tensor, positions: Tensor, answering: Any, mask: Tensor | None) -> None:
    model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=mask,
        use_cache=False,
        attnplug_step=answering,
    )


def _zeros(asked: Asked) -> Tensor:
    return asked.query.new_zeros(asked.query.shape[0], asked.query.shape[1] * asked.value.shape[2])


class _Looking:
    """Answers with nothing, and remembers who asked for what."""

    def __init__(self, layers: Sequence[ModelLayer], kv_cache_dtype: str) -> None:
        self.found: dict[int, Learned] = {}
        self._layers = {layer.index: layer for layer in layers}
        self._kv_cache_dtype = kv_cache_dtype

    def answer(self, asked: Asked) -> Tensor:
        """Learn from the first call of a module."""
        index = getattr(asked.module, "layer_idx", None)
        layer = self._layers.get(index) if isinstance(index, int) else None
        if layer is None or layer.index in self.found:
            raise RequirementsError(
                f"the model called its attention from {type(asked.module).__name__} {index}",
                f"its configuration describes {len(self._layers)} layers, each of which attends once",
                "keep transformers' own attention for this model",
            )
        _check_mask(asked, layer)
        requirements = asked.call.agree(layer).evolve(kv_cache_dtype=self._kv_cache_dtype)
        sinks = (asked.sinks, version_of(asked.sinks))
        self.found[layer.index] = Learned(
            layer.name, asked.module, requirements, asked.call, asked.scale, sinks, takes_mask=True
        )
        return _zeros(asked)

    def check_complete(self) -> None:
        """Refuse a model of which a layer attends by other means."""
        missing = [layer.name for index, layer in self._layers.items() if index not in self.found]
        if missing:
            raise RequirementsError(
                f"{len(missing)} attention layers of the model, {missing[0]!r} first, did not ask the engine",
                "the classes of this model do not let their attention be replaced in all layers",
                "keep transformers' own attention for this model",
            )


class _Packed:
    """Answers with nothing, and compares the second half of the row with the first."""

    def __init__(self, mask: Tensor) -> None:
        self.masked: dict[nn.Module, bool] = {}
        self._mask = mask

    def answer(self, asked: Asked) -> Tensor:
        """Hold equal tokens at equal positions against each other."""
        name = f"{type(asked.module).__name__} {asked.module.layer_idx}"
        for rows in (asked.query, asked.key, asked.value):
            first, second = rows[:_TOKENS].float(), rows[_TOKENS:].float()
            if float((first - second).abs().max()) > _ALIKE * float(first.abs().max()):
                raise RequirementsError(
                    f"{name} computes different queries, keys or values for one token at one position",
                    "they depend on where in the row of a step the token stands: the model does not go by position_ids"
                    " alone",
                    "keep transformers' own attention for this model",
                )
        if asked.mask is not None and asked.mask is not self._mask:
            raise NotNegotiatedError(
                f"{name} is given a mask that the model computed",
                "the engine's steps have no mask tensor: requests are told apart by their pages",
                "keep transformers' own attention for this model",
            )
        self.masked[asked.module] = asked.mask is not None
        return _zeros(asked)


def _check_mask(asked: Asked, layer: ModelLayer) -> None:
    """Hold the mask that the model asks for against what was negotiated, beyond the reach of windows and chunks."""
    pattern = Pattern.of(layer.requirements)
    if asked.mask is None and not pattern.is_local:
        return
    reach = 2 * ((pattern.left or 0) + (pattern.chunk or 0)) + _TOKENS
    rows = min(reach, _ROWS)
    if isinstance(asked.mask, AskedMask):
        far = attrs.evolve(asked.mask, q_length=rows, kv_length=reach, q_offset=reach - rows, packings={})
        queries, keys = torch.arange(reach - rows, reach), torch.arange(reach)
        expected = pattern.attends(queries[:, None], keys[None, :])
        if all(bool((found[0].cpu() == expected[start : start + found.shape[1]]).all()) for start, found in far.rows()):
            return
    raise NotNegotiatedError(
        f"{layer.name}: by the mask that the model asks for, other keys are attended",
        f"by its configuration this is {pattern}, and the backend is chosen for that",
        "keep transformers' own attention for this model",
    )
