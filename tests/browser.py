"""Chromium without a window, for tests of pages. It needs no driver: a program in the page finds what a test reads."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PATH: Final = next(filter(None, map(shutil.which, _NAMES)), None)

in_browser = pytest.mark.skipif(
    _PATH is None, reason="Chromium is not installed: apt-get install chromium-headless-shell"
)

PHONE: Final = 390
DESKTOP: Final = 1400
"""Widths in pixels."""

OVERFLOW: Final = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
"""The pixels by which a page is wider than its window."""

CELLS: Final = """[...document.querySelectorAll(".attnplug-matrix tbody .cell")]"""
"""The cells of the matrix of capabilities."""


class Browser:
    """
    A browser that opens a page anew for each question.

    Args:
        file: The page. Copies are written beside it, where its relative links lead to the same files.
    """

    def __init__(self, file: Path) -> None:
        self._page = file.read_text("utf-8")
        self._copy = file.with_name(f"{file.stem}-in-browser.html")

    def found(self, script: str, width: int = DESKTOP, scheme: str = "light", **filters: str) -> str:
        """
        Return the value of an expression in the page, as a text.

        Args:
            script: The expression, in JavaScript, evaluated once the page is loaded.
            width: Of the window.
            scheme: The colors that the reader prefers: light or dark.
            filters: The filters in the page's address.
        """
        program = f"document.body.dataset.found = {script};"
        listener = f'<script>addEventListener("load", () => {{ {program} }});</script>'
        self._copy.write_text(self._page.replace("</body>", f"{listener}</body>"), encoding="utf-8")
        text = self._dump(
            f"{self._copy.as_uri()}#{urlencode(filters)}" if filters else self._copy.as_uri(), width, scheme
        )
        match = re.search(r'<body[^>]* data-found="([^"]*)"', text)
        assert match, f"the program failed: {text[:1000]}"
        return unescape(match[1])

    def _dump(self, address: str, width: int, scheme: str) -> str:
        assert _PATH is not None
        options = (
            "--no-sandbox",
            "--disable-gpu",
            f"--window-size={width},900",
            f"--user-data-dir={self._copy.with_suffix('.user')}",
            f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
            "--virtual-time-budget=2000",
            "--dump-dom",
        )
        done = subprocess.run([_PATH, *options, address], capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout
