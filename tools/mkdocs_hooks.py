"""Hooks of the documentation's build."""

from __future__ import annotations

import re
from typing import Final

_KEPT: Final = r"<(?P<kept>pre|script|style)\b.*?</(?P=kept)>|<[^>]*>"  # a block of code scrolls in its frame
_OPTION: Final = re.compile(rf"{_KEPT}|(?P<option>--[a-z][\w-]*)", re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    """Mark each ``--option`` of the prose: browsers break lines at hyphens, and the style sheet forbids it there."""
    return _OPTION.sub(
        lambda found: f'<span class="option">{found[0]}</span>' if found["option"] else found[0],
        html,
    )
