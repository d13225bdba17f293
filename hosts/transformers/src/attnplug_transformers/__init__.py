"""
Run the attention of transformers' models through attnplug.

    import attnplug_transformers as host

    host.requirements(config)                         # what each layer requires, from the configuration alone
    host.register()
    model.set_attn_implementation("attnplug")         # or attn_implementation="attnplug" when the model is made
    model.generate(...)
    host.selections(model)                            # which backend each layer runs on, and why
    with host.continuous_batching(model):             # transformers' own continuous batching
        model.generate_batch(prompts)

Importing this and reading configurations needs neither transformers nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import AttnplugError
from attnplug.models import requirements, requirements_from_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from attnplug.request import BackendNames, Options
    from attnplug_transformers.binding import selections as selections
    from attnplug_transformers.continuous import ContinuousBatching as ContinuousBatching

__all__ = [
    "KEY",
    "ContinuousBatching",
    "continuous_batching",
    "register",
    "requirements",
    "requirements_from_json",
    "selections",
]

KEY: Final = "attnplug"
"""The attention implementation's name; with "flash" or "sdpa" in it the library would take it for one of its own."""


def register() -> str:
    """
    Register the attention function and its mask function with transformers. A second call changes nothing.

    Then ``from_pretrained(..., attn_implementation="attnplug")`` works, and so does
    ``model.set_attn_implementation("attnplug")``.

    Returns:
        The name.

    Raises:
        AttnplugError: transformers or torch is not installed.
    """
    try:
        from transformers import AttentionInterface  # noqa: PLC0415 - only this function needs the library
        from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise AttnplugError(
            "the host 'transformers' was requested",
            f"it requires transformers 5.17 or newer, and torch: {error}",
            "pip install 'attnplug[transformers]'",
        ) from error
    from attnplug_transformers.attention import attend  # noqa: PLC0415 - imports torch and transformers
    from attnplug_transformers.mask import make_mask  # noqa: PLC0415 - likewise

    AttentionMaskInterface.register(KEY, make_mask)
    AttentionInterface.register(KEY, attend)
    return KEY


def continuous_batching(
    model: PreTrainedModel, *, backend: BackendNames | None = None, options: Options | None = None
) -> ContinuousBatching:
    """
    Return a context manager in which a model's continuous batching runs on attnplug: `generate_batch`, and managers.

    Other models keep their attention. Leaving it restores the model's own, and destroys a manager that it has kept.
    Backends are chosen in the scope in which it is entered, or by the arguments. A call of the model that is not one of
    continuous batching is refused meanwhile.

    Args:
        model: A decoder of transformers 5.17, 5.23 or 5.24 whose attention is replaceable.
        backend: As for `attnplug.select`; None is the scope's choice.
        options: As for `attnplug.select`.

    Raises:
        AttnplugError: On entering: the model, or this version of transformers, does not let it.
    """
    from attnplug_transformers.continuous import ContinuousBatching  # noqa: PLC0415 - imports torch and transformers

    return ContinuousBatching(model, backend=backend, options=options)


def __getattr__(name: str) -> Any:
    if name == "selections":
        from attnplug_transformers.binding import selections  # noqa: PLC0415 - imports torch

        return selections
    if name == "ContinuousBatching":
        from attnplug_transformers.continuous import ContinuousBatching  # noqa: PLC0415 - likewise

        return ContinuousBatching
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
