"""One architecture both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.hosts.transformers.demonstration.decoding import decode
from attnplug.hosts.transformers.demonstration.encoding import encode
from attnplug.hosts.transformers.demonstration.transcribing import transcribe

if TYPE_CHECKING:
    from attnplug.hosts.transformers.demonstration.example import Example
    from attnplug.hosts.transformers.demonstration.outcome import Outcome


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
