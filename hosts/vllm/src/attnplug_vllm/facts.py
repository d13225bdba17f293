"""
What vLLM says about a layer, its engine and the device, in attnplug's words.

vLLM's selector says part of it. The current configuration says more: head counts, the length of a window, the soft cap,
ALiBi. What neither says becomes known when vLLM makes the layer; a refusal then still comes before any result.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import attnplug
from attnplug.errors import NoBackendError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug import Explanation, Requirements, Selection, Verdict

Choice = tuple[str, ...]

KV_CACHE_DTYPES: Final[dict[str, str]] = {
    "auto": "auto",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
"""vLLM's names of KV-cache dtypes, and attnplug's. Others are formats of vLLM's own kernels, or another plugin's."""

UNKNOWN_WINDOW: Final = 4095
"""The length of a window that nobody states. It is odd: a variant that serves certain lengths only is refused."""

_ENCODERS: Final = ("encoder", "encoder_only")
_OF_CACHE: Final = ("block_size", "kv_layout", "kv_cache_form", "kv_cache_dtype")


def device_kind() -> tuple[tuple[str, str], ...]:
    """Return the device type and its vendor, as (field, value) pairs; nothing where vLLM has no platform."""
    current = _platform()
    if not current.device_type:
        return ()
    vendor = _vendor(current)
    return (("device_type", current.device_type), *((("vendor", vendor),) if vendor else ()))


def device() -> attnplug.Device:
    """
    Return the device of this process. CUDA is not started for it: where it runs already, torch is asked, which knows
    the number of multiprocessors; vLLM's platform otherwise.
    """
    current, torch = _platform(), sys.modules.get("torch")
    if current.device_type != "cuda":
        return attnplug.Device(current.device_type or "cpu")
    if torch is not None and torch.cuda.is_initialized():
        return attnplug.Device.current()
    vendor, capability = _vendor(current), current.get_device_capability()
    return attnplug.Device(
        "cuda",
        vendor=vendor,
        name=current.get_device_name(),
        compute_capability=(capability.major, capability.minor) if vendor == "nvidia" else None,
    )


def current_config() -> Any:
    """Return vLLM's current configuration; None outside of an engine."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - imports torch

    return get_current_vllm_config_or_none()


def layer_requirements(*, head_size: int, dtype: Any, **fields: Any) -> Requirements:
    """
    Return what one layer requests, from values in vLLM's words.

    Args:
        head_size: Size of one query and key head.
        dtype: The layer's, of torch or by name.
        fields: Other fields of `attnplug.Requirements`. None leaves one out. `kv_cache_dtype` and `attn_type` are in
            vLLM's words. Head counts that are left out, and the block size of a KV cache, are bound later.

    Raises:
        RequirementsError: A value is invalid, or contradicts another.
    """
    found = {name: value for name, value in fields.items() if value is not None}
    found |= {"head_size": head_size, "dtype": str(dtype).removeprefix("torch.")}
    found["attn_type"] = text_of(found.get("attn_type", "decoder"))
    if found["attn_type"] in _ENCODERS:  # without a KV cache, whose dtype and block size vLLM states all the same
        found = {name: value for name, value in found.items() if name not in _OF_CACHE}
    else:
        found.setdefault("paged", True)
        found["kv_cache_dtype"] = KV_CACHE_DTYPES.get(dtype := found.get("kv_cache_dtype", "auto"), dtype)
    late = [name for name in ("num_q_heads", "num_kv_heads") if name not in found]
    if found.get("paged") and "block_size" not in found:
        late.append("block_size")
    return attnplug.Requirements(**found, late=tuple(late))


def engine_fields() -> dict[str, Any]:
    """Return the fields that vLLM's current configuration decides for all layers; empty outside of an engine."""
    config = current_config()
    if config is None:
        return {}
    speculative = config.speculative_config
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    is_optimistic = speculative is not None and getattr(config.scheduler_config, "async_scheduling", False)
    return {
        "dcp_size": config.parallel_config.decode_context_parallel_size,
        "decode_query_len": 1 + drafts,
        "seq_lens_cpu_kind": "upper_bound" if is_optimistic else "exact",
    }


