"""One architecture both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug_transformers.demo.models.decoding import decode
from attnplug_transformers.demo.models.encoding import encode
from attnplug_transformers.demo.models.transcribing import transcribe

if TYPE_CHECKING:
    from attnplug_transformers.demo.models.example import Example
    from attnplug_transformers.demo.models.outcome import Outcome


def demonstrate(example: Example, text: bytes) -> Outcome:
    """
    Run an architecture on transformers' eager attention, and through the backends that attnplug chooses.

    Args:
        example: The architecture.
        text: What prompts and sentences are cut from, a token per byte.

    Raises:
        AttnplugError: Nothing can serve one of its layers, or a backend refuses what it is given.
    """
    if example.kind == "encoder":
        return encode(example, text)
    if example.kind == "encoder_decoder":
        return transcribe(example)
    return decode(example, text)
