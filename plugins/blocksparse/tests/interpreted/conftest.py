"""Tests whose kernels Triton's interpreter runs, in a process of their own: see test_by_interpreter.py."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_configure(config):
    """Offer the backend to a CPU, before the kit asks for it."""
    if INTERPRETED:
        import attnplug  # noqa: PLC0415 - nothing of this is for other processes
        from plugins.blocksparse.tests import cpu_manifest  # noqa: PLC0415 - likewise

        with TemporaryDirectory() as folder:
            attnplug.register("attnplug_blocksparse.plugin", manifest=cpu_manifest.write(Path(folder)))
