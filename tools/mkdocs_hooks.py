"""Hooks of the documentation's build."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from attnplug_kit.report.page import matrix_fragment

_KEPT: Final = r"<(?P<kept>pre|script|style)\b.*?</(?P=kept)>|<[^>]*>"  # a block of code scrolls in its frame
_OPTION: Final = re.compile(rf"{_KEPT}|(?P<option>--[a-z][\w-]*)", re.DOTALL)


_ROOT: Final = Path(__file__).parents[1]
_PLACE: Final = '<div id="can-i-use">The table is in the built documentation: <code>make docs</code>.</div>'


def on_page_content(html: str, **_: object) -> str:
    """
    Put the matrix of capabilities into its page, and mark each ``--option`` of the prose: browsers break lines at
    hyphens, and the style sheet forbids it there.
    """
    if _PLACE in html:
        data = json.loads((_ROOT / "docs/assets/can-i-use.json").read_text(encoding="utf-8"))
        html = html.replace(_PLACE, matrix_fragment(data))
    return _OPTION.sub(
        lambda found: f'<span class="option">{found[0]}</span>' if found["option"] else found[0],
        html,
    )
