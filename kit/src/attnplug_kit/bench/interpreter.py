"""Fresh interpreters to measure in: what a process pays once can be measured in no other way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug import AttnplugError
from attnplug.request import PREFIX
from attnplug_kit.bench import scenery

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@frozen
class Interpreter:
    """
    This Python, started anew each time, without any settings of this project.

    Attributes:
        folder: A folder that goes first on ``sys.path``.
    """

    folder: Path

    def seconds(self, *arguments: str) -> float:
        """Return how long a whole process takes, from its start to its end."""
        start = time.perf_counter()
        self._run(arguments)
        return time.perf_counter() - start

    def answer(self, code: str) -> Any:
        """Run code that prints one JSON document, and return it."""
        return json.loads(self._run(["-c", code]))

    def _run(self, arguments: Sequence[str]) -> str:
        done = subprocess.run(  # noqa: S603 - this interpreter, and code of this package
            [sys.executable, *arguments], capture_output=True, text=True, check=False, env=self._environment()
        )
        if done.returncode:
            raise AttnplugError(
                f"a measuring process ended with {done.returncode}",
                f"it printed\n{done.stderr.strip()}",
                "see whether `attnplug doctor` finds a problem",
            )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        return {**own, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(self.folder)}


@contextmanager
def interpreter(variants: Sequence[int] = ()) -> Iterator[Interpreter]:
    """
    Yield an interpreter that finds made-up plugins beside what is installed.

    Args:
        variants: How many variants each made-up backend has.
    """
    with TemporaryDirectory() as folder:
        scenery.install(Path(folder), variants)
        yield Interpreter(Path(folder))
