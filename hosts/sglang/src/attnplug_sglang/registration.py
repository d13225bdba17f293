"""
The names under which SGLang knows the backends of attnplug.

``attnplug`` leaves the choice to attnplug; ``attnplug:flash_attn/fa3_vllm`` names a candidate. All candidates of
installed plugins have a name, also those that cannot run here: choosing one of these is an error with its reasons,
where an unknown name of SGLang's command line has none.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import attnplug
from attnplug.errors import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug_sglang.backend import AttnplugAttnBackend

AUTO: Final = "attnplug"
"""The name that leaves the choice to attnplug."""

_LISTS: Final = (
    "ATTENTION_BACKEND_CHOICES",  # of --attention-backend, and of --prefill- and --decode-attention-backend
    "DRAFT_ATTENTION_BACKEND_CHOICES",  # of DFLASH's drafts; SGLang 0.5.15 has no such list
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",  # those with a radix cache
)
_log: Final = logging.getLogger("sglang.attnplug")


def register() -> None:
    """Add the names to SGLang's registry and to its lists of choices. Calling it again adds what is new."""
    from sglang.srt import server_args  # noqa: PLC0415 - imports torch
    from sglang.srt.layers.attention.attention_registry import (  # noqa: PLC0415 - likewise
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    for name, candidate in backend_names().items():
        if name not in ATTENTION_BACKENDS:
            register_attention_backend(name)(factory_of(candidate))
        for listed in _LISTS:
            choices = getattr(server_args, listed, None)
            if choices is not None and name not in choices:
                choices.append(name)


def backend_names() -> dict[str, str | None]:
    """Return the candidate behind each name; None behind the one that names none."""
    found: dict[str, str | None] = {AUTO: None}
    try:
        candidates = attnplug.registry().candidates()
    except AttnplugError as error:  # SGLang may run on its own backends; choosing one of these raises it again
        _log.error("attnplug's settings are wrong, and its candidates have no names. %s", error)
        return found
    return found | {f"{AUTO}:{candidate.id}": candidate.id for candidate in candidates if "/" in candidate.id}


def factory_of(candidate: str | None) -> Callable[[Any], AttnplugAttnBackend]:
    """
    Return what SGLang calls with its model runner.

    Args:
        candidate: ``backend/variant``; None lets attnplug decide.
    """

    def make(runner: Any) -> AttnplugAttnBackend:
        from attnplug_sglang.backend import AttnplugAttnBackend  # noqa: PLC0415 - imports SGLang's layers

        made = AttnplugAttnBackend(runner, backend=candidate)
        _log.info("attention by attnplug\n%s", made.explain())
        return made

    return make
