"""
What vLLM says about a layer, its engine and the device, in attnplug's words, and the decision that follows.

vLLM's selector says part of it. The current configuration says more: head counts, the length of a window, the soft cap,
ALiBi. What neither says becomes known when vLLM makes the layer; a refusal then still comes before any result.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError, PluginError, RequirementsError
from attnplug.negotiation import AUTO
from attnplug.request import FIELDS
from attnplug_vllm import advice, int8

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug import Explanation, Requirements, Selection
    from attnplug.negotiation import Candidate

Choice = tuple[str, ...]
"""The identifiers of the candidates that a name of vLLM permits; empty where attnplug and its settings decide."""

KV_CACHE_DTYPES: Final[dict[str, str]] = {
    "auto": "auto",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    **{name: name for name in int8.DTYPES},
}
"""vLLM's names of KV-cache dtypes, and attnplug's. Others are formats of vLLM's own kernels, or another plugin's."""

UNKNOWN_WINDOW: Final = 4095
"""The length of a window that nobody states. It is odd: a variant that serves certain lengths only is refused."""

CONNECTED: Final = "packed"
"""The form of a KV cache that a KV connector moves: vLLM's own shape. Connectors may take a block's heads apart."""

_ENCODERS: Final = ("encoder", "encoder_only")
_OF_CACHE: Final = ("block_size", "kv_layout", "kv_cache_form", "kv_cache_dtype", "dcp_size", "kv_in_cache")
_SIMPLE: Final[dict[str, Any]] = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}

_log: Final = logging.getLogger("vllm.attnplug")  # vLLM shows the records of loggers below its own
_logged: Final[set[str]] = set()
_loaded: Final[set[tuple[str, Requirements]]] = set()


# What vLLM says


def platform_name() -> str:
    """Return the device type of vLLM's platform: cuda for ROCm too; empty where vLLM has no platform."""
    return str(_platform().device_type or "")


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


def engine_fields() -> dict[str, Any]:
    """Return the fields that vLLM's current configuration decides for all layers; empty outside of an engine."""
    config = current_config()
    if config is None:
        return {}
    from vllm.envs import VLLM_BATCH_INVARIANT  # noqa: PLC0415 - see above; read anew with each call

    speculative, transfer = config.speculative_config, config.kv_transfer_config
    # With asynchronous scheduling vLLM assumes that every draft was accepted: lengths on the CPU are upper bounds.
    is_optimistic = speculative is not None and bool(config.scheduler_config.async_scheduling)
    fields: dict[str, Any] = {
        "dcp_size": config.parallel_config.decode_context_parallel_size,
        "decode_query_len": 1 + (getattr(speculative, "num_speculative_tokens", None) or 0),
        "seq_lens_cpu_kind": "upper_bound" if is_optimistic else "exact",
        "batch_invariant": bool(VLLM_BATCH_INVARIANT),
        "causal": False if getattr(config.attention_config, "use_non_causal", False) else None,
        "mm_prefix": bool(getattr(config.model_config, "is_mm_prefix_lm", False)),
        "features": int8.features(config),
    }
    if transfer is not None and transfer.is_kv_transfer_instance:
        fields["kv_cache_form"] = CONNECTED
    return fields


def is_latent() -> bool:
    """Whether vLLM's current model has multi-head latent attention; False outside of an engine."""
    return bool(getattr(getattr(current_config(), "model_config", None), "use_mla", False))


def latent_fields(rank: int, num_heads: int | None) -> dict[str, Any]:
    """
    Return the fields of layers with latent attention that vLLM's current configuration decides.

    With decode context parallelism vLLM gathers the query heads of all ranks, and merges the ranks' outputs by LSE: a
    backend gets an ordinary request with more heads.

    Args:
        rank: Elements of a latent.
        num_heads: Query heads of one rank of tensor parallelism; None where nobody has said.

    Raises:
        NotNegotiatedError: Decodes of several tokens are configured, with decode context parallelism.
    """
    fields = engine_fields() | {"latent": True, "head_size_v": rank, "num_kv_heads": 1, "kv_in_cache": True}
    fields.pop("kv_cache_form", None)  # it has its own
    fields.pop("mm_prefix", None)  # the selector refuses it
    ranks = fields.pop("dcp_size", 1)
    if ranks > 1 and fields["decode_query_len"] > 1:
        # The keys of a rank do not say which of several new tokens they come before.
        raise NotNegotiatedError(
            "speculative decoding was configured in vLLM, and decode context parallelism (DCP) of latent attention",
            "ranks attend from one new token of a request to their parts of its KV cache",
            "leave --speculative-config out, or pass --decode-context-parallel-size 1",
        )
    return fields | {"return_lse": ranks > 1, "num_q_heads": num_heads and num_heads * ranks}


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
        found |= {"phases": ("prefill",), "decode_query_len": 1}
    else:
        found.setdefault("paged", True)
        found["kv_cache_dtype"] = cache_dtype(found.get("kv_cache_dtype", "auto"))
        if found.get("kv_cache_form") == CONNECTED and found["kv_cache_dtype"] in int8.DTYPES:
            _refuse_connected(found["kv_cache_dtype"])
    if found["attn_type"] != "decoder" or found.get("causal") is False:  # which attend to later tokens anyway
        found.pop("mm_prefix", None)
    late = [name for name in ("num_q_heads", "num_kv_heads") if name not in found]
    if found.get("paged") and "block_size" not in found:
        late.append("block_size")
    return attnplug.Requirements(**found, late=tuple(late))


def _refuse_connected(name: str) -> None:
    raise RequirementsError(
        f"a KV connector was configured in vLLM, and kv_cache_dtype={name!r}",
        "a connector may take the heads of a block apart, whose int8 keys have their scales elsewhere in the block",
        "leave --kv-transfer-config out, or the int8 KV cache",
    )


