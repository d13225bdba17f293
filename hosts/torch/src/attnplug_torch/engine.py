"""
What ``attnplug explain --engine torch`` and ``attnplug doctor`` say of torch: the module of the entry point `torch` in
the group ``attnplug.engines``.

torch runs in a process that ends afterwards (`attnplug_torch.chooser`): it is not imported here.
"""

from __future__ import annotations

import os
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice, EngineDiagnosis, run_program
from attnplug.errors import DeviceError, PluginError, RequestError
from attnplug_torch.registration import NAME, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug import Device, Requirements

SAME_KERNELS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "cpu": {"FLASH_ATTENTION": ("torch/sdpa",)},
    "cuda": {"FLASH_ATTENTION": ("flash_attn/torch", "torch/sdpa")},
}
"""Device type -> torch's operator -> the candidates of attnplug that run its kernels."""

_ABSENT: Final = {
    "sliding_window": "a window",
    "attention_chunk": "chunks",
    "logits_soft_cap": "a soft cap",
    "alibi": "ALiBi slopes",
    "sinks": "attention sinks",
    "block_sparse": "a sparse pattern",
}
"""Requested fields that `scaled_dot_product_attention` has no argument for, in words."""
_CONSIDERED: Final = frozenset(
    {
        *("head_size", "head_size_v", "num_q_heads", "num_kv_heads", "dtype", "attn_type", "causal", "custom_mask"),
        *("attn_bias", "paged", "phases"),
    }
)
_LONGEST: Final = 300  # seconds; importing torch takes 2 to 20
_GROUP: Final = "torch.backends"
_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def choose(requirements: Sequence[Requirements], device: Device, *, assume_installed: bool) -> EngineAnswer:
    """
    Return which operator torch's `scaled_dot_product_attention` takes by itself, without attnplug.

    Args:
        requirements: What each layer requests.
        device: The CPU, or the NVIDIA GPU of this machine: torch chooses on the GPU itself.
        assume_installed: Changes nothing: torch's operators are parts of torch.

    Raises:
        RequestError: torch is not installed here.
        DeviceError: The device is neither the CPU nor an NVIDIA GPU.
        PluginError: torch fails.
    """
    del assume_installed
    if find_spec("torch") is None:
        raise RequestError("torch is not installed in this environment", "", "pip install torch")
    if device.type not in SAME_KERNELS or device.vendor not in (None, "nvidia"):
        raise DeviceError(
            f"--engine torch was given for the device {device}",
            "attnplug-torch runs on the CPU and on NVIDIA GPUs",
            "name one of these: --device cpu, or --device cuda",
        )
    reasons = [_refusal(each) for each in requirements]
    open_ones = [each for each, reason in zip(requirements, reasons, strict=True) if not reason]
    capability = device.compute_capability
    request = {
        "device": device.type,
        "capability": capability and [capability.major, capability.minor],
        "calls": list(map(_call, open_ones)),
    }
    found = _run(request)
    choices = iter(found["choices"])
    return EngineAnswer(
        f"torch {found['version']}",
        [
            EngineChoice(None, reason=reason) if reason else _choice(each, next(choices), device.type)
            for each, reason in zip(requirements, reasons, strict=True)
        ],
    )


def diagnose(*, load: bool) -> EngineDiagnosis:
    """
    Return whether torch knows attnplug by name.

    Args:
        load: Also start torch, and list the names that it has.
    """
    try:
        lines, problems = [f"torch {version('torch')}"], list(_obstacles())
    except PackageNotFoundError:
        return EngineDiagnosis(("torch is not installed here: attnplug-torch belongs in the environment of torch",))
    warnings = []
    if os.environ.get(_AUTOLOAD, "1") != "1":
        warnings.append(
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]!r} keeps torch from loading attnplug-torch: programs have to call "
            "attnplug_torch.register()"
        )
    elif not problems:
        lines.append(f"import torch registers {NAME!r} for torch.nn.attention.activate_flash_attention_impl")
        if names := os.environ.get(VARIABLE):
            lines.append(f"{VARIABLE} adds {names}")
    if load and not problems:
        try:
            names = _run({"device": "cpu", "capability": None, "calls": []})["names"]
            lines.append(f"its names are {', '.join(names)}" if names else "it has no names: it is older than 2.11")
        except PluginError as error:
            problems.append((error.problem, error.fix))
    return EngineDiagnosis(lines, warnings, problems)


def _refusal(requirements: Requirements) -> str:
    """Return why torch's function cannot be called for a request, or nothing."""
    if requirements.paged:
        return "torch's scaled_dot_product_attention has no paged KV cache; its varlen_attn reads one, on CUDA alone"
    facts = requirements.facts()
    absent = [text for name, text in _ABSENT.items() if facts.get(name)]
    return f"torch's scaled_dot_product_attention has no argument for {' and '.join(absent)}" if absent else ""


def _call(requirements: Requirements) -> dict[str, Any]:
    """Return what torch's function is called with."""
    each = requirements
    heads = {"q_heads": each.num_q_heads, "kv_heads": each.num_kv_heads}
    sizes = {"head_size": each.head_size, "head_size_v": each.head_size_v}
    mask = "additive" if each.attn_bias else "boolean" if each.custom_mask else None
    return {**heads, **sizes, "dtype": each.dtype, "is_causal": bool(each.causal) and mask is None, "mask": mask}


def _choice(requirements: Requirements, found: Mapping[str, Any], device_type: str) -> EngineChoice:
    same_as = SAME_KERNELS[device_type]
    backends = [EngineBackend(name, why, "", same_as.get(name, ())) for name, why in found.get("backends", ())]
    ignored = [name for name, _ in requirements.requested() if name not in _CONSIDERED]
    return EngineChoice(found["chosen"], backends, ignored, found.get("reason", ""))


def _obstacles() -> Iterator[tuple[str, str]]:
    """Yield why torch does not know attnplug, with the fix."""
    try:  # of this distribution alone: the metadata of another one may be damaged
        own = distribution("attnplug-torch").entry_points
    except PackageNotFoundError:
        own = EntryPoints()
    if not any((each.group, each.value) == (_GROUP, "attnplug_torch.registration:autoload") for each in own):
        yield f"no entry point of the group {_GROUP} names attnplug_torch", "reinstall attnplug-torch"


def _run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of `attnplug_torch.chooser`, which runs in another process."""
    return run_program("attnplug_torch.chooser", request, engine="torch", trial="import torch", timeout=_LONGEST)
