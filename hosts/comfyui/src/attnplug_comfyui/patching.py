"""Gives a model of ComfyUI an override, and finds it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attnplug
from attnplug.errors import RequestError
from attnplug_comfyui.override import OPTION, AttentionOverride

if TYPE_CHECKING:
    from attnplug_comfyui.routes import Route


class Model(Protocol):
    """What this needs of ComfyUI's `ModelPatcher`."""

    model_options: dict[str, Any]

    def clone(self) -> Any:
        """Return a copy whose options are separate."""


M = TypeVar("M", bound=Model)


def patch(
    model: M,
    backend: str | None = None,
    *,
    options: dict[str, dict[str, Any]] | None = None,
    fallback: bool = False,
    replace: bool = False,
) -> M:
    """
    Return a clone of a model whose attention calls run through attnplug. The model itself stays as it is.

    Nothing is decided yet: a decision needs head sizes and dtype, which the first call has.

    Args:
        model: ComfyUI's `ModelPatcher`.
        backend: The backend that has to serve, ``backend`` or ``backend/variant``; None for the one that a selection
            chooses.
        options: Options by backend, as for `attnplug.select`.
        fallback: Whether ComfyUI's own function runs what no backend serves, counted and logged once.
        replace: Whether an override that another node has set is replaced. One of attnplug always is.

    Raises:
        RequestError: Another node has set an override, and `replace` is False.
        UnknownBackendError: Nothing that is installed has this name.
    """
    if backend is not None:
        attnplug.registry().check_name(backend)
    present = model.model_options.get("transformer_options", {}).get(OPTION)
    if present is not None and not isinstance(present, AttentionOverride) and not replace:
        raise RequestError(
            f"the model has {OPTION}={present!r} already, which another node has set",
            "a model has one override, and what that node does would be lost",
            "take that node out of the workflow, or set replace",
        )
    override = AttentionOverride(backend, options=options, fallback=fallback)
    clone: M = model.clone()
    inner = {**clone.model_options.get("transformer_options", {}), OPTION: override}
    clone.model_options = {**clone.model_options, "transformer_options": inner}
    return clone


def override_of(model: Model) -> AttentionOverride:
    """
    Return the override of a model.

    Raises:
        RequestError: It has none of attnplug, or another node has replaced it.
    """
    present = model.model_options.get("transformer_options", {}).get(OPTION)
    if isinstance(present, AttentionOverride):
        return present
    found = "no override" if present is None else f"{OPTION}={present!r} of another node"
    raise RequestError(
        f"the model has {found}",
        "its attention runs through attnplug where a patch of attnplug is the last one",
        "put the node of attnplug behind the others that choose attention, and in front of the sampler",
    )


def report(model: Model) -> tuple[Route, ...]:
    """
    Return where the attention calls of a model went, most calls first.

    Raises:
        RequestError: As for `override_of`.
    """
    return override_of(model).report()
