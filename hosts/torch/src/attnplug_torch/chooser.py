"""
torch's own choice of operators. A program: it reads a request as JSON from standard input, and writes what torch
chooses to standard output. `attnplug_torch.engine` runs it in a process that ends afterwards.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import attention

from attnplug_torch.choice import why_not_flash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TOKENS = 32
"""Queries, and keys, of the calls that torch chooses for: its choice does not depend on how many there are."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return torch's version, the names of its registry, and its choice for each call."""
    names: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    absent = _absent(request)
    calls = request["calls"]
    choices = [{"chosen": None, "reason": absent} if absent else choose(call, request["device"]) for call in calls]
    return {"version": torch.__version__, "names": names, "choices": choices}


def choose(call: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return torch's choice for one call, with the operators that it prefers and does not take, and why."""
    query, key, value, mask = tensors(call, device)
    options = {"enable_gqa": call["q_heads"] != call["kv_heads"]}
    chosen = torch._fused_sdp_choice(query, key, value, mask, 0.0, call["is_causal"], **options)  # noqa: SLF001 - torch has no public name for its choice
    name = next(one.name for one in attention.SDPBackend.__members__.values() if one.value == chosen)
    backends: list[tuple[str, list[str]]] = [(name, [])]
    if name != "FLASH_ATTENTION":
        backends.insert(0, ("FLASH_ATTENTION", [why_not_flash(query, key, value, mask)]))
    return {"chosen": name, "backends": backends}


def tensors(call: Mapping[str, Any], device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key, value and mask of a call, of few tokens."""
    dtype = getattr(torch, call["dtype"])

    def rows(heads: int, size: int) -> Tensor:
        return torch.zeros(1, heads, TOKENS, size, dtype=dtype, device=device)

    mask = None
    if call["mask"] is not None:
        kind = torch.bool if call["mask"] == "boolean" else dtype
        mask = torch.ones(TOKENS, TOKENS, dtype=kind, device=device)
    size = call["head_size"]
    return rows(call["q_heads"], size), rows(call["kv_heads"], size), rows(call["kv_heads"], call["head_size_v"]), mask


def _absent(request: Mapping[str, Any]) -> str:
    """Return why torch cannot choose for this device here, or nothing."""
    if request["device"] == "cpu":
        return ""
    if not torch.cuda.is_available():
        return "torch chooses on the GPU itself, and there is none here"
    if torch.version.hip is not None:  # an AMD GPU has a capability of other instruction sets
        return "torch chooses on the GPU itself, and the one here is AMD's"
    here, wanted = torch.cuda.get_device_capability(), request["capability"]
    if wanted is not None and tuple(wanted) != here:
        return f"torch chooses on the GPU itself, and the one here has compute capability {here[0]}.{here[1]}"
    return ""


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
