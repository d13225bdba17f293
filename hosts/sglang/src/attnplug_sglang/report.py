"""
What ``attnplug explain --engine sglang`` and ``attnplug doctor`` say of SGLang: the module of the entry point `sglang`
in the group ``attnplug.engines``.

SGLang runs in a process that ends afterwards (`attnplug_sglang.chooser`): neither torch nor SGLang is imported here.
"""

from __future__ import annotations

import os
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice, EngineDiagnosis, run_program
from attnplug.errors import DeviceError, RequestError
from attnplug_sglang.registration import names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug import Device, Requirements

SAME_KERNELS: Final[dict[str, tuple[str, ...]]] = {
    "fa3": ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa3_tokenspeed"),
    "fa4": ("flash_attn/fa4",),
    "flashinfer": ("flashinfer/fa2", "flashinfer/fa3"),
    "flashmla": ("flashmla/sgl",),
    "torch_native": ("torch/sdpa",),
}
"""SGLang's backend -> the candidates of attnplug that run its kernels."""

_CONSIDERED: Final = frozenset(
    {
        "head_size",
        "head_size_v",
        "num_q_heads",
        "num_kv_heads",
        "dtype",
        "sinks",
        "paged",
        "phases",
        "attn_type",
        "causal",
        "latent",
    }
)
"""The fields of requirements that its choice considers, or that say nothing about it."""
_LONGEST: Final = 300  # seconds; importing SGLang takes 5 to 30
_GROUP: Final = "sglang.srt.plugins"
_RESTRICTS: Final = "SGLANG_PLUGINS"


def choose(requirements: Sequence[Requirements], device: Device, *, assume_installed: bool) -> EngineAnswer:
    """
    Return what SGLang picks by itself for a model with these layers: one backend for all.

    Args:
        requirements: What each layer requests.
        device: An NVIDIA GPU, which need not be there.
        assume_installed: Suppose that FlashInfer is installed.

    Raises:
        RequestError: SGLang is not installed here.
        DeviceError: The device is no NVIDIA GPU with a compute capability.
        PluginError: SGLang fails.
    """
    if find_spec("sglang") is None:
        raise RequestError(
            "SGLang is not installed in this environment", "", "run this in the environment of SGLang, or install it"
        )
    capability = device.compute_capability
    if device.type != "cuda" or device.vendor != "nvidia" or capability is None:
        raise DeviceError(
            f"--engine sglang was given for the device {device}",
            "SGLang's choice is asked for NVIDIA GPUs, of any compute capability",
            "name one: --device cuda:9.0",
        )
    has_flashinfer = find_spec("flashinfer") is not None
    request = {
        "capability": [capability.major, capability.minor],
        "sinks": any(each.sinks for each in requirements),
        "asymmetric": any(each.head_size_v != each.head_size for each in requirements),
        "latent": any(each.latent for each in requirements),
        "flashinfer": has_flashinfer or assume_installed,
    }
    found = run_program("attnplug_sglang.chooser", request, engine="SGLang", trial="import sglang", timeout=_LONGEST)
    assumed = ["FlashInfer is installed"] if assume_installed and not has_flashinfer else []
    return EngineAnswer(
        f"SGLang {found['version']}",
        [_choice(found["chosen"], each) for each in requirements],
        ["SGLang is started without speculative decoding, and names no attention backend", *assumed],
    )


def diagnose(*, load: bool) -> EngineDiagnosis:
    """
    Return whether SGLang finds attnplug.

    Args:
        load: Changes nothing: SGLang's plugins are loaded by its own processes.
    """
    del load
    try:
        lines = [f"SGLang {version('sglang')}"]
    except PackageNotFoundError:
        return EngineDiagnosis(("SGLang is not installed here: attnplug-sglang belongs in the environment of SGLang",))
    problems = list(_obstacles())
    if not problems:
        lines.append(f"--attention-backend takes {', '.join(sorted(names()))}")
    return EngineDiagnosis(lines, (), problems)


def _choice(name: str, requirements: Requirements) -> EngineChoice:
    backend = EngineBackend(name, same_as=SAME_KERNELS.get(name, ()))
    ignored = [field for field, _ in requirements.requested() if field not in _CONSIDERED]
    return EngineChoice(name, [backend], ignored)


def _obstacles() -> Iterator[tuple[str, str]]:
    """Yield why SGLang does not know the names, with the fix."""
    allowed = os.environ.get(_RESTRICTS)
    if allowed and "attnplug" not in {name.strip() for name in allowed.split(",")}:
        yield f"{_RESTRICTS}={allowed!r} leaves attnplug out", f"add attnplug to {_RESTRICTS}, or unset it"
    try:  # of this distribution alone: the metadata of another one may be damaged
        own: Any = distribution("attnplug-sglang").entry_points
    except PackageNotFoundError:
        own = EntryPoints()
    if not any(each.group == _GROUP for each in own):
        yield f"no entry point of the group {_GROUP} names attnplug_sglang", "reinstall attnplug-sglang"
