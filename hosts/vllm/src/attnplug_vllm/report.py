"""
What ``attnplug explain --engine vllm`` and ``attnplug doctor`` say of vLLM: the module of the entry point `vllm` in the
group ``attnplug.engines``.

vLLM runs in a process that ends afterwards (`attnplug_vllm.stand_in`, `attnplug_vllm.registered`): neither torch nor
vLLM is imported here, and nothing of vLLM is changed for good.
"""

from __future__ import annotations

import os
import shlex
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice, EngineDiagnosis, run_program
from attnplug.errors import DeviceError, PluginError, RequestError
from attnplug_vllm import versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug import Device, Requirements

SAME_KERNELS: Final[dict[str, tuple[str, ...]]] = {
    "FlashAttention 2": ("flash_attn/fa2_vllm", "flash_attn/fa2"),
    "FlashAttention 3": ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa3_tokenspeed"),
    "FlashAttention 4": ("flash_attn/fa4",),
    "FlashInfer": ("flashinfer/fa2", "flashinfer/fa3"),
    "FlexAttention": ("torch/flex",),
}
"""Kernels of vLLM's backends -> the candidates of attnplug that run them."""

OF_BACKEND: Final[dict[str, tuple[str, ...]]] = {
    "FLASH_ATTN": (*SAME_KERNELS["FlashAttention 2"], *SAME_KERNELS["FlashAttention 3"], "flash_attn/fa4"),
    "FLASHINFER": SAME_KERNELS["FlashInfer"],
    "FLEX_ATTENTION": SAME_KERNELS["FlexAttention"],
}
"""The same for a backend that vLLM refuses, for which it picks no kernels."""

CONSIDERED: Final = frozenset(
    {
        *("head_size", "num_q_heads", "num_kv_heads", "dtype", "attn_type", "causal", "sinks", "paged", "phases"),
        *("kv_cache_dtype", "block_size", "per_head_scales", "batch_invariant", "dcp_size", "seq_lens_cpu_kind"),
        *("late", "latent"),
        "sliding_window",  # that there is one; no backend of vLLM depends on its length
    }
)
"""The fields of requirements that vLLM's selection considers, or that say nothing about its choice."""

_FIELD_OF: Final = {"use_dcp": "dcp_size"}  # what only newer versions of vLLM consider
_LONGEST: Final = 600  # seconds: importing vLLM takes 10 to 60
_ENVIRONMENT: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_BY_ITSELF: Final = {
    "CUDA_VISIBLE_DEVICES": "",  # nothing is computed, and no CUDA context is created
    "VLLM_PLUGINS": "",
    "VLLM_HAS_FLASHINFER_CUBIN": "1",  # vLLM sends a request to a server of NVIDIA otherwise
}
_GROUP: Final = "vllm.general_plugins"
_NAME: Final = "attnplug"
_VARIABLE: Final = "VLLM_ATTENTION_BACKEND"


def choose(requirements: Sequence[Requirements], device: Device, *, assume_installed: bool) -> EngineAnswer:
    """
    Return what vLLM picks by itself: its own selector is called, without plugins.

    Args:
        requirements: What each layer requests.
        device: The device, which need not be there: the CPU, or an NVIDIA GPU.
        assume_installed: Suppose that FlashInfer is installed.

    Raises:
        RequestError: vLLM is not installed here.
        DeviceError: The device is neither the CPU nor an NVIDIA GPU.
        PluginError: vLLM fails.
    """
    _check_installed()
    capability = device.compute_capability
    if device.type != "cpu" and capability is None:
        raise DeviceError(
            f"--engine vllm was given for the device {device}",
            "vLLM's selection is called for the CPU and for NVIDIA GPUs",
            "name one of these: --device cpu, or --device cuda:9.0",
        )
    layers = {index: _layer(each) for index, each in enumerate(requirements) if _is_paged(each)}
    request = {
        "device_type": device.type,
        "capability": capability and capability.number,
        "assume_installed": assume_installed,
        "layers": list(layers.values()),
    }
    found = _run("stand_in", request, _BY_ITSELF)
    chosen = dict(zip(layers, found["choices"], strict=True))
    choices = [_choice(each, chosen.get(index)) for index, each in enumerate(requirements)]
    warnings = [versions.untested(versions.installed_version())]
    return EngineAnswer(f"vLLM {found['version']}", choices, found["assumed"], list(filter(None, warnings)))


def diagnose(*, load: bool) -> EngineDiagnosis:
    """
    Return whether vLLM sees the backends of attnplug.

    Args:
        load: Also start vLLM with its plugins, and list the names that it has for them.
    """
    if find_spec("vllm") is None:
        return EngineDiagnosis(("vLLM is not installed here: attnplug-vllm belongs in the environment of vLLM",))
    version = versions.installed_version()
    lines, problems = [f"vLLM {version or 'of an unknown version'}"], list(_obstacles())
    if not problems:
        lines.append("its plugins include attnplug")
        if load:
            text, failures = _names()
            lines += text
            problems += failures
    return EngineDiagnosis(lines, [*filter(None, (versions.untested(version), _unread()))], problems)


