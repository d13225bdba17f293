"""The model whose configuration is in the working folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

CONFIG: Final = "config.json"


def has_config() -> bool:
    """Whether the working folder has a config.json of a model: a JSON object with ``model_type``."""
    try:
        data = json.loads(Path(CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get("model_type"), str)
