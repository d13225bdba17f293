"""
Every attention backend of attnplug as an attention backend of unmodified vLLM.

    vllm serve MODEL --attention-backend ATTNPLUG

vLLM finds `register` by its entry-point group ``vllm.general_plugins`` and calls it in every process. Importing this
module imports neither torch nor anything of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug.contract import Attention


def register() -> None:
    """
    Give vLLM the names of the backends that can be chosen here: ``ATTNPLUG``, which leaves the choice to attnplug, and
    one for each candidate; the names of int8 KV caches; and Phi-3-small. No plugin is imported. Calling it again adds
    what is new. A vLLM outside of the tested range is warned of in its log, once in a process.

    Raises:
        AttnplugError: Under attnplug's strict setting, a plugin that may be used has a problem.
    """
    # vLLM's registries are imported by whoever registers, not here.
    from attnplug_vllm import int8, phi3_small_config, registration, versions  # noqa: PLC0415

    versions.warn_if_untested()
    registration.register()
    int8.register_dtypes()
    phi3_small_config.register_model()


def implementations(worker: Any) -> dict[str, Attention]:
    """
    Return attnplug's implementations of a worker's layers, by vLLM's names: for `LLM.collective_rpc`.

    Layers have them once vLLM has made its KV cache.

    Args:
        worker: vLLM's worker, which ``llm.collective_rpc(function)`` passes to the function.
    """
    from attnplug_vllm.binding import impls_of  # noqa: PLC0415 - it imports vLLM

    bound = (impl.binding for impl in impls_of(worker.vllm_config))
    return {one.attn.layer.name: one.attn for one in bound if one is not None}


__all__ = ["implementations", "register"]
