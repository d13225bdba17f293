"""What a step hands to the layers."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from attnplug.contract import Metadata


@frozen(eq=False, kw_only=True)
class Int8Metadata(Metadata):
    """
    A step, with the provider's plans.

    Attributes:
        decode_plan: Of the decodes; None where there are none.
        prefill_plan: Of the prefills, likewise.
        skips: Whether decodes have rows that are not to be written, as far as the host knows. A kernel that finds
            places by itself would write them.
    """

    decode_plan: Any = None
    prefill_plan: Any = None
    skips: bool = False
