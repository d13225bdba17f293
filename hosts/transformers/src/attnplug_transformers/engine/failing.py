"""Requests whose logits choose no token: they fail, and the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug_transformers.engine.request import Request


def failed(requests: Sequence[Request]) -> list[Request]:
    """Return those that have failed."""
    return [request for request in requests if request.finish_reason == "failed"]


def refuse_failed(requests: Sequence[Request]) -> None:
    """
    See that none of the requests of a call has failed.

    Args:
        requests: The request of each prompt.

    Raises:
        TensorError: One has; its id and the prompt's place are named.
    """
    found = failed(requests)
    if found:
        places = [place for place, request in enumerate(requests) if request in found]
        raise TensorError(
            f"the logits of prompts {places}, as requests {[request.id for request in found]}, choose no token",
            "logits are numbers, and not all of a row are minus infinity",
            "look for the first NaN in the model's layers, or submit() each prompt for the tokens of the others",
        )
