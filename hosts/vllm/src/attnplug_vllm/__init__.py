"""
Every attention backend of attnplug as an attention backend of unmodified vLLM.

    vllm serve MODEL --attention-backend ATTNPLUG

vLLM finds `register` by its entry-point group ``vllm.general_plugins`` and calls it in every process. Importing this
module imports neither torch nor anything of vLLM.
"""

from __future__ import annotations


def register() -> None:
    """
    Give vLLM the names of the backends that can be chosen here: ``ATTNPLUG``, which leaves the choice to attnplug, and
    one for each candidate. No plugin is imported. Calling it again adds what is new. A vLLM outside of the tested range
    is warned of in its log, once in a process.

    Raises:
        AttnplugError: Under attnplug's strict setting, a plugin that may be used has a problem.
    """
    from attnplug_vllm import registration, versions  # noqa: PLC0415 - vLLM's registry is imported by whoever registers

    versions.warn_if_untested()
    registration.register()


__all__ = ["register"]
