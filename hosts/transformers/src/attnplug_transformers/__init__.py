"""
Run the attention of transformers' models through attnplug.

    import attnplug_transformers as host

    host.requirements(config)                         # what each layer requires, from the configuration alone
    host.register()
    model.set_attn_implementation("attnplug")         # or attn_implementation="attnplug" when the model is made
    model.generate(...)
    host.selections(model)                            # which backend each layer runs on, and why

Importing this and reading configurations needs neither transformers nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import AttnplugError
from attnplug.models import requirements, requirements_from_json

if TYPE_CHECKING:
    from attnplug_transformers.binding import selections as selections

__all__ = ["KEY", "register", "requirements", "requirements_from_json", "selections"]

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


def __getattr__(name: str) -> Any:
    if name != "selections":
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from attnplug_transformers.binding import selections  # noqa: PLC0415 - imports torch

    return selections
