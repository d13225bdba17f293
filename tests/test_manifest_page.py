"""The manifest that the reference page shows is a manifest."""

from __future__ import annotations

import re
from pathlib import Path

from attnplug.manifest.reader import parse_manifest

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "manifest.md"


def test_the_example_parses():
    example = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)

    manifest = parse_manifest(example[1], str(PAGE))

    assert [variant.name for variant in manifest.variants] == ["fast"]
    assert manifest.variants[0].supports["block_size"].choices() == (128, 16)
    assert manifest.options["splits"].default == 0
