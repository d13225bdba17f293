"""
The names under which SGLang knows the backends of attnplug.

SGLang checks ``--attention-backend``, and the same of prefills, of decodes and of draft models, against lists of
names, and makes a backend by the function that its registry has for the name. Each candidate that the registry of
attnplug knows has a name. One that cannot run here has a name too, so that the refusal is attnplug's, with the reason,
and not the one of a command line that only lists what it takes.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import attnplug
from attnplug.errors import SettingsError
from attnplug_sglang import page_size
from attnplug_sglang.names import AUTO, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["create", "names", "register"]

_log: Final = logging.getLogger("sglang.attnplug")

_LISTS: Final = (
    ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
    ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "add_deterministic_attention_backend_choices"),
    # SGLang 0.5.15 has no list of drafts: it takes every name of the first list for them.
    ("DRAFT_ATTENTION_BACKEND_CHOICES", "add_draft_attention_backend_choices"),
)
"""SGLang's lists of names, each with the function that extends it."""
_EXPANDED: Final = "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS"
"""SGLang's list of names with which models may expand cached latents to keys and values per head."""


def register() -> None:
    """
    Add the names to SGLang's lists and to its registry, and hook its default page size. Calling it again adds what is
    new.

    A name that another plugin has registered stays that plugin's.

    Raises:
        AttnplugError: Under the strict setting, a plugin that may be used has a problem.
    """
    from sglang.srt import server_args  # noqa: PLC0415 - imports torch
    from sglang.srt.layers.attention import attention_registry  # noqa: PLC0415 - likewise

    registered: dict[str, Callable[[Any], Any]] = attention_registry.ATTENTION_BACKENDS
    own = {name: backend for name, backend in names().items() if _is_free(registered, name)}
    for name, backend in own.items():
        attention_registry.register_attention_backend(name)(partial(create, backend=backend))
    for listed, extend in _LISTS:
        if hasattr(server_args, listed):
            _extend(getattr(server_args, listed), _adder(server_args, extend), list(own))
    # 0.5.15 has this list where it runs models.
    module = server_args if hasattr(server_args, _EXPANDED) else import_module("sglang.srt.model_executor.model_runner")
    expanded: list[str] = getattr(module, _EXPANDED)
    _extend(expanded, expanded.extend, list(own))
    page_size.hook()


def names() -> dict[str, str | None]:
    """
    Return what each name stands for: the identifier of a candidate, or None for the name that leaves the choice open.

    Where attnplug's settings are wrong, that name alone: SGLang may run on its own backends, and whoever chooses this
    one gets the error of the settings.
    """
    found: dict[str, str | None] = {AUTO: None}
    try:
        candidates = attnplug.registry().candidates()
    except SettingsError as error:
        _log.error("attnplug's settings are wrong, and its backends have no names. %s", error)
        return found
    return found | {name_of(each.id): each.id for each in candidates}


def create(model_runner: Any, *, backend: str | None) -> Any:
    """
    Make the attention backend of one of SGLang's model runners: what its registry calls.

    Args:
        model_runner: SGLang's model runner, with its pools.
        backend: The identifier of a candidate; None leaves the choice to attnplug.

    Raises:
        AttnplugError: No backend of attnplug serves the model here, or it needs what the adapter refuses.
    """
    from attnplug_sglang.backend import AttnplugAttnBackend  # noqa: PLC0415 - imports SGLang's layers
    from attnplug_sglang.latent import register_handler  # noqa: PLC0415 - imports torch

    made = AttnplugAttnBackend(model_runner, backend=backend)
    if made.has_latents:
        register_handler(AUTO if backend is None else name_of(backend))
    _log.info("attention by attnplug\n%s", made.explain())
    return made


def _is_free(registered: dict[str, Callable[[Any], Any]], name: str) -> bool:
    """Whether a name is ours to register: nobody has it, or we have."""
    there = registered.get(name)
    if there is None or (isinstance(there, partial) and there.func is create):
        return True
    _log.warning("SGLang knows %s already, by another plugin; attnplug does not replace it", name)
    return False


def _adder(server_args: Any, name: str) -> Callable[[list[str]], Any]:
    """Return SGLang's function that extends a list: 0.5.20 and 0.5.23 export some of them from another module only."""
    there = hasattr(server_args, name)
    module = server_args if there else import_module("sglang.srt.arg_groups.choices")  # which 0.5.15 lacks
    found: Callable[[list[str]], Any] = getattr(module, name)
    return found


def _extend(listed: Sequence[str], add: Callable[[list[str]], Any], own: list[str]) -> None:
    """Extend a list of SGLang by the names that it lacks: SGLang's functions would add them twice."""
    add([name for name in own if name not in listed])
