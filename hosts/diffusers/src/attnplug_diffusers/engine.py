"""
What ``attnplug explain --engine diffusers`` and ``attnplug doctor`` say of diffusers: the module of the entry point
`diffusers` in the group ``attnplug.engines``.

diffusers runs in a process that ends afterwards (`attnplug_diffusers.chooser`): it is not imported here.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice, EngineDiagnosis, run_program
from attnplug.errors import DeviceError, PluginError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug import Device, Requirements

SAME_KERNELS: Final[dict[str, tuple[str, ...]]] = {
    "native": ("torch/sdpa",),
    "_native_flash": ("flash_attn/torch",),
    "flex": ("torch/flex",),
    "flash": ("flash_attn/fa2",),
    "flash_hub": ("flash_attn/fa2",),
    "flash_varlen": ("flash_attn/fa2",),
    "flash_varlen_hub": ("flash_attn/fa2",),
    "_flash_3": ("flash_attn/fa3",),
    "_flash_3_hub": ("flash_attn/fa3",),
    "_flash_varlen_3": ("flash_attn/fa3",),
    "_flash_3_varlen_hub": ("flash_attn/fa3",),
    "flash_4_hub": ("flash_attn/fa4",),
}
"""Backend of diffusers -> the candidates of attnplug that run its kernels."""

_KERNELS: Final = {"native": "torch's scaled_dot_product_attention"}
_NO_ARGUMENT: Final = (
    "sliding_window",
    "attention_chunk",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "block_sparse",
)
"""Requested fields that `dispatch_attention_fn` has no argument for, that all of its backends take."""
_CONSIDERED: Final = frozenset(
    {
        *("head_size", "head_size_v", "num_q_heads", "num_kv_heads", "dtype", "attn_type", "causal", "custom_mask"),
        *("attn_bias", "paged", "phases"),
    }
)
_LONGEST: Final = 300  # seconds; importing diffusers takes 5 to 60
_TESTED: Final = (0, 42)


def choose(requirements: Sequence[Requirements], device: Device, *, assume_installed: bool) -> EngineAnswer:
    """
    Return which backend diffusers' dispatch takes by itself, without attnplug.

    diffusers does not choose: it takes the active backend, which is ``native`` unless the environment names another.

    Args:
        requirements: What each layer requests.
        device: The CPU, or an NVIDIA GPU, which need not be there.
        assume_installed: Changes nothing: no library makes diffusers take another backend.

    Raises:
        RequestError: diffusers is not installed here.
        DeviceError: The device is neither the CPU nor an NVIDIA GPU.
        PluginError: diffusers fails.
    """
    del assume_installed
    if find_spec("diffusers") is None:
        raise RequestError(
            "diffusers is not installed in this environment", "", "pip install attnplug-diffusers, with Python 3.11"
        )
    capability = device.compute_capability
    if device.type != "cpu" and capability is None:
        raise DeviceError(
            f"--engine diffusers was given for the device {device}",
            "diffusers' checks are called for the CPU and for NVIDIA GPUs",
            "name one of these: --device cpu, or --device cuda:9.0",
        )
    reasons = [_refusal(each) for each in requirements]
    open_ones = [each for each, reason in zip(requirements, reasons, strict=True) if not reason]
    request = {
        "device": device.type,
        "capability": capability and [capability.major, capability.minor],
        "calls": list(map(_call, open_ones)),
    }
    found = _run(request)
    choices = iter(found["choices"])
    return EngineAnswer(
        f"diffusers {found['version']}",
        [
            EngineChoice(None, reason=reason) if reason else _choice(each, next(choices))
            for each, reason in zip(requirements, reasons, strict=True)
        ],
        warnings=_untested(found["version"]),
    )


def diagnose(*, load: bool) -> EngineDiagnosis:
    """
    Return whether diffusers' models can be bound to backends of attnplug.

    Args:
        load: Also start diffusers, and see which backend is active there.
    """
    try:
        installed = version("diffusers")
    except PackageNotFoundError:
        return EngineDiagnosis(("diffusers is not installed here: attnplug-diffusers belongs in its environment",))
    lines = [f"diffusers {installed}", "attnplug_diffusers.bind(model) runs a model on attnplug"]
    problems: list[tuple[str, str]] = []
    if load:
        try:
            request = {"device": "cpu", "capability": None, "calls": [_EXAMPLE]}
            active = _run(request)["choices"][0]["backends"][0][0]
            lines.append(f"models that are not bound run on its backend {active!r}")
        except PluginError as error:
            problems.append((error.problem, error.fix))
    return EngineDiagnosis(lines, _untested(installed), problems)


_EXAMPLE: Final = {
    "q_heads": 1,
    "kv_heads": 1,
    "head_size": 64,
    "head_size_v": 64,
    "dtype": "float32",
    "is_causal": False,
    "attn_mask": None,
    "enable_gqa": False,
}


def _refusal(requirements: Requirements) -> str:
    """Return why diffusers' dispatch cannot be called for a request, or nothing."""
    if requirements.paged:
        return "diffusers has no KV cache"
    facts = requirements.facts()
    absent = [name for name in _NO_ARGUMENT if facts.get(name)]
    return f"diffusers' dispatch_attention_fn has no argument for {' and '.join(absent)}" if absent else ""


def _call(requirements: Requirements) -> dict[str, Any]:
    """Return what diffusers' checks are called with."""
    each = requirements
    mask = "added" if each.attn_bias else "boolean" if each.custom_mask else None
    return {
        "q_heads": each.num_q_heads,
        "kv_heads": each.num_kv_heads,
        "dtype": each.dtype,
        "attn_mask": mask,
        "head_size": each.head_size,
        "head_size_v": each.head_size_v,
        "is_causal": bool(each.causal) and mask is None,
        "enable_gqa": each.num_q_heads != each.num_kv_heads,
    }


def _choice(requirements: Requirements, found: Mapping[str, Any]) -> EngineChoice:
    backends = [
        EngineBackend(name, why, _KERNELS.get(name, ""), SAME_KERNELS.get(name, ())) for name, why in found["backends"]
    ]
    ignored = [name for name, _ in requirements.requested() if name not in _CONSIDERED]
    return EngineChoice(found["chosen"], backends, ignored)


def _untested(installed: str) -> list[str]:
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers == _TESTED:
        return []
    return [f"attnplug-diffusers is tested with diffusers {'.'.join(map(str, _TESTED))}, and this is {installed}"]


def _run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of `attnplug_diffusers.chooser`, which runs in another process."""
    return run_program(
        "attnplug_diffusers.chooser", request, engine="diffusers", trial="import diffusers", timeout=_LONGEST
    )
