"""The names of an engine's options, and those that other engines have for them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

from attnplug.errors import RequirementsError
from attnplug_transformers.engine.params import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_RENAMED: Final = {
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), "max_num_reqs=..."),
    **dict.fromkeys(("max_num_batched_tokens", "chunked_prefill_size"), "max_num_tokens=..."),
    **dict.fromkeys(("max_model_len", "context_length"), "max_seq_len=..."),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "memory_fraction=..."),
    **dict.fromkeys(("enable_prefix_caching", "disable_radix_cache"), "prefix_caching=True or False"),
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), "graphs=False"),
    **dict.fromkeys(("attention_backend", "attn_implementation"), "backend=..."),
    "disable_overlap_schedule": "async_scheduling=False",
    "page_size": "block_size=...",
    "num_gpu_blocks_override": "num_blocks=...",
    "torch_dtype": "dtype=... to Engine.from_pretrained(), or load the model in this dtype",
}
"""Options of vLLM, SGLang and transformers -> how to pass them here."""

_MISSING: Final = {
    **dict.fromkeys(
        ("tensor_parallel_size", "tp_size", "pipeline_parallel_size", "device_map"), "the engine runs on one device"
    ),
    **dict.fromkeys(("speculative_config", "speculative_algorithm"), "the engine has no speculative decoding"),
    **dict.fromkeys(("enable_lora", "lora_paths"), "the engine has no adapters: merge them into the model"),
    "quantization": "the engine runs the model as it is: load it quantized with transformers",
}
"""Options that it does not have, and why."""


def check_options_known(where: str, given: Mapping[str, object], *calls: Callable[..., object]) -> None:
    """
    Check that the options of a caller have names that the engine has.

    Args:
        where: The call, for the message.
        given: The options.
        calls: The functions whose named parameters are the options.

    Raises:
        RequirementsError: One has another name; the message has the nearest one.
    """
    parameters = [one for call in calls for one in inspect.signature(call).parameters.values()]
    known = sorted({one.name for one in parameters if one.kind is one.KEYWORD_ONLY})
    for name in given:
        if name in known:
            continue
        if name in _RENAMED:
            raise RequirementsError(f"{where} was given {name!r}", "it has another name here", f"pass {_RENAMED[name]}")
        if name in _MISSING:
            raise RequirementsError(
                f"{where} was given {name!r}", _MISSING[name], "leave it out, or use vLLM or SGLang"
            )
        raise unknown_name(name, where, known)
