"""Reads the tables of evidence pages: those that `benchmarks/beside.py` writes, and pages with one row per work."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def ratios_on_the_device(page: Path, backend: str) -> dict[str, float]:
    """Return row -> native time over a backend's on the device, of the first table of a page that has the backend."""
    column, found = None, {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if found and not line.startswith("|"):
            break
        if cells[0] == "work":
            column = cells.index(f"native / {backend}") if f"native / {backend}" in cells else None
        elif column is not None and line.startswith("| ") and cells[1] not in ("---", "host"):
            found[cells[0]] = float(cells[column])
    return found