def explain(requirements: Requirements, choice: Choice) -> Explanation:
    """
    Return the verdict on every candidate.

    Args:
        requirements: What is requested.
        choice: The candidates that vLLM's name permits, in order; empty leaves it to attnplug and its settings.

    Raises:
        AttnplugError: As for `attnplug.explain`.
    """
    return attnplug.explain(requirements, device(), backend=list(choice) or None)


def select(requirements: Requirements, choice: Choice) -> Selection:
    """
    Return the decision for a layer.

    Args:
        requirements: What is requested.
        choice: As for `explain`.

    Raises:
        NoBackendError: Nothing that may be chosen can serve it; the fix is one for vLLM's command line.
    """
    explanation = explain(requirements, choice)
    if explanation.chosen is None:
        raise NoBackendError(
            f"no attention backend of attnplug can serve {_assigned(requirements)} on {explanation.device}",
            "\n    ".join(["a backend that supports all of it", *refusals(explanation, choice)]),
            _fix(explanation),
            explanation,
        )
    return explanation.chosen


def reasons(requirements: Requirements, choice: Choice) -> list[str]:
    """Return why nothing that may be chosen can serve this, a text for each candidate; empty where something can."""
    explanation = explain(requirements, choice)
    return [] if explanation.chosen is not None else refusals(explanation, choice)


def refusals(explanation: Explanation, choice: Choice) -> list[str]:
    """Return the reasons and the fix of each candidate that was permitted, a text each."""
    permitted = choice or explanation.listed
    verdicts = [v for v in explanation.verdicts if _is_permitted(v, permitted)]
    listed = [v for v in verdicts if permitted or v.status != "absent"] or verdicts
    return [_text_of(verdict) for verdict in listed] or ["no attention backend of attnplug is installed"]


def serves(choice: Choice, **fields: Any) -> bool:
    """Whether a candidate that may be chosen declares these fields on this device; rules about them aside."""
    requested = (*fields.items(), *((name, value) for name, value in device().facts().items() if value is not None))
    return any(not candidate.objections(requested) for candidate in candidates(choice))


def candidates(choice: Choice) -> Iterator[Any]:
    """Yield the candidates that are ready and may be chosen."""
    permitted = choice or attnplug.Settings.read().backend
    for candidate in attnplug.registry().candidates():
        names = {candidate.id, candidate.backend, *candidate.aliases}
        if candidate.availability == "ready" and (not permitted or names & set(permitted) or "auto" in permitted):
            yield candidate


def text_of(value: Any) -> str:
    """Return the text of a member of vLLM's enums, or of a text."""
    return str(getattr(value, "value", value))


def _is_permitted(verdict: Verdict, permitted: Iterable[str]) -> bool:
    names = set(permitted)
    return not names or "auto" in names or bool({verdict.id, verdict.id.partition("/")[0]} & names)


def _text_of(verdict: Verdict) -> str:
    why = "; ".join(map(str, verdict.reasons)) or verdict.status
    fix = verdict.fix
    return f"{verdict.id}: {why}" + (f" (fix: {fix})" if fix is not None and fix.possible else "")


def _fix(explanation: Explanation) -> str:
    from attnplug_vllm.registration import AUTO, name_of, own_name  # noqa: PLC0415 - it names what is decided here

    able = [verdict.id for verdict in explanation.verdicts if verdict.status == "eligible"]
    if able and own_name(()) == AUTO:
        return f"pass --attention-backend {name_of(able[0])}, or {AUTO} with ATTNPLUG_BACKEND unset"
    if able:
        return f"set ATTNPLUG_BACKEND={able[0]}, or unset it"
    fixes = [f"{v.id}: {v.fix}" for v in explanation.verdicts if v.fix is not None and v.fix.possible]
    return "; or ".join(fixes) or "leave --attention-backend out: vLLM then chooses one of its own"


def _assigned(requirements: Requirements) -> str:
    return " ".join(f"{name}={value}" for name, value in requirements.requested())


def _vendor(current: Any) -> str | None:
    if current.device_type != "cuda":
        return None
    return "amd" if current.is_rocm() else "nvidia"


def _platform() -> Any:
    import vllm.platforms  # noqa: PLC0415 - vLLM finds its platform when it is first asked

    return vllm.platforms.current_platform
