"""
SGLang's own choice of an attention backend. A program: it reads a request as JSON from standard input, and writes what
SGLang chooses to standard output. `attnplug_sglang.report` runs it in a process that ends afterwards.

SGLang chooses one backend for a model, by the GPU that it finds, by the speculative decoding that it was started with,
and by whether the model has sinks or latent attention. The GPU is replaced here, so that any can be asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEW: Final = "sglang.srt.arg_groups.model_override_base"  # since 0.5.20
_OLD: Final = "sglang.srt.server_args"
_OVERRIDES: Final = "sglang.srt.arg_groups.overrides"


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's version, and its choice for a model without speculative decoding."""
    sglang = importlib.import_module("sglang")
    return {"version": sglang.__version__, "chosen": choose(request)}


def choose(request: Mapping[str, Any]) -> str:
    """Return the name of SGLang's default for a model on an NVIDIA GPU."""
    options = SimpleNamespace(speculative_algorithm=None, speculative_eagle_topk=None, page_size=None, tp_size=1)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[]),
        has_attention_sinks=request["sinks"],
        has_asymmetric_kv=request["asymmetric"],
    )
    if find_spec(_NEW) is not None:
        return _by_function(importlib.import_module(_NEW), request, options, model)
    return _by_method(importlib.import_module(_OLD), request, options, model)


def _by_function(module: Any, request: Mapping[str, Any], options: Any, model: Any) -> str:
    """Ask 0.5.20 or newer."""
    major, minor = request["capability"]
    platform = SimpleNamespace(
        is_hopper_with_cuda_12_3=(major, minor) == (9, 0),
        is_sm100=major == 10,
        is_hip=False,
        has_flashinfer=request["flashinfer"],
    )
    changed: dict[str, Any] = {
        "get_platform": lambda: platform,
        "resolving_view": _same,
        "resolved_view": _same,
        "is_mps": _false,
    }
    with mock.patch.multiple(module, **changed):
        return str(module.get_default_attn_backend(options, request["latent"], model))


def _by_method(module: Any, request: Mapping[str, Any], options: Any, model: Any) -> str:
    """Ask 0.5.15."""
    major, minor = request["capability"]
    facts = {
        "is_hopper_with_cuda_12_3": (major, minor) == (9, 0),
        "is_sm100_supported": major == 10,
        "is_hip": False,
        "is_mps": False,
        "is_flashinfer_available": request["flashinfer"],
    }
    changed: dict[str, Any] = {name: lambda value=value: value for name, value in facts.items()}
    overrides = importlib.import_module(_OVERRIDES)
    with mock.patch.multiple(module, **changed), mock.patch.object(overrides, "resolved_view", _same):
        default = module.ServerArgs._get_default_attn_backend  # noqa: SLF001 - it has no public name
        return str(default(options, request["latent"], model))


def _same(view: Any) -> Any:
    return view


def _false() -> bool:
    return False


if __name__ == "__main__":
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # SGLang's imports print
        found = answer(given)
    json.dump(found, sys.stdout)