def _check_installed() -> None:
    if find_spec("vllm") is None:
        raise RequestError(
            "vLLM is not installed in this environment",
            "attnplug-vllm calls the selection of the vLLM beside it",
            "pip install attnplug-vllm in the environment of vLLM, and run attnplug there",
        )


def _is_paged(requirements: Requirements) -> bool:
    """Whether vLLM has such layers: those that decode have a paged KV cache there."""
    return requirements.paged or requirements.attn_type in ("encoder", "encoder_only")


def _layer(requirements: Requirements) -> dict[str, Any]:
    """Return what vLLM's selector, and its choice of a version of FlashAttention, are called with."""
    each = requirements
    selector = {
        "head_size": each.head_size,
        "dtype": each.dtype,
        "kv_cache_dtype": "auto" if each.kv_cache_dtype == each.dtype else each.kv_cache_dtype,
        "block_size": each.block_size,
        "use_mla": each.latent,
        "has_sink": each.sinks,
        "use_per_head_quant_scales": each.per_head_scales,
        "attn_type": each.attn_type,
        "has_sliding_window": each.sliding_window is not None,
        "use_non_causal": each.attn_type == "decoder" and not each.causal,
        "use_batch_invariant": each.batch_invariant,
        "use_dcp": each.dcp_size > 1,
    }
    flash_attention = {
        "requires_alibi": each.alibi is not None,
        "head_size": each.head_size,
        "has_sinks": each.sinks,
        "requires_softcap": each.logits_soft_cap is not None,
        "kv_cache_block_size": each.block_size,
        "supports_fa4_hd256": True,
    }
    heads = {"num_heads": each.num_q_heads, "num_kv_heads": each.num_kv_heads}
    return {"selector": selector, "flash_attention": flash_attention, **heads}


def _choice(requirements: Requirements, found: Mapping[str, Any] | None) -> EngineChoice:
    if found is None:
        return EngineChoice(None, reason="vLLM keeps the keys and values of layers that decode in a paged KV cache")
    backends = [_backend(**each) for each in found.get("backends", ())]
    # Layers with latents pass no window to the selection, and only absorbed queries have it.
    considered = CONSIDERED - {"sliding_window"} | {"head_size_v"} if requirements.latent else CONSIDERED
    ignored = [name for name in requirements.to_dict() if name not in considered]
    ignored += [_FIELD_OF[name] for name in found["ignored"] if name in _FIELD_OF]
    return EngineChoice(found.get("chosen"), backends, ignored, found.get("reason", ""))


def _backend(name: str, reasons: Sequence[str], kernels: str = "") -> EngineBackend:
    same_as = OF_BACKEND.get(name, ()) if reasons else SAME_KERNELS.get(kernels, ())
    return EngineBackend(name, reasons, kernels, same_as)


def _obstacles() -> Iterator[tuple[str, str]]:
    """Yield why vLLM does not call the plugin, with the fix."""
    if not any(each.value == "attnplug_vllm:register" for each in entry_points(group=_GROUP, name=_NAME)):
        yield f"no entry point of the group {_GROUP} names attnplug_vllm", "reinstall attnplug-vllm"
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and _NAME not in listed.split(","):
        names = list(filter(None, map(str.strip, listed.split(","))))
        why = f": vLLM does not strip the space around {_NAME!r}" if _NAME in names else ""
        wanted = ",".join(dict.fromkeys([*names, _NAME]))
        yield (
            f"VLLM_PLUGINS={listed!r} leaves attnplug out, so that vLLM sees none of its backends{why}",
            f"set VLLM_PLUGINS={shlex.quote(wanted)}, or unset it",
        )


def _unread() -> str | None:
    """Return what is to be said of the variable that named a backend for versions before the tested ones."""
    name = os.environ.get(_VARIABLE)
    if not name:
        return None
    return (
        f"{_VARIABLE}={name!r} is set, which the tested versions of vLLM do not read: "
        f"pass --attention-backend {shlex.quote(name)}, and unset it"
    )


def _names() -> tuple[list[str], list[tuple[str, str]]]:
    """Return the names that a vLLM with its plugins has for attnplug's backends, or what is wrong with that."""
    try:
        names = _run("registered", {}, {})["names"]
    except PluginError as error:
        return [], [(error.problem, error.fix)]
    if not names:
        return [], [("vLLM has loaded its plugins, and has no name of attnplug", "see the log of vLLM for the reason")]
    return [f"it has these names for --attention-backend: {', '.join(names)}"], []


def _run(program: str, request: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer of a module of this distribution, which runs in another process."""
    return run_program(
        f"attnplug_vllm.{program}",
        request,
        engine="vLLM",
        trial="import vllm.config",
        environment={**_ENVIRONMENT, **environment},
        timeout=_LONGEST,
    )
