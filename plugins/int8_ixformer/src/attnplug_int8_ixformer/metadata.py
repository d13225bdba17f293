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
    """

    decode_plan: Any = None
    prefill_plan: Any = None