def cache_dtype(name: str) -> str:
    """
    Return attnplug's name of a dtype of vLLM's KV caches.

    Raises:
        RequirementsError: It is a format of vLLM's own kernels, or another plugin's.
        SettingsError: As for `int8.cache_dtype`.
    """
    name = int8.cache_dtype(name, current_config())
    if name not in KV_CACHE_DTYPES:
        raise RequirementsError(
            f"--kv-cache-dtype {name} was given to vLLM",
            f"attnplug serves {', '.join(KV_CACHE_DTYPES)}; {name} is a format of other kernels",
            "pass --kv-cache-dtype with one of these, or leave --attention-backend out",
        )
    return KV_CACHE_DTYPES[name]


def text_of(value: Any) -> str:
    """Return the text of a member of vLLM's enums, or of a text."""
    return str(getattr(value, "value", value))


# The decision


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
    Return the decision for a layer. Where vLLM captures decodes in CUDA graphs, a candidate that can be captured comes
    first; vLLM captures less of the model around one that cannot.

    Args:
        requirements: What is requested.
        choice: As for `explain`.

    Raises:
        NoBackendError: Nothing that may be chosen can serve it; the fix is one for vLLM's command line.
    """
    for wished in dict.fromkeys((in_graphs(requirements), requirements)):
        explanation = explain(wished, choice)
        if explanation.chosen is not None:
            _log_decision(explanation)
            return explanation.chosen
    raise NoBackendError(
        f"no attention backend of attnplug can serve {_assigned(requirements)} on {explanation.device}",
        "\n    ".join(["a backend that supports all of it", *_refusals(explanation, choice)]),
        advice.way_on(explanation),
        explanation,
    )


def choose(requirements: Requirements, choice: Choice) -> Selection:
    """
    Return the decision for a layer that vLLM is about to make: for a candidate that loads in this process. Where
    attnplug decides, one that fails to load is left out, with a warning, and the next one is tried.

    Args:
        requirements: What is requested, with the head counts.
        choice: As for `explain`.

    Raises:
        NoBackendError: Nothing that may be chosen can serve it.
        PluginError: What was named fails to load, or anything under the strict setting.
    """
    failure: PluginError | None = None
    failed: set[str] = set()
    while True:  # each failure is recorded in attnplug's registry, so that the next decision is another one
        try:
            selection = select(requirements, choice)
        except NoBackendError as error:
            raise error from failure
        try:
            _load_once(selection)
        except PluginError as error:
            failure = error
            if _is_named_alone(requirements, choice) or attnplug.Settings.read().strict or selection.id in failed:
                raise
            failed.add(selection.id)
            _log.warning("%s failed to load and is left out: %s", selection.id, error)
        else:
            return selection


def _load_once(selection: Selection) -> None:
    """Load a decision on trial, with the block size that its backend prefers, unless one like it has loaded before."""
    key = selection.id, selection.requirements
    if key not in _loaded:
        sizes = selection.agreement.block_sizes
        (selection if sizes is None else selection.bind(block_size=sizes.first())).load()
        _loaded.add(key)


def _is_named_alone(requirements: Requirements, choice: Choice) -> bool:
    named = choice or explain(requirements, choice).listed
    return len(named) == 1 and AUTO not in named


def in_graphs(requirements: Requirements) -> Requirements:
    """Return the requirements, with the CUDA graphs that vLLM captures attention in."""
    config = current_config()
    mode = None if config is None else config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs() or not requirements.paged or requirements.cudagraph != "never":
        return requirements
    level = "uniform_batch" if requirements.decode_query_len > 1 else "single_token_decode"
    return requirements.evolve(cudagraph=level)


def reasons(requirements: Requirements, choice: Choice) -> list[str]:
    """Return why nothing that may be chosen can serve this, a text for each candidate; empty where something can."""
    explanation = explain(requirements, choice)
    return [] if explanation.chosen is not None else _refusals(explanation, choice)


def serves(choice: Choice, **fields: Any) -> bool:
    """Whether a candidate that may be chosen declares these fields on this device; rules about them aside."""
    wanted = ((name, value) for name, value in fields.items() if value != FIELDS[name].neutral)
    on_device = ((name, value) for name, value in device().facts().items() if value is not None)
    requested = (*wanted, *on_device)
    return any(not candidate.objections(requested) for candidate in candidates(choice))


def candidates(choice: Choice) -> Iterator[Candidate]:
    """Yield the candidates that are ready and may be chosen."""
    listed = choice or explain(attnplug.Requirements(**_SIMPLE), ()).listed
    permitted = {one for name in listed for one in name.split("+")}  # both of a routed pair
    for candidate in attnplug.registry().candidates():
        names = (candidate.id, candidate.backend, *candidate.aliases)
        if candidate.availability == "ready" and advice.is_permitted(names, permitted):
            yield candidate


def _refusals(explanation: Explanation, choice: Choice) -> list[str]:
    return advice.refusals(explanation, choice or explanation.listed)


def _log_decision(explanation: Explanation) -> None:
    """Write each decision once: what was selected, and on the level of details why not the others."""
    text = str(explanation.chosen)
    if text not in _logged:
        _logged.add(text)
        _log.info("attnplug selects %s", text)
        _log.debug("%s", explanation)


def _assigned(requirements: Requirements) -> str:
    return " ".join(f"{name}={value}" for name, value in requirements.requested())


def _vendor(current: Any) -> str | None:
    if current.device_type != "cuda":
        return None
    return "amd" if current.is_rocm() else "nvidia"


def _platform() -> Any:
    import vllm.platforms  # noqa: PLC0415 - vLLM finds its platform when it is first asked

    return vllm.platforms.current_platform
