"""
The replacement of torch's operators, and their restoration.

Of each device type, torch's operators of flash attention run a backend; those that torch takes instead of them are
counted, and run as they are. What no backend serves runs in the operator that torch had when the first activation
replaced it.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.library import Library, get_kernel

from attnplug_torch import dense, packed
from attnplug_torch.choice import why_not_flash
from attnplug_torch.decisions import RefusedError
from attnplug_torch.nesting import inside, is_inside
from attnplug_torch.routes import SDPA, VARLEN, VARLEN_BACKWARD, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_FORWARD: Final = "_flash_attention_forward"
_FORWARD_INTO: Final = "_flash_attention_forward_no_dropout_inplace"
_BACKWARD: Final = "_flash_attention_backward"

SERVED: Final[dict[str, dict[str, tuple[str, Callable[..., tuple[str, Any]]]]]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": (SDPA, dense.on_cpu),
        _FORWARD: (VARLEN, packed.forward),
        _FORWARD_INTO: (VARLEN, packed.forward_into),
        _BACKWARD: (VARLEN_BACKWARD, packed.backward),  # torch has none; on CUDA it has
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": (SDPA, dense.on_cuda),
        _FORWARD: (VARLEN, packed.forward),
        _FORWARD_INTO: (VARLEN, packed.forward_into),
    },
}
"""Dispatch key -> operator of aten -> what it is counted as, and what serves it."""

_MATH: Final = "_scaled_dot_product_attention_math"
COUNTED: Final[dict[str, dict[str, str]]] = {
    "CPU": {_MATH: "math"},
    "AutogradCPU": {_MATH: "math"},
    "CUDA": {
        _MATH: "math",
        "_scaled_dot_product_efficient_attention": "memory-efficient",
        "_scaled_dot_product_cudnn_attention": "cuDNN",
    },
    "AutogradCUDA": {_MATH: "math"},
}
"""Dispatch key -> operator that torch takes in place of flash attention -> its name."""


class Replacement:
    """The operators of this process while attnplug is active."""

    def __init__(self) -> None:
        self._libraries: list[Library] = []
        self._handles: set[object] = set()
        self._lock = threading.Lock()

    def add(self, handle: object) -> None:
        """Replace the operators for a handle; they are replaced once for all."""
        with self._lock:
            if not self._handles:
                self._replace()
            self._handles.add(handle)

    def discard(self, handle: object) -> None:
        """Restore torch's operators after the last handle."""
        with self._lock:
            if handle in self._handles:
                self._handles.discard(handle)
                if not self._handles:
                    self._restore()

    def _replace(self) -> None:
        # All of torch's kernels are found before any is replaced: `CPU` and `AutogradCPU` may share one.
        kernels = list(_kernels())
        try:
            with warnings.catch_warnings():
                # torch warns of every operator that is overridden, which is what was requested.
                warnings.filterwarnings("ignore", message=".*[Oo]verrid", category=UserWarning)
                for key, name, kernel in kernels:
                    library = Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
                    self._libraries.append(library)
                    library.impl(name, kernel, key, with_keyset=True)  # type: ignore[no-untyped-call]
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        while self._libraries:
            self._libraries.pop()._destroy()  # type: ignore[no-untyped-call] # noqa: SLF001 - as torch's own tests do


_REPLACEMENT: Final = Replacement()


class Handle:
    """
    One activation: what `torch.nn.attention.restore_flash_attention_impl` removes.

    torch's operators are in force again when the last handle is removed, in whichever order.
    """

    def __init__(self) -> None:
        self._token = object()  # held by the replacement: another handle may have the address of one that is gone
        _REPLACEMENT.add(self._token)

    def remove(self) -> None:
        """End this activation; a second time changes nothing."""
        _REPLACEMENT.discard(self._token)


def activate() -> Handle:
    """Replace torch's operators, and return what restores them."""
    return Handle()


def _kernels() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield a dispatch key, an operator of it, and what replaces it."""
    types = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)  # type: ignore[no-untyped-call] # of torch
    for device_type in types:
        for name, (operator, serve) in SERVED[device_type].items():
            if hasattr(torch.ops.aten, name):  # torch 2.11 does not have all of them
                yield device_type, name, _serving(operator, serve, _own_kernel(name, device_type))
        for key in (device_type, f"Autograd{device_type}"):
            for name, choice in COUNTED[key].items():
                own = _own_kernel(name, device_type)
                if own is not None:
                    yield key, name, _counting(choice, own)


def _own_kernel(name: str, key: str) -> Any:
    """Return torch's kernel of an operator, or None where it has none for the key."""
    try:
        return get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def _serving(operator: str, serve: Callable[..., tuple[str, Any]], own: Any) -> Callable[..., Any]:
    """Return the kernel that runs a backend, or torch's own kernel for the reason that is counted."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        device: str = args[0].device.type
        if is_inside():
            if own is None:
                raise RefusedError("a backend of attnplug calls it").without_own(operator, device)
            return own.call_boxed(keys, *args, **kwargs)
        try:
            with inside():
                ran, results = serve(*args, **kwargs)
        except RefusedError as refusal:
            count(operator, device, None, refusal.reason, refused=own is None)
            if own is None:
                raise refusal.without_own(operator, device) from None
            with inside():
                return own.call_boxed(keys, *args, **kwargs)
        count(operator, device, ran)
        return results

    return kernel


def _counting(choice: str, own: Any) -> Callable[..., Any]:
    """Return the kernel that counts a call that torch does not give to flash attention, and runs it."""

    def kernel(keys: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_inside():
            count(
                SDPA,
                query.device.type,
                None,
                f"torch takes its {choice} operator: {why_not_flash(query, *args, **kwargs)}",
            )
        return own.call_boxed(keys, query, *args, **kwargs)

    return kernel
