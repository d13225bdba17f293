"""
Builds the plugins of this folder and installs them for real.

Adding one is adding a folder with a pyproject.toml, a package, its ``plugin.py`` and its ``attnplug.toml``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

PLUGINS = Path(__file__).parent
_BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
for folder in sys.argv[2:]:
    print(next(WheelBuilder(folder).build(directory=sys.argv[1], versions=["standard"])))
"""


class Workshop:
    """
    A folder of wheels, each built once, when it is first installed.

    Args:
        folder: Where the wheels go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wheels: dict[str, Path] = {}

    def build(self, *names: str) -> list[Path]:
        """Return the wheels of these plugins."""
        missing = [name for name in dict.fromkeys(names) if name not in self._wheels]
        if missing:
            command = [sys.executable, "-c", _BUILD, str(self.folder), *(str(PLUGINS / name) for name in missing)]
            built = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            self._wheels.update(zip(missing, map(Path, built), strict=True))
        return [self._wheels[name] for name in names]

    def install(self, target: Path, *names: str) -> Path:
        """Unpack the wheels of these plugins into a folder for ``sys.path``, as an installer does; return the folder."""
        target.mkdir(parents=True, exist_ok=True)
        for wheel in self.build(*names):
            with ZipFile(wheel) as archive:
                archive.extractall(target)
        return target


def run(code: str, *sites: Path, home: Path, **environment: str) -> Any:
    """
    Run code in a fresh Python that looks into these folders first; return what it printed last, read as JSON.

    Args:
        code: The program.
        sites: Folders for ``sys.path``.
        home: Where the user's configuration is looked for.
        environment: Further variables; those of the project that are set outside are not seen.
    """
    outside = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    variables = {"PYTHONPATH": os.pathsep.join(map(str, sites)), "XDG_CONFIG_HOME": str(home), "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**outside, **variables, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])
