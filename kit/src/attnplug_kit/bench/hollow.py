"""The contract alone: a layer of a backend that checks its calls as always, and computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug_kit.bench.rig import Rig


def hollow(rig: Rig) -> Callable[[], None]:
    """Return the forward of such a layer, on the tensors of a step."""
    backend, metadata = rig.planner.backend, rig.metadata
    impl_class: Any = type("Hollow", (backend.impl_class,), {"run": _nothing})
    hollow_backend: Any = type("HollowBackend", (type(backend),), {"impl_class": impl_class})(
        backend.agreement, backend.device_properties
    )
    impl = hollow_backend.make_impl(rig.planner.layer)
    query, key, value, cache, output = rig.query, rig.key, rig.value, rig.cache, rig.output

    def call() -> None:
        impl.forward(query, key, value, cache, metadata, output)

    return call


def _nothing(*arguments: object) -> None:
    del arguments
