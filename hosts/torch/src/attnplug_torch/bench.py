"""
What ``attnplug bench --host torch`` measures: torch's attention by its own operators and through attnplug, the module
of the entry point `torch` in the group ``attnplug.benchmarks``.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
from attnplug.errors import AttnplugError
from attnplug_torch.activation import activate
from attnplug_torch.routes import report, reset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

DISTRIBUTIONS: Final = ("torch", "attnplug-torch")

SHAPES: Final = {
    "cpu": ((1, 4, 8, 64), (2, 8, 256, 64)),
    "cuda": ((1, 4, 8, 64), (1, 24, 4608, 128)),
}
"""Device type -> ``(batch, heads, tokens, size)``: a call of next to no work, and one of much."""


class Switch:
    """Makes attnplug with one of its backends active, and torch's own operators again."""

    def __init__(self) -> None:
        self._is_active = False
        self._backend: str | None = None
        self._scope = ExitStack()

    def use(self, *, active: bool, backend: str | None = None) -> None:
        """
        Make attnplug active, or torch's own operators.

        Args:
            active: Whether calls go through attnplug.
            backend: The backend that they run on; None leaves it to attnplug.
        """
        if (active, backend) == (self._is_active, self._backend):
            return
        self._scope.close()
        if active:
            self._scope.callback(activate().remove)
            self._scope.enter_context(attnplug.using(backend=backend))
        self._is_active, self._backend = active, backend


def parts(device: str, backend: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Yield the calls that are measured, and leave torch as it was.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backend: The backend of attnplug; None for the one that is chosen.

    Raises:
        AttnplugError: A call does not run on a backend, or with another result.
    """
    switch = Switch()
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        for shape in SHAPES[device]:
            batch, heads, tokens, size = shape
            made = torch.randn(3, batch, tokens, heads, size, device=device, generator=generator).to(dtype)
            query, key, value = made.transpose(2, 3)
            text = f"scaled_dot_product_attention, causal, {batch} x {tokens} tokens, {heads} heads of {size}"
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # torch prefers cuDNN on some GPUs
                yield text, _calls(switch, partial(sdpa, query, key, value, is_causal=True), backend)
    finally:
        switch.use(active=False)


def _calls(switch: Switch, call: Callable[[], Tensor], backend: str | None) -> dict[str, Any]:
    """Return the call of both, whose results are compared."""

    def native() -> None:
        switch.use(active=False)
        call()  # the first one after a switch is no call that a model repeats

    def ours() -> None:
        switch.use(active=True, backend=backend)
        call()

    native()
    wanted = call().float()
    ours()
    reset()
    found = call().float()
    routes = report()
    name = next((route.backend for route in routes if route.backend), None)
    if name is None:
        raise AttnplugError(
            "torch's call does not run on a backend of attnplug",
            "; ".join(map(str, routes)) or "no operator of attnplug was called",
            "name another one by --backend",
        )
    if not torch.allclose(found, wanted, atol=3e-2, rtol=3e-2):
        raise AttnplugError(f"{name} computes another result than torch", "", "run the conformance kit on it")
    return {who: (lambda _: call(), prepare) for who, prepare in (("torch", native), (f"attnplug on {name}", ours))}
