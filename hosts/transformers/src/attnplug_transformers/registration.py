"""Making the name ``"attnplug"`` known to transformers."""

from __future__ import annotations

from typing import Final

from attnplug import AttnplugError

KEY: Final = "attnplug"
"""The attention implementation's name; with "flash" or "sdpa" in it the library would take it for one of its own."""


def register() -> str:
    """
    Register the attention function and its mask function with transformers. Doing it again changes nothing.

    Then ``from_pretrained(..., attn_implementation="attnplug")`` works, and so does
    ``model.set_attn_implementation("attnplug")``.

    Returns:
        The name.

    Raises:
        AttnplugError: transformers or torch is not installed.
    """
    try:
        from transformers import AttentionInterface  # noqa: PLC0415 - only this function needs the library
        from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415
    except ImportError as error:
        raise AttnplugError(
            "the host 'transformers' was asked for",
            f"it needs transformers 5.17 or newer, and torch: {error}",
            "pip install 'attnplug[transformers]'",
        ) from error
    from attnplug_transformers.attention import attend  # noqa: PLC0415 - imports torch and transformers
    from attnplug_transformers.mask import make_mask  # noqa: PLC0415

    AttentionMaskInterface.register(KEY, make_mask)
    AttentionInterface.register(KEY, attend)
    return KEY
