"""Leaves a trace when this code runs."""

import os
from pathlib import Path

with Path(os.environ["WRITES_ON_IMPORT"]).open("a", encoding="utf-8") as trace:
    trace.write(f"{__name__}\n")
