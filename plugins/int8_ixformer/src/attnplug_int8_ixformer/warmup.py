"""The warm-up: one tiny step for each kernel, so that they are compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve

from attnplug.contract import dummy_batch_of, dummy_layer, warm_up

if TYPE_CHECKING:
    from attnplug.contract import LoadedBackend
    from attnplug_int8_ixformer.backend import Int8Backend

LAYER: Final = "attnplug_int8_ixformer.warmup"
"""The name of the warm-up's layer, which needs no scales in a calibration file."""

_SPLIT: Final = (1024, 8192)
"""Lengths of sequences that have few splits, and many: different kernels merge them."""


def run_warmup(backend: Int8Backend, loaded: LoadedBackend) -> None:
    """Run decodes with one, few and many splits, and prefills."""
    target = "earlier" if backend.agreement.requirements.kv_sharing else None
    layer = evolve(dummy_layer(loaded, LAYER), kv_sharing_target=target)
    cache = loaded.make_cache(2)
    if "v_scale" in cache:
        cache["v_scale"].fill_(1.0)
    agreement, device = backend.agreement, backend.device
    batches = (dummy_batch_of(agreement, device, [query], [seq]) for query, seq in _lengths(backend))
    warm_up(loaded, batches, layer=layer, kv_cache=cache)


def _lengths(backend: Int8Backend) -> list[tuple[int, int]]:
    """Return new tokens and tokens of each step."""
    requested = backend.agreement.requirements
    found = []
    if "decode" in requested.phases:
        found += [(1, length) for length in (1, *_SPLIT)]
    if "prefill" in requested.phases:
        least = requested.decode_query_len + 1  # shorter queries are decodes
        lens = {max(length, least) for length in backend.provider.warmup_lens}
        found += [(length, length) for length in sorted(lens)]
    return found
