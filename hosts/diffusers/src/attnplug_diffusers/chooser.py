"""
diffusers' own choice of an attention backend. A program: it reads a request as JSON from standard input, and writes
what diffusers would run to standard output. `attnplug_diffusers.engine` runs it in a process that ends afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VARIABLE: Final = "DIFFUSERS_ATTN_BACKEND"
"""Environment variable: diffusers' backend where none is set."""

_TOKENS: Final = 32
_OTHERS: Final = ("_native_npu", "_native_xla")
"""Backends of diffusers for devices that this is not called for."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return diffusers' version, and its choice for each call."""
    with warnings.catch_warnings():  # of diffusers and what it imports
        warnings.simplefilter("ignore")
        import diffusers  # noqa: PLC0415 - see above
        import torch  # noqa: PLC0415 - likewise
        from diffusers.models import attention_dispatch  # noqa: PLC0415 - likewise
    if request["capability"]:  # of the device that is supposed, for the checks of this process
        capability = tuple(request["capability"])
        torch.cuda.get_device_capability = lambda device=None: capability  # noqa: ARG005 - the name of torch
    return {
        "version": diffusers.__version__,
        "choices": [choose(call, request["device"], attention_dispatch) for call in request["calls"]],
    }


def choose(call: Mapping[str, Any], device: str, dispatch: Any) -> dict[str, Any]:
    """Return the active backend for a call, if it takes it, with the others and why they are not it."""
    active = dispatch._AttentionBackendRegistry.get_active_backend()[0].value  # noqa: SLF001 - has no public name
    names = [one.value for one in dispatch.AttentionBackendName if one.value not in _OTHERS]
    names.sort(key=lambda name: name != active)
    found = {name: list(reasons(dispatch.AttentionBackendName(name), call, device, dispatch)) for name in names}
    for name, why in found.items():
        if name != active and not why:
            why.append(f"diffusers takes it where it is named: set_attention_backend({name!r}), or {VARIABLE}")
    return {"chosen": None if found[active] else active, "backends": list(found.items())}


def reasons(name: Any, call: Mapping[str, Any], device: str, dispatch: Any) -> Iterator[str]:
    """Yield what keeps a backend of diffusers from a call: a package, an argument, or one of diffusers' own checks."""
    registry = dispatch._AttentionBackendRegistry  # noqa: SLF001 - has no public name
    if name not in registry._backends:  # noqa: SLF001 - likewise
        yield "diffusers registers no function for it here"
        return
    try:
        dispatch._check_attention_backend_requirements(name)  # noqa: SLF001 - likewise
    except (ImportError, RuntimeError) as error:
        yield _first_sentence(error)
    known = registry._supported_arg_names[name]  # noqa: SLF001 - likewise
    for argument, text in (("attn_mask", "masks"), ("is_causal", "causal calls"), ("enable_gqa", "grouped heads")):
        if call[argument] and argument not in known:
            yield f"it has no argument for {text}"
    for check in registry._constraints[name]:  # noqa: SLF001 - likewise
        try:
            check(**arguments(call, device))
        except (ValueError, RuntimeError) as error:
            yield _first_sentence(error)


def arguments(call: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return what diffusers' checks read of a call: no tensors, since the device need not be there."""
    import torch  # noqa: PLC0415 - takes a second

    dtype, where = getattr(torch, call["dtype"]), torch.device(device)

    def rows(heads: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(shape=torch.Size((1, _TOKENS, heads, size)), dtype=dtype, device=where, ndim=4)

    mask = None
    if call["attn_mask"]:
        kind = torch.bool if call["attn_mask"] == "boolean" else dtype
        mask = SimpleNamespace(shape=torch.Size((1, 1, _TOKENS, _TOKENS)), dtype=kind, device=where, ndim=4)
    size = call["head_size"]
    return {
        "query": rows(call["q_heads"], size),
        "key": rows(call["kv_heads"], size),
        "value": rows(call["kv_heads"], call["head_size_v"]),
        "attn_mask": mask,
        "is_causal": call["is_causal"],
    }


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].strip().rstrip(".")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched to see what is chosen
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
