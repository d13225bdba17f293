"""The warnings that reading settings and looking for plugins leaves in the log."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.found[record.getMessage()] = None


@contextmanager
def collected_warnings() -> Iterator[dict[str, None]]:
    """Collect the warnings of this project inside the ``with`` block, each once, instead of letting them be printed."""
    log, collector = logging.getLogger("attnplug"), _Collector()
    log.addHandler(collector)
    propagate, log.propagate = log.propagate, False
    try:
        yield collector.found
    finally:
        log.propagate = propagate
        log.removeHandler(collector)
