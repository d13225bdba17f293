"""Who writes K/V into the cache, phase by phase: exactly one of forward and the host, or nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attnplug.errors import LayerError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from attnplug.contract.layer import Layer
    from attnplug.negotiation.agreement import Agreement

CHOICES: Final = ("forward", "host", "either")


def by_phase(cache_write: str | Mapping[str, str]) -> Mapping[str, str]:
    """Return an implementation's `cache_write` spelled out by phase."""
    return cache_write if isinstance(cache_write, Mapping) else {"prefill": cache_write, "decode": cache_write}


def settle_writers(
    cache_write: str | Mapping[str, str], layer: Layer, agreement: Agreement
) -> tuple[frozenset[str], frozenset[str]]:
    """
    Return the phases in which forward writes, and those in which the host does.

    Raises:
        NotNegotiatedError: The layer wants a writer that the implementation does not have.
        LayerError: The layer's `cache_write` is no writer.
        PluginContractError: The phases of cross attention have different writers.
    """
    if layer.cache_write not in (None, "forward", "host"):
        raise LayerError(
            f"layer {layer.name!r} has cache_write={layer.cache_write!r}",
            "the cache is written by 'forward' or by the 'host'",
            "pass one of them",
        )
    if not agreement.requirements.paged or layer.kv_sharing_target is not None:
        return frozenset(), frozenset()
    declared = {phase: by_phase(cache_write)[phase] for phase in agreement.requirements.phases}
    if layer.cache_write is not None and not {"either", layer.cache_write} & set(declared.values()):
        raise NotNegotiatedError(
            f"layer {layer.name!r} has cache_write={layer.cache_write!r}",
            f"in {agreement.id} the cache is written by {', '.join(sorted(map(repr, set(declared.values()))))}",
            "leave cache_write out of the layer",
        )
    if agreement.requirements.attn_type == "encoder_decoder" and len(set(declared.values()) - {"either"}) > 1:
        raise PluginContractError(
            f"{agreement.id} declares cache_write={cache_write!r} for cross attention",
            "the rows that are written there are an encoder's, and belong to no phase of the decoder",
            "declare one writer for both phases",
        )
    writers = {phase: layer.cache_write or "forward" if who == "either" else who for phase, who in declared.items()}
    return tuple(frozenset(phase for phase, who in writers.items() if who == writer) for writer in ("forward", "host"))  # type: ignore[return-value]
