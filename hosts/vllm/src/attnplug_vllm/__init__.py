"""
Every attention backend of attnplug as an attention backend of unmodified vLLM.

    vllm serve MODEL --attention-backend ATTNPLUG

vLLM finds `register` by its entry-point group ``vllm.general_plugins`` and calls it in every process. Importing this
module imports neither torch nor anything of vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnplug.contract import Attention

_log: Final = logging.getLogger("vllm.attnplug")  # vLLM shows the records of loggers below its own


def register() -> None:
    """
    Give vLLM the names of the backends that can be chosen here: ``ATTNPLUG``, which leaves the choice to attnplug, and
    one for each candidate; the names of int8 KV caches; and Phi-3-small. No plugin is imported. Calling it again adds
    what is new. A vLLM outside of the tested range is warned of in its log, once in a process.

    It does not raise, since that would stop a vLLM that runs on its own backends. A failure is in vLLM's log, and a
    name of attnplug that vLLM lacks for it is an error with the reason.
    """
    try:
        # vLLM's registries are imported by whoever registers, not here.
        from attnplug_vllm import int8, phi3_small_config, registration, versions  # noqa: PLC0415

        versions.warn_if_untested()
        registration.register()
        int8.register_dtypes()
        phi3_small_config.register_model()
    except Exception as error:  # noqa: BLE001 - vLLM runs on its own backends, whatever fails here
        _log.exception("attnplug-vllm could not register all that it has; vLLM goes on without")
        with contextlib.suppress(ImportError):  # of a vLLM without such an enum
            _refuse(f"{type(error).__name__}: {error}")


def _refuse(why: str) -> None:
    """Let vLLM refuse the names of attnplug with the reason, where it has none. attnplug itself may be missing."""
    from attnplug_vllm.names import explain_missing, is_own, members  # noqa: PLC0415 - they import vLLM

    def error_of(name: str) -> AttributeError:
        return AttributeError(
            f"the attention backend {name!r} was requested of vLLM\n"
            f"  expected: attnplug-vllm could not register it: {why}\n"
            "  fix: run `pip check` in the environment of vLLM, or leave --attention-backend out"
        )

    if not any(map(is_own, members().__members__.values())):
        explain_missing(members(), error_of)


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
