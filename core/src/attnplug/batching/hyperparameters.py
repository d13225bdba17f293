"""The values that a library fixes when it plans, layer by layer, and whether all layers share them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attnplug.errors import LayerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attnplug.contract.impl import AttentionImpl


class Hyperparameters(NamedTuple):
    """
    What a plan of one layer is made for.

    Attributes:
        window_left: Tokens attended to the left of a token's own; -1 for all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``; None for no cap.
        sm_scale: Factor of the scores.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def per_layer_parameters(impls: Iterable[AttentionImpl]) -> dict[str, Hyperparameters]:
    """
    Return the values of each layer, by its name.

    Raises:
        LayerError: Two layers have one name.
    """
    found: dict[str, Hyperparameters] = {}
    for impl in impls:
        name = impl.layer.name
        if name in found:
            raise LayerError(
                f"two layers are called {name!r}",
                "each layer of a model has a name of its own",
                "name them after their place in the model: 'layers.0.attention', ...",
            )
        found[name] = Hyperparameters(impl.window[0], impl.logits_soft_cap, impl.scale)
    return found


def infer_global_hyperparameters(per_layer: Mapping[str, Hyperparameters]) -> Hyperparameters:
    """
    Return the values that all layers share, for a library that plans once for all of them.

    Args:
        per_layer: What `per_layer_parameters` returned; plain tuples of that order do too.

    Raises:
        LayerError: There are no layers, or some differ; it names them.
    """
    if not per_layer:
        raise LayerError("no layers were given", "the shared values are those of at least one layer", "pass the impls")
    (first, shared), *_ = per_layer.items()
    differing = {name: values for name, values in per_layer.items() if tuple(values) != tuple(shared)}
    if differing:
        listed = ", ".join(f"{name!r} has {_words(values)}" for name, values in differing.items())
        raise LayerError(
            f"{first!r} has {_words(shared)}; {listed}",
            "one plan for all layers needs one window, one soft cap and one scale",
            "plan per group of equal values: MetadataBuilder keeps one plan for each plan_key",
        )
    return Hyperparameters(*shared)


def _words(values: tuple[int, float | None, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(Hyperparameters._fields, values, strict=True))
