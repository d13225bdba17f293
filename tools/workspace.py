"""Print pip's arguments for the hosts and plugins that admit this Python. It runs before anything is installed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

for project in sorted(Path().glob("*/*/pyproject.toml")):
    oldest = re.search(r'^requires-python = ">=3\.(\d+)"$', project.read_text("utf-8"), re.MULTILINE)
    if oldest and sys.version_info >= (3, int(oldest[1])):
        print(f"-e ./{project.parent}")
