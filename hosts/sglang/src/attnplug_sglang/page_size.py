"""
The page size of SGLang's pools, where the user left it open.

SGLang makes pages of one token unless ``--page-size`` says otherwise, and settles it before it makes any backend. A
backend that is named by ``attnplug:ID``, or alone by ATTNPLUG_BACKEND, may have no pages of one token: SGLang's hooks
let its own default be replaced by the smallest page that the backend's manifest admits, or both of a routed pair. What
the user passes is never changed.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import attnplug
from attnplug.errors import AttnplugError
from attnplug_sglang.names import backend_of, is_own

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attnplug.negotiation import Candidate

__all__ = ["SIZES", "hook", "replace_default", "smallest_page"]

_log: Final = logging.getLogger("sglang.attnplug")

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The page sizes that are tried, in tokens."""

_ANY: Final = "auto"  # in attnplug's list of backends
_PIPELINE: Final = "sglang.srt.arg_groups.pipeline"
_OVERRIDES: Final = "sglang.srt.arg_groups.overrides"
_hooked: Final[set[str]] = set()


def hook() -> None:
    """Hook SGLang's default page size, once per process. Its plugin loader applies the hook afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - imports SGLang

    # 0.5.15 has no pipeline and looks the function up at each call; later ones have it in the pipeline by its name.
    module = _PIPELINE if find_spec(_PIPELINE) is not None else _OVERRIDES
    target = f"{module}._page_size_default"
    if target not in _hooked:
        _hooked.add(target)
        HookRegistry.register(target, replace_default, HookType.AFTER)


def replace_default(found: Mapping[str, Any], view: Any) -> Mapping[str, Any]:
    """
    Return SGLang's declaration of a page size, in which its default may be replaced.

    Args:
        found: What SGLang declares: nothing where the user passed ``--page-size``.
        view: SGLang's arguments, as far as they are settled.
    """
    default = found.get("page_size")
    if default is None:
        return found
    named = (view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend)
    size = smallest_page((name for name in named if is_own(name)), default)
    if size == default:
        return found
    _log.info("The page size is %d tokens: %s has no pages of %d", size, " and ".join(filter(is_own, named)), default)
    return {**found, "page_size": size}


def smallest_page(names: Iterable[str], default: int) -> int:
    """
    Return the smallest page, in tokens, that is a multiple of SGLang's default and that every named backend admits.

    The default where no backend is named, and where no page suits all: the refusal is then the one of the decision.

    Args:
        names: Names of ours, as ``--attention-backend`` has them.
        default: SGLang's default, in tokens.
    """
    try:
        candidates = [_candidates_of(backend) for name in names for backend in _named(name)]
    except AttnplugError:  # whoever makes the backend gets this error
        return default
    tried = [default, *(size for size in SIZES if size > default and size % default == 0)]
    return next((size for size in tried if all(_any_admits(each, size) for each in candidates)), default)


def _named(name: str) -> list[str]:
    """Return what a name of ours names, or the one backend of the settings where it names none; both of a pair."""
    listed = attnplug.Settings.read().backend
    backend = backend_of(name) or (listed[0] if len(listed) == 1 and listed[0] != _ANY else "")
    return backend.split("+") if backend else []


def _candidates_of(backend: str) -> list[Candidate]:
    return [each for each in attnplug.registry().candidates() if backend in (each.id, each.backend)]


def _any_admits(candidates: Iterable[Candidate], size: int) -> bool:
    return any(not each.objections([("block_size", size)]) for each in candidates)
