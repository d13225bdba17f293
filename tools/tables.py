"""Writes the reference pages that are made from data, or says which are stale: ``python -m tools.tables --write``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from tools import api_pages, capabilities, compatibility, contract, models, vllm_matrix, vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT: Final = Path(__file__).parents[1]
PAGES: Final[Mapping[str, Callable[[Path], str]]] = MappingProxyType(
    {
        capabilities.DATA: capabilities.data,
        models.EXPLANATION: models.explanation,
        "docs/reference/capabilities.md": capabilities.page,
        "docs/reference/compatibility.md": compatibility.page,
        "docs/reference/contract.md": contract.page,
        "docs/reference/models.md": models.page,
        "docs/reference/requirements.md": vocabulary.page,
        "docs/reference/vllm-matrix.md": vllm_matrix.page,
        **api_pages.WRITERS,
    }
)


def stale(root: Path = ROOT) -> list[str]:
    """Return the pages that differ from what their data says now."""
    return [name for name, page in PAGES.items() if not (root / name).exists() or _read(root / name) != page(root)]


def write(root: Path = ROOT) -> list[str]:
    """Write the stale pages and return their names."""
    names = stale(root)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(PAGES[name](root), encoding="utf-8")
    return names


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write or check, and return the exit status."""
    writes = arguments == ["--write"]
    names = write() if writes else stale()
    print("\n".join(f"{'written' if writes else 'stale'}: {name}" for name in names) or "every table is up to date")
    return 0 if writes or not names else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
