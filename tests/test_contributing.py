"""CONTRIBUTING lists the files that a change touches, and the lists are true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SENTINELS = ("logits_soft_cap", "attention_chunk")  # fields of a layer that have nothing else in common


def test_the_files_of_a_field_are_listed() -> None:
    section = re.search(
        r"^## Add a field$(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    listed = re.findall(r"^\| `(\S+)` \|", section[1], re.MULTILINE)
    sources = [path for part in ("core/src", "kit/src") for path in (ROOT / part).rglob("*.py")]
    named = {path for path in sources if all(re.search(rf"\b{one}\b", path.read_text("utf-8")) for one in SENTINELS)}

    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in named)
