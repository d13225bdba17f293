"""What a step runs: one launch for its decodes, one for its prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from attnplug_blocksparse.decode import Tokens
    from attnplug_blocksparse.prefill import Prompts


@frozen(eq=False, kw_only=True)
class Plan:
    """
    A step.

    Attributes:
        tokens: The decodes, or None.
        prompts: The prompts and chunks, or None.
        decode_rows: Query rows of the decodes.
        prompt_rows: Query rows of the prompts.
        reads_rows: Whether the prompts attend the keys that come with the call. Otherwise they read pages.
    """

    tokens: Tokens | None = None
    prompts: Prompts | None = None
    decode_rows: slice = slice(0)
    prompt_rows: slice = slice(0)
    reads_rows: bool = False
